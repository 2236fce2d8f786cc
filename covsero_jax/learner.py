"""The compiled training programs: log-probabilities of actions, and the policy update.

One update of a minibatch adds up, micro-batch by micro-batch, gradients of sums that were divided by the counts of the
*whole* minibatch; then clip, AdamW on float32 master weights. Hence the update does not depend on how the rows are split
into micro-batches, padded, or spread over devices. Each micro-batch has its own (P, A), and one program per (P, A) serves
all; nothing waits for the device until the caller fetches the metrics.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from covsero_jax import model, objective, sharding
from covsero_jax.batch import OracleBatch, PolicyBatch, TokenBatch

Array = jax.Array
PyTree = Any
Metrics = objective.Metrics

OPTIMIZERS = ('adamw', 'adafactor')


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW as published (decay on every parameter). `warmup_steps` optimizer steps of linear rise, then constant.

    For less memory: first_moment 'bfloat16' (2 bytes a parameter less), or name 'adafactor', which keeps row and column
    means of the second moment instead of both moments (8 bytes less; Shazeer and Stern, 1804.04235, section 3; update
    clipping at 1, no relative step size), with the same decay.
    """

    name: str = 'adamw'  # OPTIMIZERS
    first_moment: str = 'float32'
    learning_rate: float = 1e-6
    warmup_steps: int = 0
    weight_decay: float = 0.01
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    max_grad_norm: float = 1.0

    def __post_init__(self):
        if self.name not in OPTIMIZERS:
            raise ValueError(f'optimizer {self.name!r} is not one of {OPTIMIZERS}')


@flax.struct.dataclass
class TrainState:
    """Everything an update changes. `step` counts optimizer steps, the skipped ones included."""

    step: Array  # int32 []
    params: PyTree
    opt_state: PyTree


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    rate = config.learning_rate
    if config.warmup_steps:
        rate = optax.warmup_constant_schedule(0.0, config.learning_rate, config.warmup_steps)
    if config.name == 'adafactor':
        rule = optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0),
                           optax.add_decayed_weights(config.weight_decay), optax.scale_by_learning_rate(rate))
    else:
        rule = optax.adamw(rate, config.b1, config.b2, config.eps, weight_decay=config.weight_decay, mu_dtype=config.first_moment)
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), rule)


def create_state(params: PyTree, tx: optax.GradientTransformation, mesh: Mesh, config: model.QwenConfig) -> TrainState:
    """A state that starts from loaded parameters, as float32 masters. `params` stay valid: the state has its own copy.

    The copy matters: the train step donates the state, and the same `params` usually go on as the reference policy. With
    LoRA, `params` have adapters (`model.lora_params`); the frozen rest is kept in `config.dtype` and has no moments.
    """
    params = sharding.put_params(mesh, params)
    masters = functools.partial(_masters, config, tx)
    return jax.jit(masters, out_shardings=sharding.shardings(mesh, jax.eval_shape(masters, params)))(params)


def init_state(key: Array, config: model.QwenConfig, tx: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """A state with random parameters, born sharded: no device ever holds the whole model."""
    return jax.jit(functools.partial(_init, config, tx), out_shardings=_state_shardings(config, tx, mesh))(key)


def abstract_state(config: model.QwenConfig, tx: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """Shapes, types and places of a state, without its numbers: what the programs below can be lowered with."""
    shapes = jax.eval_shape(functools.partial(_init, config, tx), jax.random.key(0))
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
                        shapes, sharding.shardings(mesh, shapes))


def make_logprob_step(
    config: model.QwenConfig, loss: objective.LossConfig, mesh: Mesh
) -> Callable[[PyTree, TokenBatch], Array]:
    """Compiled (params, tokens [B, ...]) -> log-probs [B, A]: the old and reference log-probs of a micro-batch."""

    def logprob_step(params: PyTree, tokens: TokenBatch) -> Array:
        params = sharding.gather_embeddings(mesh, params)
        tokens = jax.lax.with_sharding_constraint(tokens, sharding.batch_sharding(mesh))
        return objective.token_logprobs(params, tokens, config=config, temperature=loss.temperature, chunk=loss.chunk,
                                        rows=sharding.batch_sharding(mesh))[0]

    return jax.jit(logprob_step, out_shardings=sharding.batch_sharding(mesh))


class Sums(NamedTuple):
    """What a minibatch adds up over its micro-batches, on the devices."""

    grads: PyTree  # float32, sharded as the parameters
    metrics: Metrics


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """(state, minibatch) -> (state, metrics); made by `make_train_step`. The old state's buffers are reused: drop it.

    oracle: SERO's term, beside the policy loss and normalised by itself: this minibatch adds
    oracle_coef * oracle_scale * sum_b weight_b NLL_b over the rows of all `oracle` batches. With oracle_scale = M / N for
    M minibatches and N attempted roots, the mean over the minibatches is oracle_coef * L_O (SERO, 4.4). Without batches
    the very same programs run as without SERO.

    counts: `objective.counts_of` the minibatch, for callers who have it on the host (several hosts cannot fetch it).

    A gradient that is not finite changes neither parameters nor optimizer, and is counted in `update/skipped`.
    ValueError when a micro-batch lacks a column that the loss needs.
    """

    config: model.QwenConfig
    loss: objective.LossConfig
    start: Any  # compiled () -> an empty Sums
    accumulate: Any  # compiled (params, Sums, micro-batch, counts) -> Sums, one program per (P, A)
    accumulate_oracle: Any  # compiled (params, Sums, OracleBatch, scale) -> Sums, likewise
    apply: Any  # compiled (state of what learns, Sums) -> (state, metrics)

    def __call__(
        self,
        state: TrainState,
        minibatch: Sequence[PolicyBatch],
        oracle: Sequence[OracleBatch] = (),
        oracle_scale: float = 1.0,
        counts: np.ndarray | None = None,
    ) -> tuple[TrainState, Metrics]:
        for micro in minibatch:
            objective.check_columns(micro, self.loss)
        counts = objective.counts_of(minibatch, self.loss) if counts is None else counts
        sums = self.start()
        for micro in minibatch:
            sums = self.accumulate(state.params, sums, micro, counts)
        for micro in oracle:
            sums = self.accumulate_oracle(state.params, sums, micro, np.float32(oracle_scale))
        learning, frozen = model.split_params(state.params, self.config)
        state, metrics = self.apply(state.replace(params=learning), sums)
        return state.replace(params=model.join_params(state.params, frozen)), metrics

    def num_compiled(self) -> int:
        return sum(program._cache_size() for program in (
            self.start, self.accumulate, self.accumulate_oracle, self.apply))


def make_train_step(
    config: model.QwenConfig, loss: objective.LossConfig, tx: optax.GradientTransformation, mesh: Mesh
) -> TrainStep:
    """The programs of one optimizer step, compiled at their first use."""
    state_shardings = _state_shardings(config, tx, mesh)
    replicated = sharding.replicated(mesh)
    learning_shardings = model.split_params(state_shardings.params, config)[0]
    sums_shardings = Sums(learning_shardings, replicated)

    def start() -> Sums:
        params = model.split_params(jax.eval_shape(functools.partial(_init, config, tx), jax.random.key(0)).params, config)[0]
        return Sums(jax.tree.map(jnp.zeros_like, params), {name: jnp.zeros(()) for name in objective.METRICS})

    def adding(term: Callable[..., tuple[Array, Metrics]]) -> Callable:
        """Compiled (params, Sums, micro-batch, its divisor or factor) -> Sums with the gradient of `term` added."""

        def accumulate(params: PyTree, sums: Sums, micro: PyTree, factor: Array) -> Sums:
            micro = jax.lax.with_sharding_constraint(micro, sharding.batch_sharding(mesh))

            learning, frozen = model.split_params(params, config)

            def share(learning: PyTree) -> tuple[Array, Metrics]:
                params = sharding.gather_embeddings(mesh, model.join_params(learning, frozen))
                return term(params, micro, factor, config=config, loss=loss, rows=sharding.batch_sharding(mesh))

            grads, metrics = jax.grad(share, has_aux=True)(learning)
            grads = jax.lax.with_sharding_constraint(grads, learning_shardings)
            added = {
                name: jnp.maximum(sums.metrics[name], value) if name.endswith('_max') else sums.metrics[name] + value
                for name, value in metrics.items()
            }
            return Sums(jax.tree.map(jnp.add, sums.grads, grads), sums.metrics | added)

        return jax.jit(accumulate, donate_argnums=1, out_shardings=sums_shardings)

    def apply(state: TrainState, sums: Sums) -> tuple[TrainState, Metrics]:
        grads = sums.grads
        grad_norm = jnp.sqrt(sum(jnp.sum(jnp.square(grad)) for grad in jax.tree.leaves(grads)))
        finite = jnp.isfinite(grad_norm)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        new = (optax.apply_updates(state.params, updates), opt_state)
        params, opt_state = jax.tree.map(functools.partial(jnp.where, finite), new, (state.params, state.opt_state))
        metrics = sums.metrics | {'update/grad_norm': grad_norm, 'update/skipped': 1.0 - finite.astype(jnp.float32)}
        return TrainState(step=state.step + 1, params=params, opt_state=opt_state), metrics

    return TrainStep(
        config=config,
        loss=loss,
        start=jax.jit(start, out_shardings=sums_shardings),
        accumulate=adding(objective.policy_objective),
        accumulate_oracle=adding(objective.oracle_objective),
        apply=jax.jit(apply, donate_argnums=0, out_shardings=(state_shardings.replace(params=learning_shardings), replicated)),
    )


def _init(config: model.QwenConfig, tx: optax.GradientTransformation, key: Array) -> TrainState:
    return _masters(config, tx, model.init_params(dataclasses.replace(config, param_dtype='float32'), key))


def _masters(config: model.QwenConfig, tx: optax.GradientTransformation, params: PyTree) -> TrainState:
    learning, frozen = model.split_params(params, config)
    learning = jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), learning)
    params = model.join_params(learning, model.round_matrices(frozen, config.dtype))
    return TrainState(jnp.zeros((), jnp.int32), params, tx.init(learning))


def _state_shardings(config: model.QwenConfig, tx: optax.GradientTransformation, mesh: Mesh) -> PyTree:
    return sharding.shardings(mesh, jax.eval_shape(functools.partial(_init, config, tx), jax.random.key(0)))
