from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from covsero_jax import batch, learner, model, objective, sharding

CONFIG = model.QwenConfig(
    vocab_size=40, embed_dim=16, mlp_dim=24, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, rope_theta=1e4
)
LOSS = objective.LossConfig(kl_coef=0.1, entropy_coef=0.01, chunk=2)
GSPO = dataclasses.replace(LOSS, policy_loss='gspo', aggregation='sequence', clip_low=0.1, clip_high=0.1)
# Adam divides by |g|: with its usual eps, rounding noise in a zero gradient is a step of full size. 1e-3 compares gradients.
OPTIMIZER = learner.OptimizerConfig(learning_rate=1e-2, eps=1e-3)
PROMPT, ACTION = 8, 4


@functools.cache
def make_params(config: model.QwenConfig = CONFIG):
    """Fixed weights, large enough to have opinions, that do not depend on how the model initialises itself."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(functools.partial(model.init_params, config), jax.random.key(0))
    return jax.tree.map(lambda x: rng.normal(0.3 * (x.ndim == 1), 0.3, x.shape).astype(np.float32), shapes)


def make_batch(num_rows=21, *, minibatch=24, micro_batch=8, seed=0, config=CONFIG, prompt_buckets=(PROMPT,)):
    """One minibatch of ragged random rows; the old and reference log-probs are near the policy's own.

    A row keeps its advantage and its noise however the minibatch is cut, padded or sorted.
    """
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(1, config.vocab_size, rng.integers(2, PROMPT + 1)) for _ in range(num_rows)]
    actions = [rng.integers(1, config.vocab_size, rng.integers(1, ACTION + 1)) for _ in range(num_rows)]
    advantage_N = rng.normal(size=num_rows).astype(np.float32)
    advantage_N[::5] = 0.0
    noise_N = np.zeros((num_rows + 1, 2, ACTION), np.float32)
    order = np.random.default_rng(seed).permutation(num_rows)
    noise_N[order] = rng.normal(0, 0.3, (2, num_rows, ACTION)).swapaxes(0, 1)
    (micro_batches,) = batch.build_minibatches(
        prompts,
        actions,
        np.arange(num_rows) + 1.0,  # in the place of advantages: which row is where (0: padding)
        np.arange(num_rows) // 4,
        minibatch=minibatch,
        micro_batch=micro_batch,
        prompt_buckets=prompt_buckets,
        action_buckets=(ACTION,),
        rng=np.random.default_rng(seed),
    )
    return [finish_micro(micro, np.append(advantage_N, np.float32(0)), noise_N) for micro in micro_batches]


def finish_micro(micro, advantage_N, noise_N):
    row_B = micro.advantage_B.astype(int) - 1  # -1, the last of each column, is padding
    logprob_BA = np.asarray(logprobs(micro.tokens))
    old_BA, ref_BA = (logprob_BA + noise_N[row_B, column] for column in (0, 1))
    return micro.replace(advantage_B=advantage_N[row_B], old_logprob_BA=old_BA, ref_logprob_BA=ref_BA)


@jax.jit
def logprobs(tokens):
    return objective.token_logprobs(make_params(), tokens, config=CONFIG, temperature=1.0, chunk=ACTION)[0]


def put(mesh, minibatch):
    return [sharding.put_batch(mesh, micro) for micro in minibatch]


def joined(minibatch):
    """A minibatch with one bucket as one micro-batch."""
    return jax.tree.map(lambda *x: jnp.concatenate(x), *minibatch)


@functools.cache
def program(loss=LOSS, optimizer=OPTIMIZER, config=CONFIG, data=1, fsdp=1, tensor=1):
    mesh, tx = sharding.make_mesh(data=data, fsdp=fsdp, tensor=tensor), learner.make_optimizer(optimizer)
    return mesh, tx, learner.make_train_step(config, loss, tx, mesh)


@functools.cache
def first_state(**kwargs):
    mesh, tx, _ = program(**kwargs)
    return learner.create_state(make_params(), tx, mesh, CONFIG)


def update(minibatch, *, state=None, **kwargs):
    """(state, metrics as floats) after one update with `minibatch`, from `state` or else from the fixed weights."""
    mesh, _, train_step = program(**kwargs)
    state = state or jax.tree.map(jnp.copy, first_state(**kwargs))  # a copy: the step donates what it is given
    state, metrics = train_step(state, put(mesh, minibatch))
    return state, {name: float(value) for name, value in metrics.items()}


def assert_same_update(one, other, atol=1e-5):
    for a, b in zip(jax.tree.leaves(one[0]), jax.tree.leaves(other[0]), strict=True):
        np.testing.assert_allclose(a, b, atol=atol)
    assert one[1] == pytest.approx(other[1], rel=1e-4, abs=1e-5)


def params_moved(state):
    """Largest change of any parameter from the start."""
    return max(
        float(np.abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (state.params, make_params())), strict=True)
    )


# ---- the update does not depend on its layout -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('loss', 'micro_batches'),
    [
        (LOSS, (12, 6)),
        (dataclasses.replace(LOSS, aggregation='trajectory', count_zero_rows=False), (6,)),
        (GSPO, (6,)),
    ],
)
def test_microbatching_does_not_change_the_update(loss, micro_batches):
    whole = update(make_batch(micro_batch=24), loss=loss)
    assert params_moved(whole[0]) > 1e-3
    for micro_batch in micro_batches:
        assert_same_update(update(make_batch(micro_batch=micro_batch), loss=loss), whole)


def test_sharded_equals_single_device():
    single = update(make_batch())
    sharded = update(make_batch(), data=2, fsdp=4)
    assert_same_update(sharded, single)
    kernel = sharded[0].params['layers']['gate']['kernel']
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(2, 4, 24)}  # split, not copied


def test_rows_stay_on_their_device():
    """FSDP: parameters travel, activations do not. All that is gathered has the shape of one layer's matrix."""
    mesh, _, train_step = program(data=2, fsdp=4)
    state, (micro, *_) = first_state(data=2, fsdp=4), put(mesh, make_batch())
    sums = jax.eval_shape(train_step.start)
    text = train_step.accumulate.lower(state.params, sums, micro, np.ones(2, np.float32)).compile().as_text()
    gathered = {tuple(map(int, dims.split(','))) for dims in re.findall(r'= f32\[([\d,]+)\]\S* all-gather\(', text)}
    assert gathered == {(16, 16), (16, 8), (16, 24), (24, 16), (40, 16)}
    assert 'all-to-all(' not in text and 'collective-permute(' not in text
    assert 'all-gather(' not in train_step.apply.lower(state, sums).compile().as_text()


def test_padding_rows_change_nothing():
    none, few, many = (make_batch(minibatch=rows, micro_batch=size) for rows, size in ((21, 7), (24, 8), (24, 24)))
    assert [sum(len(micro.advantage_B) for micro in minibatch) for minibatch in (none, few, many)] == [21, 24, 24]
    empty = jax.tree.map(np.zeros_like, few[0]).replace(trajectory_tokens_B=few[0].trajectory_tokens_B)
    small = update(none)
    assert small[1]['batch/action_tokens'] > 0
    for padded in (few, many, [*few, empty]):
        assert_same_update(update(padded), small)


def test_prompt_padding_changes_nothing():
    short, long = make_batch(), make_batch(prompt_buckets=(2 * PROMPT,))
    np.testing.assert_allclose(logprobs(joined(short).tokens), logprobs(joined(long).tokens), atol=1e-5)
    assert_same_update(update(short), update(long))


def test_mixed_buckets_equal_one_common_bucket():
    mixed = make_batch(prompt_buckets=(4, 6, PROMPT))
    assert [micro.tokens.prompt_BP.shape for micro in mixed] == [(8, PROMPT), (8, 6), (8, 4)]
    assert_same_update(update(mixed), update(make_batch()))


def test_padding_may_hold_anything():
    rng = np.random.default_rng(1)

    def dirty(clean):
        tokens = clean.tokens
        mask_BP, mask_BA = tokens.prompt_mask_BP, tokens.action_mask_BA
        return clean.replace(
            tokens=tokens.replace(
                prompt_BP=np.where(mask_BP, tokens.prompt_BP, rng.integers(40, size=mask_BP.shape)).astype(np.int32),
                action_BA=np.where(mask_BA, tokens.action_BA, rng.integers(40, size=mask_BA.shape)).astype(np.int32),
            ),
            old_logprob_BA=np.where(mask_BA, clean.old_logprob_BA, -np.inf).astype(np.float32),
            ref_logprob_BA=np.where(mask_BA, clean.ref_logprob_BA, np.nan).astype(np.float32),
            advantage_B=np.where(mask_BA.any(-1), clean.advantage_B, 1e9).astype(np.float32),
        )

    assert_same_update(update([dirty(micro) for micro in make_batch()]), update(make_batch()))


# ---- what an update is ------------------------------------------------------------------------------------------------


def test_update_matches_the_formula():
    """The same minibatch written out: one softmax over everything, plain means, optax alone."""
    policy = joined(make_batch())
    tokens, mask_BA = policy.tokens, policy.tokens.action_mask_BA
    advantage_BA = jnp.broadcast_to(policy.advantage_B[:, None], mask_BA.shape)
    old_BA, ref_BA = policy.old_logprob_BA, policy.ref_logprob_BA

    def objective(params):
        logprob_BA, entropy_BA = plain_logprobs(params, tokens)
        ratio_BA = jnp.exp(logprob_BA - old_BA)
        policy_BA = -jnp.minimum(ratio_BA * advantage_BA, jnp.clip(ratio_BA, 0.8, 1.2) * advantage_BA)
        kl_BA = jnp.exp(ref_BA - logprob_BA) - (ref_BA - logprob_BA) - 1
        return jnp.mean((policy_BA + 0.1 * kl_BA - 0.01 * entropy_BA)[mask_BA])

    params = jax.tree.map(jnp.asarray, make_params())
    value, grads = jax.jit(jax.value_and_grad(objective))(params)
    tx = learner.make_optimizer(OPTIMIZER)
    expected = optax.apply_updates(params, tx.update(grads, tx.init(params), params)[0])
    state, metrics = update(make_batch())
    assert metrics['loss/total'] == pytest.approx(float(value), abs=1e-5)
    grad_norm = np.sqrt(sum(np.sum(np.square(grad)) for grad in jax.tree.leaves(grads)))
    assert metrics['update/grad_norm'] == pytest.approx(grad_norm, rel=1e-4)
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_gspo_step_has_one_ratio_per_reply():
    """The policy term of a train step is the sequence objective written out; its metrics are of the replies' ratios."""
    policy = joined(make_batch())
    mask_BA, advantage_B = policy.tokens.action_mask_BA, policy.advantage_B
    length_B = mask_BA.sum(-1)
    difference_BA = np.where(mask_BA, np.asarray(logprobs(policy.tokens)) - policy.old_logprob_BA, 0)
    ratio_B = np.exp(difference_BA.sum(-1) / length_B.clip(1))
    loss_B = -np.minimum(ratio_B * advantage_B, np.clip(ratio_B, 0.9, 1.1) * advantage_B)
    clipped_B = np.where(advantage_B > 0, ratio_B > 1.1, (advantage_B < 0) & (ratio_B < 0.9))
    real_B = length_B > 0
    state, metrics = update(make_batch(), loss=GSPO)
    assert metrics['loss/policy'] == pytest.approx(loss_B[real_B].mean(), rel=1e-4)
    assert metrics['loss/clip_fraction'] == pytest.approx(clipped_B[real_B].mean(), abs=1e-6) and clipped_B.any()
    assert metrics['loss/ratio_max'] == pytest.approx(ratio_B[real_B].max(), rel=1e-5)
    assert metrics['update/skipped'] == 0 and params_moved(state) > 1e-3
    token_level = update(make_batch(), loss=dataclasses.replace(GSPO, policy_loss='ppo'))[1]
    assert token_level['loss/policy'] != pytest.approx(metrics['loss/policy'], rel=1e-2)


def test_unknown_losses_are_refused():
    with pytest.raises(ValueError, match=r"policy_loss='gsp' is not one of \('ppo', 'gspo'\)"):
        objective.LossConfig(policy_loss='gsp')
    with pytest.raises(ValueError, match="policy_loss='gspo' averages over replies"):
        objective.LossConfig(policy_loss='gspo')
    with pytest.raises(ValueError, match="aggregation='row' is not one of"):
        objective.LossConfig(aggregation='row')


def test_zero_advantage_rows_in_the_denominator():
    minibatch = make_batch()
    policy = joined(minibatch)
    tokens_of = policy.tokens.action_mask_BA.sum(-1)
    share = float(tokens_of[policy.advantage_B != 0].sum() / tokens_of.sum())
    assert 0.5 < share < 0.95
    counted = update(minibatch)[1]
    left_out = update(minibatch, loss=dataclasses.replace(LOSS, count_zero_rows=False))[1]
    assert counted['loss/policy'] == pytest.approx(share * left_out['loss/policy'], rel=1e-4)
    assert counted['loss/kl'] == pytest.approx(left_out['loss/kl'], rel=1e-6) and counted['loss/kl'] > 0


def test_reference_is_not_needed_without_kl():
    minibatch = [micro.replace(ref_logprob_BA=None) for micro in make_batch()]
    with pytest.raises(ValueError, match='ref_logprob_BA is None; the policy loss needs it for kl_coef > 0'):
        update(minibatch)
    metrics = update(minibatch, loss=dataclasses.replace(LOSS, kl_coef=0.0))[1]
    assert metrics['loss/kl'] == 0 and metrics['update/skipped'] == 0
    with pytest.raises(ValueError, match='old_logprob_BA is None'):
        update([*make_batch()[1:], minibatch[0].replace(old_logprob_BA=None)])


def test_second_inner_epoch_has_other_ratios_and_clips():
    logprob_step = learner.make_logprob_step(CONFIG, LOSS, program()[0])
    minibatch = []
    for micro in make_batch():
        old_BA = logprob_step(make_params(), micro.tokens)
        minibatch.append(micro.replace(old_logprob_BA=old_BA, ref_logprob_BA=old_BA))
    state, first = update(minibatch)
    assert first['loss/ratio_max'] == pytest.approx(1.0, abs=1e-5)
    assert first['loss/clip_fraction'] == 0 and first['loss/old_kl'] < 1e-8 and first['loss/kl'] < 1e-8
    for _ in range(3):
        state, later = update(minibatch, state=state)
    assert later['loss/ratio_max'] > 1.2 and later['loss/clip_fraction'] > 0 and later['loss/old_kl'] > 1e-3
    assert later['loss/total'] < first['loss/total'] and int(state.step) == 4


def test_published_learning_rate_changes_float32_masters():
    """lr 1e-6 moves weights by less than one bfloat16 ulp: only float32 masters learn, whatever the compute dtype."""
    kwargs = {'config': dataclasses.replace(CONFIG, dtype='bfloat16'), 'optimizer': learner.OptimizerConfig()}
    state, _ = update(make_batch(), **kwargs)
    for new, old in zip(jax.tree.leaves(state.params), jax.tree.leaves(make_params()), strict=True):
        assert new.dtype == jnp.float32
        changed = np.asarray(new) != old
        assert changed.mean() > 0.9
        assert (np.asarray(new.astype(jnp.bfloat16)) == old.astype(jnp.bfloat16)).mean() > 0.9


def test_warmup_then_constant():
    tx = learner.make_optimizer(learner.OptimizerConfig(learning_rate=0.1, warmup_steps=2, weight_decay=0.0))
    params, state, steps = jnp.ones(1), tx.init(jnp.ones(1)), []
    for _ in range(4):
        updates, state = tx.update(jnp.ones(1), state, params)
        steps.append(-float(updates[0]))
    np.testing.assert_allclose(steps, [0.0, 0.05, 0.1, 0.1], atol=1e-6)


# ---- numbers that are not finite --------------------------------------------------------------------------------------


def test_nonfinite_gradient_skips_the_update():
    good, bad = make_batch(), make_batch()
    bad[1].advantage_B[0] = np.nan
    before, _ = update(good)
    kept = jax.tree.map(np.array, before)
    state, metrics = update(bad, state=before)
    assert metrics['update/skipped'] == 1 and int(state.step) == 2
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.opt_state), (kept.params, kept.opt_state))
    state, metrics = update(good, state=state)
    assert metrics['update/skipped'] == 0 and np.isfinite(metrics['loss/total'])
    assert not np.array_equal(state.params['embed']['embedding'], kept.params['embed']['embedding'])


def test_empty_rows_micro_batches_and_minibatches_are_finite():
    minibatch = make_batch(24)
    masks = [micro.tokens.action_mask_BA for micro in minibatch]
    masks[0][0] = False  # one row
    masks[1][:] = False  # one micro-batch
    for _ in range(2):
        state, metrics = update(minibatch)
        assert metrics['update/skipped'] == 0 and np.isfinite(list(metrics.values())).all()
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))
        masks[0][:] = masks[2][:] = False  # everything
    assert metrics['loss/total'] == 0 and metrics['update/grad_norm'] == 0


# ---- log-probabilities ------------------------------------------------------------------------------------------------


def plain_logprobs(params, tokens, temperature=1.0):
    """[rows, tokens, vocabulary] in one piece, token by token from the definition."""
    position_BL, mask_BLL = model.positions_and_mask(jnp.concatenate([tokens.prompt_mask_BP, tokens.action_mask_BA], 1))
    token_BL = jnp.concatenate([tokens.prompt_BP, tokens.action_BA], 1)
    hidden_BLD, _ = model.Qwen(CONFIG).apply({'params': params}, token_BL, position_BL, mask_BLL)
    logprob_BLV = jax.nn.log_softmax(model.project(params, hidden_BLD, CONFIG) / temperature)[:, :-1]
    picked_BL = jnp.take_along_axis(logprob_BLV, token_BL[:, 1:, None], -1)[..., 0]
    entropy_BL = -jnp.sum(jnp.exp(logprob_BLV) * logprob_BLV, -1)
    return picked_BL[:, -ACTION:], entropy_BL[:, -ACTION:]


def test_chunked_logprobs_equal_plain_with_gradient():
    temperature = 0.4
    tokens = joined(make_batch(7, minibatch=8)).tokens

    def mean_of(fn):
        def mean(params):
            logprob_BA, entropy_BA = fn(params, tokens)
            return jnp.mean(logprob_BA + 0.3 * entropy_BA), (logprob_BA, entropy_BA)

        return jax.jit(jax.value_and_grad(mean, has_aux=True))(make_params())

    expected = mean_of(functools.partial(plain_logprobs, temperature=temperature))
    for chunk in (2, 16):
        kwargs = {'config': CONFIG, 'temperature': temperature, 'chunk': chunk}
        found = mean_of(functools.partial(objective.token_logprobs, **kwargs))
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5, rtol=1e-5), found, expected)


def test_chunk_must_divide_the_action_bucket():
    with pytest.raises(ValueError, match='chunk=3 does not divide the 4'):
        objective.token_logprobs(make_params(), make_batch()[0].tokens, config=CONFIG, temperature=1.0, chunk=3)


def largest_vocabulary_buffer(loss, config, micro):
    """Elements of the largest array with a vocabulary axis in the optimised program of a gradient."""
    train_step = program(loss=loss, config=config)[2]
    sums = jax.eval_shape(train_step.start)
    text = train_step.accumulate.lower(sums.grads, sums, micro, np.ones(2, np.float32)).compile().as_text()
    shapes = [[int(size) for size in dims.split(',')] for dims in re.findall(r'\b(?:f32|bf16)\[([\d,]+)\]', text)]
    return max(int(np.prod(shape)) for shape in shapes if config.vocab_size in shape)


def test_no_buffer_of_rows_by_tokens_by_vocabulary():
    config = dataclasses.replace(CONFIG, vocab_size=1013)
    micro = make_batch(24, micro_batch=12)[0]
    block = 12 * ACTION * config.vocab_size
    assert largest_vocabulary_buffer(dataclasses.replace(LOSS, chunk=1), config, micro) < block / 2
    assert largest_vocabulary_buffer(dataclasses.replace(LOSS, chunk=ACTION), config, micro) >= block  # it would show


def test_one_compilation_per_bucket():
    mesh, tx, _ = program()
    train_step = learner.make_train_step(CONFIG, LOSS, tx, mesh)
    logprob_step = learner.make_logprob_step(CONFIG, LOSS, mesh)
    assert train_step.num_compiled() == 0
    state, reference = jax.tree.map(jnp.copy, first_state()), sharding.put_params(mesh, make_params())
    rng = np.random.default_rng(0)
    for seed in range(30):
        minibatch = []
        for micro in put(mesh, make_batch(rng.integers(5, 25), seed=seed, prompt_buckets=(6, PROMPT))):
            old_BA, ref_BA = logprob_step(state.params, micro.tokens), logprob_step(reference, micro.tokens)
            minibatch.append(micro.replace(old_logprob_BA=old_BA, ref_logprob_BA=ref_BA))
        state, _ = train_step(state, minibatch)
    assert logprob_step._cache_size() == train_step.accumulate._cache_size() == 2  # one per bucket
    assert train_step.num_compiled() == 2 + 2  # and one each to start and to apply


# ---- states -----------------------------------------------------------------------------------------------------------


def test_a_state_owns_its_buffers():
    """The train step donates the state; the parameters it was made from go on as the reference policy."""
    mesh, tx, train_step = program()
    params = sharding.put_params(mesh, make_params())
    state = learner.create_state(params, tx, mesh, CONFIG)
    train_step(state, put(mesh, make_batch()))
    assert all(x.is_deleted() for x in jax.tree.leaves(state.params))
    jax.tree.map(np.testing.assert_array_equal, params, make_params())


def test_random_states_are_born_sharded_and_equal():
    tx = learner.make_optimizer(OPTIMIZER)
    states = [
        learner.init_state(jax.random.key(0), CONFIG, tx, sharding.make_mesh(data=1, fsdp=fsdp)) for fsdp in (1, 8)
    ]
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), *states)
    moments = states[1].opt_state[1][0]
    for tree in (states[1].params, moments.mu, moments.nu):
        assert tree['embed']['embedding'].addressable_shards[0].data.shape == (40, 2)


# ---- one number for everything ----------------------------------------------------------------------------------------

GOLDEN = {
    'batch/action_tokens': 58.0,
    'loss/clip_fraction': 0.172414,
    'loss/entropy': 3.582849,
    'loss/kl': 0.0719272,
    'loss/old_kl': 0.0449019,
    'loss/oracle': 0.0,
    'loss/policy': 0.1530114,
    'loss/ratio_max': 2.053345,
    'loss/total': 0.1243756,
    'update/grad_norm': 0.4494132,
    'update/skipped': 0.0,
}


def test_golden_first_step():
    _, metrics = update(make_batch())
    assert metrics == pytest.approx(GOLDEN, rel=1e-4, abs=1e-6), (
        'The first update of fixed weights on a fixed batch gives other numbers than it did. If you meant to change the '
        'model, the loss or the batches, say so and put the new numbers into GOLDEN; if not, you have found a bug.'
    )


def test_every_device_computes_its_own_rows_of_a_scanned_model_only():
    """Parameters are gathered to the rows; were the hidden states cut as they are, partial sums of all rows would be added."""
    config = dataclasses.replace(CONFIG, num_layers=6)
    mesh, tx = sharding.make_mesh(), learner.make_optimizer(OPTIMIZER)
    state, rows = learner.init_state(jax.random.key(0), config, tx, mesh), 16
    tokens = sharding.put_batch(mesh, batch.TokenBatch(
        np.zeros((rows, PROMPT), np.int32), np.ones((rows, PROMPT), bool), np.zeros((rows, ACTION), np.int32),
        np.ones((rows, ACTION), bool)))
    text = learner.make_logprob_step(config, LOSS, mesh).lower(state.params, tokens).compile().as_text()
    assert f'f32[{rows // 8 * (PROMPT + ACTION)},{config.mlp_dim}]' in text and 'all-gather(' in text
    assert f'[{rows * (PROMPT + ACTION)},' not in text and 'all-reduce(' not in text
