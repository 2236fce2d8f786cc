"""A run as a page: learning curves, the gate's work, time per phase, and some episodes to read.

    python -m experiments.report RUN          (training writes it at its end, too)
"""

from __future__ import annotations

import base64
import html
import io
import json
import pathlib
import sys
from collections.abc import Callable

from covsero_jax import metrics
from covsero_jax.envs import sokoban_image

PANELS = (
    ('Groups without contrast', 'share', {'all-failed task groups': 'group/all_failed_share',
                                          'triggered (all levels)': 'gate/triggered_share'}),
    ('First-visit coverage', 'rate', {'failed': 'coverage/failed', 'successful': 'coverage/successful'}),
    ('Replies', 'share', {'format': 'rollout/parsed', 'admissible': 'rollout/admissible'}),
    ('Policy', 'nats', {'entropy': 'loss/entropy', 'KL to start': 'loss/kl'}),
    ('Seconds per update', 's', {phase: f'time/{phase}_s' for phase in (
        'rollout', 'old_logprobs', 'ref_logprobs', 'oracle_wait', 'oracle_score', 'learn', 'evaluate', 'save')}),
)
ORACLE_PANELS = (  # of runs with SERO
    ('Oracle branches', 'per update', {'attempted': 'oracle/roots', 'valid': 'oracle/valid', 'gated in': 'oracle/gated'}),
    ('Depth of a branch', 'commands', {'length': 'oracle/branch_length', 'effective: sum of weights': 'oracle/effective_depth'}),
    ("The oracle's commands", '', {'compatibility': 'oracle/compatibility', 'loss': 'loss/oracle'}),
)
EPISODES = 6


def success_panel(rows: list[dict[str, float]]) -> tuple[str, str, dict[str, str]]:
    """Success of rollouts and of every evaluation split, and task scores where an environment grades."""
    names = sorted({name for row in rows for name in row})
    series = {name.split('/')[1]: name for name in names if name.startswith('eval/') and name.endswith('/success_rate')}
    graded = {f'score, {name.split("/")[1]}': name for name in names if name.startswith('eval/') and name.endswith('/score')}
    return 'Success', 'share', {'rollouts': 'rollout/success_rate', **series, **graded}


def plot(rows: list[dict[str, float]]) -> bytes:
    """The panels as PNG."""
    import matplotlib

    matplotlib.use('Agg')
    from matplotlib import pyplot as plt

    panels = (success_panel(rows), *PANELS) + (ORACLE_PANELS if any('oracle/roots' in row for row in rows) else ())
    figure, axes = plt.subplots(len(panels) // 3, 3, figsize=(15, 4 * len(panels) // 3), constrained_layout=True)
    for ax, (title, unit, series) in zip(axes.flat, panels, strict=True):
        for label, name in series.items():
            points = [(row['update'], row[name]) for row in rows if name in row]
            if points:
                ax.plot(*zip(*points, strict=True), marker='o' if len(points) < 15 else None, label=label)
        ax.set_title(title)
        ax.set_xlabel('update')
        ax.set_ylabel(unit)
        ax.grid(alpha=0.3)
        if unit in ('share', 'rate'):
            ax.set_ylim(0, 1.02)
        if ax.lines:
            ax.legend(fontsize=8)
    buffer = io.BytesIO()
    figure.savefig(buffer, format='png', dpi=90)
    plt.close(figure)
    return buffer.getvalue()


def observation_html(run: pathlib.Path) -> Callable[[str], str]:
    """How an observation of this run is shown: Sokoban's grids as pictures, a WebShop page piece by piece, else its text."""
    config = run / 'config.json'
    environment = json.loads(config.read_text())['env']['name'] if config.exists() else ''
    if environment == 'sokoban':
        return lambda grid: (f'<img alt="{html.escape(grid)}" src="data:image/png;base64,'
                             f'{base64.b64encode(sokoban_image.from_text(grid, cell=16)).decode()}">')
    if environment == 'webshop':
        return lambda page: html.escape(page).replace(' [SEP] ', ' &middot; ')
    return html.escape


def episodes(run: pathlib.Path) -> str:
    """The first episodes of the last update whose trajectories were written, as HTML."""
    files = sorted((run / 'trajectories').glob('*.jsonl'))
    if not files:
        return '<p>No trajectories were written.</p>'
    parts, seen = [f'<p>{html.escape(files[-1].name)}</p>'], observation_html(run)
    lines = files[-1].read_text().splitlines()
    for line in lines[:: max(1, len(lines) // EPISODES)][:EPISODES]:
        episode = json.loads(line)
        rows = ''.join(
            f'<tr><td>{seen(step["observation"])}</td><td><b>{html.escape(step["command"])}</b></td>'
            f'<td>{"" if step["admissible"] else "not admissible"}</td><td>{step["advantage"]:+.2f}'
            f'{" (coverage)" if step["gate_open"] else ""}</td></tr>' for step in episode['steps'])
        verdict = 'success' if episode['success'] else episode['stop_reason']
        parts.append(f'<details><summary>{html.escape(episode["task"])}: {verdict}, {len(episode["steps"])} steps</summary>'
                     f'<table><tr><th>observation</th><th>command</th><th></th><th>advantage</th></tr>{rows}</table></details>')
    return '\n'.join(parts)


def branches(run: pathlib.Path) -> str:
    """The oracle's branches of the last update that wrote them, as HTML; '' for a run without SERO."""
    files = sorted((run / 'branches').glob('*.jsonl'))
    if not files:
        return ''
    seen = observation_html(run)
    parts = [f'<h2>Oracle branches</h2><p>{html.escape(files[-1].name)}: from states that failed rollouts reached</p>']
    for line in files[-1].read_text().splitlines()[:EPISODES]:
        branch = json.loads(line)
        rows = ''.join(
            f'<tr><td>{seen(step["observation"])}</td><td><b>{html.escape(step["command"])}</b></td>'
            f'<td>{step["compatibility"]:.3f}</td><td>{step["weight"]:.3f}</td></tr>' for step in branch['steps'])
        verdict = f'invalid ({branch["invalid"]})' if branch['invalid'] else f'valid, gate {branch["gate"]:g}'
        parts.append(f'<details><summary>{html.escape(branch["task"])} from step {branch["step"]}: {verdict}, '
                     f'{len(branch["steps"])} commands</summary><table><tr><th>observation</th><th>oracle</th>'
                     f'<th>compatibility</th><th>weight</th></tr>{rows}</table></details>')
    return '\n'.join(parts)


def write(run: pathlib.Path) -> pathlib.Path:
    """Write report.html and learning_curve.png into the run."""
    picture = plot(metrics.read_metrics(run))
    (run / 'learning_curve.png').write_bytes(picture)
    page = (f'<!doctype html><meta charset="utf-8"><title>{html.escape(run.name)}</title><style>body{{font:15px sans-serif;'
            'max-width:1200px;margin:2em auto}td,th{border-top:1px solid #ddd;padding:3px 8px;text-align:left;'
            'vertical-align:top;white-space:pre-line}img{max-width:100%}</style>'
            f'<h1>{html.escape(run.name)}</h1><img src="data:image/png;base64,{base64.b64encode(picture).decode()}">'
            f'<h2>Episodes</h2>{episodes(run)}{branches(run)}')
    out = run / 'report.html'
    out.write_text(page)
    return out


if __name__ == '__main__':
    for name in sys.argv[1:]:
        print(f'results: {write(pathlib.Path(name))}')
