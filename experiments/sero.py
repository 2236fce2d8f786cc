"""SERO inside a run: oracle branches while the device is busy, their weights, and their share of every optimizer step.

`start` after the rollouts, `finish` when the old log-probabilities are there and the parameters are still the old ones.
"""

from __future__ import annotations

import concurrent.futures
import functools
import pathlib
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import jax
import numpy as np
from ml_collections import ConfigDict

from covsero_jax import bank, batch, hosts, metrics, oracle, reachability, rollout, sharding, workers
from covsero_jax.trajectory import Group, OracleBranch
from experiments import wiring

RECENT_ROOTS = 256  # how far back prioritised sampling looks
PLOTTED_DEPTHS = 12  # the Figure 4 curve: mean weight at depths 0 .. 11


class Weighed(NamedTuple):
    """Branches with their compatibilities and weights, [R, T] on the host; R and T are padded."""

    log_compat_RT: np.ndarray
    step_mask_RT: np.ndarray  # False on all steps of an invalid branch
    reach_RT: np.ndarray  # SERO's own weights, whatever the variant
    weight_RT: np.ndarray  # the variant's, without the gate
    gate_R: np.ndarray


class Guidance(NamedTuple):
    """The oracle's part of an update."""

    batches: Sequence[Sequence[batch.OracleBatch]]  # one sequence for each minibatch
    scale: float  # M / attempted roots
    branches: Sequence[OracleBranch]
    weighed: Weighed | None
    metrics: dict[str, float]


class Sero:
    """The oracle of a run. logprobs: the compiled (params, tokens) -> log-probs of `learner.make_logprob_step`."""

    def __init__(self, config: ConfigDict, policy: wiring.Policy, pool: workers.WorkerPool, prompts, logprobs, mesh):
        self._config, self._pool, self._prompts, self._logprobs, self._mesh = config, pool, prompts, logprobs, mesh
        self._bank = None
        if config.sero.bank:
            about = wiring.bank_identity(config, policy, pool.task_names)
            self._bank, _ = bank.read_bank(pathlib.Path(config.sero.bank), about)
        self._weigh = jax.jit(functools.partial(_weigh, config=wiring.weight_config(config), scale=config.env.success_reward))
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        self.recent: list[str] = []  # task types of the last roots, oldest first

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception) -> None:
        self._thread.shutdown()  # the pool must not be closed under its feet

    def start(self, collected: Sequence[Group], update: int) -> None:
        """Choose the update's roots and set the oracle to work; the pool belongs to it until `finish`."""
        if self._bank is not None:
            drawn = rollout.task_schedule(self._config.seed, update, num_tasks=len(self._bank),
                                          num_groups=min(self._config.rollout.num_groups, len(self._bank)))
            self._working = self._thread.submit(lambda: ([self._bank[i] for i in drawn], 0.0))
            return
        rng = np.random.default_rng([self._config.seed, update, wiring.PURPOSES['roots']])
        roots = oracle.sample_roots(
            collected, rng, max_steps=self._config.env.max_steps, sampling=self._config.sero.root_sampling,
            task_types=self._pool.task_types, recent=self.recent,
            needed=wiring.needed_steps(self._config, self._pool))
        self._mine, self._num_roots = hosts.my_roots(roots), len(roots)
        self._working = self._thread.submit(self._collect, [roots[i] for i in self._mine])

    def _collect(self, roots) -> tuple[list[OracleBranch], float]:
        began = time.perf_counter()
        if not roots:
            return [], 0.0
        branches = oracle.collect_branches(
            self._pool, self._prompts, roots, restoration=self._config.sero.restoration, think=self._config.sero.think,
            max_target=self._config.prompt.max_action)
        return branches, time.perf_counter() - began

    def finish(self, params: Any, update: int, num_minibatches: int, timer: metrics.Timer) -> Guidance:
        """Score the branches with the parameters that made the rollouts, weigh them, and share them out evenly."""
        with timer('oracle_wait'):
            branches, seconds = self._working.result()
            if self._bank is None:
                branches = hosts.merge_branches(self._mine, branches, self._num_roots)
        types = [self._pool.task_types[branch.root.task_id] for branch in branches]
        self.recent = [*self.recent, *types][-RECENT_ROOTS:]  # not in `start`: an update may be given up in between
        with timer('oracle_score'):
            weighed = self.weigh(params, branches, wiring.draw_key(self._config.seed, update, 'shuffle'))
        counts = oracle.branch_metrics(branches) | {'oracle/replayed_steps': 0.0}
        if self._bank is not None:
            counts['oracle/steps'] = 0.0  # what is read from a file costs no transitions
        elif self._config.sero.restoration == 'replay':
            counts['oracle/replayed_steps'] = float(sum(len(branch.root.commands) for branch in branches))
        measured = counts | weight_metrics(weighed) | {'time/oracle_s': seconds}
        return self.share_out(branches, weighed, update, num_minibatches)._replace(metrics=measured)

    def share_out(self, branches: Sequence[OracleBranch], weighed: Weighed, update: int, num_minibatches: int) -> Guidance:
        """Spread the rows that weigh something evenly, in random order, over the M minibatches.

        Each adds (M / attempted roots) * its sum, so that the mean over the minibatches is L_O (SERO, 4.4).
        """
        place_Q2 = np.argwhere(weighed.gate_R[:, None] * weighed.weight_RT > 0)
        rng = np.random.default_rng([self._config.seed, update, wiring.PURPOSES['oracle_rows']])
        batches = []
        for share in np.array_split(rng.permutation(place_Q2), num_minibatches):
            weight_Q = np.array([weighed.gate_R[r] * weighed.weight_RT[r, t] for r, t in share], np.float32)
            built = self._build([branches[r].steps[t] for r, t in share], weight_Q)
            batches.append([sharding.put_batch(self._mesh, micro) for _, micro in built])
        return Guidance(batches, num_minibatches / max(len(branches), 1), branches, weighed, metrics={})

    def weigh(self, params: Any, branches: Sequence[OracleBranch], key: jax.Array) -> Weighed:
        """Compatibilities under `params`, and the weights that follow from them. Invalid branches have gate 0."""
        unit = self._config.rollout.num_groups
        shape = (unit * max(1, -(-len(branches) // unit)), self._config.env.max_steps)  # few shapes: it is compiled
        log_compat_RT, step_mask_RT = np.zeros(shape, np.float32), np.zeros(shape, bool)
        oracle_return_R, policy_return_R = np.zeros((2, shape[0]), np.float32)
        valid_R = np.zeros(shape[0], bool)
        for r, branch in enumerate(branches):
            step_mask_RT[r, : len(branch.steps)] = not branch.invalid
            oracle_return_R[r], policy_return_R[r] = branch.oracle_return, branch.root.policy_return
            valid_R[r] = not branch.invalid
        place_Q2 = np.argwhere(step_mask_RT)
        steps = [branches[r].steps[t] for r, t in place_Q2]
        for rows, micro in self._build(steps, np.zeros(len(steps))):
            logprob_BA = hosts.fetch(self._logprobs(params, sharding.put_batch(self._mesh, micro.tokens)))
            log_compat_B = reachability.log_compatibility(logprob_BA, micro.command_mask_BA)
            log_compat_RT[tuple(place_Q2[rows].T)] = np.asarray(log_compat_B)[: len(rows)]
        reach_RT, weight_RT, gate_R = jax.device_get(
            self._weigh(log_compat_RT, step_mask_RT, oracle_return_R, policy_return_R, valid_R, key))
        return Weighed(log_compat_RT, step_mask_RT, reach_RT, weight_RT, gate_R)

    def _build(self, steps, weight_B: np.ndarray):
        return batch.build_oracle_batches(
            steps, weight_B, micro_batch=self._config.learner.micro_batch, prompt_buckets=self._config.prompt.buckets,
            action_buckets=(self._config.prompt.max_action,))


def _weigh(log_compat_RT, step_mask_RT, oracle_return_R, policy_return_R, valid_R, key, *, config, scale):
    reach_RT = reachability.reachability_weights(log_compat_RT, step_mask_RT)
    weight_RT = reachability.scheme_weights(reach_RT, step_mask_RT, config, key)
    return reach_RT, weight_RT, reachability.branch_gate(oracle_return_R, policy_return_R, valid_R, scale=scale)


def weight_metrics(weighed: Weighed) -> dict[str, float]:
    """Over gated branches: SERO's mean weight by depth (Figure 4), effective depth sum_j w_j, compatibility, mass."""
    gated_R = weighed.gate_R > 0
    mask_RT = weighed.step_mask_RT[gated_R]
    out = {'oracle/gated': float(gated_R.sum())}
    if not mask_RT.any():
        return out
    reach_RT = weighed.reach_RT[gated_R]
    out |= {
        'oracle/branch_length': mask_RT.sum(axis=1).mean(),
        'oracle/effective_depth': reach_RT.sum(axis=1).mean(),
        'oracle/mass': weighed.weight_RT[gated_R].sum(axis=1).mean(),
        'oracle/compatibility': np.exp(weighed.log_compat_RT[gated_R][mask_RT]).mean(),
    }
    for depth in range(min(PLOTTED_DEPTHS, mask_RT.shape[1])):
        if mask_RT[:, depth].any():
            out[f'oracle/weight/{depth:02d}'] = reach_RT[:, depth][mask_RT[:, depth]].mean()
    return {name: float(value) for name, value in out.items()}
