"""Metrics files survive crashes and resumes; the numbers in them are those of the groups."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from covsero_jax import metrics
from covsero_jax.trajectory import Group, Step, Trajectory
from experiments import report


def step(observation: str, following: str, *, reward=0.0, parsed=True, admissible=True) -> Step:
    return Step(observation, following, np.arange(5, dtype=np.int32), np.arange(3, dtype=np.int32), np.zeros(3, np.float32),
                'look', parsed, admissible, False, ('look',), reward)


def group(task: int, *episodes: tuple[str, bool]) -> Group:
    """Episodes as strings of one-letter observations."""
    return Group(task, tuple(
        Trajectory(task, tuple(step(a, b) for a, b in zip(seen, seen[1:], strict=False)), success,
                   'success' if success else 'max_steps')
        for seen, success in episodes))


def test_rollout_metrics_count_groups_and_coverage():
    groups = [group(0, ('abab', False), ('abcd', False)), group(1, ('abc', True), ('aa', False))]
    out = metrics.rollout_metrics(groups, ['look', 'place'])
    assert out['rollout/success_rate'] == 0.25 and out['group/all_failed'] == 1 and out['group/all_failed_share'] == 0.5
    assert out['group/all_failed_share/look'] == 1.0 and out['group/all_failed_share/place'] == 0.0
    assert out['coverage/failed'] == pytest.approx((1 / 3 + 3 / 3 + 0) / 3) and out['coverage/successful'] == 1.0
    assert out['rollout/action_tokens'] == 3 and out['rollout/prompt_tokens'] == 5


def test_failures_by_type_add_up_over_any_updates():
    """Every type is counted in every update, so that sums over updates give P(type | all-failed) exactly."""
    failed, mixed = (('abab', False), ('abcd', False)), (('abc', True), ('aa', False))
    types = ['look', 'place', 'look', 'heat']
    updates = [[group(0, *failed), group(2, *failed), group(1, *mixed)], [group(1, *failed), group(2, *mixed)],
               [group(0, *mixed)]]
    rows = [metrics.rollout_metrics(groups, types) for groups in updates]
    by_type = [{kind: row[f'group/all_failed/{kind}'] for kind in ('look', 'place', 'heat')} for row in rows]
    assert [tuple(counts.values()) for counts in by_type] == [(2, 0, 0), (0, 1, 0), (0, 0, 0)]
    assert [sum(counts.values()) for counts in by_type] == [row['group/all_failed'] for row in rows]
    assert 'group/all_failed_share/heat' not in rows[0]  # a share of no groups


def test_resume_drops_what_will_be_made_again(tmp_path):
    writer = metrics.MetricsWriter(tmp_path, resume_from=0)
    for update in range(4):
        writer.write(update, {'a/b': update})
    writer.close()
    with (tmp_path / 'metrics.jsonl').open('a') as file:
        file.write('{"update": 4, "a/')  # a crash while writing
    assert [row['update'] for row in metrics.read_metrics(tmp_path)] == [0, 1, 2, 3]
    writer = metrics.MetricsWriter(tmp_path, resume_from=2)
    writer.write(3, {'a/b': np.float32(9)})
    writer.close()
    assert [(row['update'], row['a/b']) for row in metrics.read_metrics(tmp_path)] == [(0, 0), (1, 1), (2, 2), (3, 9)]


def test_trajectories_are_written_whole_with_their_credit(tmp_path):
    groups = [group(0, ('abab', False), ('abcd', False))]
    path = tmp_path / 'trajectories' / 'update_00001.jsonl'
    columns = {'advantage': np.arange(6) / 2, 'gate_open': np.array([True] * 3 + [False] * 3)}
    metrics.write_trajectories(path, groups, ['game'], lambda tokens: f'{len(tokens)} tokens', columns)
    first, second = map(json.loads, path.read_text().splitlines())
    assert [s['observation'] for s in first['steps']] == ['a', 'b', 'a'] and first['last_observation'] == 'b'
    assert [s['advantage'] for s in second['steps']] == [1.5, 2.0, 2.5] and first['steps'][0]['gate_open'] is True
    assert first['steps'][0]['reply'] == '3 tokens' and first['task'] == 'game' and second['member'] == 1


def test_the_report_escapes_and_shows_episodes(tmp_path):
    writer = metrics.MetricsWriter(tmp_path, resume_from=0)
    writer.write(1, {'rollout/success_rate': 0.5})
    writer.close()
    odd = dataclasses.replace(group(0, ('abab', False)).trajectories[0].steps[0], observation='<script>')
    episode = Group(0, (Trajectory(0, (odd,), True, 'success'),))
    columns = {'advantage': np.ones(1), 'gate_open': np.ones(1, bool)}
    metrics.write_trajectories(tmp_path / 'trajectories' / 'update_00001.jsonl', [episode], ['game'], str, columns)
    page = report.write(tmp_path).read_text()
    assert '&lt;script&gt;' in page and '<script>' not in page and 'success, 1 steps' in page and '(coverage)' in page


def test_timer_adds_up_and_clears():
    timer = metrics.Timer()
    for _ in range(2):
        with timer('learn'):
            pass
    assert set(timer.take()) == {'time/learn_s'} and timer.take() == {}
