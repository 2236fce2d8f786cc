"""Rollouts: what is recorded is what happened, whoever plays it and wherever."""

import functools
import json
import os
import signal

import numpy as np
import pytest
import scripted
from hypothesis import given, settings
from hypothesis import strategies as st

from covsero_jax import rollout, workers
from covsero_jax.envs import base, keydoor

TASK_IDS = [0, 1, 2, 3, 4, 5, 1]
NEAR, SHORT = keydoor.KeyDoorEnv.task_names.index('one_door/near'), keydoor.KeyDoorEnv.task_names.index('passage/short')


def collect(make_env=keydoor.KeyDoorEnv, policy=None, *, num_envs=8, num_workers=0, timeout_s=60, **arguments):
    policy = scripted.RandomPolicy() if policy is None else policy
    arguments = {'task_ids': TASK_IDS, 'group_size': 3, 'max_steps': 7} | arguments
    with workers.WorkerPool(make_env, num_envs=num_envs, num_workers=num_workers, timeout_s=timeout_s) as pool:
        return rollout.collect_groups(pool, policy, scripted.JsonPrompts(), **arguments)


@functools.cache
def undisturbed() -> list:
    groups = scripted.plain(collect())
    stop_reasons = {trajectory[3] for trajectory in groups}
    assert stop_reasons == {'success', 'failure', 'max_steps'}  # the example has all kinds of episodes
    return groups


def test_scripted_policy_transcript():
    policy = scripted.scripted_policy({0: ['do take red key', 'unlock red door...', 'do fly', 'do go east']})
    (group,) = collect(policy=policy, task_ids=[NEAR], group_size=1, num_envs=1)
    (trajectory,) = group.trajectories
    observations = [
        'You are in room 0. A red key lies here. To the east is a locked red door. You hold: nothing.',
        'You are in room 0. To the east is a locked red door. You hold: red.',
        'You are in room 0. To the east is an open red door. You hold: red.',
        'Nothing happens.',
        'You are in room 1. This is the last room.',
    ]
    assert [step.observation for step in trajectory.steps] == observations[:-1]
    assert [step.next_observation for step in trajectory.steps] == observations[1:]
    assert [step.command for step in trajectory.steps] == ['take red key', 'unlock red door', 'fly', 'go east']
    assert [step.parsed for step in trajectory.steps] == [True, False, True, True]
    assert [step.admissible_command for step in trajectory.steps] == [True, True, False, True]
    assert [step.reward for step in trajectory.steps] == [0.0, 0.0, 0.0, 1.0]
    assert (trajectory.success, trajectory.stop_reason, trajectory.episode_return) == (True, 'success', 1.0)
    assert (group.task_id, trajectory.task_id) == (NEAR, NEAR)
    # the tokens are those sampled, although the parsed command would be written differently
    assert [scripted.decode(step.action_tokens) for step in trajectory.steps][1] == 'unlock red door...'
    # the prompt gets the task, the whole history, the present observation and the step number
    task, history, text, admissible, number = json.loads(scripted.decode(trajectory.steps[2].prompt_tokens))
    assert (task, text, number) == ('Reach the last room.', observations[2], 2)
    assert history == [[observations[0], 'take red key'], [observations[1], 'unlock red door']]
    assert tuple(admissible) == trajectory.steps[2].admissible == ('climb out of the window', 'go east', 'look')


def test_restored_root_prompt_is_identical():
    env, prompts = keydoor.KeyDoorEnv(), scripted.JsonPrompts()
    for group in collect():
        for trajectory in group.trajectories:
            for t, step in enumerate(trajectory.steps):
                root = base.replay(env, group.task_id, [past.command for past in trajectory.steps[:t]])
                history = [(past.observation, past.command) for past in trajectory.steps[:t]]
                assert (root.text, root.admissible) == (step.observation, step.admissible)
                np.testing.assert_array_equal(prompts.build(root.task, history, root, t), step.prompt_tokens)


def test_three_ways_to_stop():
    scripts = {0: ['do go east'], 1: ['do look', 'do climb out of the window'], 2: ['do look']}
    groups = collect(policy=scripted.scripted_policy(scripts), task_ids=[SHORT] * 3, group_size=2)
    for group, stop_reason, success, length in zip(
        groups, ['success', 'failure', 'max_steps'], [True, False, False], [2, 2, 7], strict=True
    ):
        for trajectory in group.trajectories:
            assert (trajectory.stop_reason, trajectory.success) == (stop_reason, success)
            assert len(trajectory.steps) == length


def collect_until_contrast(winners, num_batches):
    """Batches of two groups of two episodes; those of `winners`, pairs (group, member), walk out, the others look."""

    def policy(prompts, row_ids):
        replies = ['do go east' if (group, member) in winners else 'do look' for group, member, _ in row_ids.tolist()]
        return scripted.scripted_policy(dict(enumerate([reply] for reply in replies)))(
            prompts, np.array([(i, 0, 0) for i in range(len(replies))]))

    with workers.WorkerPool(keydoor.KeyDoorEnv, num_envs=4, num_workers=0, timeout_s=60) as pool:
        kept, played = rollout.collect_until_contrast(
            pool, policy, scripted.JsonPrompts(), [[SHORT, SHORT]] * num_batches, group_size=2, max_steps=7)
    return [next(i for i, group in enumerate(played) if group is one) for one in kept], played


def successes(groups):
    return [[trajectory.success for trajectory in group.trajectories] for group in groups]


def test_dynamic_sampling_keeps_groups_with_contrast_until_there_are_enough():
    """Groups 0 (all won) and 1 (all lost) have none; 2 and 3 have, and two are wanted: no third batch."""
    kept, played = collect_until_contrast({(0, 0), (0, 1), (2, 0), (3, 1)}, num_batches=3)
    assert successes(played) == [[True, True], [False, False], [True, False], [False, True]]
    assert kept == [2, 3]


def test_dynamic_sampling_keeps_the_surplus():
    kept, played = collect_until_contrast({(1, 0), (2, 0), (3, 0)}, num_batches=3)
    assert len(played) == 4 and kept == [1, 2, 3]


def test_dynamic_sampling_gives_up_with_a_message_and_keeps_the_last_batch_whole(caplog):
    kept, played = collect_until_contrast({(1, 0)}, num_batches=3)
    assert len(played) == 6 and kept == [1, 4, 5]
    assert 'only 1 of 6 groups have contrast after the allowed 3 batches' in caplog.text


def test_one_batch_is_plain_collection(caplog):
    kept, played = collect_until_contrast({(0, 0)}, num_batches=1)
    assert kept == [0, 1] and successes(played) == [[True, False], [False, False]]
    assert not caplog.text


def test_finished_episodes_are_never_sent_to_the_policy():
    policy = scripted.RandomPolicy()
    groups = collect(policy=policy)
    steps = [
        (g, m, s)
        for g, group in enumerate(groups)
        for m, trajectory in enumerate(group.trajectories)
        for s in range(len(trajectory.steps))
    ]
    assert sorted(policy.rows) == steps  # each step was asked for exactly once, and nothing else


def test_free_slots_are_used_at_once():
    asked = []

    def policy(prompts, row_ids):
        asked.append(len(prompts))
        return scripted.RandomPolicy()(prompts, row_ids)

    groups = collect(policy=policy, num_envs=4)
    rows = sum(len(trajectory.steps) for group in groups for trajectory in group.trajectories)
    assert sum(asked) == rows
    assert all(n == 4 for n in asked[: len(asked) // 2])  # no slot idles while episodes wait


@pytest.mark.parametrize(('num_envs', 'num_workers'), [(1, 0), (5, 0), (21, 0), (8, 1), (8, 4), (21, 4)])
def test_groups_do_not_depend_on_slots_or_workers(num_envs, num_workers):
    assert scripted.plain(collect(num_envs=num_envs, num_workers=num_workers)) == undisturbed()


@pytest.mark.parametrize('fault', ['die', 'hang', 'crash'])
def test_a_failing_worker_does_not_change_the_groups(fault, tmp_path, caplog):
    flag = tmp_path / 'flag'
    flag.write_text('two_doors/chain')
    make_env = functools.partial(scripted.Faulty, getattr(scripted, fault), flag)
    assert scripted.plain(collect(make_env, num_workers=2, timeout_s=2 if fault == 'hang' else 60)) == undisturbed()
    assert not flag.exists()
    cause = {'die': 'SIGKILL', 'hang': 'time limit', 'crash': 'ArithmeticError: the game divides by zero'}[fault]
    assert cause in caplog.text
    assert 'step of task two_doors/chain' in caplog.text


def test_kill_nine_from_outside_does_not_change_the_groups(tmp_path, caplog):
    class Killer(scripted.RandomPolicy):
        def __call__(self, prompts, row_ids):
            victims = list(tmp_path.iterdir()) if len(self.rows) < 16 else []
            for path in victims:  # all workers die, in each of the first two calls
                os.kill(int(path.name), signal.SIGKILL)
                path.unlink()
            return super().__call__(prompts, row_ids)

    assert (
        scripted.plain(collect(functools.partial(scripted.WithPid, tmp_path), Killer(), num_workers=2)) == undisturbed()
    )
    assert caplog.text.count('SIGKILL') == 4


class Moody(keydoor.KeyDoorEnv):
    """Every second reset shows another admissible command."""

    resets = 0

    def reset(self, task_id):
        Moody.resets += 1
        first = super().reset(task_id)
        return base.Observation(first.text, first.admissible + ('sing',) * (Moody.resets % 2), task=first.task)


def test_members_must_start_alike():
    with pytest.raises(ValueError, match='(?s)must start alike.*passage/short'):
        collect(Moody, task_ids=[SHORT], group_size=2)


class Priced(keydoor.KeyDoorEnv):
    """Pays 0.25 for every command, nothing but NaN for 'xyzzy'."""

    def step(self, command):
        after = super().step(command)
        reward = float('nan') if command == 'xyzzy' else 0.25
        return base.Observation(after.text, after.admissible, reward, after.done, after.success, after.task)


def test_every_reward_counts():
    (group,) = collect(Priced, scripted.scripted_policy({0: ['do look']}), task_ids=[0], group_size=1, max_steps=3)
    assert group.trajectories[0].episode_return == 0.75


def test_a_reward_that_is_no_number_names_the_task():
    with pytest.raises(ValueError, match="passage/short: 'xyzzy' gives reward nan"):
        collect(Priced, scripted.scripted_policy({0: ['do xyzzy']}), task_ids=[SHORT], group_size=1)


def test_progress_sees_every_trajectory():
    seen = []
    groups = collect(progress=seen.append)
    assert len(seen) == sum(len(group.trajectories) for group in groups)
    assert sum(t.success for t in seen) == sum(t.success for group in groups for t in group.trajectories)


@given(
    seed=st.integers(0, 2**31),
    num_tasks=st.integers(1, 40),
    num_groups=st.integers(1, 16),
    num_updates=st.integers(1, 12),
)
@settings(deadline=None)
def test_schedule_repeats_no_task_inside_a_pass(seed, num_tasks, num_groups, num_updates):
    updates = [
        rollout.task_schedule(seed, update, num_tasks=num_tasks, num_groups=num_groups) for update in range(num_updates)
    ]
    assert all(update.shape == (num_groups,) for update in updates)
    tasks = np.concatenate(updates)
    for start in range(0, len(tasks), num_tasks):
        one_pass = tasks[start : start + num_tasks]
        assert len(set(one_pass.tolist())) == len(one_pass)
        assert set(one_pass.tolist()) <= set(range(num_tasks))


def test_schedule_is_a_function_of_seed_and_update():
    def passes(seed):
        return [tuple(rollout.task_schedule(seed, update, num_tasks=50, num_groups=50)) for update in range(3)]

    assert passes(1) == passes(1)
    assert len({*passes(1), *passes(2)}) == 6  # every pass and every seed has its own order
    halves = [rollout.task_schedule(1, update, num_tasks=50, num_groups=25) for update in range(2)]
    assert tuple(np.concatenate(halves)) == passes(1)[0]
    with pytest.raises(ValueError, match='no tasks'):
        rollout.task_schedule(0, 0, num_tasks=0, num_groups=1)
