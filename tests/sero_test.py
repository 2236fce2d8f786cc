"""SERO inside an update: real rollouts of the packaged policy, real branches, real programs."""

from __future__ import annotations

import dataclasses
import types

import jax
import numpy as np
import pytest

from configs import alfworld_sero
from covsero_jax import batch, learner, metrics, objective, trajectory
from experiments import sero, train, wiring


@pytest.fixture(scope='module')
def parts():
    config = alfworld_sero.get_config('smoke')
    config.env.num_workers, config.env.max_steps, config.rollout.num_groups = 0, 15, 3
    policy = wiring.load_policy(config)
    prompts, mesh = wiring.make_prompts(config, policy.tokenizer), wiring.make_mesh(config)
    logprobs = learner.make_logprob_step(policy.config, wiring.loss_config(config), mesh)
    stop = types.SimpleNamespace(check=lambda *_: None)
    with wiring.make_pool(config, 'train', 12, oracle='planner') as pool:
        groups, _ = train.collect(config, pool, policy, prompts, policy.params, 1, stop)
        with sero.Sero(config, policy, pool, prompts, logprobs, mesh) as guide:
            yield types.SimpleNamespace(config=config, policy=policy, prompts=prompts, mesh=mesh, logprobs=logprobs,
                                        pool=pool, groups=groups, guide=guide)


@pytest.fixture(scope='module')
def guidance(parts):
    parts.guide.start(parts.groups, 1)
    return parts.guide.finish(parts.policy.params, 1, 4, metrics.Timer())


def invalid(branch):
    return dataclasses.replace(branch, invalid='mismatch')


def total(guidance) -> float:
    """What the minibatches add on average, with an NLL of 1 on every row: sum of weights / attempted roots."""
    return guidance.scale * sum(float(micro.weight_B.sum()) for share in guidance.batches for micro in share) / len(guidance.batches)


def rows(guidance):
    """(prompt, reply, weight) of every real row, sorted."""
    out = []
    for micro in (jax.device_get(micro) for share in guidance.batches for micro in share):
        for b in np.flatnonzero(micro.tokens.action_mask_BA.any(axis=1)):
            out.append((micro.tokens.prompt_BP[b][micro.tokens.prompt_mask_BP[b]].tolist(),
                        micro.tokens.action_BA[b][micro.tokens.action_mask_BA[b]].tolist(), float(micro.weight_B[b])))
    return sorted(out)


def test_valid_branches_win_and_are_scored(parts, guidance):
    valid = [branch for branch in guidance.branches if not branch.invalid]
    assert valid and guidance.metrics['oracle/valid'] == len(valid) == guidance.metrics['oracle/gated']
    assert all(branch.oracle_return == parts.config.env.success_reward for branch in valid)
    assert 0 < guidance.metrics['oracle/compatibility'] < 1
    assert guidance.metrics['oracle/weight/00'] == 1.0
    assert guidance.metrics['oracle/effective_depth'] <= guidance.metrics['oracle/branch_length']


def test_compatibility_is_that_of_the_policy_that_rolled_out(parts, guidance):
    """Scored again, row by row, by the learner's own function at the rollout temperature."""
    branch = next(b for b in guidance.branches if len(b.steps) > 1 and not b.invalid)
    r = guidance.branches.index(branch)
    for t, step in enumerate(branch.steps):
        tokens = batch.build_tokens([step.prompt_tokens], [step.reply_tokens], num_rows=1, prompt_len=448, action_len=16)
        logprob_BA, _ = objective.token_logprobs(parts.policy.params, tokens, config=parts.policy.config,
                                               temperature=parts.config.rollout.temperature, chunk=16)
        mean = np.asarray(logprob_BA)[0, : len(step.command_mask)][step.command_mask].mean()
        assert guidance.weighed.log_compat_RT[r, t] == pytest.approx(mean, abs=2e-5)
        assert parts.prompts.decode(step.reply_tokens[step.command_mask]).strip() == step.command


@pytest.mark.parametrize('num_minibatches', [1, 4, 50])
def test_rows_are_shared_out_evenly_and_once(parts, guidance, num_minibatches):
    shared = parts.guide.share_out(guidance.branches, guidance.weighed, 1, num_minibatches)
    sizes = [sum(int(np.asarray(m.tokens.action_mask_BA).any(axis=1).sum()) for m in share) for share in shared.batches]
    assert len(sizes) == num_minibatches and max(sizes) - min(sizes) <= 1
    assert rows(shared) == rows(guidance)
    assert sum(sizes) == sum(len(branch.steps) for branch in guidance.branches if not branch.invalid)
    assert total(shared) == pytest.approx(total(guidance), rel=1e-6)
    by_hand = (guidance.weighed.gate_R[:, None] * guidance.weighed.weight_RT).sum() / len(guidance.branches)
    assert total(shared) == pytest.approx(by_hand, rel=1e-6)


def test_two_attempted_one_valid_is_half(parts, guidance):
    branch = next(b for b in guidance.branches if not b.invalid)

    def term(branches):
        weighed = parts.guide.weigh(parts.policy.params, branches, jax.random.key(0))
        return parts.guide.share_out(branches, weighed, 1, 4)

    alone, pair = term([branch]), term([branch, invalid(branch)])
    assert rows(alone) == rows(pair)
    assert total(pair) == pytest.approx(total(alone) / 2, rel=1e-6) and total(alone) > 0
    lost = dataclasses.replace(branch, root=dataclasses.replace(branch.root, policy_return=branch.oracle_return))
    assert rows(term([lost])) == []  # no gain over the policy: the gate is 0


def test_without_failures_there_is_nothing_to_learn(parts):
    won = [trajectory.Group(g.task_id, tuple(dataclasses.replace(t, success=True) for t in g.trajectories)) for g in parts.groups]
    parts.guide.start(won, 2)
    nothing = parts.guide.finish(parts.policy.params, 2, 3, metrics.Timer())
    assert list(nothing.branches) == [] and rows(nothing) == [] and len(nothing.batches) == 3
    assert nothing.metrics['oracle/roots'] == 0 and np.isfinite(nothing.scale)


def test_the_policy_batch_is_bit_equal_with_and_without(parts):
    """What the learner gets for the policy loss, recorded: rows, advantages, old log-probs."""
    config = parts.config

    def recorded(guide):
        seen = []

        def record(state, minibatch, oracle_batches, scale, counts):
            del counts
            seen.append(jax.device_get(minibatch))
            assert bool(oracle_batches) == bool(guide)
            return state, {'update/skipped': np.float32(0)}

        programs = train.Programs(None, parts.logprobs, record)
        table = train.build_table(config, parts.groups)
        advantage_N = np.asarray(table.step_return_N) + np.arange(len(table.step_return_N))
        if guide:
            guide.start(parts.groups, 1)
        state = types.SimpleNamespace(params=parts.policy.params)
        train.learn(config, programs, parts.mesh, metrics.Timer(), state, None, parts.groups, advantage_N, guide, 1)
        return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(seen)]

    assert recorded(parts.guide) == recorded(None)


@pytest.mark.parametrize('variant, commands', [('root_only', 1), ('short_bridge', 3), ('full_flat', 99)])
def test_controls_learn_their_part_of_each_branch(parts, guidance, variant, commands):
    config = parts.config.copy_and_resolve_references()
    config.sero.variant = variant
    with sero.Sero(config, parts.policy, parts.pool, parts.prompts, parts.logprobs, parts.mesh) as guide:
        weighed = guide.weigh(parts.policy.params, guidance.branches, jax.random.key(0))
        shared = guide.share_out(guidance.branches, weighed, 1, 2)
    wanted = [step.prompt_tokens.tolist() for b in guidance.branches if not b.invalid for step in b.steps[:commands]]
    assert sorted(prompt for prompt, _, _ in rows(shared)) == sorted(wanted)
    assert {weight for _, _, weight in rows(shared)} == {1.0}
    np.testing.assert_array_equal(weighed.reach_RT, guidance.weighed.reach_RT)


def test_same_seed_same_guidance(parts, guidance):
    parts.guide.start(parts.groups, 1)
    again = parts.guide.finish(parts.policy.params, 1, 4, metrics.Timer())
    assert rows(again) == rows(guidance) and again.scale == guidance.scale
    clocks = {'time/oracle_s'}
    assert {k: v for k, v in again.metrics.items() if k not in clocks} == {k: v for k, v in guidance.metrics.items() if k not in clocks}
