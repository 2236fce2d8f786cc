"""Sampling: equal to the full forward pass, independent of the batch, no more work than needed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from covsero_jax import model, sampler

CONFIG = model.QwenConfig(
    vocab_size=40, embed_dim=16, mlp_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, tie_embeddings=False
)
PARAMS = jax.tree.map(lambda x: 8.0 * x if x.ndim > 2 else x, model.init_params(CONFIG, jax.random.key(0)))
PARAMS['lm_head']['kernel'] *= 20.0  # a peaked distribution: logits of a few units


def make_prompts(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 40, length).astype(np.int32) for length in lengths]


def make_ids(rows, group=0):
    return np.stack([np.full(rows, group), np.arange(rows), np.full(rows, 3)], axis=1).astype(np.uint32)


def make_policy(seed=1, **changes):
    options = {
        'buckets': (8, 16),
        'row_buckets': (4, 8),
        'max_new_tokens': 6,
        'temperature': 1.0,
        'eos_ids': (5, 6, 7, 8),
    }
    return sampler.make_policy(PARAMS, config=CONFIG, key=jax.random.key(seed), **(options | changes))


def assert_same(left, right):
    for a, b in zip(left, right, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5, rtol=0)
        assert a.truncated == b.truncated


def forward_logprobs(prompt, tokens, temperature):
    """What the learner computes: one full forward pass over prompt and reply, no padding, no cache."""
    row = np.concatenate([prompt, tokens])[None]
    position_BL, mask_BLL = model.positions_and_mask(jnp.ones(row.shape, bool))
    hidden, _ = model.Qwen(CONFIG).apply({'params': PARAMS}, row, position_BL, mask_BLL)
    logprobs = jax.nn.log_softmax(model.project(PARAMS, hidden, CONFIG) / temperature)[0]
    return np.asarray(logprobs)[np.arange(len(prompt) - 1, row.size - 1)]


@pytest.mark.parametrize('temperature', [0.4, 1.0])
def test_logprobs_match_forward(temperature):
    prompts = make_prompts([1, 3, 8, 12, 16])
    actions = make_policy(temperature=temperature)(prompts, make_ids(5))
    assert len({len(action.tokens) for action in actions}) > 1  # mixed reply lengths too
    for prompt, action in zip(prompts, actions, strict=True):
        expected = forward_logprobs(prompt, action.tokens, temperature)[np.arange(len(action.tokens)), action.tokens]
        assert np.abs(action.logprobs - expected).max() <= 1e-4


def test_row_does_not_depend_on_its_batch():
    prompts, ids = make_prompts([2, 5, 8, 11, 14, 3, 7, 16, 9, 1]), make_ids(10)
    together = make_policy()(prompts, ids)  # two batches: 8 rows and 2
    alone = [make_policy()([prompt], ids[row : row + 1])[0] for row, prompt in enumerate(prompts)]
    assert_same(together, alone)
    order = np.random.default_rng(0).permutation(10)
    shuffled = make_policy()([prompts[i] for i in order], ids[order])
    assert_same([together[i] for i in order], shuffled)


def test_row_does_not_depend_on_its_bucket():
    prompts, ids = make_prompts([2, 5, 8]), make_ids(3)
    assert_same(make_policy()(prompts, ids), make_policy(buckets=(13,), row_buckets=(5,))(prompts, ids))


def test_key_and_row_ids_decide_the_sample():
    prompts = make_prompts([4] * 8)
    first = make_policy(seed=1)(prompts, make_ids(8))
    assert_same(first, make_policy(seed=1)(prompts, make_ids(8)))

    def replies(actions):
        return [action.tokens.tolist() for action in actions]

    assert replies(first) != replies(make_policy(seed=2)(prompts, make_ids(8)))
    assert replies(first) != replies(make_policy(seed=1)(prompts, make_ids(8, group=1)))
    same_prompt = make_policy(seed=1)([prompts[0]] * 8, make_ids(8))
    assert len({tuple(reply) for reply in replies(same_prompt)}) > 4  # members of a group differ


def test_tokens_of_a_reply_use_different_keys():
    keys = sampler.row_keys(jax.random.key(0), make_ids(64))
    uniform = jax.tree.map(jnp.zeros_like, PARAMS)  # every token equally likely at every step
    out = sampler.generate(
        uniform, np.ones((64, 8), np.int32), np.ones((64, 8), bool), np.ones(64, bool), keys,
        config=CONFIG, max_new_tokens=6, temperature=1.0, eos_ids=(),
    )  # fmt: skip
    tokens = np.asarray(out.tokens_BA)
    assert np.abs((tokens[:, 1:] == tokens[:, :-1]).mean() - 1 / 40) < 0.03  # 320 pairs: sd 0.009
    np.testing.assert_allclose(out.logprobs_BA, -np.log(40), rtol=1e-5)


@pytest.mark.parametrize('temperature', [0.4, 1.0])
def test_samples_follow_the_softmax(temperature):
    rows = 4096
    prompt = make_prompts([4])[0]
    keys = sampler.row_keys(jax.random.key(2), make_ids(rows))
    out = sampler.generate(
        PARAMS, np.tile(prompt, (rows, 1)), np.ones((rows, 4), bool), np.ones(rows, bool), keys,
        config=CONFIG, max_new_tokens=1, temperature=temperature, eos_ids=(5,),
    )  # fmt: skip
    probability = np.exp(forward_logprobs(prompt, np.array([0]), temperature)[0])
    count = np.bincount(np.asarray(out.tokens_BA)[:, 0], minlength=40)
    sd = np.sqrt(rows * probability * (1 - probability))
    assert 0.02 < probability.max() < 0.98
    assert (np.abs(count - rows * probability) <= 5 * sd + 1).all()


def test_temperature_zero_is_greedy():
    prompts = make_prompts([3, 9, 16])
    greedy = make_policy(temperature=0.0)(prompts, make_ids(3))
    assert_same(greedy, make_policy(temperature=0.0, seed=9)(prompts, make_ids(3, group=4)))
    for prompt, action in zip(prompts, greedy, strict=True):
        logprobs = forward_logprobs(prompt, action.tokens, 1.0)
        np.testing.assert_array_equal(action.tokens, logprobs.argmax(axis=1))
        np.testing.assert_allclose(action.logprobs, logprobs.max(axis=1), atol=1e-4, rtol=0)


def test_reply_ends_with_eos_unless_truncated():
    actions = make_policy()(make_prompts([4] * 8), make_ids(8))
    assert {action.truncated for action in actions} == {True, False}
    for action in actions:
        ended = np.isin(action.tokens, (5, 6, 7, 8))
        assert not ended[:-1].any()
        assert ended[-1] == (not action.truncated)
        assert len(action.tokens) == 6 or not action.truncated
        assert action.tokens.dtype == np.int32 and action.logprobs.dtype == np.float32


def test_eos_equal_to_pad_is_kept():
    """The buffers are filled with 0; an eos with id 0 is still a sampled token with its log-probability."""
    uniform = jax.tree.map(jnp.zeros_like, PARAMS)
    policy = sampler.make_policy(
        uniform, config=CONFIG, key=jax.random.key(0), buckets=(8,), row_buckets=(8,), max_new_tokens=6,
        temperature=1.0, eos_ids=tuple(range(0, 40, 2)),
    )  # fmt: skip
    actions = policy([np.zeros(4, np.int32)] * 64, make_ids(64))  # prompts full of "padding" ids are real, too
    ended = [action for action in actions if action.tokens[-1] == 0]
    assert ended
    for action in ended:
        assert not action.truncated
        np.testing.assert_allclose(action.logprobs, -np.log(40), rtol=1e-5)


@pytest.mark.parametrize('case', ['replies of one token', 'no active row', 'no eos'])
def test_stops_when_all_rows_are_done(case, monkeypatch):
    eos_ids = () if case == 'no eos' else tuple(range(40))
    active = np.zeros(3, bool) if case == 'no active row' else np.array([True, False, True])
    draws = []

    def counted_project(params, hidden, config, project=model.project):
        jax.debug.callback(lambda: draws.append(1))
        return project(params, hidden, config)

    monkeypatch.setattr(model, 'project', counted_project)
    out = sampler.generate.__wrapped__(
        PARAMS, jnp.ones((3, 8), jnp.int32), jnp.ones((3, 8), bool), jnp.asarray(active),
        sampler.row_keys(jax.random.key(0), make_ids(3)),
        config=CONFIG, max_new_tokens=7, temperature=1.0, eos_ids=eos_ids,
    )  # fmt: skip
    jax.effects_barrier()
    length = {'replies of one token': 1, 'no active row': 0, 'no eos': 7}[case]
    np.testing.assert_array_equal(np.asarray(out.mask_BA).sum(axis=1), length * active)
    assert len(draws) == max(length, 1)  # one projection per token; the first belongs to the prefill


def test_inactive_rows_change_nothing():
    prompt = np.tile(make_prompts([8])[0], (4, 1))
    keys = sampler.row_keys(jax.random.key(0), make_ids(4))
    options = {'config': CONFIG, 'max_new_tokens': 6, 'temperature': 1.0, 'eos_ids': (5, 6, 7, 8)}
    mask = np.ones((4, 8), bool)
    every = sampler.generate(PARAMS, prompt, mask, np.ones(4, bool), keys, **options)
    active = np.array([True, False, True, False])
    some = sampler.generate(PARAMS, prompt, mask & active[:, None], active, keys, **options)
    for field in ('tokens_BA', 'logprobs_BA', 'mask_BA'):
        np.testing.assert_array_equal(getattr(every, field)[active], getattr(some, field)[active])
        assert not getattr(some, field)[~active].any()


def test_compilations_are_bounded_by_the_buckets():
    policy = make_policy(max_new_tokens=3)
    rng = np.random.default_rng(0)
    before = sampler.generate._cache_size()
    for rows in (1, 2, 4, 5, 8, 9, 17, 3):
        policy(make_prompts(rng.integers(1, 17, rows)), make_ids(rows))
    assert sampler.generate._cache_size() - before <= 2 * 2
    before = sampler.generate._cache_size()
    make_policy(max_new_tokens=3, seed=5)(make_prompts([16] * 7), make_ids(7))  # the next update's policy
    assert sampler.generate._cache_size() == before


def test_no_prompts_no_actions():
    assert make_policy()([], np.zeros((0, 3), np.uint32)) == []


@pytest.mark.parametrize(
    ('lengths', 'rows', 'message'),
    [([3, 17], 2, 'of 3 to 17 tokens.*1 to 16'), ([3, 0], 2, 'of 0 to 3'), ([3, 4], 3, 'row_ids of shape')],
)
def test_bad_input_is_named(lengths, rows, message):
    with pytest.raises(ValueError, match=message):
        make_policy()(make_prompts(lengths), make_ids(rows))
