"""Evaluate a policy on whole splits, every game once.

    python -m experiments.evaluate --config=configs/alfworld_covgpo.py --workdir=runs/NAME        the run's best checkpoint
    python -m experiments.evaluate --config=... --model=FOLDER --splits=valid_unseen               a Hugging Face folder

Writes evaluation.json (per game, per task type and per length of the expert plan, with split, manifest hash, temperature
and seed) and prints tables.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import tqdm
from absl import flags, logging
from ml_collections import ConfigDict

from covsero_jax import checkpoint, evaluate, hosts, learner, workers
from covsero_jax.envs import alfworld_data
from experiments import checks, environments, wiring

PLAN_STRATA = ('short', 'medium', 'long', 'unknown')  # of expert plans; unknown: the game file holds none


class Evaluator:
    """Plays the configuration's evaluation splits; environments are built without an oracle."""

    def __init__(self, config: ConfigDict, policy: wiring.Policy, prompts, splits: Sequence[str] | None = None):
        self._config, self._policy, self._prompts = config, policy, prompts
        self._splits = tuple(splits or config.eval.splits)
        self._stack = contextlib.ExitStack()
        self._pools: dict[str, workers.WorkerPool] = {}
        self._strata: dict[str, tuple[str, ...]] = {}
        self.selection = f'eval/{self._splits[0]}/success_rate'  # the metric that chooses the best checkpoint

    def __enter__(self) -> Self:
        for split in self._splits:
            self._strata[split] = plan_strata(self._config, split)
            pool = wiring.make_pool(self._config, split, self._config.eval.num_envs)
            self._pools[split] = self._stack.enter_context(pool)
        return self

    def __exit__(self, *exception) -> None:
        self._stack.close()

    def results(self, params, *, seed: int, check: Callable[[], None] = lambda: None) -> dict[str, evaluate.EvalResult]:
        """One result per split. `check` is called after every episode and may raise to stop."""
        config = self._config
        out = {}
        for split, pool in self._pools.items():
            key = wiring.draw_key(seed, 0, 'evaluate')
            act = wiring.make_act(config, self._policy, params, key=key, temperature=config.eval.temperature)
            total = len(hosts.my_share(len(pool.task_names)))
            with tqdm.tqdm(total=total, desc=split, leave=False, delay=5, disable=not hosts.is_main()) as bar:

                def progress(_) -> None:
                    bar.update()
                    check()

                out[split] = evaluate.evaluate(pool, act, self._prompts, pool.task_names, pool.task_types,
                                               max_steps=config.env.max_steps, strata=self._strata[split],
                                               progress=progress, collect=hosts.collect_groups)
        return out

    def run(self, params, *, check: Callable[[], None] = lambda: None) -> dict[str, float]:
        """The results as metrics `eval/<split>/...`. The draws are the same at every update: only the policy differs."""
        return as_metrics(self.results(params, seed=self._config.seed, check=check))


def plan_strata(config: ConfigDict, split: str) -> tuple[str, ...]:
    """PLAN_STRATA of each game by the length of its expert plan, () where there are no plans: SERO, A.8.

    short <= first of config.eval.plan_bounds < medium <= second < long, in commands. The plans are those that ALFWorld's
    game files hold: no oracle is asked.
    """
    if config.env.name != 'alfworld':
        return ()
    bounds = tuple(config.eval.plan_bounds)
    if len(bounds) != 2 or not 0 < bounds[0] < bounds[1]:
        raise wiring.ConfigError(f'eval.plan_bounds={bounds}: two rising numbers are needed, such as (4, 6)')
    lengths = alfworld_data.find_games(environments.data_folder(config), split).plan_lengths
    labels = [PLAN_STRATA[bisect.bisect_left(bounds, length)] if length else 'unknown' for length in lengths]
    return tuple(labels) if any(lengths) else ()


def as_metrics(results: Mapping[str, evaluate.EvalResult]) -> dict[str, float]:
    out = {}
    for split, result in results.items():
        for name in ('success_rate', 'mean_steps', 'parsed_rate', 'admissible_rate', 'num_games'):
            out[f'eval/{split}/{name}'] = float(getattr(result, name))
        if result.mean_score is not None:
            out[f'eval/{split}/score'] = result.mean_score
        for kind, (successes, games) in result.per_type.items():
            out[f'eval/{split}/success_rate/{kind}'] = successes / games
        for stratum, (successes, games) in result.per_stratum.items():
            out[f'eval/{split}/success_by_plan/{stratum}'] = successes / games
    return out


def one_line(measured: Mapping[str, float]) -> str:
    """'valid_seen 31.7 %, valid_unseen 28.3 %', with task scores where there are some: 'test 31.7 % (score 54.0)'."""
    rates = {name.split('/')[1]: value for name, value in measured.items()
             if name.startswith('eval/') and name.endswith('/success_rate')}
    scores = {split: f' (score {100 * measured[f"eval/{split}/score"]:.1f})' if f'eval/{split}/score' in measured else ''
              for split in rates}
    return ', '.join(f'{split} {rate:.1%}{scores[split]}' for split, rate in rates.items())


def table(results: Mapping[str, evaluate.EvalResult]) -> str:
    """Success per task type and split, as text."""
    kinds = sorted({kind for result in results.values() for kind in result.per_type})
    rows = {kind: [result.per_type.get(kind, (0, 0)) for result in results.values()] for kind in kinds}
    rows['all'] = [(sum(result.success), result.num_games) for result in results.values()]
    return _lines('', results, rows)


def plan_table(results: Mapping[str, evaluate.EvalResult]) -> str:
    """Success per length of the expert plan and split, as text; '' where there are no plans."""
    rows = {stratum: [result.per_stratum.get(stratum, (0, 0)) for result in results.values()] for stratum in PLAN_STRATA}
    rows = {stratum: cells for stratum, cells in rows.items() if any(games for _, games in cells)}
    return _lines('expert plan', results, rows) if rows else ''


def _lines(title: str, splits: Iterable[str], rows: Mapping[str, Sequence[tuple[int, int]]]) -> str:
    lines = [f'{title:32}' + ''.join(f'{split:>20}' for split in splits)]
    for name, cells in rows.items():
        lines.append(f'{name:32}' + ''.join(f'{f"{s / n:.1%} ({s}/{n})" if n else "-":>20}' for s, n in cells))
    return '\n'.join(lines)


def checkpoint_params(config: ConfigDict, policy: wiring.Policy, workdir: pathlib.Path, which: str) -> tuple[Any, int]:
    """Parameters of the run's 'best' or 'latest' checkpoint, and its update. Raises checkpoint.CheckpointError."""
    saved = checkpoint.Checkpoints(workdir, keep=config.checkpoint.keep)
    try:
        best = which == 'best' and saved.best_update() is not None
        update = saved.best_update() if best else saved.latest()
        if update is None:
            raise checkpoint.CheckpointError(f'{workdir}: there is no checkpoint here')
        optimizer = learner.make_optimizer(wiring.optimizer_config(config))
        like = learner.create_state(policy.params, optimizer, policy.mesh, policy.config)
        return saved.restore(update, like, best=best).params, update
    finally:
        saved.close()


def main(argv: Sequence[str]) -> None:
    del argv
    logging.set_verbosity(logging.WARNING)
    config = _CONFIG.value
    checks.check(config)
    wiring.use_compilation_cache(config.debug.compilation_cache)
    policy = wiring.load_policy(config, pathlib.Path(_MODEL.value) if _MODEL.value else None)
    source, params = str(policy.folder), policy.params
    if _WORKDIR.value:
        params, update = checkpoint_params(config, policy, pathlib.Path(_WORKDIR.value), _WHICH.value)
        source = f'{_WORKDIR.value}, update {update}'
    splits = _SPLITS.value or config.eval.splits
    with Evaluator(config, policy, wiring.make_prompts(config, policy.tokenizer), splits) as evaluator:
        results = evaluator.results(params, seed=config.seed)
    record = {'policy': source, 'temperature': config.eval.temperature, 'seed': config.seed, 'data': config.env.data,
              'plan_bounds': list(config.eval.plan_bounds),
              'splits': {split: result.to_dict() for split, result in results.items()}}
    out = pathlib.Path(_OUT.value or (pathlib.Path(_WORKDIR.value or '.') / 'evaluation.json'))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + '\n')
    print(f'{source}; temperature {config.eval.temperature}, seed {config.seed}')
    for split, result in results.items():
        print(f'{split}: {result.num_games} games, manifest {result.manifest_hash[:12]}, {result.mean_steps:.1f} steps, '
              f'{result.admissible_rate:.1%} admissible'
              + (f', task score {100 * result.mean_score:.1f}' if result.mean_score is not None else ''))
    print(table(results))
    if plans := plan_table(results):
        print(plans)
    print(f'results: {out}')


if __name__ == '__main__':
    _CONFIG = wiring.define_config('experiment, optionally with :preset')
    _WORKDIR = flags.DEFINE_string('workdir', '', 'a run whose checkpoint is evaluated')
    _WHICH = flags.DEFINE_enum('which', 'best', ['best', 'latest'], 'which checkpoint of the run')
    _MODEL = flags.DEFINE_string('model', '', 'a Hugging Face folder; default: the configuration\'s')
    _SPLITS = flags.DEFINE_list('splits', [], 'default: the configuration\'s eval.splits')
    _OUT = flags.DEFINE_string('out', '', 'default: evaluation.json in the workdir')
    wiring.limit_preallocation()
    wiring.run_main(main)
