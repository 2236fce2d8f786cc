"""SERO's term in the optimizer step: beside the policy loss, normalised by itself, and absent when it is off."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from learner_test import (
    ACTION,
    CONFIG,
    LOSS,
    OPTIMIZER,
    PROMPT,
    assert_same_update,
    first_state,
    joined,
    make_batch,
    make_params,
    program,
    put,
)

from covsero_jax import batch, learner, losses, objective, sharding
from covsero_jax.trajectory import OracleStep

SERO = dataclasses.replace(LOSS, oracle_coef=0.5)
SCALE = 0.75


def make_steps(num_rows: int, seed: int = 5) -> tuple[list[OracleStep], np.ndarray]:
    """Ragged oracle targets, whose command is a part of the reply, and their weights."""
    rng = np.random.default_rng(seed)
    steps = []
    for _ in range(num_rows):
        reply = rng.integers(1, CONFIG.vocab_size, rng.integers(2, ACTION + 1))
        mask = np.zeros(len(reply), bool)
        mask[rng.integers(len(reply) - 1) : -1] = True
        steps.append(OracleStep(rng.integers(1, CONFIG.vocab_size, rng.integers(2, PROMPT + 1)), reply, mask, '', '', 0.0))
    return steps, rng.uniform(0.1, 1, num_rows).astype(np.float32)


def make_oracle(num_rows=7, *, micro_batch=8, weight=None, prompt_buckets=(PROMPT,)):
    steps, weight_B = make_steps(num_rows)
    batches = batch.build_oracle_batches(
        steps, weight_B if weight is None else weight, micro_batch=micro_batch, prompt_buckets=prompt_buckets, action_buckets=(ACTION,))
    return [micro for _, micro in batches]


def update(oracle, *, loss=SERO, minibatch=None, **kwargs):
    mesh, _, train_step = program(loss=loss, **kwargs)
    state = jax.tree.map(jnp.copy, first_state(**kwargs))
    minibatch = put(mesh, make_batch() if minibatch is None else minibatch)
    state, metrics = train_step(state, minibatch, [sharding.put_batch(mesh, micro) for micro in oracle], SCALE)
    return state, {name: float(value) for name, value in metrics.items()}


def bits(state):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


def test_off_is_the_base_bit_for_bit():
    """Without batches no other program runs; with coefficient 0, or weights 0, what is added is 0."""
    base = update((), loss=LOSS)
    assert bits(update((), loss=SERO)[0]) == bits(base[0])
    zero = update(make_oracle(), loss=dataclasses.replace(SERO, oracle_coef=0.0))
    assert bits(zero[0]) == bits(base[0]) and zero[1]['loss/oracle'] > 0
    assert bits(update(make_oracle(weight=np.zeros(7, np.float32)))[0]) == bits(base[0])
    assert bits(update(make_oracle())[0]) != bits(base[0])


def test_the_policy_term_is_the_same_with_and_without():
    base, sero = update((), loss=LOSS)[1], update(make_oracle())[1]
    for name in set(base) - {'loss/total', 'loss/oracle', 'update/grad_norm'}:
        assert base[name] == sero[name]
    assert sero['loss/total'] == pytest.approx(base['loss/total'] + 0.5 * sero['loss/oracle'], rel=1e-5)


@pytest.mark.parametrize('nll', ['token_mean', 'token_sum'])
def test_update_matches_the_formula(nll):
    """coef * scale * sum_b w_b NLL_b, written out, added to the policy loss's gradient."""
    loss = dataclasses.replace(SERO, oracle_nll=nll)
    steps, weight_B = make_steps(7)
    params = jax.tree.map(jnp.asarray, make_params())

    def oracle(params):
        total = 0.0
        for step, weight in zip(steps, weight_B, strict=True):
            tokens = batch.build_tokens([step.prompt_tokens], [step.reply_tokens], num_rows=1, prompt_len=PROMPT, action_len=ACTION)
            logprob_BA, _ = objective.token_logprobs(params, tokens, config=CONFIG, temperature=1.0, chunk=ACTION)
            command = -logprob_BA[0][np.flatnonzero(step.command_mask)]
            total += weight * (command.mean() if nll == 'token_mean' else command.sum())
        return SCALE * total

    def policy(params):
        rows = joined(make_batch())
        count = np.array([rows.tokens.action_mask_BA.sum()] * 2, np.float32)
        return objective.policy_objective(params, rows, count, config=CONFIG, loss=LOSS)[0]

    grads = jax.grad(lambda p: policy(p) + 0.5 * oracle(p))(params)
    tx = learner.make_optimizer(OPTIMIZER)
    expected = optax.apply_updates(params, tx.update(grads, tx.init(params), params)[0])
    state, metrics = update(make_oracle(), loss=loss)
    assert metrics['loss/oracle'] == pytest.approx(float(oracle(params)), rel=1e-5)
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_layout_of_the_oracle_rows_does_not_matter():
    whole = update(make_oracle())
    for other in (make_oracle(micro_batch=4), make_oracle(prompt_buckets=(4, 6, PROMPT), micro_batch=2), make_oracle(micro_batch=24)):
        assert_same_update(update(other), whole)


def test_sharded_equals_single_device():
    assert_same_update(update(make_oracle(), data=2, fsdp=4), update(make_oracle()))


def test_padding_may_hold_anything():
    rng = np.random.default_rng(1)
    (clean,) = make_oracle()
    tokens, mask_BA = clean.tokens, clean.tokens.action_mask_BA
    noise_BA = rng.integers(40, size=mask_BA.shape).astype(np.int32)
    dirty = clean.replace(tokens=tokens.replace(action_BA=np.where(mask_BA, tokens.action_BA, noise_BA)),
                          weight_B=np.where(mask_BA.any(-1), clean.weight_B, 1e9).astype(np.float32))
    assert_same_update(update([dirty]), update([clean]))


def test_only_command_tokens_are_learned():
    """The reply around the command is context: the gradient of the logits at its own positions is zero."""
    (micro,) = make_oracle()
    logprob_BA = jnp.full(micro.tokens.action_BA.shape, -1.0)
    grad_BA = jax.grad(lambda x: jnp.sum(losses.oracle_nll(x, micro.command_mask_BA)))(logprob_BA)
    np.testing.assert_array_equal(np.asarray(grad_BA) != 0, micro.command_mask_BA)
    assert (micro.command_mask_BA <= micro.tokens.action_mask_BA).all()
    assert micro.command_mask_BA.sum() < micro.tokens.action_mask_BA.sum()


def test_positions_say_which_row_is_which():
    steps, weight_B = make_steps(11)
    seen = []
    for rows, micro in batch.build_oracle_batches(steps, weight_B, micro_batch=4, prompt_buckets=(4, PROMPT), action_buckets=(ACTION,)):
        for place, row in enumerate(rows):
            step = steps[row]
            assert micro.tokens.prompt_BP[place][micro.tokens.prompt_mask_BP[place]].tolist() == step.prompt_tokens.tolist()
            assert micro.tokens.action_BA[place][micro.command_mask_BA[place]].tolist() == step.reply_tokens[step.command_mask].tolist()
            assert micro.weight_B[place] == weight_B[row]
        assert (micro.weight_B[len(rows):] == 0).all()
        seen += rows.tolist()
    assert sorted(seen) == list(range(11))
    assert batch.build_oracle_batches([], np.zeros(0), micro_batch=4, prompt_buckets=(8,), action_buckets=(4,)) == []
