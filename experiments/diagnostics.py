"""CovGPO's diagnostics of one or several runs: a figure, and two tables as Markdown.

    python -m experiments.diagnostics RUN...      a run's folder, or a file under results/
        --at=10,30,150          the updates of the first table; default 1, 25 %, 50 %, 75 % and 100 % of each run
        --until=30 --pool=10    the second table pools the last 10 updates up to 30; default all of them
        --out=FILE.png          the figure; default beside the first run's folder, or in the current folder for a file

The figure is the paper's Figure 4 (upper row) and Figure 7 (below), the tables are its Tables 16 and 17 (CovGPO §5.2,
§10.8). What a run did not log shows as a dash and is named in a line at the end.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from covsero_jax import metrics
from experiments import results

WINDOW = 5  # updates that one point of a smoothed curve, and one row of the first table, average
DASH = '–'
LEVELS = {'step': 'step groups', 'trajectory': 'task groups'}
COUNTS = ('groups', 'zero_score', 'triggered', 'singleton', 'zero_degenerate', 'gap_violations', 'added_to_penalty')
BY_TYPE = 'group/all_failed/'
PHASES = ('time/rollout_s', 'time/advantages_s', 'time/old_logprobs_s', 'time/learn_s')  # in every update of every run
NEEDED = (
    'rollout/success_rate', 'group/all_failed', 'group/all_failed_share', 'coverage/failed', 'coverage/successful',
    'gate/triggered_share', *PHASES,
    *(f'gate/{level}/{what}' for level in LEVELS for what in (*COUNTS, 'q_fail', 'scale', 'repair')))


class RunError(ValueError):
    """A path that holds no run to show; the message names it and says what is wrong."""


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run logged. Arrays with suffix U have one value per update, NaN where it was not logged."""

    label: str
    update_U: np.ndarray  # int
    curves: Mapping[str, np.ndarray]
    notes: tuple[str, ...] = ()  # about the file

    def curve(self, name: str) -> np.ndarray:
        return self.curves[name] if name in self.curves else np.full(len(self.update_U), np.nan)

    def share(self, level: str, what: str, of: str = 'groups') -> np.ndarray:
        """Two counts of one level, divided; NaN where there is nothing to divide by."""
        return _ratio(self.curve(f'gate/{level}/{what}'), self.curve(f'gate/{level}/{of}'))

    def repair(self, level: str) -> np.ndarray:
        """Mean |fallback| over the rows of triggered groups; NaN where none was triggered."""
        return np.where(self.curve(f'gate/{level}/triggered') > 0, self.curve(f'gate/{level}/repair'), np.nan)

    def coverage(self, kind: str) -> np.ndarray:
        """Mean first-visit rate of the 'failed' or 'successful' trajectories; NaN where there are none."""
        empty = {'failed': 1.0, 'successful': 0.0}[kind]
        return np.where(self.curve('rollout/success_rate') == empty, np.nan, self.curve(f'coverage/{kind}'))

    def iteration_seconds(self) -> np.ndarray:
        """The phases' sum without evaluation. Phases other than PHASES count as 0 in an update that lacks them."""
        others = [values for name, values in self.curves.items()
                  if name.startswith('time/') and name not in (*PHASES, 'time/evaluate_s')]
        return sum(self.curve(name) for name in PHASES) + sum(np.nan_to_num(values) for values in others)

    def only(self, chosen_U: np.ndarray) -> Run:
        """The same run, some updates."""
        curves = {name: value_U[chosen_U] for name, value_U in self.curves.items()}
        return dataclasses.replace(self, update_U=self.update_U[chosen_U], curves=curves)

    def types(self) -> set[str]:
        return {name.removeprefix(BY_TYPE) for name in self.curves if name.startswith(BY_TYPE)}

    def missing(self) -> list[str]:
        """The names of NEEDED that some update lacks."""
        out = [name for name in NEEDED if not np.isfinite(self.curve(name)).all()]
        return out if self.types() else [*out, f'{BY_TYPE}<type>']


SERIES: Mapping[str, Callable[[Run], np.ndarray]] = {
    'success of rollouts': lambda run: run.curve('rollout/success_rate'),
    'all-failed task groups': lambda run: run.curve('group/all_failed_share'),
    'zero-score step groups': lambda run: run.share('step', 'zero_score'),
    'triggered groups, all levels': lambda run: run.curve('gate/triggered_share'),
    'triggered step groups': lambda run: run.share('step', 'triggered'),
    'triggered task groups': lambda run: run.share('trajectory', 'triggered'),
    '|repair| in triggered step groups': lambda run: run.repair('step'),
    '|repair| in triggered task groups': lambda run: run.repair('trajectory'),
    'step groups, number': lambda run: run.curve('gate/step/groups'),
    'zero-score step groups, number': lambda run: run.curve('gate/step/zero_score'),
    'singleton step groups, number': lambda run: run.curve('gate/step/singleton'),
    'zero score, equal coverage, number': lambda run: run.curve('gate/step/zero_degenerate'),
}
NUM_SHARES = 6  # the first series are shares
PROGRESS = ('zero-score step groups', 'triggered step groups', 'triggered task groups', 'triggered groups, all levels',
            'all-failed task groups', 'success of rollouts')


def read_run(path: pathlib.Path) -> Run:
    """A run's folder or a committed result. Raises RunError if it is neither, broken, or holds no update."""
    try:
        run = _read_result(path) if path.is_file() else _read_folder(path)
    except FileNotFoundError as error:
        raise RunError(
            f'{path} is neither a run (a folder with config.json and metrics.jsonl) nor a result file') from error
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f'{path} is not what experiments.train or experiments.results wrote: {error!r}') from error
    if not run.update_U.size:
        raise RunError(f'{path} holds no update yet; let the run finish one')
    return run


def _read_folder(path: pathlib.Path) -> Run:
    config, lines = json.loads((path / 'config.json').read_text()), metrics.read_metrics(path)
    torn = len((path / 'metrics.jsonl').read_text().splitlines()) > len(lines)
    notes = ('the torn last line of metrics.jsonl (a crash while writing) is left out',) if torn else ()
    rows = [row for row in lines if row['update'] > 0]  # 0 is the evaluation before training
    unlogged = dict.fromkeys((name for row in rows for name in row if name != 'update'), np.nan)
    curves = {name: np.array([(unlogged | row)[name] for row in rows]) for name in unlogged}
    return Run(_label(config), np.array([int(row['update']) for row in rows]), curves, notes)


def _read_result(path: pathlib.Path) -> Run:
    result = results.read(path)
    num_updates = result['config']['updates']
    curves = {name: np.array(values, float) for name, values in result['curves'].items() if len(values) == num_updates}
    notes = tuple(f'curve {name} has {len(values)} values for {num_updates} updates and is left out'
                  for name, values in result['curves'].items() if name not in curves)
    return Run(_label(result), np.arange(1, num_updates + 1), curves, notes)


def _label(run: Mapping) -> str:
    return f'{run["experiment"]}, seed {run["seed"]}'


def read_runs(paths: Sequence[pathlib.Path]) -> list[Run]:
    """All runs; those that would carry the same label carry their path, too."""
    runs = [read_run(path) for path in paths]
    labels = [run.label for run in runs]
    return [dataclasses.replace(run, label=f'{run.label} ({path})') if labels.count(run.label) > 1 else run
            for run, path in zip(runs, paths, strict=True)]


def smooth(value_U: np.ndarray) -> np.ndarray:
    """Centred running mean over WINDOW updates: fewer at both ends, and NaN are skipped."""
    half = WINDOW // 2
    return np.array([_mean(value_U[max(0, u - half):u + half + 1]) for u in range(len(value_U))])


def plot(runs: Sequence[Run], path: pathlib.Path) -> None:
    """One panel per series of SERIES, one colour per run, as PNG."""
    import matplotlib

    matplotlib.use('Agg')
    from matplotlib import pyplot as plt
    from matplotlib import ticker

    colours = plt.get_cmap('tab10').colors if len(runs) <= 10 else plt.get_cmap('turbo')(np.linspace(0, 1, len(runs)))
    figure, axes = plt.subplots(3, 4, figsize=(16, 9.5), sharex=True, layout='constrained')
    for i, (ax, (title, series)) in enumerate(zip(axes.flat, SERIES.items(), strict=True)):
        for run, colour in zip(runs, colours, strict=False):  # there may be more colours than runs
            value_U = series(run)
            ax.plot(run.update_U, value_U, color=colour, alpha=0.3, linewidth=1, marker='.', markersize=3)
            ax.plot(run.update_U, smooth(value_U), color=colour, linewidth=2.2, label=run.label)
        if not any(np.isfinite(series(run)).any() for run in runs):
            ax.text(0.5, 0.5, DASH, transform=ax.transAxes, ha='center', va='center', color='grey', fontsize=20)
            ax.set_yticks([])
        ax.set_title(title.removesuffix(', number'), fontsize=12)
        ax.set_ylabel('share' if i < NUM_SHARES else 'number' if title.endswith('number') else '|repair|')
        ax.set_ylim(*((-0.02, 1.02) if i < NUM_SHARES else (0, 1.05 * ax.get_ylim()[1])))
        ax.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        ax.grid(alpha=0.25)
    figure.supxlabel('update')
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc='outside upper center', ncols=min(4, len(runs)), frameon=False, fontsize=11,
                  title=f'faint: every update; bold: centred running mean of {WINDOW} updates, fewer at the ends')
    figure.savefig(path, format='png', dpi=100)
    plt.close(figure)


def progress_table(runs: Sequence[Run], at: Sequence[int] | None = None) -> str:
    """Table 16: shares in per cent at some updates of each run; an update that a run does not have is left out."""
    lines = [_line('run', 'update', *PROGRESS), '|---' * (len(PROGRESS) + 2) + '|']
    for run in runs:
        last = int(run.update_U[-1])
        smoothed = [smooth(SERIES[name](run)) for name in PROGRESS]
        for update in at or sorted({1, *(math.ceil(last * quarter / 4) for quarter in range(1, 5))}):
            for u in np.flatnonzero(run.update_U == update):
                lines.append(_line(run.label, str(update), *(_number(100 * value_U[u], '.1f') for value_U in smoothed)))
    return '\n'.join(lines)


def runtime_table(runs: Sequence[Run], until: int | None = None, pool: int | None = None) -> str:
    """Table 17: each run's columns over the `pool` last updates up to `until`; without them, over all updates."""
    types = sorted(set().union(*(run.types() for run in runs)))
    columns = []
    for run in runs:
        last = run.update_U[-1] if until is None else max(min(until, run.update_U[-1]), run.update_U[0])
        columns.append(_summary(run.only((run.update_U <= last) & (run.update_U > last - (pool or last))), types))
    lines = [_line('', *(run.label for run in runs)), '|---' * (len(runs) + 1) + '|']
    return '\n'.join(lines + [_line(name, *(column[name] for column in columns)) for name in columns[0]])


def _summary(run: Run, types: Sequence[str]) -> dict[str, str]:
    """One column of the second table. Counts are added up before they are divided."""
    def count(level, what):
        return run.curve(f'gate/{level}/{what}').sum()

    failed = sum(run.curve(BY_TYPE + kind).sum() for kind in types)
    out = {
        'updates': f'{run.update_U[0]}{DASH}{run.update_U[-1]}',
        'all-failed task groups': _number(run.curve('group/all_failed').sum(), '.0f'),
        **{f'P({kind} \\| all-failed) %': _percent(run.curve(BY_TYPE + kind).sum(), failed)
           for kind in types or ('type',)},
        'coverage of failed trajectories': _number(_mean(run.coverage('failed')), '.3f'),
        'coverage of successful trajectories': _number(_mean(run.coverage('successful')), '.3f'),
    }
    for level, groups in LEVELS.items():
        out |= {
            f'{groups}: triggered %': _percent(count(level, 'triggered'), count(level, 'groups')),
            f'{groups}: singleton %': _percent(count(level, 'singleton'), count(level, 'groups')),
            f'{groups}: q_fail': _number(_mean(run.curve(f'gate/{level}/q_fail')), '.3f'),
            f'{groups}: lambda_eff': _number(_mean(run.curve(f'gate/{level}/scale')), '.3f'),
            f'{groups}: \\|repair\\| where triggered': _number(_mean(run.repair(level)), '.3f'),
            f'{groups}: equal coverage, % of zero-score': _percent(
                count(level, 'zero_degenerate'), count(level, 'zero_score')),
            f'{groups}: added to a penalty, % of triggered': _percent(
                count(level, 'added_to_penalty'), count(level, 'triggered')),
            f'{groups}: gate-gap violations': _number(count(level, 'gap_violations'), '.0f'),
        }
    advantages, iteration = (float(np.median(value_U)) for value_U in (
        run.curve('time/advantages_s'), run.iteration_seconds()))
    return out | {'advantage computation, s': _number(advantages, '.4f'), 'iteration, s': _number(iteration, '.2f'),
                  'advantage computation, % of iteration': _number(100 * advantages / iteration, '.2f')}


def _mean(values: np.ndarray) -> float:
    """The mean of the finite values; NaN if there are none."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else math.nan


def _ratio(part, whole):
    part, whole = np.asarray(part, float), np.asarray(whole, float)
    return np.divide(part, whole, out=np.full(part.shape, np.nan), where=whole != 0)


def _percent(part: float, whole: float) -> str:
    return _number(100 * float(_ratio(part, whole)), '.1f')


def _number(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else DASH


def _line(*cells: str) -> str:
    return f'| {" | ".join(cells)} |'


def _braces(names: Sequence[str]) -> str:
    """Names with a common area as area/{a,b}."""
    parts = []
    for area, members in itertools.groupby(names, lambda name: name.rpartition('/')[0]):
        last = [name.rpartition('/')[2] for name in members]
        parts.append(f'{area}/{last[0]}' if len(last) == 1 else f'{area}/{{{",".join(last)}}}')
    return ', '.join(parts)


def notes(runs: Sequence[Run], at: Sequence[int] | None = None) -> list[str]:
    """What the reader has to know about the files, one line for all runs that share it."""
    about: dict[str, list[str]] = {}
    for run in runs:
        late = [str(update) for update in at or () if update not in run.update_U]
        for note in (*run.notes,
                     *([f'has no update {", ".join(late)} (its last is {run.update_U[-1]})'] if late else []),
                     *([f'not logged in every update: {_braces(run.missing())}'] if run.missing() else [])):
            about.setdefault(note, []).append(run.label)
    return [f'note: {"; ".join(labels)}: {note}' for note, labels in about.items()]


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'{text!r} is not a number of updates (1, 2, ...)')
    return int(text)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('runs', nargs='+', metavar='RUN', type=pathlib.Path)
    parser.add_argument('--at', type=lambda text: [_positive(part) for part in text.split(',')])
    parser.add_argument('--until', type=_positive)
    parser.add_argument('--pool', type=_positive)
    parser.add_argument('--out', type=pathlib.Path)
    options = parser.parse_args(arguments)
    first = options.runs[0]
    out = options.out or (first.parent if first.is_dir() else pathlib.Path()) / 'diagnostics.png'
    try:
        runs = read_runs(options.runs)
        plot(runs, out)
    except (RunError, OSError) as error:
        sys.exit(f'error: {error}')
    print(f'Over training, in %: means over the updates at most {WINDOW // 2} away from the one named (Table 16)\n')
    print(progress_table(runs, options.at))
    print('\nThe fallback at work: counts are added up over the updates and then divided; q_fail, lambda_eff, |repair| '
          'and coverage are means over updates, seconds are medians (Table 17)\n')
    print(runtime_table(runs, options.until, options.pool) + '\n')
    print('\n'.join([*notes(runs, options.at), f'figure: {out}']))


if __name__ == '__main__':
    main()
