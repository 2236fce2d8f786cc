"""What SERO costs: one update of the tiny preset with and without its term, in turns, in one process.

    python -m experiments.bench_sero [--config=configs/alfworld_sero.py:PRESET] [--repeat=5]

Prints, as shares of a whole iteration (rollout, old log-probabilities, learning): the oracle's work (restoring, planning,
stepping, building prompts) as it would be in the foreground; what of it the run waits for; scoring; and the extra loss.
"""

from __future__ import annotations

import argparse
import statistics
import time
import types

import jax
import numpy as np

from covsero_jax import learner, metrics
from experiments import compare, sero, train, wiring


def measure(config, repeat: int) -> dict[str, float]:
    """Median seconds of each part over `repeat` rounds, after one that compiles."""
    policy = wiring.load_policy(config)
    prompts, mesh = wiring.make_prompts(config, policy.tokenizer), wiring.make_mesh(config)
    optimizer = learner.make_optimizer(wiring.optimizer_config(config))
    programs = train.make_programs(config, policy.config, optimizer, mesh)
    stop = types.SimpleNamespace(check=lambda *_: None)
    seconds: dict[str, list[float]] = {}
    num_envs = config.rollout.num_groups * config.rollout.group_size
    with (wiring.make_pool(config, config.env.train_split, num_envs, oracle=config.sero.oracle) as pool,
          sero.Sero(config, policy, pool, prompts, programs.logprobs, mesh) as guide):
        for round_ in range(repeat + 1):
            spent = one_round(config, programs, policy, prompts, mesh, optimizer, pool, guide, stop, update=round_ + 1)
            for name, value in spent.items() if round_ else ():
                seconds.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in seconds.items()}


def one_round(config, programs, policy, prompts, mesh, optimizer, pool, guide, stop, *, update: int) -> dict[str, float]:
    """Collect once, then learn without and with the oracle, from the same state, in changing order."""
    began = time.perf_counter()
    groups, _ = train.collect(config, pool, policy, prompts, policy.params, update, stop)
    spent = {'rollout': time.perf_counter() - began}
    table = train.build_table(config, groups)
    advantage_N = jax.device_get(programs.advantages(table, wiring.draw_key(config.seed, update, 'coverage'))[0])
    for which in (None, guide) if update % 2 else (guide, None):
        timer = metrics.Timer()
        state = learner.create_state(policy.params, optimizer, mesh, policy.config)
        if which:
            which.start(groups, update)
        _, guidance, _ = train.learn(config, programs, mesh, timer, state, None, groups, np.asarray(advantage_N), which, update)
        phases = timer.take()
        if which:
            spent |= {'learn with': phases['time/learn_s'], 'oracle': guidance.metrics['time/oracle_s'],
                      'wait': phases['time/oracle_wait_s'], 'score': phases['time/oracle_score_s']}
        else:
            spent |= {'learn without': phases['time/learn_s'], 'old_logprobs': phases['time/old_logprobs_s']}
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--config', default='configs/alfworld_sero.py')
    parser.add_argument('--repeat', type=int, default=5)
    options, rest = parser.parse_known_args()
    config = compare.build([f'--config={options.config}', '--config.loss.kl_coef=0.0', *rest])
    s = measure(config, options.repeat)
    whole = s['rollout'] + s['old_logprobs'] + s['learn without']
    print(f'an iteration without SERO: {whole:.2f} s (median of {options.repeat}); of that')
    for name, value in (('oracle work, were it in the foreground', s['oracle']), ('waiting for the oracle', s['wait']),
                        ('scoring the branches', s['score']), ('the extra loss', s['learn with'] - s['learn without'])):
        print(f'{name:42}{value:8.3f} s {value / whole:7.1%}')


if __name__ == '__main__':
    with wiring.one_line_errors():
        main()
