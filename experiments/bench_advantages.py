"""Times the credit assignment of one update, for every estimator, without and with CovGPO.

    python -m experiments.bench_advantages                  1,000 to 100,000 rows (the papers' ALFWorld update has 6,400)

Groups of 8 episodes of 50 random legal steps in generated rooms of real size, so that texts are as long and repeat as
often as they really do; which episodes count as won is drawn, and half of the groups have none. `host` is strings to
ids and returns (`groups.build_step_table`); `device` the compiled estimator; `+ CovGPO` what its gate, fallback and
diagnostics add to that. Medians, in milliseconds; `share` is CovGPO's part of host + device.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
import tqdm

from covsero_jax import advantages, coverage, groups
from covsero_jax.envs import alfworld_data, alfworld_engine
from covsero_jax.trajectory import Group, Step, Trajectory
from experiments import bench

GROUP_SIZE, STEPS = 8, 50
TABLE = {'discount': 0.95, 'goal_discount': 0.1, 'history_depth': 3}
NO_TOKENS = np.zeros(8, np.int32)


def random_walk(game: alfworld_engine.Game, task_id: int, rng: random.Random, *, success: bool) -> Trajectory:
    """An episode of STEPS random legal commands; a successful one gets its reward at the end, whatever happened."""
    state, steps = game.initial_state(), []
    observation = state.intro()
    for t in range(STEPS):
        command = rng.choice(state.admissible())
        after = state.step(command)
        steps.append(Step(
            observation=observation, next_observation=after, prompt_tokens=NO_TOKENS, action_tokens=NO_TOKENS,
            action_logprobs=np.zeros(8, np.float32), command=command, parsed=rng.random() > 0.05, admissible_command=True,
            truncated=False, admissible=(), reward=10.0 * (success and t == STEPS - 1)))
        observation = after
    return Trajectory(task_id, tuple(steps), success, 'success' if success else 'max_steps')


def walks(num_rows: int) -> list[Group]:
    """Groups with `num_rows` steps in all, or a few less."""
    games = alfworld_data.find_games(bench.embedded_games(), 'train')
    rng, out = random.Random(0), []
    for number in tqdm.trange(max(1, num_rows // (GROUP_SIZE * STEPS)), desc='walks', leave=False):
        task_id = number % len(games.names)
        chance = rng.choice([0.0, 0.4])
        out.append(Group(task_id, tuple(random_walk(games.game(task_id), task_id, rng, success=rng.random() < chance)
                                        for _ in range(GROUP_SIZE))))
    return out


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    """Median time of `work`, which has run once before (compilation)."""
    work()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


def compiled(name: str, *, with_coverage: bool) -> Callable:
    """The compiled estimator of one name, with or without CovGPO and its diagnostics."""

    def run(table):
        compare = advantages.make_compare(table)
        if with_coverage:
            compare = coverage.with_coverage(compare, table)
        advantage_N, comparisons = advantages.ESTIMATORS[name](table, compare)
        return advantage_N, coverage.gate_metrics(comparisons) if with_coverage else {}

    return jax.jit(run)


def measure(num_rows: int, repeats: int) -> list[str]:
    """One line per estimator."""
    batch = walks(num_rows)
    rows = sum(len(trajectory.steps) for group in batch for trajectory in group.trajectories)
    host = milliseconds(lambda: groups.build_step_table(batch, num_rows=rows, **TABLE), repeats)
    table = jax.device_put(groups.build_step_table(batch, num_rows=rows, **TABLE))
    lines = []
    for name in advantages.ESTIMATORS:
        base, full = (milliseconds(lambda f=compiled(name, with_coverage=flag): jax.block_until_ready(f(table)), repeats)
                      for flag in (False, True))
        extra = full - base
        lines.append(f'{rows:8,} {name:13} {host:8.1f} {base:8.2f} {extra:+9.2f} {host + full:8.1f} {extra / (host + full):7.1%}')
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--rows', type=int, nargs='+', default=[1_000, 6_400, 20_000, 100_000])
    parser.add_argument('--repeats', type=int, default=21)
    options = parser.parse_args(arguments)
    print(f'{"rows":>8} {"estimator":13} {"host":>8} {"device":>8} {"+ CovGPO":>9} {"all":>8} {"share":>7}   ms')
    for num_rows in options.rows:
        print('\n'.join(measure(num_rows, options.repeats)), flush=True)


if __name__ == '__main__':
    main()
