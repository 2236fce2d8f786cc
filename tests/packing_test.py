"""Packed rows give the numbers of rows in sequences of their own, and leave little padding."""

from __future__ import annotations

import dataclasses
import functools

import chex
import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covsero_jax import batch, learner, model, objective, packing, sharding

CONFIG = model.QwenConfig(
    vocab_size=40, embed_dim=16, mlp_dim=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, rope_theta=1e4)
PACK = packing.PackConfig(length=32, rows=4, actions=16)
LOSS = objective.LossConfig(kl_coef=0.1, entropy_coef=0.01, chunk=4)
BUCKETS = {'prompt_buckets': (12,), 'action_buckets': (8,)}


def make_rows(num_rows: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 40, rng.integers(1, 13)).astype(np.int32) for _ in range(num_rows)]
    actions = [rng.integers(0, 40, rng.integers(1, 9)).astype(np.int32) for _ in range(num_rows)]
    return prompts, actions, rng.normal(size=num_rows).astype(np.float32), np.arange(num_rows) // 3


def build(rows, pack=None, micro_batch=4, minibatch=24, seed=0):
    """Minibatches whose sampler log-probs tell which row stands where."""
    numbered = [np.full(len(action), i, np.float32) for i, action in enumerate(rows[1])]
    return batch.build_minibatches(
        *rows, minibatch=minibatch, micro_batch=micro_batch, rng=np.random.default_rng(seed), sampler_logprobs=numbered,
        pack=pack, **BUCKETS)


PARAMS = jax.tree.map(lambda x: x * 12 if x.ndim > 1 else x, model.init_params(CONFIG, jax.random.key(0)))  # visible


@functools.partial(jax.jit, static_argnames=('loss', 'config'))
def logprobs(tokens, loss=LOSS, config=CONFIG):
    return objective.token_logprobs(PARAMS, tokens, config=config, temperature=0.8, chunk=loss.chunk)


def by_row(minibatches, columns):
    """row -> its values of each column, as the masks say."""
    out = {}
    for micro in (micro for minibatch in minibatches for micro in minibatch):
        mask_BA = micro.tokens.action_mask_BA
        values = columns(micro)
        for b in np.flatnonzero(mask_BA.any(axis=1)):
            row = int(micro.sampler_logprob_BA[b][mask_BA[b]][0])
            assert row not in out
            out[row] = [np.asarray(x)[b][mask_BA[b]] if np.ndim(x) == 2 else np.asarray(x)[b] for x in values]
    return out


@pytest.mark.parametrize('chunk', [0, 5])
def test_packed_rows_have_the_numbers_of_rows_alone(chunk):
    config = dataclasses.replace(CONFIG, attention_chunk=chunk)

    def columns(micro):
        return (*logprobs(micro.tokens, config=config), micro.advantage_B, micro.trajectory_tokens_B)

    rows = make_rows(23)
    alone, packed = by_row(build(rows), columns), by_row(build(rows, PACK), columns)
    assert alone.keys() == packed.keys() == set(range(23))
    assert max(np.abs(values[0]).max() for values in alone.values()) > 4  # of visible size
    for row, values in alone.items():
        chex.assert_trees_all_close(packed[row], values, atol=1e-5)


@pytest.mark.parametrize('policy_loss', ['ppo', 'gspo'])
@pytest.mark.parametrize('devices', [1, 4])
def test_packed_update_is_the_unpacked_one(policy_loss, devices):
    loss = dataclasses.replace(LOSS, policy_loss=policy_loss, aggregation='sequence' if policy_loss == 'gspo' else 'trajectory')
    mesh = sharding.make_mesh(data=1, fsdp=devices)
    optimizer = learner.make_optimizer(learner.OptimizerConfig(learning_rate=1e-2, eps=1e-2))  # Adam's sign of tiny gradients is rounding
    train_step = learner.make_train_step(CONFIG, loss, optimizer, mesh)
    rows, states, metrics = make_rows(24), [], []
    for pack in (None, PACK):
        minibatch, = build(rows, pack)
        assert len(minibatch) > 1
        finished = []
        for micro in minibatch:
            old_BA = np.asarray(logprobs(micro.tokens)[0]) + 0.3 * np.sin(np.maximum(micro.sampler_logprob_BA, 0))
            finished.append(sharding.put_batch(mesh, micro.replace(
                old_logprob_BA=old_BA, ref_logprob_BA=old_BA - 0.1, sampler_logprob_BA=None)))
        state, measured = train_step(learner.create_state(PARAMS, optimizer, mesh, CONFIG), finished)
        states.append(state)
        metrics.append({name: float(value) for name, value in measured.items()})
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-4, abs=1e-6)
    assert metrics[0]['update/grad_norm'] > 1e-3
    chex.assert_trees_all_close(*states, atol=2e-5)


def test_other_rows_of_the_sequence_do_not_matter():
    rows = make_rows(8)
    one = build(rows, PACK, micro_batch=2, minibatch=8)[0][0]
    other = one.tokens.token_BL.copy()
    changed = one.tokens.segment_BL == 2  # the second row of every sequence
    assert changed.any()
    other[changed] = (other[changed] + 7) % 40
    before, after = (np.asarray(logprobs(one.tokens.replace(token_BL=t))[0]).reshape(2, PACK.rows, -1) for t in (one.tokens.token_BL, other))
    mask = one.tokens.action_mask_BA.reshape(2, PACK.rows, -1)
    np.testing.assert_array_equal(before[:, [0, 2, 3]][mask[:, [0, 2, 3]]], after[:, [0, 2, 3]][mask[:, [0, 2, 3]]])
    assert np.abs(before[:, 1][mask[:, 1]] - after[:, 1][mask[:, 1]]).max() > 0.1


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 8)), min_size=1, max_size=60), st.integers(1, 5))
def test_a_plan_holds_every_row_once_and_no_sequence_overflows(sizes, num_sequences):
    lengths, actions = [p + a for p, a in sizes], [a for _, a in sizes]
    micros = packing.plan(lengths, actions, PACK, num_sequences)
    assert sorted(row for _, bins in micros for rows in bins for row in rows) == list(range(len(sizes)))
    for length, bins in micros:
        assert length in PACK.lengths and 1 <= len(bins) <= num_sequences
        for rows in bins:
            assert sum(lengths[r] for r in rows) <= length and len(rows) <= PACK.rows
            assert sum(actions[r] for r in rows) <= PACK.max_actions(length)


def test_ragged_rows_fill_their_sequences():
    """Prompts of ALFWorld's spread (a factor of four), replies of 20 to 200 tokens, 256 rows in each optimizer step."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(300, 1200, 256).tolist()
    actions = rng.integers(20, 200, 256).tolist()
    lengths = [p + a for p, a in zip(prompts, actions, strict=True)]
    micros = packing.plan(lengths, actions, packing.PackConfig(length=4096), 8)
    slots = sum(8 * length for length, _ in micros)
    assert sum(lengths) / slots > 0.9


@pytest.mark.parametrize(('prompt', 'action', 'message'), [(40, 3, 'row 0 has 43 tokens'), (8, 20, '20 of them of the reply')])
def test_rows_too_long_are_named(prompt, action, message):
    with pytest.raises(ValueError, match=message):
        packing.plan([prompt + action], [action], PACK, 2)


def test_bad_sizes_are_named():
    with pytest.raises(ValueError, match='pack_rows=0'):
        packing.PackConfig(length=32, rows=0)
