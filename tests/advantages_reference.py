"""The estimators and CovGPO's gate again, in float64 NumPy and plain loops over strings, written from the papers' text.

Shares nothing with `covsero_jax` but the trajectory types. Groups are lists of row numbers, found by comparing keys.
"""

from __future__ import annotations

import collections
import dataclasses
from fractions import Fraction

import numpy as np

from covsero_jax.trajectory import Group

DISCOUNT, GOAL_DISCOUNT, PENALTY, DEPTH = 0.95, 0.5, 0.1, 3


@dataclasses.dataclass(frozen=True)
class Row:
    task: int
    path: int
    history: tuple[str, ...]  # o_0 .. o_t
    after: str
    novel: bool
    outcome: float
    to_go: float
    graph: float
    penalty: float
    coverage: Fraction
    success: bool


@dataclasses.dataclass(frozen=True)
class Options:
    """mode None is the base estimator."""

    estimator: str
    mode: str | None = None
    scale: float = 0.3
    gate_on: str = 'task'
    levels: tuple[str, ...] = ('trajectory', 'step')
    q_fail_scope: str = 'level'
    coverage_credit: str = 'trajectory'
    normalisation: str = 'mean_std'
    episode_stats: str = 'trajectory'


def rows_of(groups: list[Group]) -> list[Row]:
    rows = []
    for task, members in enumerate(groups):
        distance = _distances(members)
        for path in members.trajectories:
            texts = [path.steps[0].observation, *(step.next_observation for step in path.steps)]
            length, number = len(path.steps), rows[-1].path + 1 if rows else 0
            for t, step in enumerate(path.steps):
                last = t == length - 1
                rows.append(
                    Row(
                        task=task,
                        path=number,
                        history=tuple(texts[: t + 1]),
                        after=texts[t + 1],
                        novel=texts[t + 1] not in texts[: t + 1],
                        outcome=sum(s.reward for s in path.steps),
                        to_go=sum(DISCOUNT ** (k - t) * path.steps[k].reward for k in range(t, length)),
                        graph=10 * GOAL_DISCOUNT ** (0 if path.success and last else distance[texts[t + 1]]),
                        penalty=0.0 if step.parsed else PENALTY,
                        coverage=Fraction(len(set(texts)) - 1, length),
                        success=path.success,
                    )
                )
    return rows


def _distances(members: Group) -> dict[str, int]:
    """Bellman-Ford to the success node: relax every edge until nothing changes."""
    edges, nodes = [], set()
    for path in members.trajectories:
        for t, step in enumerate(path.steps):
            won = path.success and t == len(path.steps) - 1
            edges.append((step.observation, '' if won else step.next_observation))
            nodes |= {step.observation, step.next_observation}
    far = 10**6
    distance = dict.fromkeys(nodes, far) | {'': 0}
    for _ in range(len(nodes)):
        for source, target in edges:
            distance[source] = min(distance[source], distance[target] + 1)
    largest = max(value for value in distance.values() if value < far)
    return {node: value if value < far else largest + 1 for node, value in distance.items()}


def _normalised(values, weights, members, ddof, divide):
    if members < 2 or max(values) - min(values) < 1e-9:
        return np.zeros(len(values))
    values, weights = np.array(values, np.float64), np.array(weights, np.float64)
    centred = values - (weights * values).sum() / members
    std = np.sqrt((weights * centred**2).sum() / (members - ddof)) if divide else 1 - 1e-6
    return centred / (std + 1e-6)


def _zero(values, mode):
    return all(abs(v) < 1e-3 for v in values) if mode == 'deployed' else all(v == 0 for v in values)


def advantages(rows: list[Row], o: Options) -> tuple[np.ndarray, collections.Counter]:
    """The advantage of every row, and the numbers of groups by level and kind."""
    counts: collections.Counter = collections.Counter()

    def gate_score(row, score):
        return score(row) - (row.penalty if o.gate_on == 'penalised' else 0.0)

    def buckets(key):
        found = collections.defaultdict(list)
        for n, row in enumerate(rows):
            if key(row) is not None:
                found[key(row)].append(n)
        return list(found.values())

    def compare(level, score, key, ddof=1, gate=None):
        out = np.zeros(len(rows))
        per_path = level == 'trajectory' and o.episode_stats == 'trajectory'
        groups = buckets(key)
        scope, scope_score = (buckets(lambda row: row.task), lambda row: row.outcome)
        if o.q_fail_scope == 'level':
            scope, scope_score = groups, gate or score
        q_fail = np.mean([_zero([gate_score(rows[n], scope_score) for n in g], o.mode) for g in scope])
        scale = o.scale * (q_fail if o.mode == 'deployed' else 1.0)
        for numbers in groups:
            group = [rows[n] for n in numbers]
            on_path = collections.Counter(row.path for row in group)
            weights = [1 / on_path[row.path] if per_path else 1.0 for row in group]
            members = len(on_path) if per_path else len(group)

            def z(values, divide=True, weights=weights, members=members):
                return _normalised(values, weights, members, ddof, divide)

            divide = o.normalisation == 'mean_std'
            scores, penalties = [score(row) for row in group], [row.penalty for row in group]
            advantage = z(np.subtract(scores, penalties), divide)
            read = [gate_score(row, gate or score) for row in group]
            zero = _zero(read, o.mode)
            by_row = level == 'step' and o.coverage_credit == 'transition'
            credit = [Fraction(int(row.novel)) if by_row else row.coverage for row in group]
            varies = len(set(credit)) > 1
            opens = zero and varies and o.mode is not None and level in o.levels
            if o.mode == 'ideal':
                opens = opens and not any(row.success for row in group)
            if gate:
                opens = opens and len({round(gate_score(row, score), 9) for row in group}) == 1
            if zero and o.mode == 'deployed' and level in o.levels and not gate:
                advantage = z(np.negative(penalties), divide) if o.gate_on == 'task' else 0 * advantage
            if opens:
                advantage = advantage + scale * z([float(value) for value in credit])
            out[numbers] = advantage
            counts[level, 'groups'] += 1
            counts[level, 'zero_score'] += zero
            counts[level, 'triggered'] += opens
            counts[level, 'singleton'] += members == 1
            counts[level, 'all_failed'] += not any(row.success for row in group)
            counts[level, 'zero_degenerate'] += zero and not varies
            counts[level, 'gap_violations'] += zero and any(v != 0 for v in read)
            counts[level, 'added_to_penalty'] += opens and len(set(penalties)) > 1
        return out

    def episode():
        return compare('trajectory', lambda row: row.outcome, lambda row: row.task)

    def anchor(row):
        return row.task, row.history[-1]

    if o.estimator == 'grpo':
        return episode(), counts
    if o.estimator == 'gigpo':
        return episode() + compare('step', lambda row: row.to_go, anchor), counts
    if o.estimator == 'graphgpo':
        return episode() + compare('step', lambda row: row.graph, anchor, gate=lambda row: row.outcome), counts
    numerator, denominator = np.zeros(len(rows)), np.zeros(len(rows))
    for k in range(DEPTH):
        level = compare(
            'step',
            lambda row: row.to_go,
            lambda row, k=k: (row.task, row.history[-k - 1 :]) if len(row.history) > k else None,
            ddof=0,
        )
        weight = (k + 1) * (abs(level) > 1e-6)  # levels where this row is not at the mean
        numerator += weight * level
        denominator += weight
    return numerator / (denominator + 1e-6), counts
