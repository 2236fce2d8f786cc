"""Sampling: equal to the full forward pass, independent of the batch, no more work than needed."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from covsero_jax import model, sampler

CONFIG = model.QwenConfig(
    vocab_size=40, embed_dim=16, mlp_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, tie_embeddings=False
)
SHAPES = jax.eval_shape(lambda key: model.init_params(CONFIG, key), jax.random.key(0))
RNG = np.random.default_rng(0)
PARAMS = jax.tree.map(lambda x: RNG.normal(0.0, 0.3, x.shape).astype(np.float32), SHAPES)
PARAMS['final_norm']['scale'] += 1.0
UNIFORM = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), SHAPES)  # every token equally likely at every step
EOS_IDS = (0, 5, 6, 7)  # 0 is also what the buffers are padded with
OPTIONS = {'config': CONFIG, 'max_new_tokens': 6, 'temperature': 1.0, 'eos_ids': EOS_IDS}


def make_prompts(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 40, length).astype(np.int32) for length in lengths]


def make_ids(rows, group=0):
    return np.stack([np.full(rows, group), np.arange(rows), np.full(rows, 3)], axis=1).astype(np.uint32)


def make_policy(params=PARAMS, seed=1, **changes):
    options = OPTIONS | {'buckets': (8, 16), 'row_buckets': (4, 8)} | changes
    return sampler.make_policy(params, key=jax.random.key(seed), **options)


def assert_same(left, right):
    for a, b in zip(left, right, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5, rtol=0)
        assert a.truncated == b.truncated


@jax.jit
def full_logits(row):
    position_BL, mask_BLL = model.positions_and_mask(jnp.ones((1, 32), bool))
    hidden, _ = model.Qwen(CONFIG).apply({'params': PARAMS}, row[None], position_BL, mask_BLL)
    return model.project(PARAMS, hidden, CONFIG)[0]


def forward_logprobs(prompt, tokens, temperature):
    """[a, V] by one forward pass over prompt and reply without a cache; what follows them is never seen."""
    row = np.concatenate([prompt, tokens])
    logits = np.asarray(full_logits(np.pad(row, (0, 32 - row.size))), np.float64) / temperature
    logits = logits[len(prompt) - 1 : row.size - 1]
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


@pytest.mark.parametrize('temperature', [0.4, 1.0])
def test_logprobs_match_forward(temperature):
    prompts = make_prompts([16, 1, 3, 8, 12, 16, 5, 9] * 4)
    actions = make_policy(temperature=temperature, row_buckets=(8,))(prompts, make_ids(32))
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
    actions = make_policy(UNIFORM)(make_prompts([4] * 128), make_ids(128))
    pairs = np.concatenate([np.stack([action.tokens[1:], action.tokens[:-1]], axis=1) for action in actions])
    assert len(pairs) > 300
    assert (pairs[:, 0] == pairs[:, 1]).mean() < 0.06  # 1/40 +- 0.009


def test_samples_follow_the_softmax():
    rows, prompt = 4096, make_prompts([4])[0]
    out = sampler.generate(
        PARAMS, np.tile(prompt, (rows, 1)), np.ones((rows, 4), bool), np.ones(rows, bool),
        sampler.row_keys(jax.random.key(2), make_ids(rows)), **OPTIONS | {'temperature': 0.4, 'max_new_tokens': 1},
    )  # fmt: skip
    probability = np.exp(forward_logprobs(prompt, np.array([1]), 0.4)[0])
    count = np.bincount(np.asarray(out.tokens_BA)[:, 0], minlength=40)
    sd = np.sqrt(rows * probability * (1 - probability))
    assert 0.1 < probability.max() < 0.9
    assert (np.abs(count - rows * probability) <= 5 * sd + 1).all()


def test_bands_move_probability_by_the_rule():
    """p = .6 .25 .1 .045 .005 with head .5, floor .01: .25, .1 and .045 share another 40 % of everything."""
    p = np.array([0.6, 0.25, 0.1, 0.045, 0.005], np.float32)
    q = np.exp(sampler.band_logprobs(np.log(p)[None], sampler.Bands(mix=0.4, head=0.5, floor=0.01)))[0]
    np.testing.assert_allclose(q, 0.6 * p + 0.4 * np.array([0, 0.25, 0.1, 0.045, 0]) / 0.395, rtol=1e-5)
    assert q.sum() == pytest.approx(1, abs=1e-6)
    sure = np.log(np.array([[0.995, 0.002, 0.001, 0.001, 0.001]], np.float32))
    np.testing.assert_array_equal(sampler.band_logprobs(sure, sampler.Bands(mix=0.4)), sure)  # nothing to favour


def test_band_samples_follow_q_and_report_p():
    rows, prompt = 4096, make_prompts([4])[0]
    bands = sampler.Bands(mix=0.5, head=0.2, floor=0.01)
    out = sampler.generate(
        PARAMS, np.tile(prompt, (rows, 1)), np.ones((rows, 4), bool), np.ones(rows, bool),
        sampler.row_keys(jax.random.key(2), make_ids(rows)),
        **OPTIONS | {'temperature': 0.4, 'max_new_tokens': 1}, bands=bands,
    )  # fmt: skip
    logprob = forward_logprobs(prompt, np.array([1]), 0.4)
    q = np.exp(np.asarray(sampler.band_logprobs(logprob.astype(np.float32), bands)))[0]
    token_B = np.asarray(out.tokens_BA)[:, 0]
    count = np.bincount(token_B, minlength=40)
    assert (np.abs(count - rows * q) <= 5 * np.sqrt(rows * q * (1 - q)) + 1).all()
    assert np.abs(count - rows * np.exp(logprob[0])).max() > 200  # and not p
    np.testing.assert_allclose(out.logprobs_BA[:, 0], logprob[0][token_B], atol=1e-4)


@pytest.mark.parametrize('options', [{'mix': 0.0}, {'mix': 1.0}, {'mix': 0.5, 'head': 0.01}, {'mix': 0.5, 'floor': -0.1}])
def test_bands_refuse_impossible_numbers(options):
    with pytest.raises(ValueError, match='needs 0 < mix < 1'):
        sampler.Bands(**options)


def test_temperature_zero_is_greedy():
    prompts = make_prompts([3, 9, 16])
    greedy = make_policy(temperature=0.0)(prompts, make_ids(3))
    assert_same(greedy, make_policy(temperature=0.0, seed=9)(prompts, make_ids(3, group=4)))
    for prompt, action in zip(prompts, greedy, strict=True):
        logprobs = forward_logprobs(prompt, action.tokens, 1.0)
        np.testing.assert_array_equal(action.tokens, logprobs.argmax(axis=1))
        np.testing.assert_allclose(action.logprobs, logprobs.max(axis=1), atol=1e-4, rtol=0)


def test_reply_ends_with_eos_unless_truncated():
    actions = make_policy()(make_prompts([4] * 32), make_ids(32))
    assert {action.truncated for action in actions} == {True, False}
    for action in actions:
        ended = np.isin(action.tokens, EOS_IDS)
        assert not ended[:-1].any()
        assert ended[-1] == (not action.truncated)
        assert len(action.tokens) == 6 or not action.truncated
        assert action.tokens.dtype == np.int32 and action.logprobs.dtype == np.float32


def test_eos_equal_to_pad_is_kept():
    """The buffers are filled with 0; an eos with id 0 is still a sampled token with its log-probability."""
    actions = make_policy(UNIFORM)([np.zeros(4, np.int32)] * 128, make_ids(128))  # ids 0 in prompts are real, too
    ended = [action for action in actions if action.tokens[-1] == 0]
    assert ended
    for action in ended:
        assert not action.truncated
        np.testing.assert_allclose(action.logprobs, -np.log(40), rtol=1e-5)


def test_stops_when_all_rows_are_done(monkeypatch):
    draws = []

    def counted_project(params, hidden, config, project=model.project):
        jax.debug.callback(lambda: draws.append(1))
        return project(params, hidden, config)

    monkeypatch.setattr(model, 'project', counted_project)
    options = OPTIONS | {'temperature': 0.0, 'eos_ids': (0,)}
    generate = jax.jit(functools.partial(sampler.generate.__wrapped__, **options))  # a fresh trace, with the counter
    keys = sampler.row_keys(jax.random.key(0), make_ids(4))

    def run(params, active):
        draws.clear()
        out = generate(params, np.ones((4, 8), np.int32), np.ones((4, 8), bool), np.array(active), keys)
        jax.effects_barrier()
        return len(draws), np.asarray(out.mask_BA).sum(axis=1).tolist()

    # one draw belongs to the prefill; UNIFORM's likeliest token is the first, an eos
    assert run(UNIFORM, [True, False, True, True]) == (1, [1, 0, 1, 1])
    assert run(PARAMS, [False] * 4) == (1, [0, 0, 0, 0])
    assert run(PARAMS, [False, True, False, False]) == (6, [0, 6, 0, 0])


def test_inactive_rows_change_nothing():
    prompt = np.tile(make_prompts([8])[0], (4, 1))
    keys = sampler.row_keys(jax.random.key(0), make_ids(4))
    mask = np.ones((4, 8), bool)
    every = sampler.generate(PARAMS, prompt, mask, np.ones(4, bool), keys, **OPTIONS)
    active = np.array([True, False, True, False])
    some = sampler.generate(PARAMS, prompt, mask & active[:, None], active, keys, **OPTIONS)
    for field in ('tokens_BA', 'logprobs_BA', 'mask_BA'):
        np.testing.assert_array_equal(getattr(every, field)[active], getattr(some, field)[active])
        assert not getattr(some, field)[~active].any()


def test_compilations_are_bounded_by_the_buckets():
    policy = make_policy()
    rng = np.random.default_rng(0)
    before = sampler.generate._cache_size()
    for rows in (1, 2, 4, 5, 8, 9, 17, 3):
        policy(make_prompts(rng.integers(1, 17, rows)), make_ids(rows))
    assert sampler.generate._cache_size() - before <= 2 * 2
    before = sampler.generate._cache_size()
    make_policy(seed=5)(make_prompts([16] * 7), make_ids(7))  # the next update's policy
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
