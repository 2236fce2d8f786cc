"""What CovGPO's controls compare in the place of first-visit coverage (CovGPO §5.2, §5.3, §10.4, Tables 2, 12, 13).

Each answers one question. Is it *which* member gets the score (`shuffle`, `random`)? *When* it moved (`shuffle_h`,
`random_h`)? That the place was *new*, not only different (`obs_change`)? That the fallback is a *fallback* (`always_on`)?

The paper's summary names the two `-h` ("horizontal") controls without a definition; theirs is our reading.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from covsero_jax import advantages
from covsero_jax.groups import StepTable

Array = jax.Array

VARIANTS = ('covgpo', 'always_on', 'shuffle', 'random', 'shuffle_h', 'random_h', 'obs_change', 'off')
RANDOM = ('shuffle', 'random', 'shuffle_h', 'random_h')  # need a key
UNGATED_BY_COVERAGE = ('shuffle_h', 'random_h')  # open wherever there is no score, spread of coverage or not


def permute_members(x_N: Array, id_N: Array, member_id_N: Array, key: Array) -> Array:
    """Deal each group's values out to its members anew, at random.

    A member is the rows that share a `member_id_N`, all of one group; x is constant on them, before and after. Every
    group keeps its values. Padding (id -1) keeps its own.
    """
    chex.assert_rank([x_N, id_N, member_id_N], 1)
    chex.assert_equal_shape([x_N, id_N, member_id_N])
    row_N = jnp.arange(id_N.shape[0])
    speaks_N = (advantages.group_min(row_N, member_id_N) == row_N) & (id_N >= 0)  # one row for each member
    group_N = jnp.where(speaks_N, id_N, -1)
    # Both orders list group after group, so that equal positions belong to the same group.
    receives = jnp.lexsort((row_N, group_N))
    gives = jnp.lexsort((jax.random.uniform(key, row_N.shape), group_N))
    dealt_N = jnp.zeros_like(x_N).at[receives].set(x_N[gives])
    return jnp.where(id_N >= 0, advantages.group_sum(jnp.where(speaks_N, dealt_N, 0), member_id_N), x_N)


def trajectory_mean(x_N: Array, trajectory_id_N: Array) -> Array:
    """The mean over each row's trajectory, on that row."""
    return advantages.group_sum(x_N, trajectory_id_N) / advantages.group_sum(jnp.ones_like(x_N), trajectory_id_N)


def score(
    variant: str, table: StepTable, level: str, id_N: Array, *, coverage_credit: str, keys: tuple[Array, Array] | None
) -> tuple[Array, Array]:
    """(score_N float32, rank_N int32): what the fallback compares, and whose spread opens the gate.

    covgpo, always_on  P, the trajectory's coverage; at the step level with coverage_credit='transition', novel_t
    obs_change         the same of changed_t = [o_{t+1} != o_t]
    shuffle            P dealt out anew among the members of each group: trajectories at the trajectory level, else rows
    random             one uniform number per trajectory, at both levels
    shuffle_h          novel_t dealt out anew among all rows of each group, over members and time
    random_h           one uniform number per row
    The last two are averaged over each trajectory at the trajectory level. The rank is always that of the true quantity.
    keys: one for this comparison, and one shared by all comparisons of the update.
    """
    own_credit = level == 'step' and coverage_credit == 'transition'
    if variant == 'obs_change':
        score_N, rank_N, event_N = table.change_rate_N, table.change_rank_N, table.changed_N
    else:
        score_N, rank_N, event_N = table.coverage_N, table.coverage_rank_N, table.novel_N
    if own_credit:
        score_N, rank_N = event_N, jnp.asarray(event_N, jnp.int32)
    score_N, event_N = (jnp.asarray(x_N, jnp.float32) for x_N in (score_N, event_N))
    if variant not in RANDOM:
        return score_N, rank_N

    own_key, shared_key = keys
    row_N = jnp.arange(id_N.shape[0])
    whole = level == 'trajectory'
    match variant:
        case 'shuffle':
            score_N = permute_members(score_N, id_N, table.trajectory_id_N if whole else row_N, own_key)
        case 'random':
            score_N = jax.random.uniform(shared_key, row_N.shape)[table.trajectory_id_N]
        case 'shuffle_h':
            score_N = permute_members(event_N, id_N, row_N, own_key)
        case 'random_h':
            score_N = jax.random.uniform(shared_key, row_N.shape)
    if whole and variant in UNGATED_BY_COVERAGE:
        score_N = trajectory_mean(score_N, table.trajectory_id_N)
    return score_N, rank_N
