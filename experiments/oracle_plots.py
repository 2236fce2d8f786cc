"""Pictures of SERO: how deep the weights reach, early and late (Figure 4), and the proxy check (A.3)."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments import compare_tables, diagnostics, oracle_checks, results, sero, wiring

UPDATES = 4  # the first and the last so many of a run are its early and its late point

Curves = Mapping[str, np.ndarray]  # label -> mean weight at depth 0, 1, ...; NaN where no branch is so long


def read(paths: Sequence[pathlib.Path]) -> tuple[list[oracle_checks.Report], list[results.Result]]:
    """(proxy checks, runs with SERO). Raises wiring.ConfigError for a file that is neither."""
    proxies, runs = [], []
    for path in paths:
        try:
            content = json.loads(path.read_text())
            is_proxy = content.get('kind') == 'proxy'
            (proxies if is_proxy else runs).append(content if is_proxy else results.read(path))
        except (OSError, ValueError, AttributeError) as error:
            raise wiring.ConfigError(f'{path} is neither a proxy check nor a result of a run ({error})') from error
        if not is_proxy and 'oracle/effective_depth' not in runs[-1]['curves']:
            raise wiring.ConfigError(f'{path}: this run had no oracle, so there is nothing to draw')
    return proxies, runs


def draw(paths: Sequence[pathlib.Path], folder: pathlib.Path) -> list[pathlib.Path]:
    """Write weight_by_depth.png and, where there are proxy checks, proxy.png; returns what was written."""
    proxies, runs = read(paths)
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / 'weight_by_depth.png']
    draw_weights(proxies, runs, written[0])
    if proxies:
        written.append(folder / 'proxy.png')
        draw_proxy(proxies, written[1])
    return written


def weights_of_proxy(report: oracle_checks.Report) -> np.ndarray:
    """Mean w_j by depth over the branches of a bank that are so long, up to depth sero.PLOTTED_DEPTHS - 1."""
    depth_Q, weight_Q = (np.array(report['rows'][name]) for name in ('depth', 'weight'))
    return np.array([weight_Q[depth_Q == depth].mean() if (depth_Q == depth).any() else np.nan
                     for depth in range(sero.PLOTTED_DEPTHS)])


def weights_of_runs(runs: Sequence[results.Result], updates: slice) -> np.ndarray:
    """Mean over some updates of all runs; an update without a branch so long does not count."""
    means = []
    for depth in range(sero.PLOTTED_DEPTHS):
        name = f'oracle/weight/{depth:02d}'
        values = [value for run in runs if name in run['curves'] for value in results.curve(run, name)[updates]]
        means.append(np.nanmean(values) if np.isfinite(values).any() else np.nan)
    return np.array(means)


def draw_weights(proxies: Sequence[oracle_checks.Report], runs: Sequence[results.Result], path: pathlib.Path) -> None:
    """Left: mean weight by depth. Right: effective depth, the sum of a branch's weights, over the updates of runs."""
    plt = _pyplot()
    variants = compare_tables.by_variant(runs)
    panels = 2 if variants else 1
    figure, axes = plt.subplots(1, panels, figsize=(6.5 * panels, 4.5), constrained_layout=True, squeeze=False)
    left, right = axes[0, 0], axes[0, -1]
    colours = plt.get_cmap('tab10')(np.arange(len(variants) + len(proxies)) % 10)
    for colour, report in zip(colours[len(variants):], proxies, strict=True):
        left.plot(weights_of_proxy(report), 's-', color=colour, label=f'bank of {report["bank"]["policy"]}; weights of '
                  f'{report["policy"]}')
    for colour, (variant, seeds) in zip(colours, variants.items(), strict=False):
        for updates, style, when in ((slice(UPDATES), 'o--', 'first'), (slice(-UPDATES, None), 'o-', 'last')):
            left.plot(weights_of_runs(list(seeds.values()), updates), style, color=colour,
                      label=f'{variant}, {when} {UPDATES} updates')
        curves = [diagnostics.smooth(results.curve(run, 'oracle/effective_depth')) for run in seeds.values()]
        shortest = min(map(len, curves))
        right.plot(range(1, shortest + 1), np.mean([curve[:shortest] for curve in curves], axis=0), color=colour,
                   label=variant)
    right.set(title=f'Effective depth, sum of w_j (mean of seeds, running mean of {diagnostics.WINDOW})',
              xlabel='update', ylim=(0, 1.1 * right.dataLim.y1))
    left.set(title='How reachable the oracle\'s commands are', xlabel='depth j', ylabel='mean w_j of branches so long',
             ylim=(0, 1.05))
    for ax in axes.flat:
        ax.grid(alpha=0.3)
    left.legend(fontsize=7)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def draw_proxy(proxies: Sequence[oracle_checks.Report], path: pathlib.Path) -> None:
    """A row per check. Left: c_j against how often the command was matched. Right: bins of w_j against reproduction."""
    plt = _pyplot()
    size = (12, 4.5 * len(proxies))
    figure, axes = plt.subplots(len(proxies), 2, figsize=size, constrained_layout=True, squeeze=False)
    for (left, right), report in zip(axes, proxies, strict=True):
        rows, bins = report['rows'], report['bins']
        left.scatter(rows['compatibility'], rows['matched'], s=8, alpha=0.35, linewidths=0)
        left.set(title=f'{report["policy"]}: {_correlation(report["match"])}', xlabel='compatibility c_j',
                 ylabel=f'share of {report["samples"]} replies with this command', xlim=(0, 1.02), ylim=(-0.02, 1.02))
        left.plot([0, 1], [0, 1], color='grey', linewidth=0.8, linestyle=':')
        right.bar(range(len(bins)), [row['reproduced'] or 0.0 for row in bins], width=0.6, label='prefix reproduced')
        right.plot(range(len(bins)), [np.nan if row['weight'] is None else row['weight'] for row in bins], 'o',
                   color='black', label='mean w_j')
        right.set_xticks(range(len(bins)), [f'{row["low"]:g} to {row["high"]:g}\n{row["steps"]} steps' for row in bins])
        right.set(title=f'all steps but roots: {_correlation(report["prefix"])}', xlabel='w_j', ylim=(0, 1.02),
                  ylabel='share of samples')
        right.legend()
        for ax in (left, right):
            ax.grid(alpha=0.3)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _correlation(measured: Mapping[str, Any]) -> str:
    if measured['rho'] is None:
        return 'no correlation (constant)'
    return f'Spearman {measured["rho"]:.2f} [{measured["interval"][0]:.2f}, {measured["interval"][1]:.2f}]'


def _pyplot():
    import matplotlib

    matplotlib.use('Agg')
    from matplotlib import pyplot

    return pyplot
