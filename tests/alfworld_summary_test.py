"""The summary of an episode, and the three kinds of observation that are made with it."""

from __future__ import annotations

import dataclasses
import functools

import alfworld_env_test as env_test
import pytest
import scripted
from table_examples import group, trajectory

from covsero_jax import groups, rollout, workers
from covsero_jax.envs import alfworld, alfworld_summary
from covsero_jax.envs.alfworld_summary import NOTHING, Summary

folder, own_cache = env_test.folder, env_test.own_cache  # fixtures


def after(*commands: str, feedback: str = 'You do it.') -> Summary:
    summary = Summary()
    for command in commands:
        summary = summary.after(command, feedback)
    return summary


def test_summary_by_hand():
    assert str(Summary()) == 'You are at the middle of a room. You hold nothing.'
    one = after('go to fridge 1', 'open fridge 1', 'take apple 1 from fridge 1', 'go to microwave 1', 'heat apple 1 with microwave 1')
    assert str(one) == ('You are at microwave 1. You hold apple 1 (heated). '
                        'So far: apple 1 (heated) from fridge 1 to your hand.')
    two = one.after('move apple 1 to garbagecan 1', 'You move it.').after('clean mug 2 with sinkbasin 1', 'You clean it.')
    assert str(two) == ('You are at microwave 1. You hold nothing. '
                        'So far: apple 1 (heated) from fridge 1 to garbagecan 1; mug 2 (cleaned).')
    assert str(one).startswith('You are at microwave 1. You hold apple 1')  # the earlier one is as it was


def test_refused_and_other_commands_change_nothing():
    summary = after('go to fridge 1')
    for command, feedback in (('go to sofa 1', NOTHING), ('look', 'You look.'), ('inventory', 'You carry nothing.'),
                              ('examine fridge 1', 'It is open.'), ('take apple 1 from sofa 1', NOTHING), ('', NOTHING)):
        assert summary.after(command, feedback) == summary


def test_doing_it_twice_says_it_once_and_the_first_place_stays():
    summary = after('take pan 1 from shelf 1', 'cool pan 1 with fridge 1', 'cool pan 1 with fridge 1', 'move pan 1 to desk 1',
                    'take pan 1 from desk 1')
    assert str(summary).endswith('So far: pan 1 (cooled) from shelf 1 to your hand.')


def play(folder, kind: str, commands) -> list:
    env = alfworld.make_env(folder, 'train', observation=kind)
    return [env.reset(0), *(env.step(command) for command in commands)]


def test_raw_is_the_text_alone_and_the_others_add_to_it(folder):
    commands = ('go to drawer 1', 'go to moon 1', 'open drawer 1', 'take pen 1 from drawer 1')
    raw, shown, compared = (play(folder, kind, commands) for kind in alfworld.OBSERVATIONS)
    for plain, rich, keyed in zip(raw, shown, compared, strict=True):
        assert plain.state is None and keyed.text == plain.text
        assert rich.text.startswith(plain.text + '\nYou are at ') and rich.state == keyed.state
        assert rich.state == alfworld_summary.state_key(rich.text, plain.admissible)
        assert (plain.admissible, plain.reward, plain.done, plain.task) == (rich.admissible, rich.reward, rich.done, rich.task)
    assert 'You are at drawer 1. You hold pen 1.' in shown[-1].text


def test_refusals_at_different_places_look_alike_but_are_not_the_same_state(folder):
    here = play(folder, 'enriched_state', ('go to drawer 1', 'fly'))[-1]
    there = play(folder, 'enriched_state', ('go to desk 1', 'fly'))[-1]
    assert here.text == there.text == NOTHING and here.state != there.state


def test_a_snapshot_keeps_the_summary(folder):
    env = alfworld.make_env(folder, 'train', observation='enriched')
    env.reset(0)
    env.step('go to drawer 1')
    saved, expected = env.snapshot(), env.step('look')
    env.reset(0)
    env.restore(saved)
    assert env.step('look') == expected


def test_unknown_kinds_list_those_that_exist(folder):
    with pytest.raises(ValueError, match='there are raw, enriched, enriched_state'):
        alfworld.make_env(folder, 'train', observation='rich')


def with_states(path, states):
    steps = [dataclasses.replace(step, state=states[t], next_state=states[t + 1]) for t, step in enumerate(path.steps)]
    return dataclasses.replace(path, steps=tuple(steps))


def test_the_short_cut_through_nothing_happens_closes():
    """Won: a -refused-> "Nothing" -> b -> won. Lost: c -refused-> "Nothing". By text, c's refusal is two steps from
    success; by state, it leads nowhere."""
    texts = [trajectory(['a', NOTHING, 'b', 'won'], success=True), trajectory(['c', NOTHING])]
    assert groups.goal_distances(group(*texts))['c'] == 3
    states = [with_states(texts[0], ['a', 'Na', 'b', 'won']), with_states(texts[1], ['c', 'Nc'])]
    distances = groups.goal_distances(group(*states))
    assert distances['Na'] == 2 and distances['c'] == distances['Nc'] == 4  # unreachable: the farthest and one more
    table = groups.build_step_table([group(*states)], num_rows=4, discount=1.0, goal_discount=0.5, history_depth=2)
    by_text = groups.build_step_table([group(*texts)], num_rows=4, discount=1.0, goal_discount=0.5, history_depth=2)
    assert (table.novel_N == by_text.novel_N).all() and (table.coverage_N == by_text.coverage_N).all()  # coverage reads texts


def test_rollouts_carry_the_states(folder):
    make_env = functools.partial(alfworld.make_env, folder, 'train', observation='enriched_state')
    policy = scripted.scripted_policy({0: ['do go to drawer 1', 'do fly', 'do go to desk 1']})
    with workers.WorkerPool(make_env, num_envs=1, num_workers=0, timeout_s=60) as pool:
        (only,) = rollout.collect_groups(pool, policy, scripted.JsonPrompts(), [0], group_size=1, max_steps=4)
    first, second, third, _ = only.trajectories[0].steps
    assert first.next_node == second.node and second.next_node == third.node
    assert second.next_observation == NOTHING and 'You are at drawer 1.' in second.next_node
    assert first.node == first.state and 'middle of a room' in first.state
