"""covsero_jax in the comparison of `experiments.bench_peers`: the sampler and one update as a run makes them."""

from __future__ import annotations

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from covsero_jax import batch, learner, objective, pretrained, sampler, sharding
from experiments.peers import common


def sample(work: common.Work) -> common.Round:
    config, params = pretrained.load_folder(work.folder)

    def once(round_: int) -> int:
        policy = sampler.make_policy(
            params, config=config, key=jax.random.key(round_), buckets=work.buckets, row_buckets=(work.rows_at_once,),
            max_new_tokens=work.max_new, temperature=1.0, eos_ids=work.eos_ids)
        ids = np.stack([np.arange(len(work.prompts)), np.zeros(len(work.prompts)), np.zeros(len(work.prompts))], axis=1)
        return sum(len(action.tokens) for action in policy(work.prompts, ids.astype(np.uint32)))

    params = jax.device_put(params)
    return once


def train(work: common.Work) -> common.Round:
    config, params = pretrained.load_folder(work.folder)
    mesh = sharding.make_mesh(data=1, fsdp=1)
    loss = objective.LossConfig(kl_coef=0.0, entropy_coef=0.0, chunk=16)
    optimizer = learner.make_optimizer(learner.OptimizerConfig())
    logprobs, step = learner.make_logprob_step(config, loss, mesh), learner.make_train_step(config, loss, optimizer, mesh)
    state = learner.create_state(params, optimizer, mesh, config)
    del params

    def once(round_: int) -> int:
        nonlocal state
        minibatch, = batch.build_minibatches(
            work.prompts, work.replies, work.advantages, np.arange(len(work.prompts)), minibatch=len(work.prompts),
            micro_batch=4, prompt_buckets=work.buckets, action_buckets=(work.max_new,),
            rng=np.random.default_rng(round_))
        minibatch = [sharding.put_batch(mesh, micro) for micro in minibatch]
        minibatch = jax.block_until_ready([micro.replace(old_logprob_BA=logprobs(state.params, micro.tokens)) for micro in minibatch])
        state, metrics = step(state, minibatch)
        jax.block_until_ready((state, metrics))
        return work.num_tokens

    return once


def ceiling() -> float:
    """GFLOP/s of float32 products of 2048 x 2048 matrices, the best of five."""
    a = jnp.ones((2048, 2048))
    product = jax.jit(jnp.matmul)
    product(a, a).block_until_ready()
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        product(a, a).block_until_ready()
        seconds.append(time.perf_counter() - began)
    return 2 * 2048**3 / min(seconds) / 1e9


if __name__ == '__main__':
    common.run(sys.argv, {'sample': sample, 'train': train}, ceiling=ceiling)
