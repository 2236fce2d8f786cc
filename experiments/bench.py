"""Times the ALFWorld engines on the same games and commands.

python -m experiments.bench                          the native engine on generated games
python -m experiments.bench --data=FOLDER --official   both engines on real games, and their ratio

Each figure is the median over games, one game per task type. What is timed: load = a game file to a game in its initial
state; reset = an already loaded game to its first observation; step = a command to the next observation, admissible
commands and `won` included; copy = a second, independent position (the official engine has none: reset and replay of
the 10 commands so far); oracle = a winning plan from there (officially Fast Downward, timed on the smallest game only,
since it may take minutes in a kitchen).
"""

from __future__ import annotations

import argparse
import pathlib
import random
import statistics
import time
from collections.abc import Callable, Sequence

from covsero_jax.envs import (
    alfworld,
    alfworld_data,
    alfworld_engine,
    alfworld_games,
    alfworld_oracle,
    alfworld_textworld,
    cache,
)

NUM_COMMANDS = 10
OPERATIONS = ('load', 'reset', 'step', 'copy', 'oracle')
Times = dict[str, list[float]]  # operation -> seconds, one value per game


def commands_for(games: alfworld_data.GameSet, task_id: int) -> list[str]:
    """A random walk of legal commands, the same for every engine. It picks nothing up, so the game stays winnable."""
    state, rng, commands = games.game(task_id).initial_state(), random.Random(task_id), []
    for _ in range(NUM_COMMANDS):
        commands.append(rng.choice([c for c in state.admissible() if not c.startswith('take')]))
        state.step(commands[-1])
    return commands


def observe(engine: alfworld.Engine, text: str) -> tuple[str, tuple[str, ...], bool]:
    return text, engine.admissible(), engine.won()


def best(action: Callable[[], object], repeat: int) -> float:
    """Seconds of the fastest of `repeat` calls."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


def time_native(games: alfworld_data.GameSet, task_ids: Sequence[int], repeat: int = 20) -> Times:
    """Times of the native engine."""
    engine, times = alfworld.NativeEngine(games), {operation: [] for operation in OPERATIONS}
    for task_id in task_ids:
        commands = commands_for(games, task_id)

        def start(task_id: int = task_id) -> None:
            observe(engine, engine.start(task_id))

        def play(start=start, commands=commands) -> None:
            start()
            for command in commands:
                observe(engine, engine.step(command))

        times['load'].append(best(lambda i=task_id: alfworld_engine.read_game(games.path(i)).initial_state(), 3))
        start()  # parse it before the clock runs
        times['reset'].append(best(start, repeat))
        times['step'].append((best(play, repeat) - times['reset'][-1]) / len(commands))
        times['copy'].append(best(engine.state().copy, repeat))
        times['oracle'].append(best(lambda: alfworld_oracle.plan(engine.state()), repeat))
    return times


def time_official(games: alfworld_data.GameSet, task_ids: Sequence[int]) -> Times:
    """Times of the official engine, once each; asserts that it says what the native one says."""
    engine, native = alfworld_textworld.TextworldEngine(games), alfworld.NativeEngine(games)
    times = {operation: [] for operation in OPERATIONS}
    smallest = min(task_ids, key=lambda i: len(games.game(i).receptacles))
    for task_id in task_ids:
        commands = commands_for(games, task_id)
        loaded = best(lambda i=task_id: engine.start(i), 1)  # the first start loads, the second does not
        times['reset'].append(best(lambda i=task_id: observe(engine, engine.start(i)), 1))
        times['load'].append(loaded - times['reset'][-1])
        native.start(task_id)
        seconds = 0.0
        for command in commands:
            start = time.perf_counter()
            seen = observe(engine, engine.step(command))
            seconds += time.perf_counter() - start
            assert seen == observe(native, native.step(command)), (games.names[task_id], command)
        times['step'].append(seconds / len(commands))
        times['copy'].append(best(lambda i=task_id, c=commands: engine.load(i, c), 1))
        if task_id == smallest:
            times['oracle'].append(best(engine.fast_downward_plan, 1))
    return times


def table(native: Times, official: Times | None) -> str:
    """The medians, with the ratio official / native."""
    lines = [f'{"":8}{"native":>12}' + (f'{"official":>12}{"ratio":>14}' if official else '')]
    for operation in OPERATIONS:
        own = statistics.median(native[operation])
        line = f'{operation:8}{own * 1e6:9.1f} us'
        if official:
            other = statistics.median(official[operation])
            line += f'{other:10.3f} s{other / own:14,.0f}'
        lines.append(line)
    lines.append(f'native steps per second and core: {1 / statistics.median(native["step"]):,.0f}')
    return '\n'.join(lines)


def embedded_games() -> pathlib.Path:
    """Generated games of real size, one of each task type."""
    return alfworld_games.ensure_games(
        cache.folder() / 'games', difficulty=alfworld_games.DIFFICULTIES['real'], seed=0,
        num_games={'train': 6, 'valid_seen': 6, 'valid_unseen': 6})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--data', help='a folder of ALFWorld games (default: generated ones)')
    parser.add_argument('--split', default='valid_unseen')
    parser.add_argument('--official', action='store_true',
                        help="also the official engine (pip install -e '.[alfworld]')")
    options = parser.parse_args(arguments)
    games = alfworld_data.find_games(options.data or embedded_games(), options.split)
    task_ids = [games.types.index(kind) for kind in sorted(set(games.types))]
    sizes = [len(games.game(i).receptacles) for i in task_ids]
    print(f'{len(task_ids)} games of {games.folder}, {options.split}; receptacles: {sizes}')
    native = time_native(games, task_ids)
    print(table(native, time_official(games, task_ids) if options.official else None))


if __name__ == '__main__':
    main()
