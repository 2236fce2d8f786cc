"""Is this accelerator right, and how fast? One prepared check of one GPU (or TPU), ten minutes at most.

    python -m experiments.gpu_check                                                     shapes of Qwen2.5-1.5B
    python -m experiments.gpu_check --config=configs/alfworld_gigpo.py:smoke --matmul=512     tried out on a CPU, seconds

Weights are random and made on the device: nothing is downloaded. Flags that are not listed are fields of the configuration
(--config.learner.micro_batch=16). Parts, each written to --out as soon as it is finished; what the time does not allow is left out:

    ceiling  TFLOP/s of square matrix products in the model's format, the best of ten
    parity   two layers of the model on the CPU and on the device: log-probabilities, gradients, greedy replies
    train    one update of ragged rows: log-probabilities as of before, gradients, AdamW
    sample   replies to ragged prompts, one batch of the largest row bucket, none ends early

tokens/s are useful ones: padding does not count. MFU: FLOPs of a forward and a backward pass over the useful tokens, without what
is computed again, as a share of the ceiling; for `sample` of the forward passes. peak: what the allocator held at most so far.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from covsero_jax import batch, learner, metrics, model, objective, sampler, sharding
from experiments import plan_costs, plan_programs, results, wiring
from experiments.peers import common

Record = dict[str, Any]


def ceiling(size: int, dtype: str) -> float:
    """FLOP/s of [size, size] x [size, size], the best of ten."""
    a = jnp.ones((size, size), dtype)
    product = jax.jit(jnp.matmul).lower(a, a).compile()
    return 2 * size**3 / min(_seconds(lambda: product(a, a)) for _ in range(10))


def ragged(config: ConfigDict, vocab_size: int, num_rows: int, seed: int = 0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(prompts, replies) of random tokens: 15 to 60 % of the longest prompt bucket, 5 to 40 % of the longest reply."""
    rng = np.random.default_rng(seed)

    def column(longest: int, low: float, high: float) -> list[np.ndarray]:
        return [rng.integers(2, vocab_size, n).astype(np.int32)
                for n in rng.integers(max(int(low * longest), 1), int(high * longest) + 1, num_rows)]

    return column(max(config.prompt.buckets), 0.15, 0.6), column(config.prompt.max_action, 0.05, 0.4)


def minibatch_of(config: ConfigDict, mesh: jax.sharding.Mesh, prompts, replies) -> list[batch.PolicyBatch]:
    """One minibatch as a run makes it, on the devices of `mesh`."""
    rows = np.arange(len(prompts))
    made, = batch.build_minibatches(
        prompts, replies, np.where(rows % 2, 1.0, -1.0).astype(np.float32), rows, minibatch=len(prompts),
        micro_batch=config.learner.micro_batch, prompt_buckets=config.prompt.buckets, action_buckets=(config.prompt.max_action,),
        rng=np.random.default_rng(0), pack=wiring.pack_config(config))
    return [sharding.put_batch(mesh, micro) for micro in made]


def parity(config: ConfigDict, sizes: model.QwenConfig, dtype: str) -> Record:
    """The same two layers, rows and keys on the CPU and on the device. Differences are absolute, of gradients relative to the norm."""
    sizes = dataclasses.replace(sizes, num_layers=2, vocab_size=min(sizes.vocab_size, 8192), dtype=dtype)
    prompts, replies = ragged(config, sizes.vocab_size, config.learner.micro_batch)
    loss, optimizer = dataclasses.replace(wiring.loss_config(config), kl_coef=0.0), _optimizer(config)
    found = []
    with jax.default_matmul_precision('highest'):
        for device in (jax.devices('cpu')[0], jax.devices()[0]):
            mesh = sharding.make_mesh(data=1, fsdp=1, devices=[device])
            with jax.default_device(jax.devices('cpu')[0]):
                params = jax.device_get(model.init_params(sizes, jax.random.key(0)))
            params = sharding.put_params(mesh, params)
            minibatch = minibatch_of(config, mesh, prompts, replies)
            logprobs = [learner.make_logprob_step(sizes, loss, mesh)(params, micro.tokens) for micro in minibatch]
            step = learner.make_train_step(sizes, loss, optimizer, mesh)
            counts, sums = objective.counts_of(minibatch, loss), step.start()
            for micro, old in zip(minibatch, logprobs, strict=True):
                sums = step.accumulate(params, sums, micro.replace(old_logprob_BA=old), counts)
            with jax.default_device(device):
                replied = _policy(config, sizes, mesh, 0.0)(params)(prompts[:8], _ids(min(8, len(prompts))))
            found.append((jax.device_get(logprobs), jax.device_get(sums.grads), [action.tokens.tolist() for action in replied]))
    (cpu_logprobs, cpu_grads, cpu_replies), (logprobs, grads, replied) = found
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(cpu_grads)))
    gap = np.sqrt(sum(np.sum(np.square(a - b)) for a, b in zip(jax.tree.leaves(cpu_grads), jax.tree.leaves(grads), strict=True)))
    return {'logprob_max': float(max(np.max(np.abs(a - b)) for a, b in zip(cpu_logprobs, logprobs, strict=True))),
            'gradient_relative': float(gap / norm),
            'greedy_replies_equal': sum(a == b for a, b in zip(cpu_replies, replied, strict=True)), 'greedy_replies': len(replied)}


def train(config: ConfigDict, sizes: model.QwenConfig, rounds: int, best_flops: float) -> Record:
    mesh, loss, optimizer = wiring.make_mesh(config), wiring.loss_config(config), _optimizer(config)
    state = learner.init_state(jax.random.key(0), sizes, optimizer, mesh)
    logprobs, step = learner.make_logprob_step(sizes, loss, mesh), learner.make_train_step(sizes, loss, optimizer, mesh)
    reference = sharding.copy_params(mesh, state.params, sizes.dtype) if loss.kl_coef else None
    prompts, replies = ragged(config, sizes.vocab_size, config.learner.minibatch)
    minibatch = minibatch_of(config, mesh, prompts, replies)
    tokens, seconds, first = sum(map(len, [*prompts, *replies])), [], 0.0

    def update() -> Any:
        nonlocal state
        scored = [micro.replace(old_logprob_BA=logprobs(state.params, micro.tokens)) for micro in minibatch]
        if reference is not None:
            scored = [micro.replace(ref_logprob_BA=logprobs(reference, micro.tokens)) for micro in scored]
        state, found = step(state, scored)
        return found

    first = _seconds(update)
    seconds = [_seconds(update) for _ in range(rounds)]
    passes = 3 + 1 + (reference is not None)  # forward and backward, and the forward passes of the log-probabilities
    flops = passes * sum(plan_costs.logprobs(sizes, 1, len(p) + len(r), len(p) - 1, len(r)).flops
                         for p, r in zip(prompts, replies, strict=True))
    return {'rows': len(prompts), 'tokens': tokens, 'micro_batches': len(minibatch), 'first_s': first, 'update_s': min(seconds),
            'tokens_per_s': tokens / min(seconds), 'pad_fraction': batch.pad_fraction(jax.device_get(minibatch)),
            'mfu': flops / min(seconds) / best_flops / mesh.size, 'peak_gib': peak_gib()}


def sample(config: ConfigDict, sizes: model.QwenConfig, rounds: int, best_flops: float) -> Record:
    mesh = wiring.make_mesh(config)
    params = sharding.copy_params(mesh, learner.init_state(jax.random.key(0), sizes, _sgd(), mesh).params, sizes.dtype)
    prompts, _ = ragged(config, sizes.vocab_size, max(config.rollout.row_buckets))
    act, made = _policy(config, sizes, mesh, 1.0)(params), []

    def once() -> None:
        made.append(sum(len(action.tokens) for action in act(prompts, _ids(len(prompts)))))

    first = _seconds(once)
    seconds = [_seconds(once) for _ in range(rounds)]
    steps, mean = made[-1] / len(prompts), int(np.mean([len(p) for p in prompts]))
    flops = plan_costs.prefill(sizes, len(prompts), mean, 0).flops + steps * plan_costs.decode(sizes, len(prompts), mean, int(steps)).flops
    return {'rows': len(prompts), 'prompt_tokens': sum(map(len, prompts)), 'new_tokens': made[-1], 'first_s': first,
            'seconds': min(seconds), 'tokens_per_s': made[-1] / min(seconds), 'mfu': flops / min(seconds) / best_flops / mesh.size,
            'peak_gib': peak_gib()}


def peak_gib() -> float:
    """Of the first device; where the backend does not count (CPU), of this process."""
    stats = jax.devices()[0].memory_stats()
    return stats['peak_bytes_in_use'] / 2**30 if stats else common.peak_mib() / 1024


def _policy(config: ConfigDict, sizes: model.QwenConfig, mesh: jax.sharding.Mesh, temperature: float) -> Callable:
    """params -> the sampler of a run, whose replies never end early."""
    return functools.partial(
        sampler.make_policy, config=sizes, key=jax.random.key(1), buckets=config.prompt.buckets,
        row_buckets=config.rollout.row_buckets, max_new_tokens=config.prompt.max_action, temperature=temperature,
        eos_ids=(sizes.vocab_size,), mesh=mesh)


def _ids(rows: int) -> np.ndarray:
    return np.stack([np.arange(rows), np.zeros(rows), np.zeros(rows)], axis=1).astype(np.uint32)


def _optimizer(config: ConfigDict):
    return learner.make_optimizer(wiring.optimizer_config(config))


def _sgd():
    """An optimizer without moments: `sample` needs parameters alone."""
    return learner.make_optimizer(learner.OptimizerConfig(name='adafactor'))


def _seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - began


def main(argv: Sequence[str] | None = None) -> Record:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument('--config', default='configs/alfworld_gigpo.py:1.5b', help='experiment, optionally with :preset')
    parser.add_argument('--parts', default='ceiling,parity,train,sample')
    parser.add_argument('--matmul', type=int, default=8192, help='size of the square matrices of the ceiling')
    parser.add_argument('--rounds', type=int, default=2, help='timed rounds, after one that compiles')
    parser.add_argument('--budget_s', type=float, default=540, help='no part is started after this')
    parser.add_argument('--out', default='results/gpu_check.json')
    options, rest = parser.parse_known_args(argv)
    if stray := [argument for argument in rest if not argument.startswith('--config.')]:
        parser.error(f'unexpected arguments {stray}')
    wiring.limit_preallocation()
    config = wiring.read_config([f'--config={options.config}', *rest])
    sizes, began = plan_programs.model_config(config), time.monotonic()
    plan_programs.check(config, wiring.make_mesh(config))
    device = jax.devices()[0]
    record: Record = {'device': f'{device.platform} ({device.device_kind})', 'devices': jax.device_count(), 'jax': jax.__version__,
                      'config': [options.config, *rest], 'date': time.strftime('%Y-%m-%d'), 'commit': results.commit(),
                      'ceiling_tflops': ceiling(options.matmul, sizes.dtype) / 1e12}
    best = record['ceiling_tflops'] * 1e12
    parts = {'parity': lambda: {dtype: parity(config, sizes, dtype) for dtype in ('float32', 'bfloat16')},
             'train': lambda: train(config, sizes, options.rounds, best),
             'sample': lambda: sample(config, sizes, options.rounds, best)}
    print(f'{record["device"]}: {record["ceiling_tflops"]:,.3f} TFLOP/s in {sizes.dtype}', flush=True)
    for name, part in parts.items():
        if name not in options.parts.split(','):
            continue
        if time.monotonic() - began > options.budget_s:
            print(f'{name} is left out: {options.budget_s:.0f} s are over')
            continue
        record[name] = part()
        print(f'{name}: {json.dumps(record[name])}', flush=True)
        pathlib.Path(options.out).parent.mkdir(parents=True, exist_ok=True)
        metrics.replace_file(pathlib.Path(options.out), json.dumps(record, indent=1) + '\n')
        jax.clear_caches()
    print(f'results: {options.out}')
    return record


if __name__ == '__main__':
    with wiring.one_line_errors():
        main()
