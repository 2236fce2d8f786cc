"""Train a policy:  python -m experiments.train --config=configs/alfworld_covgpo.py[:preset] [--workdir=FOLDER]

Starting the same command again continues an interrupted run, exactly. Read `run` from top to bottom: it is the method.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import signal
from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from absl import app, flags, logging
from ml_collections import ConfigDict

from covsero_jax import (
    advantages,
    batch,
    checkpoint,
    coverage,
    groups,
    hosts,
    learner,
    metrics,
    objective,
    rollout,
    sampler,
    sharding,
)
from experiments import checks, evaluate, report, sero, wiring

_CONFIG = wiring.define_config('experiment, optionally with :preset')
_WORKDIR = flags.DEFINE_string('workdir', '', 'where everything is written; default runs/<experiment>-<preset>-seed<seed>')
_DISTRIBUTED = flags.DEFINE_bool('distributed', False, 'several hosts, found by the environment of a TPU pod, SLURM or GKE')
_COORDINATOR = flags.DEFINE_string('coordinator', '', 'HOST:PORT of process 0: several hosts, started by hand')
_NUM_PROCESSES = flags.DEFINE_integer('num_processes', 0, 'with --coordinator: how many hosts')
_PROCESS_ID = flags.DEFINE_integer('process_id', -1, 'with --coordinator: which of them this is, from 0')
_HOST_TIMEOUT = flags.DEFINE_integer('host_timeout_s', 60, 'how long hosts wait for one another, and for signs of life')


class Stop:
    """Ctrl-C and SIGTERM ask the run to stop; it saves and leaves at the next moment when nothing is half done."""

    class Requested(Exception):
        pass

    def __init__(self):
        self.requested = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._request)

    def _request(self, number, frame) -> None:
        del frame
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt  # asked twice: now
        self.requested = True

    def check(self, *_: Any) -> None:
        """Raises Stop.Requested. On several hosts nothing: they stop together, see `agree`."""
        if self.requested and hosts.count() == 1:
            raise Stop.Requested

    def agree(self) -> None:
        """The same where all hosts are at the same point: any of them may have been asked."""
        if any(hosts.exchange(self.requested)):
            raise Stop.Requested


@dataclasses.dataclass(frozen=True)
class Programs:
    """The compiled programs of a run."""

    advantages: Any  # (StepTable, key) -> (advantage_N, gate_N, gate metrics)
    logprobs: Any  # (params, tokens of a micro-batch) -> log-probs
    train: learner.TrainStep  # (state, minibatch) -> (state, metrics)


def run(config: ConfigDict, workdir: pathlib.Path, stop: Stop) -> None:
    """The whole job. See the module docstring."""
    checks.check(config)
    wiring.use_compilation_cache(config.debug.compilation_cache)
    policy = wiring.load_policy(config)
    prompts = wiring.make_prompts(config, policy.tokenizer)
    mesh = policy.mesh
    optimizer = learner.make_optimizer(wiring.optimizer_config(config))
    state = learner.create_state(policy.params, optimizer, mesh, policy.config)
    reference = sharding.copy_params(mesh, policy.params, policy.config.dtype) if config.loss.kl_coef else None
    policy = policy._replace(params=None)  # the devices have no room for a third copy
    programs = make_programs(config, policy.config, optimizer, mesh)

    num_envs = len(hosts.my_share(config.rollout.num_groups)) * config.rollout.group_size
    saved = checkpoint.Checkpoints(workdir, keep=config.checkpoint.keep)
    start, state, best, recent_roots = resume(config, workdir, saved, state, policy)
    timer, finished = metrics.Timer(), start
    with (wiring.make_pool(config, config.env.train_split, num_envs,
                           oracle=config.sero.oracle if wiring.uses_oracle(config) else '') as pool,
          make_guide(config, policy, pool, prompts, programs, mesh) as guide,
          evaluate.Evaluator(config, policy, prompts) as evaluator,
          tqdm.tqdm(total=config.updates, initial=start, desc='update', dynamic_ncols=True, disable=not hosts.is_main()) as bar):
        writer = metrics.MetricsWriter(workdir, resume_from=start) if hosts.is_main() else metrics.NoWriter()
        try:
            if guide:
                guide.recent = recent_roots
            if start == 0:
                measured = evaluator.run(state.params, check=stop.check)
                best = measured[evaluator.selection]
                writer.write(0, measured)
                bar.write(f'before training: {evaluate.one_line(measured)}')
            for update in range(start + 1, config.updates + 1):
                stop.agree()
                with timer('rollout'):
                    collected, rollout_metrics = collect(config, pool, policy, prompts, state.params, update, stop)
                if guide:
                    guide.start(collected, update)  # the oracle works while the device does
                with timer('advantages'):
                    table = build_table(config, collected)
                    key = wiring.draw_key(config.seed, update, 'coverage')
                    advantage_N, gate_N, gate_metrics = jax.device_get(programs.advantages(table, key))
                stop.check()  # from here on the update is completed: the state is being replaced
                state, guidance, learn_metrics = learn(
                    config, programs, mesh, timer, state, reference, collected, advantage_N, guide, update)
                finished = update
                measured = {**rollout_metrics, **gate_metrics, **learn_metrics}
                if update % config.eval.every == 0 or update == config.updates:
                    with timer('evaluate'):
                        measured |= evaluator.run(state.params)
                    bar.write(f'update {update}: {evaluate.one_line(measured)}')
                measured |= {**timer.take(), 'batch/prompts_cut': prompts.take_num_cut(), 'compiled/programs': num_compiled(programs)}
                writer.write(update, measured)  # before the checkpoint: resuming drops lines that it does not cover
                with timer('save'):
                    if hosts.is_main():
                        write_episodes(config, workdir, update, collected, pool, prompts, table, advantage_N, gate_N, guidance)
                    is_best = measured.get(evaluator.selection, -1.0) > best
                    best = measured[evaluator.selection] if is_best else best
                    position = loop_position(config, policy, update, best, guide)
                    if is_best:
                        saved.save(update, state, position, best=True)
                    if update % config.checkpoint.every == 0 or update == config.updates:
                        saved.save(update, state, position)
                bar.update()
                bar.set_postfix(success=f'{measured["rollout/success_rate"]:.0%}',
                                all_failed=f'{measured["group/all_failed_share"]:.0%}',
                                triggered=f'{measured["gate/triggered_share"]:.0%}')
        except Stop.Requested:
            saved.save(finished, state, loop_position(config, policy, finished, best, guide))
            bar.write(f'stopped after update {finished}; everything is saved, the same command continues')
        finally:
            writer.close()
            saved.close()
    if not hosts.is_main():
        return
    report.write(workdir)
    print(f'results: {workdir}/report.html (metrics.jsonl, trajectories/, checkpoints/, best/, tensorboard/)')


def collect(config, pool, policy, prompts, params, update: int, stop: Stop):
    """(groups to learn from, metrics of all groups that were played), with the present parameters."""
    r = config.rollout
    act = wiring.make_act(config, policy, params, key=wiring.draw_key(config.seed, update, 'sample'),
                          temperature=r.temperature, bands=wiring.band_config(config))
    task_ids = [rollout.task_schedule(config.seed, update * r.max_batches + i, num_tasks=len(pool.task_names),
                                      num_groups=r.num_groups) for i in range(r.max_batches)]
    kept, played = rollout.collect_until_contrast(
        pool, act, prompts, task_ids, group_size=r.group_size, max_steps=config.env.max_steps,
        keep_snapshots=wiring.uses_oracle(config) and config.sero.restoration == 'copy', progress=stop.check,
        collect=hosts.collect_groups)
    measured = metrics.rollout_metrics(played, pool.task_types)
    if r.max_batches > 1:
        measured |= {'rollout/batches': len(played) // r.num_groups, 'rollout/groups_dropped': len(played) - len(kept)}
    return kept, measured


def build_table(config, collected) -> groups.StepTable:
    """The update's table. Its size is that of num_groups full groups, or twice that: two shapes to compile at most."""
    a = config.advantage
    whole = config.rollout.num_groups * config.rollout.group_size * config.env.max_steps
    steps = sum(len(trajectory.steps) for group in collected for trajectory in group.trajectories)
    return groups.build_step_table(
        collected, discount=a.discount, goal_discount=a.goal_discount, history_depth=a.history_depth,
        num_rows=whole * -(-steps // whole), invalid_penalty=a.invalid_penalty, penalise=a.penalise,
        goal_reward=config.env.success_reward, distance_offset=a.distance_offset)


def make_guide(config, policy, pool, prompts, programs, mesh) -> contextlib.AbstractContextManager[sero.Sero | None]:
    """The oracle of a run with SERO, else a context of None."""
    if config.sero.variant == 'off':
        return contextlib.nullcontext()
    return sero.Sero(config, policy, pool, prompts, programs.logprobs, mesh)


def learn(config, programs, mesh, timer, state, reference, collected, advantage_N, guide, update: int):
    """The optimizer steps of one update. Old log-probs come from the training graph, before the first step."""
    steps = [step for group in collected for t in group.trajectories for step in t.steps]
    lengths = [len(t.steps) for group in collected for t in group.trajectories]
    trajectory_id_N = np.repeat(np.arange(len(lengths)), lengths)
    rng = np.random.default_rng([config.seed, update, wiring.PURPOSES['rows']])
    minibatches: list[batch.Minibatch] = []
    for _ in range(config.learner.epochs):
        minibatches += batch.build_minibatches(
            [s.prompt_tokens for s in steps], [s.action_tokens for s in steps], advantage_N[:len(steps)], trajectory_id_N,
            minibatch=config.learner.minibatch, micro_batch=config.learner.micro_batch,
            prompt_buckets=config.prompt.buckets, action_buckets=(config.prompt.max_action,), rng=rng,
            sampler_logprobs=[s.action_logprobs for s in steps], pack=wiring.pack_config(config))
    on_host = [micro for minibatch in minibatches for micro in minibatch]
    counts = [objective.counts_of(minibatch, wiring.loss_config(config)) for minibatch in minibatches]
    minibatches = [[sharding.put_batch(mesh, micro.replace(sampler_logprob_BA=None)) for micro in minibatch]
                   for minibatch in minibatches]

    def with_logprobs(column: str, params):
        return jax.block_until_ready([
            [micro.replace(**{column: programs.logprobs(params, micro.tokens)}) for micro in minibatch]
            for minibatch in minibatches])

    with timer('old_logprobs'):
        minibatches = with_logprobs('old_logprob_BA', state.params)
        gap = batch.sampler_gap(on_host, hosts.fetch([micro.old_logprob_BA for minibatch in minibatches for micro in minibatch]))
    if reference is not None:
        with timer('ref_logprobs'):
            minibatches = with_logprobs('ref_logprob_BA', reference)
    guidance = guide.finish(state.params, update, len(minibatches), timer) if guide else sero.Guidance(
        batches=[()] * len(minibatches), scale=0.0, branches=(), weighed=None, metrics={})
    all_metrics = []
    with timer('learn'):
        for minibatch, oracle_batches, count in zip(minibatches, guidance.batches, counts, strict=True):
            state, step_metrics = programs.train(state, minibatch, oracle_batches, guidance.scale, count)
            all_metrics.append(step_metrics)
        all_metrics = jax.device_get(all_metrics)
    merged = {name: (max if name.endswith('_max') else np.sum if name == 'update/skipped' else np.mean)(
        [m[name] for m in all_metrics]) for name in all_metrics[0]}
    return state, guidance, merged | guidance.metrics | {
        'logprob/sampler_gap_mean': gap[0], 'logprob/sampler_gap_max': gap[1],
        'batch/pad_fraction': batch.pad_fraction(on_host), 'batch/optimizer_steps': len(minibatches), 'batch/rows': len(steps)}


def write_episodes(config, workdir, update, collected, pool, prompts, table, advantage_N, gate_N, guidance) -> None:
    """Every save_trajectories-th update's episodes, with the credit that each step got, and the oracle's branches."""
    every = config.rollout.save_trajectories
    if every and update % every == 0:
        columns = {'advantage': advantage_N, 'coverage': table.coverage_N, 'gate_open': gate_N}
        path = workdir / 'trajectories' / f'update_{update:05d}.jsonl'
        metrics.write_trajectories(path, collected, pool.task_names, prompts.decode, columns)
        if guidance.branches:
            path = workdir / 'branches' / path.name
            weighed = guidance.weighed
            metrics.write_branches(path, guidance.branches, pool.task_names, weighed.log_compat_RT, weighed.weight_RT, weighed.gate_R)


def make_programs(config, model_config, optimizer, mesh) -> Programs:
    """Compile-once functions; estimator and gate are chosen here."""
    options = wiring.coverage_config(config)
    loss = wiring.loss_config(config)

    def advantage_step(table: groups.StepTable, key: jax.Array):
        compare = advantages.make_compare(table, normalisation=config.advantage.normalisation,
                                          episode_stats=config.advantage.episode_stats)
        compare = coverage.with_coverage(compare, table, options, key)
        name = config.advantage.estimator
        advantage_N, comparisons = advantages.ESTIMATORS[name](table, compare, **config.advantage.options[name])
        if config.debug.check_invariants:
            for comparison in comparisons:
                coverage.check_gate(comparison, options)
        gate_N = jnp.stack([c.gate.open_N for c in comparisons]).any(axis=0)
        summary = coverage.gate_metrics(comparisons)
        triggered = sum(v for name, v in summary.items() if name.endswith('/triggered'))
        total = sum(v for name, v in summary.items() if name.endswith('/groups'))
        summary = {f'gate/{name}': value for name, value in summary.items()}
        return advantage_N, gate_N, summary | {'gate/triggered_share': triggered / jnp.maximum(total, 1)}

    compiled = jax.jit(advantage_step)
    if config.debug.check_invariants:
        compiled = chex.chexify(compiled, async_check=False)
    return Programs(compiled, learner.make_logprob_step(model_config, loss, mesh),
                    learner.make_train_step(model_config, loss, optimizer, mesh))


def num_compiled(programs: Programs) -> int:
    """Programs compiled so far for sampling and learning: it must stop growing after the first updates."""
    return sum(f._cache_size() for f in (sampler.generate, programs.logprobs)) + programs.train.num_compiled()


def loop_position(config, policy, update: int, best: float, guide) -> dict[str, Any]:
    return {'update': update, 'best': best, 'recent_roots': guide.recent if guide else [],
            'model': dataclasses.asdict(policy.config), 'model_folder': str(policy.folder),
            'config': json.loads(config.to_json_best_effort())}


def resume(config, workdir: pathlib.Path, saved: checkpoint.Checkpoints, state, policy):
    """(finished updates, state, best so far, types of recent roots) of the newest checkpoint, or of a new run."""
    update = saved.latest()
    if update is None:
        workdir.mkdir(parents=True, exist_ok=True)
        (workdir / 'config.json').write_text(config.to_json_best_effort(indent=1) + '\n')
        return 0, state, -1.0, []
    loop = saved.loop(update)
    if loop['model'] != json.loads(json.dumps(dataclasses.asdict(policy.config))):
        raise checkpoint.CheckpointError(
            f'{workdir} holds a run of another model ({loop["model_folder"]}); choose another --workdir')
    changed = wiring.differences(loop['config'], json.loads(config.to_json_best_effort()))
    if changed:
        logging.warning('continuing %s with other settings than it began with: %s', workdir, ', '.join(changed))
    if hosts.is_main():
        print(f'continuing {workdir} after update {update}')
    return update, saved.restore(update, state), loop['best'], loop['recent_roots']


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f'unexpected arguments {argv[1:]}')
    logging.set_verbosity(logging.WARNING)  # orbax and JAX narrate every file they write
    config = _CONFIG.value
    if _DISTRIBUTED.value or _COORDINATOR.value:
        hosts.connect(_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value, _HOST_TIMEOUT.value)
    workdir = pathlib.Path(_WORKDIR.value or wiring.default_workdir(config))
    if hosts.is_main():
        print(f'{config.experiment}, preset {config.preset} (others: {", ".join(_presets())}) on {jax.device_count()} x '
              f'{jax.devices()[0].device_kind}' + f' of {hosts.count()} hosts' * (hosts.count() > 1) + f'; writing to {workdir}')
    with hosts.ending_together(workdir):
        run(config, workdir, Stop())


def _presets() -> Sequence[str]:
    from configs import base

    return base.PRESETS


if __name__ == '__main__':
    wiring.limit_preallocation()
    wiring.run_main(main)
