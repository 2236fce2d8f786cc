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


def flatten(batches):
    """Every row of every minibatch, as (first real token, prompt length, action length, advantage); 0s for padding."""
    rows = []
    for policy in batches:
        tokens = policy.tokens
        for m in range(tokens.prompt_BP.shape[0]):
            for b in range(tokens.prompt_BP.shape[1]):
                prompt, action = tokens.prompt_BP[m, b], tokens.action_BA[m, b]
                real, acted = tokens.prompt_mask_BP[m, b], tokens.action_mask_BA[m, b]
                rows.append((prompt[-1], real.sum(), acted.sum(), policy.advantage_B[m, b]))
                assert len(set(prompt[real]) | set(action[acted])) <= 1  # prompt and action of the same row
    return rows


@hypothesis.settings(deadline=None, max_examples=30)
@hypothesis.given(st.integers(1, 30), st.integers(0, 2**31))
def test_every_row_exactly_once(num_rows, seed):
    prompts, actions = ragged_rows(num_rows)
    rows = flatten(build(num_rows, seed=seed))
    expected = [(n + 1, len(prompts[n]), len(actions[n]), n + 1.0) for n in range(num_rows)]
    assert sorted(row for row in rows if row[1]) == expected


def test_only_the_last_minibatch_has_padding_rows():
    batches = build(21)
    assert [policy.advantage_B.shape for policy in batches] == [(2, 4)] * 3
    real = [policy.tokens.action_mask_BA.any(-1).reshape(-1) for policy in batches]
    assert [x.tolist() for x in real] == [[True] * 8, [True] * 8, [True] * 5 + [False] * 3]
    padding = ~real[-1].reshape(2, 4)
    assert not batches[-1].tokens.prompt_mask_BP[padding].any() and not batches[-1].advantage_B[padding].any()


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
    assert flatten(build(20, seed=1)) == flatten(build(20, seed=1)) != flatten(build(20, seed=2))


def test_one_bucket_for_the_whole_update():
    lengths = {policy.tokens.prompt_BP.shape[-1] for policy in build(20)}
    assert lengths == {8}
    assert batch.choose_bucket([3, 4], (16, 4, 8), 'prompt') == 4
    assert batch.choose_bucket([3, 5], (16, 4, 8), 'prompt') == 8


def test_trajectory_tokens_are_of_the_whole_trajectory():
    _, actions = ragged_rows(9)
    lens = np.array([len(action) for action in actions])
    for policy in build(9):
        row = policy.tokens.prompt_BP[..., -1].astype(int) - 1
        expected = lens.reshape(3, 3).sum(axis=1)[row // 3]
        np.testing.assert_array_equal(policy.trajectory_tokens_B, np.where(row >= 0, expected, 1))


def test_pad_fraction_by_hand():
    prompts, actions = [np.ones(3, int)], [np.ones(1, int)]
    batches = batch.build_minibatches(
        prompts,
        actions,
        np.ones(1),
        np.zeros(1, int),
        minibatch=2,
        micro_batch=1,
        prompt_buckets=(6,),
        action_buckets=(2,),
        rng=np.random.default_rng(0),
    )
    assert batch.pad_fraction(batches) == 1 - 4 / 16


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
