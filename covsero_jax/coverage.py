"""CovGPO: where a comparison has no contrast because every member failed, compare first-visit coverage in its place.

`with_coverage` wraps any `advantages.Compare`; estimators do not know about it. First-visit coverage itself is counted
on the host (`groups.first_visits`). The controls that replace it are in `coverage_controls`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import chex
import flax.struct
import jax
import jax.numpy as jnp

from covsero_jax import advantages, coverage_controls
from covsero_jax.groups import StepTable

Array = jax.Array

_CHOICES = {
    'variant': coverage_controls.VARIANTS,
    'mode': ('ideal', 'deployed'),
    'gate_on': ('task', 'penalised'),
    'q_fail_scope': ('level', 'task'),
    'coverage_credit': ('trajectory', 'transition'),
}


@dataclasses.dataclass(frozen=True)
class CoverageConfig:
    """CovGPO's options (§4.3, §7.5, §8.3). Raises ValueError for a value that is none of the choices.

    variant: 'covgpo'; one of the controls, which compare something else (`coverage_controls.score`); 'always_on', which
        adds scale * z(P) in every group, whether or not it has contrast, always at `coverage_scale`; or 'off', the base
        estimator with the diagnostics.
    mode: 'ideal' opens the gate at scores of exactly 0 where every member failed, with scale `coverage_scale`;
        'deployed', as the paper trained, at |score| < `gate_tolerance`, with scale `coverage_scale` * q_fail.
    coverage_scale: lambda, lambda_aux in the paper. 0 is 'off'.
    gate_on: the gate reads the 'task' score, or the 'penalised' one that contains the invalid-action penalty. With
        'task', a group whose penalties differ keeps their advantage and the fallback is added to it.
    levels: where the gate may open: 'trajectory', 'step' or both.
    q_fail_scope: the zero-score share is measured among the groups of the comparison itself ('level'; at the step level
        of HGPO each depth is one), or among the task groups ('task').
    coverage_credit: at the step level, compare the 'trajectory' rate (published: a no-op row can be credited) or the
        row's own 'transition' (was its next observation new; ours).
    """

    variant: str = 'covgpo'
    mode: str = 'deployed'
    coverage_scale: float = 0.3
    gate_tolerance: float = 1e-3
    gate_on: str = 'task'
    levels: Sequence[str] = ('trajectory', 'step')
    q_fail_scope: str = 'level'
    coverage_credit: str = 'trajectory'

    def __post_init__(self):
        for field, choices in _CHOICES.items():
            if getattr(self, field) not in choices:
                raise ValueError(f'{field} is {getattr(self, field)!r}; choose one of {choices}')
        if isinstance(self.levels, str) or not set(self.levels) <= {'trajectory', 'step'}:
            raise ValueError(f"levels is {self.levels!r}; use a tuple of 'trajectory' and 'step'")

    @property
    def is_off(self) -> bool:
        return self.variant == 'off' or self.coverage_scale == 0 or not self.levels

    @property
    def is_gated(self) -> bool:
        return self.variant != 'always_on'


@flax.struct.dataclass
class Gate:
    """Where the gate of one comparison opened, and what decided it. The bool columns are constant inside a group."""

    open_N: Array  # bool: triggered
    zero_N: Array  # bool: zero-score group (within the tolerance)
    tolerated_N: Array  # bool: such a group that holds a score other than exact 0, a violation of the score gap
    varies_N: Array  # bool: coverage is not degenerate
    all_failed_N: Array  # bool: no member succeeded
    contrast_N: Array  # bool: members differ in their penalty
    score_N: Array  # float32: what the fallback compares; first-visit coverage, unless the variant is a control
    kept_N: Array  # float32: what the fallback is added to: the base advantage, save where `tolerated_N`
    q_fail: Array  # float32 []
    scale: Array  # float32 []: lambda, or lambda * q_fail


def zero_score(score_N: Array, id_N: Array, *, tolerance: float = 0.0) -> Array:
    """bool_N: every |score| of the row's group is below `tolerance`, or exactly 0 where that is 0. False on padding."""
    largest_N = advantages.group_max(jnp.abs(score_N), id_N)
    return ((largest_N < tolerance) if tolerance else (largest_N == 0)) & (id_N >= 0)


def coverage_gate(score_N: Array, rank_N: Array, failed_N: Array, id_N: Array, *, tolerance: float = 0.0) -> Array:
    """bool_N: groups without a score whose coverage varies; `rank_N`, an integer, decides equality of coverage exactly.

    tolerance 0 (ideal): every score is exactly 0 and every member failed. Else (deployed): every |score| < tolerance.
    """
    chex.assert_rank([score_N, rank_N, failed_N, id_N], 1)
    chex.assert_equal_shape([score_N, rank_N, failed_N, id_N])
    chex.assert_type([score_N, rank_N, failed_N, id_N], [jnp.float32, jnp.int32, bool, jnp.int32])
    open_N = zero_score(score_N, id_N, tolerance=tolerance) & advantages.group_varies(rank_N, id_N)
    return open_N if tolerance else open_N & _all(failed_N, id_N)


def fallback_scale(zero_N: Array, id_N: Array, *, max_scale: float) -> tuple[Array, Array]:
    """(max_scale * q_fail, q_fail), q_fail = zero-score groups / groups; 0 without groups (CovGPO §8.3)."""
    q_fail = _count(zero_N, id_N) / jnp.maximum(_count(id_N >= 0, id_N), 1.0)
    return max_scale * q_fail, q_fail


def with_coverage(
    compare: advantages.Compare, table: StepTable, config: CoverageConfig = CoverageConfig(), key: Array | None = None
) -> advantages.Compare:
    """`compare` with CovGPO's fallback: in groups whose gate opened, the advantage becomes

        A_n = scale * (P_n - mean_g(P)) / (std_g(P) + eps)

    with the base estimator's members and ddof, added to the penalties' advantage if they differ. All other groups keep
    the base's bits; in 'deployed' mode that holds under the score gap: no group with 0 < max |score| < tolerance, which
    would be read as a group of zeros. `Comparison.gate` says what happened; `gate_metrics` sums it up.
    key: for the variants that draw at random; ValueError without one.
    """
    if config.variant in coverage_controls.RANDOM and key is None:
        raise ValueError(f'variant {config.variant!r} draws at random and needs a key')
    tolerance = config.gate_tolerance if config.mode == 'deployed' and config.is_gated else 0.0
    calls = itertools.count()

    def gated(level, score_N, id_N, *, ddof=1, gate_score_N=None, normalisation=None):
        base = compare(level, score_N, id_N, ddof=ddof, gate_score_N=gate_score_N, normalisation=normalisation)
        keys = None if key is None else (jax.random.fold_in(key, next(calls) + 1), jax.random.fold_in(key, 0))
        gate = _gate(config, table, base, score_N, gate_score_N, tolerance, keys)
        if config.is_off or level not in config.levels:
            return base.replace(gate=gate.replace(open_N=jnp.zeros_like(gate.open_N)))

        kept_N = gate.kept_N
        if tolerance and gate_score_N is None:  # a score inside the tolerance counts as zero
            if config.gate_on == 'task':
                as_zero_N = jnp.where(gate.zero_N, 0.0, score_N)
                without_N = compare(level, as_zero_N, id_N, ddof=ddof, normalisation=normalisation).base_N
            else:
                without_N = jnp.zeros_like(kept_N)
            kept_N = jnp.where(gate.tolerated_N, without_N, kept_N)
        fallback_N = gate.scale * advantages.group_compare(gate.score_N, id_N, weight_N=base.weight_N, ddof=ddof)
        advantage_N = jnp.where(gate.open_N, kept_N + fallback_N, kept_N)
        return base.replace(advantage_N=advantage_N, gate=gate.replace(kept_N=kept_N))

    return gated


def _gate(config, table, base, score_N, gate_score_N, tolerance, keys) -> Gate:
    id_N = base.id_N
    penalty_N = table.penalty_N if config.gate_on == 'penalised' else jnp.zeros_like(table.penalty_N)
    read_N = (score_N if gate_score_N is None else gate_score_N) - penalty_N
    compared_N, rank_N = coverage_controls.score(
        config.variant, table, base.level, id_N, coverage_credit=config.coverage_credit, keys=keys
    )
    zero_N = zero_score(read_N, id_N, tolerance=tolerance)
    if not config.is_gated:
        open_N = advantages.group_varies(rank_N, id_N)
    elif config.variant in coverage_controls.UNGATED_BY_COVERAGE:
        open_N = zero_N if tolerance else zero_N & _all(table.failed_N, id_N)
    else:
        open_N = coverage_gate(read_N, rank_N, table.failed_N, id_N, tolerance=tolerance)
    if gate_score_N is not None and config.is_gated:  # the base may still tell failures apart, by their distance
        open_N &= ~advantages.group_varies(score_N - penalty_N, id_N)

    scope_N, scope_id_N = zero_N, id_N
    if config.q_fail_scope == 'task':
        scope_id_N = table.group_id_N
        scope_N = zero_score(table.episode_return_N - penalty_N, scope_id_N, tolerance=tolerance)
    scale, q_fail = fallback_scale(scope_N, scope_id_N, max_scale=config.coverage_scale)
    return Gate(
        open_N=open_N,
        zero_N=zero_N,
        tolerated_N=zero_N & (advantages.group_max(jnp.abs(read_N), id_N) > 0),
        varies_N=advantages.group_varies(rank_N, id_N),
        all_failed_N=_all(table.failed_N, id_N),
        contrast_N=advantages.group_varies(table.penalty_N, id_N),
        score_N=compared_N,
        kept_N=base.base_N,
        q_fail=q_fail,
        scale=scale if config.mode == 'deployed' and config.is_gated else jnp.full_like(scale, config.coverage_scale),
    )


def _all(true_N, id_N):
    return (advantages.group_min(jnp.asarray(true_N, jnp.int32), id_N) == 1) & (id_N >= 0)


def _count(true_N, id_N):
    """The number of groups whose rows are marked; the mark is constant inside a group."""
    row_N = jnp.arange(id_N.shape[0])
    return jnp.sum(true_N & (id_N >= 0) & (advantages.group_min(row_N, id_N) == row_N)).astype(jnp.float32)


def gate_metrics(comparisons: Sequence[advantages.Comparison]) -> dict[str, Array]:
    """CovGPO's diagnostics (§10.8) as float32 scalars named `<level>/<what>`, from comparisons made by `with_coverage`.

    Numbers of groups: `groups`, `all_failed`, `zero_score`, `triggered`, `singleton` (one member), `zero_degenerate`
    (zero score, no spread of coverage), `gap_violations` (0 < max |score| < tolerance), `added_to_penalty` (triggered
    groups whose penalties differ). Then `q_fail`, `scale` (lambda_eff), and `repair`, the mean |fallback|
    over the rows of triggered groups (0 without). Where one level has several comparisons (HGPO's depths),
    numbers are added up, q_fail and scale averaged.
    """
    metrics = {}
    for level in dict.fromkeys(comparison.level for comparison in comparisons):
        members = [comparison for comparison in comparisons if comparison.level == level]
        counts = [_level_counts(comparison) for comparison in members]
        total = {name: sum(count[name] for count in counts) for name in counts[0]}
        rows, change = total.pop('triggered_rows'), total.pop('change')
        total['q_fail'] = sum(comparison.gate.q_fail for comparison in members) / len(members)
        total['scale'] = sum(comparison.gate.scale for comparison in members) / len(members)
        total['repair'] = change / jnp.maximum(rows, 1.0)
        metrics |= {f'{level}/{name}': value for name, value in total.items()}
    return metrics


def _level_counts(comparison) -> dict[str, Array]:
    gate, id_N = comparison.gate, comparison.id_N
    groups = {
        'groups': id_N >= 0,
        'all_failed': gate.all_failed_N,
        'zero_score': gate.zero_N,
        'triggered': gate.open_N,
        'singleton': advantages.group_members(id_N, comparison.weight_N) == 1,
        'zero_degenerate': gate.zero_N & ~gate.varies_N,
        'gap_violations': gate.tolerated_N,
        'added_to_penalty': gate.open_N & gate.contrast_N,
    }
    change_N = jnp.where(gate.open_N, jnp.abs(comparison.advantage_N - gate.kept_N), 0.0)
    return {name: _count(true_N, id_N) for name, true_N in groups.items()} | {
        'triggered_rows': jnp.sum(gate.open_N).astype(jnp.float32),
        'change': jnp.sum(change_N),
    }


def check_gate(comparison: advantages.Comparison, config: CoverageConfig) -> None:
    """The exact-zero gate's invariants as value assertions; call it under `chex.chexify(jax.jit(...))` or eagerly.

    (a) outside open groups the advantage is bit-equal to the base's (except in groups that break the score gap);
    (b) in 'ideal' mode the base is exactly 0 inside, apart from groups whose penalties differ ('always_on' has no (b));
    (c) in each open group the fallback's (weighted) sum is 0 within 1e-5 * size * scale, and its std is
        scale * s / (s + eps), s the compared score's own std; (d) all is finite; (e) padding rows are exactly 0.
    """
    gate, id_N = comparison.gate, comparison.id_N
    base_N, advantage_N = comparison.base_N, comparison.advantage_N
    outside_N = ~gate.open_N & ~gate.tolerated_N

    def bits(x_N, where_N):
        return jnp.where(where_N, jax.lax.bitcast_convert_type(x_N, jnp.int32), 0)

    chex.assert_tree_all_finite(advantage_N, custom_message='(d) every advantage is finite')
    chex.assert_trees_all_equal(
        jnp.where(id_N < 0, advantage_N, 0.0), jnp.zeros_like(advantage_N), custom_message='(e) padding rows are zero'
    )
    for x_N, where_N in ((advantage_N, outside_N), (gate.kept_N, ~gate.tolerated_N)):
        chex.assert_trees_all_equal(
            bits(x_N, where_N), bits(base_N, where_N), custom_message='(a) outside the gate: bits of the base'
        )
    if config.mode == 'ideal' and config.is_gated:
        inside_N = jnp.where(gate.open_N & ~gate.contrast_N, base_N, 0.0)
        chex.assert_trees_all_equal(
            inside_N, jnp.zeros_like(inside_N), custom_message='(b) inside the gate: the base is zero'
        )
    fallback_N = jnp.where(gate.open_N, advantage_N - gate.kept_N, 0.0)
    # Where the fallback is added to a penalty advantage, the subtraction just made costs float32 digits of the latter.
    rounding_N = 1e-6 * advantages.group_max(jnp.where(gate.open_N, jnp.abs(gate.kept_N), 0.0), id_N)
    size_N = advantages.group_sum(comparison.weight_N, id_N)
    excess_N = jnp.abs(advantages.group_sum(comparison.weight_N * fallback_N, id_N))
    excess_N -= size_N * (1e-5 * gate.scale + rounding_N)
    statistics = {'weight_N': comparison.weight_N, 'ddof': comparison.ddof}
    spread_N = advantages.group_std(gate.score_N, id_N, **statistics)
    expected_N = gate.scale * spread_N / (spread_N + advantages.EPS)
    error_N = jnp.abs(advantages.group_std(fallback_N, id_N, **statistics) - expected_N)
    error_N -= 1e-3 * gate.scale + 10 * rounding_N
    for what, above_N in (('sums to zero', excess_N), ('has std = scale', error_N)):
        above_N = jnp.where(gate.open_N, jnp.maximum(above_N, 0.0), 0.0)
        chex.assert_trees_all_equal(
            above_N, jnp.zeros_like(above_N), custom_message=f'(c) inside the gate: the fallback {what}'
        )
