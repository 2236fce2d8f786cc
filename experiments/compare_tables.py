"""The table and the picture of a comparison, from result files (see `experiments.compare`)."""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Sequence

import numpy as np

from experiments import diagnostics, evaluate, results
from experiments.results import Result

PLANS = evaluate.PLAN_STRATA[:3]
Runs = dict[str, dict[int, Result]]  # variant -> seed -> result


def by_variant(everything: Sequence[Result]) -> Runs:
    runs: Runs = collections.defaultdict(dict)
    for result in everything:
        runs[result['experiment']][result['seed']] = result
    return dict(sorted(runs.items(), key=lambda item: (_estimator(item[0]), '+' in item[0], item[0])))


def _estimator(variant: str) -> str:
    return variant.split('+')[0]


def reference_of(variant: str, runs: Runs, reference: str) -> str | None:
    """What this variant is compared with: `reference`, or its own estimator alone in the same environment. None without."""
    estimator, *parts = variant.split('+')
    name = reference or '+'.join([estimator, *(part for part in parts if part.startswith('env.'))])
    return name if name in runs and name != variant else None


def paired(variant: dict[int, Result], reference: dict[int, Result], measure) -> list[float]:
    """measure(variant) - measure(reference), seed by seed, where both have the seed."""
    return [measure(variant[seed]) - measure(reference[seed]) for seed in sorted(variant.keys() & reference.keys())]


def final_mean(result: Result) -> float:
    """Success in % after training, mean over the splits."""
    return float(results.success(result, -1).mean())


def main_table(runs: Runs, reference: str) -> str:
    """Success before and after on every split, and paired differences on all splits together and on rollouts."""
    splits = results.splits(next(iter(next(iter(runs.values())).values())))
    head = ['variant', 'seeds', *(f'{split}: before → after' for split in splits), 'rollouts, last third', 'against',
            'difference, all splits', 'difference, rollouts']
    lines = [_row(head), _row(['---'] * len(head))]
    for variant, seeds in runs.items():
        before, after = (np.array([results.success(result, i) for result in seeds.values()]) for i in (0, -1))
        cells = [f'`{variant}`', str(len(seeds))]
        cells += [f'{before[:, i].mean():.1f} → {_spread(after[:, i])}' for i in range(len(splits))]
        cells.append(_spread(np.array([results.late_rollouts(result) for result in seeds.values()])))
        other = reference_of(variant, runs, reference)
        differences = [paired(seeds, runs[other], measure) for measure in (final_mean, results.late_rollouts)] if other else []
        cells += [f'`{other}`' if other else '–'] + ([_interval(values) for values in differences] or ['–', '–'])
        lines.append(_row(cells))
    return '\n'.join(lines)


def score_table(runs: Runs, reference: str) -> str:
    """Task score (graded, not strict success) before and after, and paired differences; '' where nothing is graded."""
    first = next(iter(next(iter(runs.values())).values()))
    if not len(results.scores(first, -1)):
        return ''
    splits = results.splits(first)
    head = ['variant', *(f'{split}: before → after' for split in splits), 'difference, all splits']
    lines = [_row(head), _row(['---'] * len(head))]
    for variant, seeds in runs.items():
        before, after = (np.array([results.scores(result, i) for result in seeds.values()]) for i in (0, -1))
        other = reference_of(variant, runs, reference)
        difference = paired(seeds, runs[other], lambda r: float(results.scores(r, -1).mean())) if other else []
        lines.append(_row([f'`{variant}`', *(f'{before[:, i].mean():.1f} → {_spread(after[:, i])}' for i in range(len(splits))),
                           _interval(difference)]))
    return '\n'.join(lines)


def type_table(runs: Runs) -> str:
    """Success after training on each task type, mean over splits and seeds."""
    first = next(iter(next(iter(runs.values())).values()))
    start = f'eval/{results.splits(first)[0]}/success_rate/'
    types = sorted(name.removeprefix(start) for name in first['evaluations'][-1] if name.startswith(start))
    lines = [_row(['variant', *types]), _row(['---'] * (1 + len(types)))]
    for variant, seeds in runs.items():
        means = [np.mean([results.success(result, -1, kind).mean() for result in seeds.values()]) for kind in types]
        lines.append(_row([f'`{variant}`', *(f'{mean:.0f}' for mean in means)]))
    return '\n'.join(lines)


def plan_table(runs: Runs) -> str:
    """Success after training by the length of the expert plan (SERO, A.8), mean over splits and seeds; '' without."""
    lines = [_row(['variant', *PLANS]), _row(['---'] * (1 + len(PLANS)))]
    for variant, seeds in runs.items():
        rates = [[result['evaluations'][-1][f'eval/{split}/success_by_plan/{plan}'] for plan in PLANS]
                 for result in seeds.values() for split in results.splits(result)
                 if f'eval/{split}/success_by_plan/{PLANS[0]}' in result['evaluations'][-1]]
        if rates:
            lines.append(_row([f'`{variant}`', *(f'{100 * rate:.0f}' for rate in np.mean(rates, axis=0))]))
    return '\n'.join(lines) if len(lines) > 2 else ''


def failure_table(runs: Runs) -> str:
    """How often there was nothing to compare, in % of groups, mean over updates and seeds."""
    curves = {'all-failed task groups': 'group/all_failed_share', 'triggered, all levels': 'gate/triggered_share'}
    levels = {'zero-score step groups': 'gate/step', 'zero-score task groups': 'gate/trajectory'}
    lines = [_row(['variant', *curves, *levels]), _row(['---'] * (1 + len(curves) + len(levels)))]
    for variant, seeds in runs.items():
        cells = [f'`{variant}`']
        for name in curves.values():
            cells.append(f'{100 * np.mean([np.mean(r["curves"][name]) for r in seeds.values()]):.0f}')
        for level in levels.values():
            shares = [np.sum(r['curves'][f'{level}/zero_score']) / np.sum(r['curves'][f'{level}/groups'])
                      for r in seeds.values() if f'{level}/groups' in r['curves']]
            cells.append(f'{100 * np.mean(shares):.0f}' if shares else '–')
        lines.append(_row(cells))
    return '\n'.join(lines)


def oracle_table(runs: Runs) -> str:
    """What SERO's oracle did, per run and mean over seeds; '' without a variant that has one.

    Transitions are those of the whole run: the oracle's and, with restoration by replay, the replayed ones. In updates:
    how many more updates of its own rollouts would be as many, the base's share in an interaction-matched comparison
    (SERO, A.2).
    """
    head = ['variant', 'roots per update', 'valid', 'gated', 'transitions', 'in updates', 'effective depth: first → last third']
    lines = [_row(head), _row(['---'] * len(head))]
    for variant, seeds in runs.items():
        with_oracle = [result for result in seeds.values() if 'oracle/roots' in result['curves']]
        if not with_oracle:
            continue
        roots, valid, gated, spent = (np.mean([_total(r, name) for r in with_oracle])
                                      for name in ('oracle/roots', 'oracle/valid', 'oracle/gated', 'oracle/steps'))
        spent += np.mean([_total(r, 'oracle/replayed_steps') for r in with_oracle])
        updates = np.mean([len(r['curves']['batch/rows']) for r in with_oracle])
        rows = np.mean([_total(r, 'batch/rows') for r in with_oracle]) / updates
        depth = [results.curve(r, 'oracle/effective_depth') for r in with_oracle]
        third = max(1, int(updates) // 3)
        early, late = (np.mean([np.nanmean(d[part]) for d in depth]) for part in (slice(third), slice(-third, None)))
        lines.append(_row([f'`{variant}`', f'{roots / updates:.1f}', f'{valid / roots:.0%}', f'{gated / roots:.0%}',
                           f'{spent:.0f}', f'{spent / rows:.1f}', f'{early:.2f} → {late:.2f}']))
    return '\n'.join(lines) if len(lines) > 2 else ''


def _total(result: Result, name: str) -> float:
    return float(np.nansum(results.curve(result, name)))


def _row(cells: Sequence[str]) -> str:
    return '| ' + ' | '.join(cells) + ' |'


def _spread(values: np.ndarray) -> str:
    return f'{values.mean():.1f} ± {values.std(ddof=1):.1f}' if len(values) > 1 else f'{values.mean():.1f}'


def _interval(values: Sequence[float]) -> str:
    if not values:
        return '–'
    mean, half = results.interval(values)
    return f'{mean:+.1f} [{mean - half:+.1f}, {mean + half:+.1f}]' if len(values) > 1 else f'{mean:+.1f}'


def draw(runs: Runs, reference: str, path: pathlib.Path) -> None:
    """Curves of every variant (mean over seeds bold, seeds faint), and the paired differences with their intervals."""
    import matplotlib

    matplotlib.use('Agg')
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(14, 10), constrained_layout=True)
    colours = dict(zip(runs, plt.get_cmap('tab20')(np.linspace(0, 1, 20))[: len(runs)] if len(runs) <= 20
                       else plt.get_cmap('turbo')(np.linspace(0.05, 0.95, len(runs))), strict=True))
    for ax, (title, curve) in zip(axes.flat, {
        'Evaluation, mean of the splits': None, 'Rollouts (running mean of 5)': 'rollout/success_rate',
        'All-failed task groups (running mean of 5)': 'group/all_failed_share'}.items(), strict=False):
        for variant, seeds in runs.items():
            lines = []
            for result in seeds.values():
                if curve is None:
                    x = [evaluation['update'] for evaluation in result['evaluations']]
                    y = [results.success(result, i).mean() / 100 for i in range(len(x))]
                else:
                    y = diagnostics.smooth(np.array(result['curves'][curve]))
                    x = list(range(1, len(y) + 1))
                lines.append((x, y))
                ax.plot(x, y, color=colours[variant], alpha=0.2, linewidth=0.8)
            shortest = min(len(y) for _, y in lines)
            ax.plot(lines[0][0][:shortest], np.mean([y[:shortest] for _, y in lines], axis=0), color=colours[variant],
                    linewidth=2.2, linestyle='-' if '+' in variant else '--', label=variant)
        ax.set(title=title, xlabel='update', ylabel='share', ylim=(0, None))
        ax.grid(alpha=0.3)
    axes[0, 0].legend(fontsize=7, ncol=2)
    _draw_differences(axes[1, 1], runs, reference, colours)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def _draw_differences(ax, runs: Runs, reference: str, colours) -> None:
    compared = [variant for variant in runs if reference_of(variant, runs, reference)]
    for row, variant in enumerate(compared):
        other = runs[reference_of(variant, runs, reference)]
        for measure, marker, shift in ((final_mean, 'o', -0.12), (results.late_rollouts, 's', 0.12)):
            values = paired(runs[variant], other, measure)
            if values:
                mean, half = results.interval(values)
                ax.errorbar(mean, row + shift, xerr=half if np.isfinite(half) else 0, fmt=marker, color=colours[variant])
                ax.plot(values, [row + shift] * len(values), '|', color='black', alpha=0.5)
    ax.axvline(0, color='grey', linewidth=1)
    ax.set_yticks(range(len(compared)), [f'{v} - {reference_of(v, runs, reference)}' for v in compared], fontsize=8)
    ax.set(title='Paired difference, 95 % interval (circle: evaluation, square: rollouts)', xlabel='points')
    ax.invert_yaxis()
    ax.grid(alpha=0.3)


def write(everything: Sequence[Result], folder: pathlib.Path, *, reference: str) -> str:
    """Write table.md and curves.png into `folder`; returns the tables and where they are."""
    runs = by_variant(everything)
    if reference and reference not in runs:
        raise ValueError(f'there are no results of the reference {reference!r}; there are {", ".join(runs)}')
    one = everything[0]
    dates = sorted({result['date'] for result in everything})
    commits = sorted({result['commit'] for result in everything})
    plans, oracle, scores = plan_table(runs), oracle_table(runs), score_table(runs, reference)
    text = '\n\n'.join([
        f'# {folder.name}', 'Success in %, mean ± standard deviation over seeds; differences are paired by seed, with their '
        '95 % interval (Student\'s t).', main_table(runs, reference),
        *(['Task score, 0 to 100 (what success is a strict part of):', scores] if scores else []),
        'After training, by task type (mean of splits and seeds):',
        type_table(runs), *(['By the length of the expert plan (`eval.plan_bounds`):', plans] if plans else []),
        'Groups without contrast, in % (mean over updates and seeds):', failure_table(runs),
        *(['What the oracle did:', oracle] if oracle else []),
        f'{len(everything)} runs, {dates[0]} to {dates[-1]}, commits {", ".join(commits)}, {one["machine"]}. '
        f'Made by `python -m experiments.compare --name={folder.name} --only_show`.'])
    (folder / 'table.md').write_text(text + '\n')
    draw(runs, reference, folder / 'curves.png')
    return f'{text}\n\nresults: {folder}/table.md, {folder}/curves.png'
