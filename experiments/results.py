"""Finished runs as small committed files, and the tables made from them.

    python -m experiments.results record runs/A runs/B      results/<experiment>-<preset>-seed<N>.json for each
    python -m experiments.results table                     success before -> after, mean +- std over seeds
"""

from __future__ import annotations

import collections
import json
import os
import pathlib
import platform
import subprocess
import sys
import time

import numpy as np

from covsero_jax import metrics

FOLDER = pathlib.Path('results')
CURVES = ('rollout/success_rate', 'group/all_failed_share', 'gate/triggered_share', 'gate/step/zero_score', 'gate/step/groups',
          'gate/step/repair', 'rollout/admissible', 'coverage/failed', 'coverage/successful')


def record(run: pathlib.Path) -> pathlib.Path:
    """Write a finished run's configuration, commit, machine, evaluations and curves. Raises ValueError if unfinished."""
    config, rows = json.loads((run / 'config.json').read_text()), metrics.read_metrics(run)
    if rows[-1]['update'] != config['updates']:
        raise ValueError(f'{run} stopped after update {rows[-1]["update"]} of {config["updates"]}; finish it first')
    evaluations = [{name: value for name, value in row.items() if name == 'update' or name.startswith('eval/')}
                   for row in rows if any(name.startswith('eval/') for name in row)]
    seconds = {name: round(float(np.mean([row[name] for row in rows[3:] if name in row])), 3)
               for name in rows[-1] if name.startswith('time/')}
    out = {
        'experiment': config['experiment'], 'preset': config['preset'], 'seed': config['seed'], 'config': config,
        'commit': _commit(), 'date': time.strftime('%Y-%m-%d'),
        'machine': f'{os.cpu_count()} cores, {platform.machine()}', 'evaluations': evaluations,
        'seconds_per_update': seconds,
        'curves': {name: [round(row[name], 5) for row in rows[1:]] for name in CURVES},
    }
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f'{config["experiment"]}-{config["preset"]}-seed{config["seed"]}.json'
    path.write_text(json.dumps(out) + '\n')
    return path


def table() -> str:
    """One line per experiment and preset and split, from all files under results/."""
    runs = collections.defaultdict(list)
    for path in sorted(FOLDER.glob('*.json')):
        result = json.loads(path.read_text())
        runs[result['experiment'], result['preset']].append(result)
    lines = ['| experiment | preset | seeds | split | before | after | gain |', '|---|---|---|---|---|---|---|']
    for (experiment, preset), results in sorted(runs.items()):
        splits = [name.split('/')[1] for name in results[0]['evaluations'][0] if name.endswith('/success_rate')]
        for split in splits:
            before, after = (np.array([r['evaluations'][i][f'eval/{split}/success_rate'] for r in results]) * 100
                             for i in (0, -1))
            spread = f' ± {after.std(ddof=1):.1f}' if len(results) > 1 else ''
            lines.append(f'| {experiment} | {preset} | {len(results)} | {split} | {before.mean():.1f} % | '
                         f'{after.mean():.1f}{spread} % | {(after - before).mean():+.1f} |')
    return '\n'.join(lines)


def _commit() -> str:
    run = subprocess.run(['git', 'rev-parse', '--short', 'HEAD'], capture_output=True, text=True, check=False)
    return run.stdout.strip() or 'unknown'


if __name__ == '__main__':
    if sys.argv[1:2] == ['record']:
        for name in sys.argv[2:]:
            print(f'results: {record(pathlib.Path(name))}')
    elif sys.argv[1:] == ['table']:
        print(table())
    else:
        sys.exit(__doc__)
