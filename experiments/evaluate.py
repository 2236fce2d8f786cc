"""Evaluate a policy on whole splits, every game once.

    python -m experiments.evaluate --config=configs/alfworld_covgpo.py --workdir=runs/NAME        the run's best checkpoint
    python -m experiments.evaluate --config=... --model=FOLDER --splits=valid_unseen               a Hugging Face folder

Writes evaluation.json (per game and per task type, with split, manifest hash, temperature and seed) and prints a table.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tqdm
from absl import flags, logging
from ml_collections import ConfigDict

from covsero_jax import checkpoint, evaluate, learner, sampler, workers
from experiments import wiring


class Evaluator:
    """Plays the configuration's evaluation splits; environments are built without an oracle."""

    def __init__(self, config: ConfigDict, policy: wiring.Policy, prompts, splits: Sequence[str] | None = None):
        self._config, self._policy, self._prompts = config, policy, prompts
        self._splits = tuple(splits or config.eval.splits)
        self._stack = contextlib.ExitStack()
        self._pools: dict[str, workers.WorkerPool] = {}
        self.selection = f'eval/{self._splits[0]}/success_rate'  # the metric that chooses the best checkpoint

    def __enter__(self) -> Evaluator:
        for split in self._splits:
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
            act = sampler.make_policy(
                params, config=self._policy.config, key=key, buckets=config.prompt.buckets,
                row_buckets=config.rollout.row_buckets, max_new_tokens=config.prompt.max_action,
                temperature=config.eval.temperature, eos_ids=self._policy.eos_ids)
            with tqdm.tqdm(total=len(pool.task_names), desc=split, leave=False, delay=5) as bar:

                def progress(_) -> None:
                    bar.update()
                    check()

                out[split] = evaluate.evaluate(pool, act, self._prompts, pool.task_names, pool.task_types,
                                               max_steps=config.env.max_steps, progress=progress)
        return out

    def run(self, params, *, check: Callable[[], None] = lambda: None) -> dict[str, float]:
        """The results as metrics `eval/<split>/...`. The draws are the same at every update: only the policy differs."""
        return as_metrics(self.results(params, seed=self._config.seed, check=check))


def as_metrics(results: Mapping[str, evaluate.EvalResult]) -> dict[str, float]:
    out = {}
    for split, result in results.items():
        for name in ('success_rate', 'mean_steps', 'parsed_rate', 'admissible_rate', 'num_games'):
            out[f'eval/{split}/{name}'] = float(getattr(result, name))
        for kind, (successes, games) in result.per_type.items():
            out[f'eval/{split}/success_rate/{kind}'] = successes / games
    return out


def one_line(measured: Mapping[str, float]) -> str:
    """'valid_seen 31.7 %, valid_unseen 28.3 %'."""
    rates = {name.split('/')[1]: value for name, value in measured.items()
             if name.startswith('eval/') and name.endswith('/success_rate')}
    return ', '.join(f'{split} {rate:.1%}' for split, rate in rates.items())


def table(results: Mapping[str, evaluate.EvalResult]) -> str:
    """Success per task type and split, as text."""
    kinds = sorted({kind for result in results.values() for kind in result.per_type})
    lines = [f'{"":32}' + ''.join(f'{split:>20}' for split in results)]
    for kind in kinds:
        cells = [result.per_type.get(kind, (0, 0)) for result in results.values()]
        lines.append(f'{kind:32}' + ''.join(f'{f"{s / n:.1%} ({s}/{n})" if n else "-":>20}' for s, n in cells))
    cells = [(sum(result.success), result.num_games) for result in results.values()]
    lines.append(f'{"all":32}' + ''.join(f'{f"{s / n:.1%} ({s}/{n})":>20}' for s, n in cells))
    return '\n'.join(lines)


def checkpoint_params(config: ConfigDict, policy: wiring.Policy, workdir: pathlib.Path, which: str) -> tuple[Any, int]:
    """Parameters of the run's 'best' or 'latest' checkpoint, and its update. Raises checkpoint.CheckpointError."""
    saved = checkpoint.Checkpoints(workdir, keep=config.checkpoint.keep)
    try:
        best = which == 'best' and saved.best_update() is not None
        update = saved.best_update() if best else saved.latest()
        if update is None:
            raise checkpoint.CheckpointError(f'{workdir}: there is no checkpoint here')
        mesh = wiring.make_mesh(config)
        like = learner.create_state(policy.params, learner.make_optimizer(wiring.optimizer_config(config)), mesh)
        return saved.restore(update, like, best=best).params, update
    finally:
        saved.close()


def main(argv: Sequence[str]) -> None:
    del argv
    logging.set_verbosity(logging.WARNING)
    config = _CONFIG.value
    wiring.check(config)
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
              'splits': {split: result.to_dict() for split, result in results.items()}}
    out = pathlib.Path(_OUT.value or (pathlib.Path(_WORKDIR.value or '.') / 'evaluation.json'))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + '\n')
    print(f'{source}; temperature {config.eval.temperature}, seed {config.seed}')
    for split, result in results.items():
        print(f'{split}: {result.num_games} games, manifest {result.manifest_hash[:12]}, {result.mean_steps:.1f} steps, '
              f'{result.admissible_rate:.1%} admissible')
    print(table(results))
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
