from __future__ import annotations

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from covsero_jax import batch


def ragged_rows(num_rows: int, seed: int = 0):
    """Row n carries the token n + 1 everywhere, so that a row can be recognised after shuffling and padding."""
    rng = np.random.default_rng(seed)
    prompts = [np.full(rng.integers(2, 9), row + 1, np.int32) for row in range(num_rows)]
    actions = [np.full(rng.integers(1, 5), row + 1, np.int32) for row in range(num_rows)]
    return prompts, actions


def build(num_rows: int, *, seed: int = 0, **overrides):
    prompts, actions = ragged_rows(num_rows)
    settings = {
        'minibatch': 8,
        'micro_batch': 4,
        'prompt_buckets': (4, 8, 16),
        'action_buckets': (4, 8),
        'rng': np.random.default_rng(seed),
    } | overrides
    return batch.build_minibatches(prompts, actions, np.arange(num_rows) + 1.0, np.arange(num_rows) // 3, **settings)


def flatten(minibatch):
    """Every row of a minibatch, as (first real token, prompt length, action length, advantage); 0s for padding."""
    rows = []
    for micro in minibatch:
        tokens = micro.tokens
        for b in range(len(tokens.prompt_BP)):
            prompt, action = tokens.prompt_BP[b], tokens.action_BA[b]
            real, acted = tokens.prompt_mask_BP[b], tokens.action_mask_BA[b]
            rows.append((prompt[-1], real.sum(), acted.sum(), micro.advantage_B[b]))
            assert len(set(prompt[real]) | set(action[acted])) <= 1  # prompt and action of the same row
    return rows


@hypothesis.settings(deadline=None, max_examples=30)
@hypothesis.given(st.integers(1, 30), st.integers(0, 2**31))
def test_every_row_exactly_once(num_rows, seed):
    prompts, actions = ragged_rows(num_rows)
    rows = [row for minibatch in build(num_rows, seed=seed) for row in flatten(minibatch)]
    expected = [(n + 1, len(prompts[n]), len(actions[n]), n + 1.0) for n in range(num_rows)]
    assert sorted(row for row in rows if row[1]) == expected


@hypothesis.settings(deadline=None, max_examples=30)
@hypothesis.given(st.integers(1, 30), st.integers(0, 2**31))
def test_optimizer_steps_are_drawn_without_regard_to_length(num_rows, seed):
    """The k-th minibatch holds the k-th eight rows of the permutation, whatever stands in them."""
    order = np.random.default_rng(seed).permutation(num_rows)
    for k, minibatch in enumerate(build(num_rows, seed=seed)):
        numbers = [row[0] - 1 for row in flatten(minibatch) if row[1]]
        assert sorted(numbers) == sorted(order[8 * k : 8 * (k + 1)])
        assert numbers == sorted(numbers, key=lambda n: -len(ragged_rows(num_rows)[0][n]))  # longest first


def test_each_micro_batch_has_the_smallest_buckets_that_hold_it():
    settings = {'prompt_buckets': (16, 3, 4, 6, 8), 'action_buckets': (8, 2, 4), 'micro_batch': 2}
    shapes = set()
    for micro in sum(build(40, **settings), ()):
        for mask, name in ((micro.tokens.prompt_mask_BP, 'prompt'), (micro.tokens.action_mask_BA, 'action')):
            assert mask.shape[1] == min(b for b in settings[f'{name}_buckets'] if b >= mask.sum(-1).max())
        shapes.add((micro.tokens.prompt_BP.shape, micro.tokens.action_BA.shape))
    assert len({prompt for prompt, _ in shapes}) == 4 and len({action for _, action in shapes}) == 2


def test_only_the_last_micro_batch_has_padding_rows():
    minibatches = build(21)
    real = [[micro.tokens.action_mask_BA.any(-1).tolist() for micro in minibatch] for minibatch in minibatches]
    assert real == [[[True] * 4] * 2, [[True] * 4] * 2, [[True] * 4, [True] + [False] * 3]]
    last = minibatches[-1][-1]
    assert not last.tokens.prompt_mask_BP[1:].any() and not last.advantage_B[1:].any()


def test_prompts_end_and_actions_begin_at_the_window():
    tokens = batch.build_tokens(
        [np.array([5, 6]), np.array([7])], [np.array([8]), np.array([9, 2])], num_rows=3, prompt_len=4, action_len=3
    )
    np.testing.assert_array_equal(tokens.prompt_BP, [[0, 0, 5, 6], [0, 0, 0, 7], [0, 0, 0, 0]])
    np.testing.assert_array_equal(tokens.prompt_mask_BP.astype(int), [[0, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]])
    np.testing.assert_array_equal(tokens.action_BA, [[8, 0, 0], [9, 2, 0], [0, 0, 0]])
    np.testing.assert_array_equal(tokens.action_mask_BA.astype(int), [[1, 0, 0], [1, 1, 0], [0, 0, 0]])


def test_padding_is_not_inferred_from_the_token():
    """A sampled eos (here token 0, also what padding holds) is a real token."""
    tokens = batch.build_tokens([np.array([0, 3])], [np.array([4, 0])], num_rows=1, prompt_len=3, action_len=3)
    assert tokens.prompt_mask_BP.sum() == 2 and tokens.action_mask_BA.sum() == 2


def test_order_is_a_function_of_the_generator():
    one, again, other = ([flatten(minibatch) for minibatch in build(20, seed=seed)] for seed in (1, 1, 2))
    assert one == again != other


def test_a_bucket_holds_the_longest():
    assert batch.choose_bucket([3, 4], (16, 4, 8), 'prompt') == 4
    assert batch.choose_bucket([3, 5], (16, 4, 8), 'prompt') == 8


def test_trajectory_tokens_are_of_the_whole_trajectory():
    _, actions = ragged_rows(9)
    lens = np.array([len(action) for action in actions])
    for micro in sum(build(9), ()):
        row = micro.tokens.prompt_BP[:, -1].astype(int) - 1
        expected = lens.reshape(3, 3).sum(axis=1)[row // 3]
        np.testing.assert_array_equal(micro.trajectory_tokens_B, np.where(row >= 0, expected, 1))


def test_pad_fraction_by_hand():
    prompts, actions = [np.ones(3, int), np.ones(6, int), np.ones(1, int)], [np.ones(1, int)] * 3
    (minibatch,) = batch.build_minibatches(
        prompts,
        actions,
        np.ones(3),
        np.zeros(3, int),
        minibatch=4,
        micro_batch=2,
        prompt_buckets=(6, 2),
        action_buckets=(2,),
        rng=np.random.default_rng(0),
    )
    assert [micro.tokens.prompt_BP.shape for micro in minibatch] == [(2, 6), (2, 2)]
    assert batch.pad_fraction(minibatch) == 1 - (9 + 1 + 3) / (12 + 4 + 8)


@pytest.mark.parametrize(
    ('overrides', 'message'),
    [
        ({'prompt_buckets': (2, 4)}, r'row \d+ has [5-8] prompt tokens, more than the largest prompt bucket \(4\)'),
        ({'action_buckets': (2,)}, r'row \d+ has [34] action tokens, more than the largest action bucket \(2\)'),
        ({'micro_batch': 3}, 'minibatch=8 is not a multiple of micro_batch=3'),
    ],
)
def test_bad_sizes_are_named(overrides, message):
    with pytest.raises(ValueError, match=message):
        build(20, **overrides)


def test_an_empty_row_is_named():
    settings = {'minibatch': 2, 'micro_batch': 1, 'prompt_buckets': (4,), 'action_buckets': (4,)}
    with pytest.raises(ValueError, match='row 1 has no action tokens'):
        batch.build_minibatches(
            [np.ones(2, int)] * 2, [np.ones(1, int), np.ones(0, int)], np.ones(2), np.zeros(2), rng=None, **settings
        )


def test_no_rows_no_minibatches():
    assert build(0) == [] and batch.pad_fraction([]) == 0.0


def test_sampler_gap_compares_each_token_with_its_own():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 8, 21)
    prompts = [np.ones(rng.integers(1, 30), np.int32) for _ in lengths]
    actions = [np.ones(n, np.int32) for n in lengths]
    sampled = [-rng.random(n).astype(np.float32) for n in lengths]
    arguments = dict(minibatch=8, micro_batch=4, prompt_buckets=(8, 16, 32), action_buckets=(8,))
    built = batch.build_minibatches(prompts, actions, np.zeros(21), np.arange(21), **arguments,
                                    rng=np.random.default_rng(1), sampler_logprobs=sampled)
    host = [micro for minibatch in built for micro in minibatch]
    same = [micro.replace(old_logprob_BA=micro.sampler_logprob_BA) for micro in host]
    assert batch.sampler_gap(host, [micro.old_logprob_BA for micro in same]) == (0.0, 0.0)
    off = [micro.replace(old_logprob_BA=micro.sampler_logprob_BA + np.float32(0.5)) for micro in host]
    np.testing.assert_allclose(batch.sampler_gap(host, [micro.old_logprob_BA for micro in off]), (0.5, 0.5), atol=1e-6)
    assert sum(int(micro.tokens.action_mask_BA.sum()) for micro in host) == lengths.sum()
