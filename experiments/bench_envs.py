"""Speed and memory of WebShop and Sokoban, every figure from one run on this machine.

    python -m experiments.bench_envs                          WebShop at 1,000, 10,000 and 100,000 products, Sokoban
    python -m experiments.bench_envs --sizes=1000 --data=FOLDER        also real products

Each row is measured in a process of its own, so that memory is that row's. A step includes the observation and the list
of admissible commands. Compare figures of one run only: machines and their load differ.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import pickle
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

SECONDS = 3.0  # of stepping, per row


def resident_mb() -> float:
    """Memory of this process now, in MB."""
    pages = int(pathlib.Path('/proc/self/statm').read_text().split()[1]) if pathlib.Path('/proc/self/statm').exists() else 0
    return pages * resource.getpagesize() / 1e6


def webshop(data: str, num_products: int) -> dict[str, float]:
    """One catalogue: building or loading, memory, steps, resets, cold searches, snapshots, the oracle."""
    from covsero_jax.envs.webshop import env as shop_env

    before, began = resident_mb(), time.perf_counter()
    make = lambda: shop_env.make_env(data, 'train', num_products=num_products, oracle=True, drop_unattainable=False)
    env = make()
    built, world = time.perf_counter() - began, resident_mb() - before
    more = [make() for _ in range(200)]
    for i, other in enumerate(more):
        other.reset(i % len(other.task_names))
    out = {'tasks': len(env.task_names), 'build_s': built, 'world_mb': world,
           'env_kb': 1000 * (resident_mb() - before - world) / len(more)}
    rng = random.Random(0)

    def query() -> str:
        words = env.reset(rng.randrange(len(env.task_names))).task.lower().replace('[', ' ').replace(']', ' ').split()
        return ' '.join(rng.sample(words, min(len(words), 6)))

    queries = [f'search[{query()}]' for _ in range(300)]
    out['reset_us'] = 1e6 * median_time(lambda: env.reset(rng.randrange(len(env.task_names))), 2000)
    env.reset(0)
    searches = []
    for command in queries[:150]:
        env.reset(rng.randrange(len(env.task_names)))
        began = time.perf_counter()
        env.step(command)
        searches.append(time.perf_counter() - began)
    out['cold_search_ms'] = 1e3 * statistics.median(searches)

    def choose(observation) -> str:
        command = rng.choice(observation.admissible)
        return rng.choice(queries) if '<' in command else command

    out['steps_per_s'] = steps_per_second(env, choose, rng)
    out['snapshot_bytes'] = len(pickle.dumps(env.snapshot()))
    out['oracle_us'] = oracle_time(env, rng)
    return out


def sokoban(height: int, width: int, boxes: int, moves: tuple[int, int]) -> dict[str, float]:
    """One kind of level: generating, steps with the text grid, the solver."""
    from covsero_jax.envs import sokoban as sokoban_env

    os.environ['COVSERO_CACHE'] = tempfile.mkdtemp()  # levels are generated now, not read
    began = time.perf_counter()
    env = sokoban_env.make_env('train', height=height, width=width, boxes=boxes, min_moves=moves[0], max_moves=moves[1],
                               num_levels=1000, max_steps=50, oracle=True)
    out = {'tasks': len(env.task_names), 'generated_per_s': len(env.task_names) / (time.perf_counter() - began)}
    rng = random.Random(0)
    out['reset_us'] = 1e6 * median_time(lambda: env.reset(rng.randrange(len(env.task_names))), 2000)
    out['steps_per_s'] = steps_per_second(env, lambda observation: rng.choice(observation.admissible), rng)
    out['snapshot_bytes'] = len(pickle.dumps(env.snapshot()))
    out['oracle_us'] = oracle_time(env, rng)
    return out


def median_time(call: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def steps_per_second(env, choose: Callable, rng: random.Random) -> float:
    """Steps of random episodes, observation and admissible commands included, resets too."""
    count, began = 0, time.perf_counter()
    observation = env.reset(rng.randrange(len(env.task_names)))
    while time.perf_counter() - began < SECONDS:
        for _ in range(100):
            if observation.done:
                observation = env.reset(rng.randrange(len(env.task_names)))
            observation = env.step(choose(observation))
            count += 1
    return count / (time.perf_counter() - began)


def oracle_time(env, rng: random.Random) -> float:
    """Median microseconds of planning from the start of a task: the first command."""
    seconds = []
    for _ in range(200):
        env.reset(rng.randrange(len(env.task_names)))
        began = time.perf_counter()
        env.oracle_command()
        seconds.append(time.perf_counter() - began)
    return 1e6 * statistics.median(seconds)


SOKOBAN = {'6x6, 1 box': (6, 6, 1, (4, 12)), '7x7, 2 boxes': (7, 7, 2, (8, 30))}


def rows(sizes: Sequence[int], data: str) -> dict[str, list]:
    """title -> call, as JSON values."""
    out = {f'WebShop, {size:,} generated products': ['webshop', 'generated', size] for size in sizes}
    if data:
        out['WebShop, real products'] = ['webshop', data, 1000]
    return out | {f'Sokoban {title}': ['sokoban', *arguments] for title, arguments in SOKOBAN.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--sizes', default='1000,10000,100000', help='products of generated catalogues')
    parser.add_argument('--data', default='', help='a folder of the official product files')
    parser.add_argument('--row', help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.row:
        name, *values = json.loads(options.row)
        print(json.dumps({'webshop': webshop, 'sokoban': sokoban}[name](*values)))
        return
    for title, call in rows([int(size) for size in options.sizes.split(',') if size], options.data).items():
        run = subprocess.run([sys.executable, '-m', 'experiments.bench_envs', f'--row={json.dumps(call)}'], text=True,
                             capture_output=True, check=False)
        if run.returncode:
            sys.exit(f'{title}: {run.stderr.strip().splitlines()[-1]}')
        measured = json.loads(run.stdout.splitlines()[-1])
        print(f'{title}: ' + ', '.join(f'{name} {value:,.4g}' for name, value in measured.items()), flush=True)


if __name__ == '__main__':
    main()
