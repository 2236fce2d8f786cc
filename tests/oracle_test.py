"""Oracle branches: restored exactly, played in the real environment, and invalid, never fatal, when something goes wrong."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json

import faulty_oracles
import numpy as np
import pytest
import scripted

from covsero_jax import oracle, rollout, workers
from covsero_jax.envs import base, keydoor
from covsero_jax.trajectory import Group

MAX_STEPS = 12
MAKE_ENV = functools.partial(keydoor.KeyDoorEnv, oracle=True)
collect = functools.partial(oracle.collect_branches, prompts=scripted.JsonPrompts(), max_target=99)


def make_pool(make_env=MAKE_ENV, *, num_envs=12, num_workers=0, timeout_s=60.0):
    return workers.WorkerPool(make_env, num_envs=num_envs, num_workers=num_workers, timeout_s=timeout_s)


def play(pool, *, seed=0, tasks=range(6), group_size=4, policy=None) -> list[Group]:
    return rollout.collect_groups(pool, policy or scripted.RandomPolicy(seed), scripted.JsonPrompts(), tasks,
                                  group_size=group_size, max_steps=MAX_STEPS, keep_snapshots=True)


def roots_of(groups, seed=0, **options):
    return oracle.sample_roots(groups, np.random.default_rng(seed), max_steps=MAX_STEPS, **options)


def all_roots(groups):
    """Every decision point of every trajectory, failed or not."""
    return [oracle.make_root(groups, g, k, t, max_steps=MAX_STEPS) for g, group in enumerate(groups)
            for k, trajectory in enumerate(group.trajectories) for t in range(len(trajectory.steps))]


def plain(branches):
    """Branches as built-in values, without the snapshots of their roots."""
    def value(x):
        if dataclasses.is_dataclass(x):
            return {name: value(v) for name, v in vars(x).items() if name != 'snapshot'}
        return [value(v) for v in x] if isinstance(x, (list, tuple)) else x.tolist() if isinstance(x, np.ndarray) else x

    return value(list(branches))


@pytest.fixture(scope='module')
def pool():
    with make_pool() as pool:
        yield pool


@pytest.fixture(scope='module')
def groups(pool):
    return play(pool)


# ---- roots ------------------------------------------------------------------------------------------------------------


def test_one_root_for_each_group_with_a_failure(groups):
    failing = [g for g, group in enumerate(groups) if not all(t.success for t in group.trajectories)]
    assert 0 < len(failing)
    roots = roots_of(groups)
    assert [root.group for root in roots] == failing
    assert all(not groups[root.group].trajectories[root.trajectory].success for root in roots)
    winners = [Group(g.task_id, tuple(dataclasses.replace(t, success=True) for t in g.trajectories)) for g in groups]
    assert roots_of(winners) == []
    assert [root.group for root in roots_of([winners[0], groups[failing[0]]])] == [1]


def test_roots_are_uniform_over_failed_trajectories_then_over_their_steps(groups):
    """Two trajectories of different length: each has half of the roots, spread evenly over its decision points."""
    lengths = (2, 6)
    trajectory = max((t for group in groups for t in group.trajectories if not t.success), key=lambda t: len(t.steps))
    group = Group(trajectory.task_id, tuple(dataclasses.replace(trajectory, steps=trajectory.steps[:n]) for n in lengths))
    count = collections.Counter((r.trajectory, r.step) for seed in range(3000) for r in roots_of([group], seed))
    for member, n in enumerate(lengths):
        for step in range(n):
            expected = 3000 / 2 / n
            assert abs(count[member, step] - expected) < 5 * np.sqrt(expected)
    assert sum(count.values()) == 3000


def test_a_root_is_what_the_policy_saw(groups):
    for root in all_roots(groups):
        steps = groups[root.group].trajectories[root.trajectory].steps
        here = steps[root.step]
        assert root.prompt_tokens is here.prompt_tokens and root.observation == here.observation
        assert root.commands == tuple(s.command for s in steps[:root.step]) == tuple(done for _, done in root.history)
        assert root.steps_left == MAX_STEPS - root.step
        assert root.policy_return == sum(s.reward for s in steps[root.step:])


def test_same_seed_same_roots(groups):
    assert plain(roots_of(groups, 3)) == plain(roots_of(groups, 3)) != plain(roots_of(groups, 4))


def test_roots_leave_the_oracle_the_steps_it_needs(groups):
    needed = [MAX_STEPS - 2] * 10
    drawn = [root for seed in range(30) for root in roots_of(groups, seed, needed=needed)]
    assert {root.step for root in drawn} == {0, 1, 2} and min(root.steps_left for root in drawn) >= needed[0]
    impossible = [root for seed in range(5) for root in roots_of(groups, seed, needed=[MAX_STEPS + 5] * 10)]
    assert {root.step for root in impossible} == {0}  # none is in time; the earliest is the best chance
    assert [r.step for r in roots_of(groups, 1, needed=[1] * 10)] == [r.step for r in roots_of(groups, 1)]  # not binding


def test_prioritised_roots_prefer_types_that_were_rare(groups):
    failed = [Group(g.task_id, tuple(dataclasses.replace(t, success=False) for t in g.trajectories)) for g in groups]
    types = keydoor.KeyDoorEnv.task_types
    recent = [t for t in types for _ in range(50)]
    recent = [t for t in recent if t != 'passage']  # six groups, two of each type; passage was rare

    def share(**options):
        drawn = [types[root.task_id] for seed in range(200) for root in roots_of(failed, seed, task_types=types, **options)]
        assert len(drawn) == 200 * len(failed)
        return drawn.count('passage') / len(drawn)

    assert share() == share(recent=recent) == pytest.approx(1 / 3)  # uniform does not look
    assert share(sampling='prioritised', recent=recent) > 0.9
    assert share(sampling='prioritised') == pytest.approx(1 / 3, abs=0.05)
    with pytest.raises(ValueError, match='uniform, prioritised'):
        roots_of(groups, sampling='by age')


# ---- restoration and continuation -------------------------------------------------------------------------------------


@pytest.mark.parametrize('restoration', oracle.RESTORATION)
def test_the_oracle_wins_from_every_state_that_can_be_won(pool, groups, restoration):
    roots = all_roots(groups)
    assert len(roots) > 100
    for branch in collect(pool, roots=roots, restoration=restoration):
        if not branch.invalid:
            assert branch.oracle_return == 1.0 and 1 <= len(branch.steps) <= branch.root.steps_left
        else:
            assert branch.invalid == 'budget' and len(branch.steps) == branch.root.steps_left


def test_copy_and_replay_agree(pool, groups):
    roots = all_roots(groups)
    assert plain(collect(pool, roots=roots, restoration='copy')) == plain(collect(pool, roots=roots, restoration='replay'))


def test_a_branch_shows_what_the_policy_would_have_seen(pool, groups):
    """A policy that gives the prefix's and then the oracle's commands gets the branch's prompts, and wins."""
    branches = [b for b in collect(pool, roots=roots_of(groups)) if not b.invalid]
    assert branches
    for branch in branches:
        commands = [*branch.root.commands, *(step.command for step in branch.steps)]
        (group,) = play(pool, tasks=[branch.root.task_id], group_size=2, policy=scripted.scripted_policy({0: commands}))
        trajectory = group.trajectories[0]
        assert trajectory.success
        for step, target in zip(trajectory.steps[branch.root.step:], branch.steps, strict=True):
            assert step.prompt_tokens.tolist() == target.prompt_tokens.tolist()
            assert (step.observation, step.command, step.reward) == (target.observation, target.command, target.reward)
        assert branch.steps[0].prompt_tokens.tolist() == branch.root.prompt_tokens.tolist()


def test_rollouts_are_the_same_after_branches_and_with_snapshots(pool, groups):
    collect(pool, roots=all_roots(groups)[:30])
    with make_pool(keydoor.KeyDoorEnv) as other:
        without = rollout.collect_groups(other, scripted.RandomPolicy(0), scripted.JsonPrompts(), range(6), group_size=4,
                                         max_steps=MAX_STEPS)
    assert scripted.plain(without) == scripted.plain([_without_snapshots(group) for group in play(pool)])


def _without_snapshots(group):
    return Group(group.task_id, tuple(dataclasses.replace(t, steps=tuple(
        dataclasses.replace(step, snapshot=None) for step in t.steps)) for t in group.trajectories))


@pytest.mark.parametrize('num_envs, num_workers', [(1, 0), (5, 2), (12, 3)])
def test_branches_do_not_depend_on_slots_and_workers(pool, groups, num_envs, num_workers):
    roots = all_roots(groups)[::5]
    with make_pool(num_envs=num_envs, num_workers=num_workers) as other:
        assert plain(collect(other, roots=roots)) == plain(collect(pool, roots=roots))


def test_targets_hold_the_command_and_its_mask(pool, groups):
    for branch in collect(pool, roots=roots_of(groups)):
        for step in branch.steps:
            assert scripted.decode(step.reply_tokens[step.command_mask]) == step.command
            assert json.loads(scripted.decode(step.prompt_tokens))[2] == step.observation


def test_a_target_that_does_not_fit_is_invalid(pool, groups):
    branches = collect(pool, roots=roots_of(groups), max_target=3)
    assert {branch.invalid for branch in branches} == {'too long'} and '3' in branches[0].detail


def test_without_an_oracle_nothing_is_collected(groups):
    with make_pool(keydoor.KeyDoorEnv) as blind, pytest.raises(base.OracleForbidden):
        collect(blind, roots=roots_of(groups))


def test_copying_needs_snapshots(pool, groups):
    roots = [dataclasses.replace(root, snapshot=None) for root in roots_of(groups)]
    with pytest.raises(ValueError, match='keep_snapshots'):
        collect(pool, roots=roots)
    assert plain(collect(pool, roots=roots, restoration='replay')) == plain(collect(pool, roots=roots_of(groups)))
    with pytest.raises(ValueError, match='copy, replay'):
        collect(pool, roots=roots, restoration='guess')


# ---- what goes wrong is counted, and does not spread ------------------------------------------------------------------


@functools.cache
def sick_and_well():
    """Roots two steps into every task, the sick one included, and their branches in a healthy pool."""
    with make_pool() as pool:
        groups = play(pool, policy=scripted.scripted_policy({g: ['look'] for g in range(6)}), group_size=2)
        roots = [oracle.make_root(groups, g, 0, 2, max_steps=MAX_STEPS) for g in range(6)]
        return roots, collect(pool, roots=roots)


def check_only_the_sick_one_is_invalid(branches, reason, detail=''):
    sick = keydoor.KeyDoorEnv.task_names.index(faulty_oracles.SICK)
    _, well = sick_and_well()
    assert branches[sick].invalid == reason and detail in branches[sick].detail
    for task, branch in enumerate(branches):
        if task != sick:
            assert plain([branch]) == plain([well[task]]) and not branch.invalid
    counts = oracle.branch_metrics(branches)
    assert (counts['oracle/roots'], counts['oracle/valid'], counts[f'oracle/invalid/{reason.replace(" ", "_")}']) == (6, 5, 1)


@pytest.mark.parametrize('num_workers', [0, 2])
@pytest.mark.parametrize('mischief, reason, detail', [
    ('raises', 'oracle failed', 'ArithmeticError'),
    ('leaves', 'oracle failed', 'had enough'),
    ('loops', 'budget', 'remaining 10'),
    ('forbidden_word', 'inadmissible', 'open sesame'),
    ('gives_up', 'no plan', ''),
    ('jumps', 'budget', 'unsolved'),
])
def test_a_sick_oracle_costs_one_branch(mischief, reason, detail, num_workers):
    make_env = functools.partial(faulty_oracles.OracleKeyDoor, getattr(faulty_oracles, mischief))
    with make_pool(make_env, num_envs=6, num_workers=num_workers) as pool:
        check_only_the_sick_one_is_invalid(collect(pool, roots=sick_and_well()[0]), reason, detail)


@pytest.mark.parametrize('mischief, cause', [('hangs', 'time limit'), ('dies', 'SIGKILL')])
def test_an_oracle_that_takes_its_worker_along_costs_one_branch(mischief, cause):
    make_env = functools.partial(faulty_oracles.OracleKeyDoor, getattr(faulty_oracles, mischief))
    with make_pool(make_env, num_envs=6, num_workers=2, timeout_s=2.0) as pool:
        check_only_the_sick_one_is_invalid(collect(pool, roots=sick_and_well()[0]), 'oracle failed', cause)
        assert len(play(pool)) == 6  # the pool goes on


@pytest.mark.parametrize('restoration', oracle.RESTORATION)
@pytest.mark.parametrize('what, reason', [
    ('text', 'mismatch'), ('admissible', 'mismatch'), ('task', 'mismatch'), ('done', 'mismatch'), ('raises', 'not restored')])
def test_a_planted_mismatch_is_invalid_and_counted(what, reason, restoration):
    sick = keydoor.KeyDoorEnv.task_names.index(faulty_oracles.SICK)
    roots = sick_and_well()[0]
    with make_pool(functools.partial(faulty_oracles.Forgetful, what), num_envs=6) as pool:
        pool.reset([None] * sick + [sick] + [None] * (5 - sick))  # the first episode; the restored one is the second
        check_only_the_sick_one_is_invalid(collect(pool, roots=roots, restoration=restoration), reason)
