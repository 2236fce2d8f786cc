"""The estimators and CovGPO's gate again, in float64 NumPy and plain loops over strings, written from the papers' text.

Shares nothing with `covsero_jax` but the trajectory types. Groups are lists of row numbers, found by comparing keys.
What a control drew at random is handed in; everything else about it is computed here.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from fractions import Fraction

import numpy as np

from covsero_jax.trajectory import Group

DISCOUNT, GOAL_DISCOUNT, PENALTY, DEPTH = 0.95, 0.5, 0.1, 3
DRAWN_ALONG_TIME = ('shuffle_h', 'random_h')


@dataclasses.dataclass(frozen=True)
class Row:
    task: int
    path: int
    history: tuple[str, ...]  # o_0 .. o_t
    after: str
    novel: bool
    changed: bool
    outcome: float
    to_go: float
    distance: int  # to success, of where this step leads
    penalty: float
    tokens: int
    coverage: Fraction
    change_rate: Fraction
    success: bool


@dataclasses.dataclass(frozen=True)
class Options:
    """The estimator's options and the gate's, with the project's defaults. ddof None is the estimator's own."""

    estimator: str
    normalisation: str = 'mean_std'
    episode_stats: str = 'trajectory'
    ddof: int | None = None
    length_alpha: float = 1.0
    weight_offset: int = 1
    episode_weight: float | None = None
    step_weight: float = 1.0
    distance_offset: int = 0
    variant: str = 'off'
    mode: str = 'deployed'
    coverage_scale: float = 0.3
    gate_tolerance: float = 1e-3
    gate_on: str = 'task'
    levels: tuple[str, ...] = ('trajectory', 'step')
    q_fail_scope: str = 'level'
    coverage_credit: str = 'trajectory'


def rows_of(groups: list[Group]) -> list[Row]:
    rows = []
    for task, members in enumerate(groups):
        distance = _distances(members)
        for path in members.trajectories:
            texts = [path.steps[0].observation, *(step.next_observation for step in path.steps)]
            length, number = len(path.steps), rows[-1].path + 1 if rows else 0
            changes = sum(before != after for before, after in itertools.pairwise(texts))
            for t, step in enumerate(path.steps):
                last = t == length - 1
                rows.append(
                    Row(
                        task=task,
                        path=number,
                        history=tuple(texts[: t + 1]),
                        after=texts[t + 1],
                        novel=texts[t + 1] not in texts[: t + 1],
                        changed=texts[t + 1] != texts[t],
                        outcome=sum(s.reward for s in path.steps),
                        to_go=sum(DISCOUNT ** (k - t) * path.steps[k].reward for k in range(t, length)),
                        distance=0 if path.success and last else distance[texts[t + 1]],
                        penalty=0.0 if step.parsed else PENALTY,
                        tokens=len(step.action_tokens),
                        coverage=Fraction(len(set(texts)) - 1, length),
                        change_rate=Fraction(changes, length),
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


@dataclasses.dataclass(frozen=True)
class Bucket:
    """One group: its row numbers, what each counts, and how many members that makes."""

    rows: list[int]
    weights: np.ndarray
    members: int

    def centred(self, column) -> np.ndarray:
        values = np.array([column[n] for n in self.rows], np.float64)
        if self.members < 2 or max(values) - min(values) < 1e-9:
            return np.zeros(len(values))
        return values - (self.weights * values).sum() / self.members

    def normalised(self, column, ddof) -> np.ndarray:
        centred = self.centred(column)
        return centred / (np.sqrt((self.weights * centred**2).sum() / max(self.members - ddof, 1)) + 1e-6)

    def has_contrast(self, column) -> bool:
        return bool(self.centred(column).any())


def _buckets(rows, key, per_path) -> list[Bucket]:
    found = collections.defaultdict(list)
    for n, row in enumerate(rows):
        if key(row) is not None:
            found[key(row)].append(n)
    buckets = []
    for numbers in found.values():
        on_path = collections.Counter(rows[n].path for n in numbers)
        weights = np.array([1 / on_path[rows[n].path] if per_path else 1.0 for n in numbers])
        buckets.append(Bucket(numbers, weights, len(on_path) if per_path else len(numbers)))
    return buckets


def _base(rows, buckets, column, how, ddof) -> np.ndarray:
    out = np.zeros(len(rows))
    for bucket in buckets:
        if how == 'mean_std':
            out[bucket.rows] = bucket.normalised(column, ddof)
        else:
            out[bucket.rows] = bucket.centred(column)
        if how == 'leave_one_out' and bucket.members > 1:
            out[bucket.rows] *= bucket.members / (bucket.members - 1)
    if how == 'batch':
        token_values = np.repeat(out, [row.tokens for row in rows])  # one value for each token of the update
        for bucket in buckets:
            if bucket.has_contrast(column):
                out[bucket.rows] = (out[bucket.rows] - token_values.mean()) / np.sqrt(token_values.var() + 1e-8)
    return out


class _Estimate:
    """One update under one set of options; `compare` is a comparison with its gate, `counts` what the gates saw."""

    def __init__(self, rows: list[Row], o: Options, drawn: Iterator):
        self.rows, self.o, self.drawn = rows, o, drawn
        self.counts: collections.Counter = collections.Counter()
        self.tolerance = o.gate_tolerance if o.mode == 'deployed' and o.variant != 'always_on' else 0.0

    def is_zero(self, values) -> bool:
        return all(abs(v) < self.tolerance for v in values) if self.tolerance else all(v == 0 for v in values)

    def read(self, score) -> list[float]:
        return [score(row) - (row.penalty if self.o.gate_on == 'penalised' else 0.0) for row in self.rows]

    def credit(self, level) -> list[Fraction]:
        by_row = level == 'step' and self.o.coverage_credit == 'transition'
        if self.o.variant == 'obs_change':
            return [Fraction(int(row.changed)) if by_row else row.change_rate for row in self.rows]
        return [Fraction(int(row.novel)) if by_row else row.coverage for row in self.rows]

    def q_fail(self, buckets, read) -> float:
        if self.o.q_fail_scope == 'task':
            buckets, read = _buckets(self.rows, lambda row: row.task, False), self.read(lambda row: row.outcome)
        return float(np.mean([self.is_zero([read[n] for n in bucket.rows]) for bucket in buckets] or [0.0]))

    def compare(self, level, score, key, *, ddof, gate_score=None, how=None) -> np.ndarray:
        o, rows = self.o, self.rows
        how, ddof = how or o.normalisation, ddof if o.ddof is None else o.ddof
        buckets = _buckets(rows, key, level == 'trajectory' and o.episode_stats == 'trajectory')
        penalised = [score(row) - row.penalty for row in rows]
        kept = base = _base(rows, buckets, penalised, how, ddof)
        read, credit, drawn = self.read(gate_score or score), self.credit(level), next(self.drawn, None)
        compared = [float(value) for value in credit] if drawn is None else drawn
        zeros = [self.is_zero([read[n] for n in bucket.rows]) for bucket in buckets]
        q_fail = self.q_fail(buckets, read)
        scale = o.coverage_scale * (q_fail if o.mode == 'deployed' and o.variant != 'always_on' else 1.0)
        acts = o.variant != 'off' and o.coverage_scale != 0 and level in o.levels

        if acts and self.tolerance and gate_score is None:  # what is inside the tolerance counts as zero
            without = np.array(penalised)
            for bucket, zero in zip(buckets, zeros, strict=True):
                without[bucket.rows] = [-rows[n].penalty if zero else penalised[n] for n in bucket.rows]
            without = _base(rows, buckets, without, how, ddof) * (o.gate_on == 'task')
            kept = base.copy()
            for bucket, zero in zip(buckets, zeros, strict=True):
                if zero and any(read[n] != 0 for n in bucket.rows):
                    kept[bucket.rows] = without[bucket.rows]

        out = kept.copy()
        for bucket, zero in zip(buckets, zeros, strict=True):
            opens = acts and self.opens(bucket, zero, credit, None if gate_score is None else self.read(score))
            if opens:
                fallback = scale * bucket.normalised(compared, ddof)
                out[bucket.rows] = kept[bucket.rows] + fallback
                self.counts[level, 'rows'] += len(bucket.rows)
                self.counts[level, 'change'] += abs(fallback).sum()
            self.count(level, bucket, zero, opens, credit, read)
        self.counts[level, 'comparisons'] += 1
        self.counts[level, 'q_fail'] += q_fail
        self.counts[level, 'scale'] += scale
        return out

    def opens(self, bucket, zero, credit, own_read) -> bool:
        varies = len({credit[n] for n in bucket.rows}) > 1
        if self.o.variant == 'always_on':
            return varies
        failed = self.o.mode == 'deployed' or not any(self.rows[n].success for n in bucket.rows)
        indistinct = own_read is None or len({round(own_read[n], 9) for n in bucket.rows}) == 1
        return zero and failed and indistinct and (varies or self.o.variant in DRAWN_ALONG_TIME)

    def count(self, level, bucket, zero, opens, credit, read):
        group = [self.rows[n] for n in bucket.rows]
        varies = len({credit[n] for n in bucket.rows}) > 1
        self.counts[level, 'groups'] += 1
        self.counts[level, 'zero_score'] += zero
        self.counts[level, 'triggered'] += opens
        self.counts[level, 'singleton'] += bucket.members == 1
        self.counts[level, 'all_failed'] += not any(row.success for row in group)
        self.counts[level, 'zero_degenerate'] += zero and not varies
        self.counts[level, 'gap_violations'] += zero and any(read[n] != 0 for n in bucket.rows)
        self.counts[level, 'added_to_penalty'] += opens and len({row.penalty for row in group}) > 1


def advantages(rows: list[Row], o: Options, drawn: Iterable = ()) -> tuple[np.ndarray, dict]:
    """The advantage of every row, and what `gate_metrics` says of it, by (level, name).

    drawn: for the random controls, the column that each comparison compared.
    """
    estimate = _Estimate(rows, o, iter(drawn))
    out = _estimator(estimate, o)
    counts = dict(estimate.counts)
    for level in {level for level, _ in counts}:
        comparisons = counts.pop((level, 'comparisons'))
        counts[level, 'q_fail'] /= comparisons
        counts[level, 'scale'] /= comparisons
        counts[level, 'repair'] = counts.pop((level, 'change'), 0.0) / max(counts.pop((level, 'rows'), 0), 1)
    return out, counts


def _estimator(estimate: _Estimate, o: Options) -> np.ndarray:
    rows = estimate.rows

    def episode(ddof=1, how=None):
        return estimate.compare('trajectory', lambda row: row.outcome, lambda row: row.task, ddof=ddof, how=how)

    def anchor(row):
        return row.task, row.history[-1]

    def graph_return(row):
        return 10 * GOAL_DISCOUNT ** (row.distance + o.distance_offset)

    if o.estimator in ('grpo', 'rloo', 'reinforce_pp'):
        return episode(how={'rloo': 'leave_one_out', 'reinforce_pp': 'batch'}.get(o.estimator))
    if o.estimator == 'gigpo':
        return episode() + o.step_weight * estimate.compare('step', lambda row: row.to_go, anchor, ddof=1)
    if o.estimator == 'graphgpo':
        weight = 1.0 if o.episode_weight is None else o.episode_weight
        return weight * episode() + o.step_weight * estimate.compare(
            'step', graph_return, anchor, ddof=1, gate_score=lambda row: row.outcome
        )
    terms = [((k + o.weight_offset) ** o.length_alpha, _hgpo_level(estimate, k)) for k in range(DEPTH)]
    if o.episode_weight:
        own, estimate.o = estimate.o, dataclasses.replace(o, ddof=None)  # the episode term has its own ddof
        terms.append((o.episode_weight, episode()))
        estimate.o = own
    numerator, denominator = np.zeros(len(rows)), np.zeros(len(rows))
    for weight, advantage in terms:
        counted = weight * (abs(advantage) > 1e-6)  # levels where this row is not at the mean
        numerator += counted * advantage
        denominator += counted
    return numerator / (denominator + 1e-6)


def _hgpo_level(estimate: _Estimate, k: int) -> np.ndarray:
    def window(row):
        return (row.task, row.history[-k - 1 :]) if len(row.history) > k else None

    return estimate.compare('step', lambda row: row.to_go, window, ddof=0)
