"""SERO's weights: how compatible the policy is with each oracle command, and hence how reachable the later ones are.

Everything is detached: weights and gates are constants of the loss. Suffix letters: R oracle branches (roots), T depth
inside a branch, B rows (branch steps), A reply tokens. SERO, 4.3, 4.4, B, F.
"""

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp

Array = jax.Array

VARIANTS = ('sero', 'full_flat', 'root_only', 'short_bridge', 'depth_decay', 'shuffled')


@dataclasses.dataclass(frozen=True)
class WeightConfig:
    """Which of a branch's commands are learned, and how much: `scheme_weights`.

    variant: 'off' | VARIANTS. bridge: commands of 'short_bridge'. decay: delta of 'depth_decay'. match_mass: scale each
    branch's weights to the sum that SERO's would have (the fixed-bank protocol, F.2). Raises ValueError.
    """

    variant: str = 'sero'
    bridge: int = 3
    decay: float = 0.9
    match_mass: bool = False

    def __post_init__(self):
        if self.variant not in ('off', *VARIANTS):
            raise ValueError(f'variant={self.variant!r} is not one of off, {", ".join(VARIANTS)}')
        if self.bridge < 1 or not 0 < self.decay <= 1:
            raise ValueError(f'bridge={self.bridge} must be at least 1 and decay={self.decay} in (0, 1]')


def log_compatibility(logprob_BA: Array, command_mask_BA: Array) -> Array:
    """log c = (1/n) sum_i log pi_old(y_i | x, y_<i) over the n command tokens of a row; float32 [B], at most 0.

    c is the geometric mean probability of a command's tokens, in (0, 1]: a length-normalised compatibility, not the
    probability of the command. Rows without command tokens (padding) give 0, c = 1. SERO, 4.3, B.1.
    """
    chex.assert_rank(logprob_BA, 2)
    chex.assert_equal_shape([logprob_BA, command_mask_BA])
    count_B = jnp.maximum(jnp.sum(command_mask_BA, axis=-1), 1)
    return jnp.sum(jnp.where(command_mask_BA, logprob_BA, 0.0), axis=-1) / count_B


def reachability_weights(log_compat_RT: Array, step_mask_RT: Array) -> Array:
    """w_0 = 1, w_j = prod_{i<j} c_i: how far the policy supports the commands that lead to command j. [R, T], detached.

    An exclusive sum of logarithms, so that a long branch neither underflows early nor loses its ordering; 0 on padding.
    A command does not influence its own weight, only those after it. SERO, 4.3, B.2.
    """
    chex.assert_rank(log_compat_RT, 2)
    chex.assert_equal_shape([log_compat_RT, step_mask_RT])
    log_compat_RT = jnp.where(step_mask_RT, log_compat_RT, 0.0)
    before_RT = jnp.pad(jnp.cumsum(log_compat_RT, axis=1)[:, :-1], ((0, 0), (1, 0)))
    return jax.lax.stop_gradient(jnp.where(step_mask_RT, jnp.exp(before_RT), 0.0))


def branch_gate(oracle_return_R: Array, policy_return_R: Array, valid_R: Array, *, scale: float = 1.0) -> Array:
    """g = valid * max(0, R_oracle - R_pi) / scale over the same remaining horizon. float32 [R], detached. SERO, 4.4.

    scale: the largest possible gain, so that g is in [0, 1]: the reward of success where success is binary.
    """
    chex.assert_rank([oracle_return_R, policy_return_R, valid_R], 1)
    chex.assert_equal_shape([oracle_return_R, policy_return_R, valid_R])
    gain_R = jnp.maximum(oracle_return_R - policy_return_R, 0.0) / scale
    return jax.lax.stop_gradient(jnp.where(valid_R, gain_R, 0.0))


def scheme_weights(reach_RT: Array, step_mask_RT: Array, config: WeightConfig, key: Array) -> Array:
    """The weights along each branch, [R, T], 0 on padding, from SERO's own (`reachability_weights`).

    sero: those. The controls (SERO, F.1, A.1, A.7):
    full_flat: 1 on every command. root_only: 1 on the first. short_bridge: 1 on the first `bridge`.
    depth_decay: decay ** j. shuffled: SERO's, permuted inside each branch; key decides how.
    """
    chex.assert_equal_shape([reach_RT, step_mask_RT])
    depth_RT = jnp.broadcast_to(jnp.arange(reach_RT.shape[1])[None], reach_RT.shape)
    if config.variant == 'sero':
        weight_RT = reach_RT
    elif config.variant == 'full_flat':
        weight_RT = jnp.ones_like(reach_RT)
    elif config.variant == 'root_only':
        weight_RT = (depth_RT < 1).astype(reach_RT.dtype)
    elif config.variant == 'short_bridge':
        weight_RT = (depth_RT < config.bridge).astype(reach_RT.dtype)
    elif config.variant == 'depth_decay':
        weight_RT = config.decay ** depth_RT.astype(reach_RT.dtype)
    elif config.variant == 'shuffled':
        weight_RT = _shuffle(reach_RT, step_mask_RT, key)
    else:
        raise ValueError(f'variant {config.variant!r} has no weights')
    weight_RT = jnp.where(step_mask_RT, weight_RT, 0.0)
    return match_mass(weight_RT, reach_RT) if config.match_mass else weight_RT


def match_mass(weight_RT: Array, reference_RT: Array) -> Array:
    """Each branch's weights times a constant, so that their sum is the reference's: only the place differs. SERO, F.2."""
    chex.assert_equal_shape([weight_RT, reference_RT])
    mass_R1 = jnp.sum(weight_RT, axis=1, keepdims=True)
    wanted_R1 = jnp.sum(reference_RT, axis=1, keepdims=True)
    return jnp.where(mass_R1 > 0, weight_RT * wanted_R1 / jnp.where(mass_R1 > 0, mass_R1, 1.0), 0.0)


def _shuffle(weight_RT: Array, step_mask_RT: Array, key: Array) -> Array:
    """Permute the real entries of each row; padding, which ends the rows, stays where it is."""
    draw_RT = jnp.where(step_mask_RT, jax.random.uniform(key, weight_RT.shape), jnp.inf)
    return jnp.take_along_axis(weight_RT, jnp.argsort(draw_RT, axis=1), axis=1)
