"""Several variants of one experiment over the same seeds: one table and one picture.

    python -m experiments.compare --variants=gigpo,gigpo+covgpo,gigpo+shuffle --seeds=3 --jobs=2
    python -m experiments.compare --name=tiny --only_show         tables and picture of what there is, nothing is run

A variant is what is joined by '+': an estimator, a coverage variant, a SERO variant, or any configuration field with its
value, as in gigpo+covgpo+coverage.coverage_scale=0.5. Flags that are not listed go to every run (--config.env.difficulty=small).

Each finished run becomes results/<name>/<variant>-seed<k>.json: commit these. A run that has its file is not repeated,
an interrupted one is continued. Seed by seed, so that differences are paired as soon as possible.
"""

from __future__ import annotations

import argparse
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
from ml_collections import ConfigDict

from covsero_jax import advantages, coverage_controls, reachability
from experiments import checks, compare_tables, results, wiring

_IN_SWEEP = threading.Event()  # cleared: no further run is started


def overrides(variant: str) -> list[str]:
    """The configuration flags of a variant. Raises wiring.ConfigError for a part that is none of the three kinds."""
    out = [f'--config.experiment={variant}']
    for part in variant.split('+'):
        if part in advantages.ESTIMATORS:
            out.append(f'--config.advantage.estimator={part}')
        elif part in coverage_controls.VARIANTS:
            out.append(f'--config.coverage.variant={part}')
        elif part in reachability.VARIANTS:
            out.append(f'--config.sero.variant={part}')
        elif '=' in part:
            out.append(f'--config.{part}')
        else:
            raise wiring.ConfigError(
                f'variant {variant!r}: {part!r} is neither an estimator ({", ".join(advantages.ESTIMATORS)}), nor a '
                f'coverage variant ({", ".join(coverage_controls.VARIANTS)}), nor a SERO variant '
                f'({", ".join(reachability.VARIANTS)}), nor field=value')
    return out


def build(arguments: Sequence[str]) -> ConfigDict:
    """The configuration that `experiments.train` gets from these flags, checked."""
    config = wiring.read_config(arguments)
    checks.check(config)
    return config


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


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the configuration flags of every run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument('--config', default='configs/alfworld_gigpo.py', help='experiment, optionally with :preset')
    parser.add_argument('--variants', default='gigpo,gigpo+covgpo', help='what is compared, separated by commas; see above')
    parser.add_argument('--seeds', type=int, default=3, help='number of seeds: 0, 1, ...')
    parser.add_argument('--jobs', type=int, default=1, help='runs at the same time; each gets its share of the cores')
    parser.add_argument('--name', help='folder under results/; default the preset')
    parser.add_argument('--reference', default='', help="what all are compared with; default each one's own estimator alone")
    parser.add_argument('--runs', default='runs/compare', help='where the runs themselves are written')
    parser.add_argument('--only_show', action='store_true', help='only make the tables and the picture')
    options, rest = parser.parse_known_args(argv)
    stray = [argument for argument in rest if not argument.startswith('--config.')]
    if stray:
        parser.error(f'unexpected arguments {stray}')
    return options, rest


def main(argv: Sequence[str] | None = None) -> None:
    options, common = parse(argv)
    variants = options.variants.split(',')
    folder = results.FOLDER / (options.name or (options.config.split(':') + ['tiny'])[1])
    errors = []
    if not options.only_show:
        todo = plan(variants, options.seeds, folder, [f'--config={options.config}', *common])
        print(f'{len(variants) * options.seeds - len(todo)} runs are there, {len(todo)} to make')
        errors = sweep(todo, pathlib.Path(options.runs) / folder.name, options.jobs)
    everything = [results.read(path) for path in sorted(folder.glob('*.json'))]
    if not everything:
        raise wiring.ConfigError(f'there are no results in {folder}')
    print(compare_tables.write(everything, folder, reference=options.reference))
    if errors:
        sys.exit(f'{len(errors)} of the runs are missing: {errors[-1].splitlines()[0]}')


if __name__ == '__main__':
    with wiring.one_line_errors():
        main()
