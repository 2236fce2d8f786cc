"""Group-relative advantages. An estimator decides what is compared with what; `group_compare` does the comparing.

    compare = make_compare(table)                              # or coverage.with_coverage(make_compare(table), table)
    advantage_N, comparisons = gigpo(table, compare)

Every function is pure and un-jitted, and works under `jit` and `vmap`. Rows with id -1 are not compared and get 0.
"""

from __future__ import annotations

from collections.abc import Callable

import chex
import flax.struct
import jax
import jax.numpy as jnp

from covsero_jax.groups import StepTable

Array = jax.Array

EPS = 1e-6  # added to every standard deviation, in the papers and in their code alike


@flax.struct.dataclass
class Comparison:
    """One comparison inside an estimator: who was compared, on what, and what came out."""

    level: str = flax.struct.field(pytree_node=False)  # 'trajectory' | 'step'
    ddof: int = flax.struct.field(pytree_node=False)
    id_N: Array  # int32
    weight_N: Array  # float32: what a row counts in its group's statistics
    base_N: Array  # float32: the base estimator's advantage
    advantage_N: Array  # float32: the same, unless CovGPO's gate opened
    gate: object = None  # coverage.Gate


# (level, score_N, id_N, *, ddof, gate_score_N, normalisation) -> Comparison. `gate_score_N` is for scores that are not
# zero at failure (GraphGPO): the gate then reads this column in their place. `normalisation` is the estimator's own.
Compare = Callable[..., Comparison]

NORMALISATIONS = ('mean_std', 'mean')  # to choose from; RLOO and REINFORCE++ bring their own


def group_sum(x_N: Array, id_N: Array) -> Array:
    """The sum over each row's group, on that row."""
    return _reduce(jax.ops.segment_sum, x_N, id_N)


def group_min(x_N: Array, id_N: Array) -> Array:
    """The minimum over each row's group, on that row."""
    return _reduce(jax.ops.segment_min, x_N, id_N)


def group_max(x_N: Array, id_N: Array) -> Array:
    """The maximum over each row's group, on that row."""
    return _reduce(jax.ops.segment_max, x_N, id_N)


def _reduce(segment_op, x_N, id_N):
    num_rows = id_N.shape[0]
    segment_N = jnp.where(id_N >= 0, id_N, num_rows)  # all padding rows share one more segment, apart from the others
    return segment_op(x_N, segment_N, num_rows + 1)[segment_N]


def group_members(id_N: Array, weight_N: Array) -> Array:
    """The number of members of each row's group, where the weights of a member's rows add up to 1. At least 1."""
    return jnp.maximum(jnp.round(group_sum(weight_N, id_N)), 1.0)  # rounded: 50 * (1 / 50) need not be 1 in float32


def group_varies(x_N: Array, id_N: Array) -> Array:
    """bool_N: the row's group holds two different values. Exact; False on padding."""
    return (group_max(x_N, id_N) > group_min(x_N, id_N)) & (id_N >= 0)


def group_std(x_N: Array, id_N: Array, *, weight_N: Array, ddof: int) -> Array:
    """Standard deviation of `x_N - (weighted group mean)`, dividing by (sum of weights) - ddof."""
    return _std(_deviation(x_N, id_N, weight_N), id_N, weight_N, ddof)


def _deviation(x_N, id_N, weight_N):
    members_N = group_members(id_N, weight_N)
    for _ in range(2):  # the second pass removes the first mean's rounding error, which a small std would magnify
        x_N = x_N - group_sum(weight_N * x_N, id_N) / members_N
    return x_N


def _std(deviation_N, id_N, weight_N, ddof):
    total_N = group_sum(weight_N * jnp.square(deviation_N), id_N)
    return jnp.sqrt(total_N / jnp.maximum(group_members(id_N, weight_N) - ddof, 1.0))


def group_compare(
    score_N: Array, id_N: Array, *, weight_N: Array | None = None, use_std: bool = True, ddof: int = 1, eps: float = EPS
) -> Array:
    """Group-relative advantage A_n = (x_n - mean_g) / (std_g + eps), without the division if not `use_std`.

    Without the division it is Dr. GRPO's (arXiv 2503.20783, section 3.2). mean_g and std_g weight the group's rows by
    `weight_N` (1 by default); with 1 / (rows of its trajectory) each trajectory counts once. A member is a row, or a
    trajectory when weighted so.
    Exactly zero for padding, single-member groups and constant groups. The last is decided by max == min: in float32
    the mean of equal numbers is often not that number, and dividing by a tiny std makes advantages of 0.1 of it. For
    the same reason a row within rounding of its group's mean, 8 ulp of the largest |x|, gets exactly 0.
    """
    weight_N = jnp.ones_like(score_N) if weight_N is None else weight_N
    chex.assert_rank([score_N, id_N, weight_N], 1)
    chex.assert_equal_shape([score_N, id_N, weight_N])
    chex.assert_type([score_N, id_N, weight_N], [jnp.float32, jnp.int32, jnp.float32])
    advantage_N = _deviation(score_N, id_N, weight_N)
    rounding_N = 8 * jnp.finfo(jnp.float32).eps * group_max(jnp.abs(score_N), id_N)
    advantage_N = jnp.where(jnp.abs(advantage_N) > rounding_N, advantage_N, 0.0)
    if use_std:
        advantage_N /= _std(advantage_N, id_N, weight_N, ddof) + eps
    return jnp.where(_has_contrast(score_N, id_N, weight_N), advantage_N, 0.0)


def _has_contrast(score_N, id_N, weight_N):
    return group_varies(score_N, id_N) & (group_members(id_N, weight_N) > 1)


def leave_one_out(score_N: Array, id_N: Array, *, weight_N: Array) -> Array:
    """A_n = x_n - mean of the other members = K / (K - 1) * (x_n - mean_g), K members; exact zeros as `group_compare`.

    RLOO (arXiv 2402.14740, section 3.2). Where rows of one trajectory differ, by a penalty, the right side holds.
    """
    members_N = group_members(id_N, weight_N)
    return group_compare(score_N, id_N, weight_N=weight_N, use_std=False) * (members_N / jnp.maximum(members_N - 1, 1))


def batch_whitened(score_N: Array, id_N: Array, *, weight_N: Array, tokens_N: Array) -> Array:
    """A_n = (y_n - mean) / sqrt(var + 1e-8), y_n = x_n - mean_g, mean and var over all action tokens of the update.

    REINFORCE++ with group baseline (arXiv 2501.03262). `tokens_N` is the number of action tokens of each row. Groups
    without contrast stay exactly 0 (whitening would move them by the mean), but count in the statistics.
    """
    centred_N = group_compare(score_N, id_N, weight_N=weight_N, use_std=False)
    count = jnp.maximum(jnp.sum(tokens_N), 1.0)
    mean = jnp.sum(tokens_N * centred_N) / count
    variance = jnp.sum(tokens_N * jnp.square(centred_N - mean)) / count
    whitened_N = (centred_N - mean) * jax.lax.rsqrt(variance + 1e-8)
    return jnp.where(_has_contrast(score_N, id_N, weight_N), whitened_N, 0.0)


def make_compare(table: StepTable, *, normalisation: str = 'mean_std', episode_stats: str = 'trajectory') -> Compare:
    """The base comparison on this table: `group_compare` of (score - the row's own invalid-action penalty).

    normalisation: 'mean_std' or 'mean', at both levels, save where an estimator has its own. episode_stats: at the
    trajectory level, 'trajectory' lets each trajectory count once, its rows sharing the vote (the papers' formula
    wherever there is no penalty); 'rows' lets each row count, so that long trajectories weigh more (the public code).
    Raises ValueError for other options.
    """
    if normalisation not in NORMALISATIONS:
        raise ValueError(f'normalisation is {normalisation!r}; choose one of {NORMALISATIONS}')
    if episode_stats not in ('trajectory', 'rows'):
        raise ValueError(f"episode_stats is {episode_stats!r}; use 'trajectory' or 'rows'")
    one_N = jnp.ones_like(table.penalty_N)
    vote_N = one_N / group_sum(one_N, table.trajectory_id_N)

    chosen = normalisation

    def compare(level, score_N, id_N, *, ddof=1, gate_score_N=None, normalisation=None):
        del gate_score_N  # the base estimator has no gate
        weight_N = vote_N if level == 'trajectory' and episode_stats == 'trajectory' else one_N
        score_N = score_N - table.penalty_N
        match normalisation or chosen:
            case 'leave_one_out':
                base_N = leave_one_out(score_N, id_N, weight_N=weight_N)
            case 'batch':
                base_N = batch_whitened(score_N, id_N, weight_N=weight_N, tokens_N=table.action_tokens_N)
            case of_group:
                base_N = group_compare(score_N, id_N, weight_N=weight_N, use_std=of_group == 'mean_std', ddof=ddof)
        return Comparison(level=level, ddof=ddof, id_N=id_N, weight_N=weight_N, base_N=base_N, advantage_N=base_N)

    return compare


def grpo(table: StepTable, compare: Compare, *, ddof: int = 1) -> tuple[Array, tuple[Comparison, ...]]:
    """Trajectories of a task compared on their return (GRPO, arXiv 2402.03300)."""
    episode = compare('trajectory', table.episode_return_N, table.group_id_N, ddof=ddof)
    return episode.advantage_N, (episode,)


def gigpo(
    table: StepTable, compare: Compare, *, step_weight: float = 1.0, ddof: int = 1
) -> tuple[Array, tuple[Comparison, ...]]:
    """A = A_episode + step_weight * A_step, A_step among rows with the same observation (GiGPO, arXiv 2505.10978)."""
    episode = compare('trajectory', table.episode_return_N, table.group_id_N, ddof=ddof)
    step = compare('step', table.step_return_N, table.anchor_id_N, ddof=ddof)
    return episode.advantage_N + step_weight * step.advantage_N, (episode, step)


def hgpo(
    table: StepTable,
    compare: Compare,
    *,
    length_alpha: float = 1.0,
    weight_offset: int = 1,
    episode_weight: float = 0.0,
    ddof: int = 0,
) -> tuple[Array, tuple[Comparison, ...]]:
    """A = sum_k w_k A_k / sum_k w_k over the levels with A_k != 0, w_k = (k + weight_offset)^length_alpha.

    Level k compares rows with the same last k + 1 observations, k = 0 .. H - 1 (HGPO, arXiv 2602.22817, Eq. 3-8).
    weight_offset 1 is the paper's, 2 its public recipe's. With `episode_weight` the trajectory level (always ddof 1) is
    one more term of that weight.
    """
    comparisons = [compare('step', table.step_return_N, id_N, ddof=ddof) for id_N in table.history_id_HN]
    weights = [float(k + weight_offset) ** length_alpha for k in range(len(comparisons))]
    if episode_weight:
        comparisons.append(compare('trajectory', table.episode_return_N, table.group_id_N, ddof=1))
        weights.append(episode_weight)
    numerator_N = denominator_N = jnp.zeros_like(table.step_return_N)
    for comparison, weight in zip(comparisons, weights, strict=True):
        # Not `!= 0`: at its group's mean a row gets 0 or, in another order of the sum, a last digit.
        weight_N = jnp.where(jnp.abs(comparison.advantage_N) > EPS, weight, 0.0)
        numerator_N += weight_N * comparison.advantage_N
        denominator_N += weight_N
    return numerator_N / (denominator_N + EPS), tuple(comparisons)


def graphgpo(
    table: StepTable, compare: Compare, *, step_weight: float = 1.0, episode_weight: float = 1.0, ddof: int = 1
) -> tuple[Array, tuple[Comparison, ...]]:
    """A = step_weight * A_graph + episode_weight * A_episode, A_graph among out-edges of one observation, scored by the
    distance to success of where they lead (GraphGPO, arXiv 2605.26684)."""
    episode = compare('trajectory', table.episode_return_N, table.group_id_N, ddof=ddof)
    edge = compare('step', table.goal_return_N, table.anchor_id_N, ddof=ddof, gate_score_N=table.episode_return_N)
    return episode_weight * episode.advantage_N + step_weight * edge.advantage_N, (episode, edge)


def rloo(table: StepTable, compare: Compare) -> tuple[Array, tuple[Comparison, ...]]:
    """Trajectories of a task against the mean return of the others (RLOO, arXiv 2402.14740)."""
    episode = compare('trajectory', table.episode_return_N, table.group_id_N, normalisation='leave_one_out')
    return episode.advantage_N, (episode,)


def reinforce_pp(table: StepTable, compare: Compare) -> tuple[Array, tuple[Comparison, ...]]:
    """Return minus the task's mean return, whitened over the update (REINFORCE++-baseline, arXiv 2501.03262)."""
    episode = compare('trajectory', table.episode_return_N, table.group_id_N, normalisation='batch')
    return episode.advantage_N, (episode,)


ESTIMATORS = {
    'grpo': grpo,
    'gigpo': gigpo,
    'hgpo': hgpo,
    'graphgpo': graphgpo,
    'rloo': rloo,
    'reinforce_pp': reinforce_pp,
}
