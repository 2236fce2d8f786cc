"""One minibatch, its gradient: however it is cut into micro-batches, spread over devices or packed, and how far that is from equal."""

from __future__ import annotations

import jax
import numpy as np
import packing_test
import pytest

from covsero_jax import batch, learner, model, objective, packing, sharding

CONFIG = model.QwenConfig(
    vocab_size=512, embed_dim=128, mlp_dim=256, num_layers=3, num_heads=8, num_kv_heads=4, head_dim=16, tie_embeddings=False)
LOSS = objective.LossConfig(kl_coef=0.1, entropy_coef=0.01, chunk=4)
PARAMS = jax.tree.map(lambda x: x * 3 if x.ndim > 1 else x, model.init_params(CONFIG, jax.random.key(0)))  # logits of size
ROWS = packing_test.make_rows(16)
PACK = packing.PackConfig(length=48, rows=4, actions=24)


def gradient(micro_batch: int, shape=(1, 1, 1), pack=None):
    mesh = sharding.make_mesh(data=shape[0], fsdp=shape[1], tensor=shape[2])
    optimizer = learner.make_optimizer(learner.OptimizerConfig())
    state = learner.create_state(PARAMS, optimizer, mesh, CONFIG)
    score, step = learner.make_logprob_step(CONFIG, LOSS, mesh), learner.make_train_step(CONFIG, LOSS, optimizer, mesh)
    minibatch, = batch.build_minibatches(
        *ROWS, minibatch=16, micro_batch=micro_batch, rng=np.random.default_rng(0), pack=pack, **packing_test.BUCKETS)
    minibatch = [sharding.put_batch(mesh, micro) for micro in minibatch]
    old = [score(state.params, micro.tokens) for micro in minibatch]
    minibatch = [micro.replace(old_logprob_BA=o - 0.1, ref_logprob_BA=o + 0.2) for micro, o in zip(minibatch, old, strict=True)]
    sums, counts = step.start(), objective.counts_of(minibatch, LOSS)
    for micro in minibatch:
        sums = step.accumulate(state.params, sums, micro, counts)
    return jax.device_get(sums.grads)


@pytest.fixture(scope='module')
def whole():
    return gradient(16)


@pytest.mark.parametrize(('micro_batch', 'shape', 'pack'), [
    (1, (1, 1, 1), None), (2, (1, 1, 1), None), (4, (1, 1, 1), None), (8, (8, 1, 1), None), (8, (1, 8, 1), None),
    (8, (2, 2, 2), None), (2, (1, 1, 1), PACK), (4, (2, 2, 2), PACK)], ids=str)  # fmt: skip
def test_the_gradient_does_not_depend_on_how_it_is_computed(whole, micro_batch, shape, pack, record_property):
    """Worst difference of any element, relative to the largest element of its tensor. float32 has 6e-8."""
    found = gradient(micro_batch, shape, pack)
    worst = max(np.abs(a - b).max() / np.abs(b).max() for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(whole), strict=True))
    record_property('worst', float(worst))
    print(micro_batch, shape, 'packed' if pack else '', f'{worst:.1e}')
    assert worst < 2e-5
