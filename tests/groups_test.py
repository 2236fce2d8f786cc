"""Ids, returns, coverage and distances against their definitions, and the table's layout."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from table_examples import group, random_groups, three_trajectories, trajectory

from covsero_jax import groups

TABLE = {'discount': 0.95, 'goal_discount': 0.1, 'history_depth': 3}
observations = st.lists(st.sampled_from('abcdef'), min_size=2, max_size=12)


@settings(deadline=None, max_examples=200)
@given(observations)
def test_revisits_add_no_coverage(texts):
    path = trajectory(texts)
    distinct = len(set(texts))
    assert groups.first_visits(path).sum() == distinct - 1
    assert groups.first_visit_coverage(path) == Fraction(distinct - 1, len(texts) - 1)
    # A no-op or a whole cycle adds steps, never first visits.
    for tail in ([texts[-1]], texts):
        longer = groups.first_visits(trajectory([*texts, *tail]))
        assert longer.sum() == distinct - 1 and not longer[len(texts) - 1 :].any()


@settings(deadline=None, max_examples=200)
@given(observations, st.randoms(use_true_random=False))
def test_at_equal_length_coverage_orders_by_distinct_observations(texts, random):
    other = [random.choice('abcdef') for _ in texts]
    a, b = (groups.first_visit_coverage(trajectory(path)) for path in (texts, other))
    assert (a < b) == (len(set(texts)) < len(set(other))) and (a == b) == (len(set(texts)) == len(set(other)))


@pytest.mark.parametrize(('novel', 'length', 'value'), [(7, 20, 0.35), (3, 20, 0.15), (7, 15, 0.4667), (2, 15, 0.1333)])
def test_published_coverage_values(novel, length, value):
    path = ['o0', *(f'o{min(t, novel)}' for t in range(1, length + 1))]
    coverage = groups.first_visit_coverage(trajectory(path))
    assert coverage == Fraction(novel, length) and round(float(coverage), 4) == value


def test_coverage_is_a_rate_and_need_not_order_counts_at_unequal_length():
    short, long = trajectory(['a', 'b']), trajectory(['a', 'b', 'c', 'c', 'c'])
    assert groups.first_visits(short).sum() < groups.first_visits(long).sum()
    assert groups.first_visit_coverage(short) > groups.first_visit_coverage(long)


@settings(deadline=None, max_examples=200)
@given(observations)
def test_observation_changes_count_revisits_and_no_no_ops(texts):
    path = trajectory(texts)
    changed = groups.observation_changes(path)
    assert changed.dtype == bool and changed.tolist() == [a != b for a, b in itertools.pairwise(texts)]
    assert (groups.first_visits(path) <= changed).all()  # a first visit is a change, not the other way round
    again = groups.observation_changes(trajectory([*texts, texts[-1], texts[0]]))
    assert again.sum() == changed.sum() + (texts[-1] != texts[0])


def test_discounted_returns():
    rewards = [0.5, -1.0, 0.0, 10.0]
    expected = [sum(0.9 ** (k - t) * rewards[k] for k in range(t, 4)) for t in range(4)]
    np.testing.assert_allclose(groups.discounted_returns(rewards, 0.9), expected, rtol=1e-15)
    # Equal suffixes give equal bits, which the exact-zero gate builds on.
    assert (groups.discounted_returns([7.0, *rewards], 0.9)[1:] == groups.discounted_returns(rewards, 0.9)).all()


def same(ids):
    return np.equal.outer(ids, ids) & (np.asarray(ids) >= 0)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from('abc')), min_size=1, max_size=20))
def test_anchor_ids_are_dense_and_equal_exactly_where_group_and_observation_are(rows):
    ids = groups.anchor_ids(*zip(*rows, strict=True))
    assert ids.dtype == np.int32 and set(ids) == set(range(len(set(rows))))
    assert (same(ids) == [[a == b for b in rows] for a in rows]).all()


def test_history_depth_one_is_anchor():
    table = groups.build_step_table(random_groups(0), num_rows=128, **TABLE)
    np.testing.assert_array_equal(table.history_id_HN[0], table.anchor_id_N)


@pytest.mark.parametrize('seed', range(5))
def test_history_ids_compare_windows_of_observations(seed):
    batch = random_groups(seed)
    table = groups.build_step_table(batch, num_rows=128, **TABLE)
    for h, ids in enumerate(table.history_id_HN):
        windows = [
            (g, tuple(step.observation for step in path.steps[t - h : t + 1])) if t >= h else None
            for g, members in enumerate(batch)
            for path in members.trajectories
            for t in range(len(path.steps))
        ]
        expected = [[a == b and a is not None for b in windows] for a in windows]
        assert (same(ids[: len(windows)]) == expected).all() and (ids[len(windows) :] == -1).all()


def test_no_history_is_an_empty_column():
    table = groups.build_step_table(three_trajectories(), num_rows=16, **TABLE | {'history_depth': 0})
    assert table.history_id_HN.shape == (0, 16)


def test_distance_without_success_is_uniform():
    members = group(trajectory('abcd'), trajectory('aabe'))
    assert {groups.goal_distances(members)[node] for node in 'abcde'} == {1}
    assert len(set(groups.goal_returns(members, goal_discount=0.1, goal_reward=10.0, distance_offset=0))) == 1


def test_goal_distances_by_hand():
    (members,) = three_trajectories()
    expected = {None: 0, 'C': 1, 'B': 2, 'A': 3, 'D': 3, 'F1': 4, 'F2': 4}  # 'won' is the success node
    assert groups.goal_distances(members) == expected
    table = groups.build_step_table([members], num_rows=9, **TABLE)
    returns = [0.1, 1, 10, 0.1, 0.01, 0.1, 0.001, 0.01, 0.001]
    np.testing.assert_allclose(table.goal_return_N, returns, rtol=1e-6)
    paper = groups.build_step_table([members], num_rows=9, distance_offset=1, **TABLE)
    np.testing.assert_allclose(paper.goal_return_N, 0.1 * np.array(returns), rtol=1e-6)


def test_table_rows_stand_in_order_and_padding_is_not_compared():
    batch = random_groups(3)
    table = groups.build_step_table(batch, num_rows=128, **TABLE)
    rows = [
        (g, 4 * g + i, path, step)
        for g, members in enumerate(batch)
        for i, path in enumerate(members.trajectories)
        for step in path.steps
    ]
    n = len(rows)
    assert table.group_id_N[:n].tolist() == [g for g, _, _, _ in rows]
    assert table.trajectory_id_N[:n].tolist() == [i for _, i, _, _ in rows]
    np.testing.assert_array_equal(
        table.episode_return_N[:n], np.float32([path.episode_return for _, _, path, _ in rows])
    )
    np.testing.assert_array_equal(table.penalty_N[:n], np.float32([0.0 if s.parsed else 0.1 for *_, s in rows]))
    assert table.failed_N[:n].tolist() == [not path.success for _, _, path, _ in rows]
    for name in ('group_id_N', 'trajectory_id_N', 'anchor_id_N'):
        column = getattr(table, name)
        assert column.dtype == np.int32 and (column[:n] >= 0).all() and (column[n:] == -1).all()
    assert table.action_tokens_N[:n].tolist() == [len(step.action_tokens) for *_, step in rows]
    assert table.changed_N[:n].tolist() == [step.observation != step.next_observation for *_, step in rows]
    columns = ('episode_return_N', 'step_return_N', 'goal_return_N', 'penalty_N', 'coverage_N', 'change_rate_N')
    for name in (*columns, 'action_tokens_N'):
        column = getattr(table, name)
        assert column.dtype == np.float32 and column.shape == (128,) and (column[n:] == 0).all()


def test_penalty_may_also_hit_inadmissible_commands():
    members = [group(trajectory('abcd', invalid={0}, inadmissible={0, 2}))]
    parsed = groups.build_step_table(members, num_rows=3, **TABLE)
    admissible = groups.build_step_table(members, num_rows=3, penalise='admissible', invalid_penalty=0.5, **TABLE)
    assert parsed.penalty_N.tolist() == [np.float32(0.1), 0, 0] and admissible.penalty_N.tolist() == [0.5, 0, 0.5]


def test_equal_coverage_has_equal_rank_and_the_ranks_order_it():
    paths = ['abcb', 'abcbabc', 'abab', 'a' * 7]  # 2/3, 1/3 (2 of 6), 1/3 (1 of 3), 0
    table = groups.build_step_table([group(*map(trajectory, paths))], num_rows=32, **TABLE)
    rank = dict(zip(table.trajectory_id_N.tolist(), table.coverage_rank_N.tolist(), strict=True))
    assert [rank[i] for i in range(4)] == [2, 1, 1, 0]


def test_equal_shares_of_changes_have_equal_rank_over_all_groups():
    # 2/4 and 2/2, then 1/2 and 0/3
    batch = [group(trajectory('aabbc'), trajectory('abc')), group(trajectory('aab'), trajectory('aaaa'))]
    table = groups.build_step_table(batch, num_rows=16, **TABLE)
    assert table.change_rank_N[:11].tolist() == [1] * 4 + [2] * 2 + [1] * 2 + [0] * 3
    np.testing.assert_array_equal(table.change_rate_N[:11], np.float32([0.5] * 4 + [1] * 2 + [0.5] * 2 + [0] * 3))
    assert table.changed_N[:4].tolist() == [False, True, False, True]


@pytest.mark.parametrize('num_rows', [0, 4])
def test_an_empty_update_is_only_padding(num_rows):
    table = groups.build_step_table([], num_rows=num_rows, **TABLE)
    for name in ('group_id_N', 'trajectory_id_N', 'anchor_id_N'):
        assert getattr(table, name).dtype == np.int32 and getattr(table, name).tolist() == [-1] * num_rows
    assert table.history_id_HN.shape == (3, num_rows) and not table.failed_N.any()


def test_bad_batches_are_refused_by_name():
    for reward in ('nan', 'inf', '-inf'):
        broken = group(trajectory('ab'), trajectory('abc', rewards=[0.0, float(reward)]), task_id=41)
        with pytest.raises(ValueError, match=f'task 41, trajectory 1, step 1: the reward is {reward}'):
            groups.build_step_table([*three_trajectories(), broken], num_rows=16, **TABLE)
    with pytest.raises(ValueError, match='task 7, trajectory 0: no steps'):
        groups.build_step_table([group(trajectory('a'), task_id=7)], num_rows=8, **TABLE)
    with pytest.raises(ValueError, match='9 environment steps do not fit into a table of num_rows=8'):
        groups.build_step_table(three_trajectories(), num_rows=8, **TABLE)
    with pytest.raises(ValueError, match="penalise is 'both'"):
        groups.build_step_table([], num_rows=8, penalise='both', **TABLE)
