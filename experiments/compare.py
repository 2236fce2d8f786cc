"""Several variants of one experiment over the same seeds: one table and one picture.

    python -m experiments.compare --variants=gigpo,gigpo+covgpo,gigpo+shuffle --seeds=3 --jobs=2
    python -m experiments.compare --name=tiny --only_show         tables and picture of what there is, nothing is run

A variant is what is joined by '+': an estimator, a coverage variant, or any configuration field with its value, as in
gigpo+covgpo+coverage.coverage_scale=0.5. Flags that are not listed go to every run (--config.env.difficulty=small).

Each finished run becomes results/<name>/<variant>-seed<k>.json: commit these. A run that has its file is not repeated,
an interrupted one is continued. Seed by seed, so that differences are paired as soon as possible.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

import tqdm
from absl import app, flags
from ml_collections import ConfigDict, config_flags

from covsero_jax import advantages, coverage_controls
from experiments import compare_tables, results, wiring

_CONFIG = flags.DEFINE_string('config', 'configs/alfworld_gigpo.py', 'experiment, optionally with :preset')
_VARIANTS = flags.DEFINE_list('variants', ['gigpo', 'gigpo+covgpo'], 'what is compared; see above')
_SEEDS = flags.DEFINE_integer('seeds', 3, 'number of seeds: 0, 1, ...')
_JOBS = flags.DEFINE_integer('jobs', 1, 'runs at the same time; each gets its share of the cores')
_NAME = flags.DEFINE_string('name', '', 'folder under results/; default the preset')
_REFERENCE = flags.DEFINE_string('reference', '', 'variant that all others are compared with; default each one\'s own estimator alone')
_RUNS = flags.DEFINE_string('runs', 'runs/compare', 'where the runs themselves are written')
_ONLY_SHOW = flags.DEFINE_bool('only_show', False, 'only make the tables and the picture')

_IN_SWEEP = threading.Event()  # cleared: no further run is started


def overrides(variant: str) -> list[str]:
    """The configuration flags of a variant. Raises wiring.ConfigError for a part that is none of the three kinds."""
    out = [f'--config.experiment={variant}']
    for part in variant.split('+'):
        if part in advantages.ESTIMATORS:
            out.append(f'--config.advantage.estimator={part}')
        elif part in coverage_controls.VARIANTS:
            out.append(f'--config.coverage.variant={part}')
        elif '=' in part:
            out.append(f'--config.{part}')
        else:
            raise wiring.ConfigError(
                f'variant {variant!r}: {part!r} is neither an estimator ({", ".join(advantages.ESTIMATORS)}), nor a '
                f'coverage variant ({", ".join(coverage_controls.VARIANTS)}), nor field=value')
    return out


def build(arguments: Sequence[str]) -> ConfigDict:
    """The configuration that `experiments.train` gets from these flags, checked."""
    argv = ['train', *arguments]
    values = flags.FlagValues()
    config_flags.DEFINE_config_file('config', flag_values=values, sys_argv=argv)
    try:
        values(argv)
    except flags.Error as error:
        raise wiring.ConfigError(str(error)) from error
    wiring.check(values.config)
    return values.config


def plan(variants: Sequence[str], seeds: int, folder: pathlib.Path, common: Sequence[str]) -> list[tuple[pathlib.Path, list[str]]]:
    """(result file, flags) of every run that is still to be made. Raises wiring.ConfigError before anything is started."""
    todo = []
    for seed in range(seeds):
        for variant in variants:
            arguments = [*common, *overrides(variant), f'--config.seed={seed}']
            path = folder / f'{variant}-seed{seed}.json'
            if path.exists():
                made = results.read(path)['config']
                wanted = json.loads(build(arguments).to_json_best_effort())
                changed = wiring.differences(made, _as_old_as(made, wanted))
                if changed:
                    raise wiring.ConfigError(f'{path} was made with other settings ({", ".join(changed)}); choose another '
                                             '--name, or remove the file')
            else:
                if seed == 0:
                    build(arguments)
                todo.append((path, arguments))
    return todo


def _as_old_as(old: dict, new: dict) -> dict:
    """`new` without the fields that did not exist yet when `old` was written."""
    return {name: _as_old_as(old[name], value) if isinstance(value, dict) and isinstance(old[name], dict) else value
            for name, value in new.items() if name in old}


def run_one(path: pathlib.Path, arguments: Sequence[str], workdir: pathlib.Path, cores: set[int]) -> None:
    """One training run in a process of its own, then its result file. Raises RuntimeError with the end of its log."""
    if not _IN_SWEEP.is_set():
        return
    workdir.mkdir(parents=True, exist_ok=True)
    log = workdir / 'log.txt'
    with log.open('ab') as file:
        process = subprocess.Popen([sys.executable, '-m', 'experiments.train', *arguments, f'--workdir={workdir}'],
                                   stdout=file, stderr=subprocess.STDOUT)
    if cores and hasattr(os, 'sched_setaffinity'):
        os.sched_setaffinity(process.pid, cores)  # JAX sizes its thread pool by this, long after the process has started
    while process.poll() is None:
        try:
            process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            if not _IN_SWEEP.is_set():
                process.send_signal(signal.SIGTERM)  # it saves and leaves
                process.wait()
                return
    if process.returncode:
        raise RuntimeError(f'{path.stem} failed; the end of {log}:\n{log.read_text(errors="replace")[-800:]}')
    results.record(workdir, path)


def sweep(todo: Sequence[tuple[pathlib.Path, list[str]]], runs: pathlib.Path, jobs: int) -> list[str]:
    """Run everything, `jobs` at a time; a failing run does not stop the others. Returns what went wrong."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else []
    shares: queue.Queue[set[int]] = queue.Queue()
    for job in range(jobs):
        shares.put(set(cores[job::jobs]))

    def work(item: tuple[pathlib.Path, list[str]]) -> None:
        share = shares.get()
        try:
            run_one(*item, runs / item[0].stem, share)
        finally:
            shares.put(share)

    def stop(number, frame) -> None:
        del number, frame
        _IN_SWEEP.clear()

    _IN_SWEEP.set()
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    errors = []
    with concurrent.futures.ThreadPoolExecutor(jobs) as executor, tqdm.tqdm(total=len(todo), desc='runs') as bar:
        futures = {executor.submit(work, item): item for item in todo}
        for future in concurrent.futures.as_completed(futures):
            bar.update()
            if future.exception() is not None:
                errors.append(str(future.exception()))
                bar.write(errors[-1])
    for number, handler in before.items():
        signal.signal(number, handler)
    if not _IN_SWEEP.is_set():
        errors.append('stopped; the same command continues')
    return errors


def main(argv: Sequence[str]) -> None:
    common = [f'--config={_CONFIG.value}', *argv[1:]]
    stray = [argument for argument in argv[1:] if not argument.startswith('--config.')]
    if stray:
        raise app.UsageError(f'unexpected arguments {stray}')
    name = _NAME.value or (_CONFIG.value.split(':') + ['tiny'])[1]
    folder = results.FOLDER / name
    errors = []
    if not _ONLY_SHOW.value:
        todo = plan(_VARIANTS.value, _SEEDS.value, folder, common)
        print(f'{len(_VARIANTS.value) * _SEEDS.value - len(todo)} runs are there, {len(todo)} to make')
        errors = sweep(todo, pathlib.Path(_RUNS.value) / name, _JOBS.value)
    everything = [results.read(path) for path in sorted(folder.glob('*.json'))]
    if not everything:
        raise wiring.ConfigError(f'there are no results in {folder}')
    print(compare_tables.write(everything, folder, reference=_REFERENCE.value))
    if errors:
        sys.exit(f'{len(errors)} of the runs are missing: {errors[-1].splitlines()[0]}')


if __name__ == '__main__':
    wiring.run_main(main, known_only=True)
