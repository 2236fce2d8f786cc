"""Finished runs as small committed files, and what can be said about several of them.

    python -m experiments.results record runs/A runs/B      results/<experiment>-<preset>-seed<N>.json for each

`experiments.compare` makes many of them, and their tables.
"""

from __future__ import annotations

import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

from covsero_jax import metrics

FOLDER = pathlib.Path('results')
Result = dict[str, Any]


def record(run: pathlib.Path, path: pathlib.Path | None = None) -> pathlib.Path:
    """Write a finished run's configuration, commit, machine, evaluations and curves. Raises ValueError if unfinished.

    A curve is one number per update, null where there is none.
    """
    config, rows = json.loads((run / 'config.json').read_text()), metrics.read_metrics(run)
    if not rows or rows[-1]['update'] != config['updates']:
        reached = rows[-1]['update'] if rows else 0
        raise ValueError(f'{run} stopped after update {reached} of {config["updates"]}; finish it first')
    evaluations = [{name: value for name, value in row.items() if name == 'update' or name.startswith('eval/')}
                   for row in rows if any(name.startswith('eval/') for name in row)]
    names = sorted({name for row in rows[1:] for name in row if name != 'update' and not name.startswith('eval/')})
    out = {
        'experiment': config['experiment'], 'preset': config['preset'], 'seed': config['seed'], 'config': config,
        'commit': commit(), 'date': time.strftime('%Y-%m-%d'),
        'machine': f'{os.cpu_count()} cores, {platform.machine()}', 'evaluations': evaluations,
        'curves': {name: [_short(row[name]) if name in row else None for row in rows[1:]] for name in names},
    }
    path = path or FOLDER / f'{config["experiment"]}-{config["preset"]}-seed{config["seed"]}.json'
    path.parent.mkdir(parents=True, exist_ok=True)
    metrics.replace_file(path, json.dumps(out) + '\n')
    return path


def read(path: pathlib.Path) -> Result:
    """One result file. ValueError names a file that is none."""
    try:
        result = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f'{path}: {error}') from error
    missing = {'experiment', 'seed', 'config', 'evaluations', 'curves'} - set(result)
    if missing:
        raise ValueError(f'{path} is not a result file: it lacks {", ".join(sorted(missing))}')
    return result


def splits(result: Result) -> list[str]:
    return [name.split('/')[1] for name in result['evaluations'][0] if name.count('/') == 2 and name.endswith('/success_rate')]


def success(result: Result, evaluation: int, kind: str = '') -> np.ndarray:
    """Success rate in % of one evaluation (0 the first, -1 the last) on each split; of one task type if given."""
    name = f'success_rate/{kind}' if kind else 'success_rate'
    return 100 * np.array([result['evaluations'][evaluation][f'eval/{split}/{name}'] for split in splits(result)])


def scores(result: Result, evaluation: int) -> np.ndarray:
    """Task score, 0 to 100, of one evaluation on each split; empty where the environment grades nothing."""
    measured = result['evaluations'][evaluation]
    return 100 * np.array([measured[f'eval/{split}/score'] for split in splits(result) if f'eval/{split}/score' in measured])


def curve(result: Result, name: str) -> np.ndarray:
    """One number per update, NaN where there was none."""
    return np.array(result['curves'][name], float)


def late_rollouts(result: Result) -> float:
    """Success rate in % of the training rollouts of the last third of the updates: many more episodes than an evaluation."""
    curve = result['curves']['rollout/success_rate']
    return 100 * float(np.mean(curve[-max(1, len(curve) // 3):]))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """(mean, half width of its 95 % confidence interval by Student's t); the half width of one value is inf."""
    values = np.asarray(values, float)
    if len(values) < 2:
        return float(values.mean()), float('inf')
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return float(values.mean()), float(half)


def _short(value: float) -> float:
    return float(f'{value:.5g}')


def commit() -> str:
    """Of the working copy; 'unknown' outside one, or where git is not installed."""
    if shutil.which('git') is None:
        return 'unknown'
    run = subprocess.run(['git', 'rev-parse', '--short', 'HEAD'], capture_output=True, text=True, check=False)
    return run.stdout.strip() or 'unknown'


if __name__ == '__main__':
    if sys.argv[1:2] == ['record'] and sys.argv[2:]:
        for argument in sys.argv[2:]:
            print(f'results: {record(pathlib.Path(argument))}')
    else:
        sys.exit(__doc__)
