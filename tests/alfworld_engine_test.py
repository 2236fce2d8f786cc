"""The native engine's own properties; its equality with the official one is in alfworld_golden_test and _parity_test."""

from __future__ import annotations

import json
import pickle
import random

import hypothesis
import pytest
from hypothesis import strategies as st

from covsero_jax.envs import alfworld_engine, alfworld_explorer, alfworld_games, alfworld_oracle
from covsero_jax.envs.alfworld_engine import NOTHING_HAPPENS, Game, GameError, State
from covsero_jax.envs.base import Observation

SETTINGS = hypothesis.settings(deadline=None, max_examples=30)
GAMES = {}


def make_game(index: int, difficulty: str = 'tiny') -> Game:
    if (index, difficulty) not in GAMES:
        made = alfworld_games.generate_game(7, 'train', index, alfworld_games.DIFFICULTIES[difficulty])
        GAMES[index, difficulty] = Game(made.problem, made.task)
    return GAMES[index, difficulty]


def wander(state: State, seed: int, steps: int) -> list[str]:
    rng = random.Random(seed)
    return [state.step(rng.choice((*state.admissible(), 'go to nowhere 1', 'put pen 1 in/on desk 1'))) for _ in range(steps)]


@SETTINGS
@hypothesis.given(st.integers(0, 23), st.integers(0, 999), st.integers(0, 30))
def test_copy_and_save_continue_identically(index, seed, steps):
    state = make_game(index, 'medium').initial_state()
    wander(state, seed, steps)
    saved = pickle.loads(pickle.dumps(state.save()))
    copy = state.copy()
    expected = wander(state, seed + 1, 20)
    assert wander(copy, seed + 1, 20) == expected
    assert wander(State(state.game, saved), seed + 1, 20) == expected


@SETTINGS
@hypothesis.given(st.integers(0, 23), st.integers(0, 999))
def test_a_copy_is_not_touched_by_the_original(index, seed):
    state = make_game(index).initial_state()
    wander(state, seed, 5)
    copy = state.copy()
    before = (copy.save(), copy.admissible(), copy.won())
    wander(state, seed, 30)
    assert (copy.save(), copy.admissible(), copy.won()) == before


@SETTINGS
@hypothesis.given(st.integers(0, 23), st.integers(0, 999), st.text(max_size=20))
def test_exactly_the_admissible_commands_do_something(index, seed, text):
    state = make_game(index).initial_state()
    wander(state, seed, 6)
    for command in state.admissible():
        assert state.copy().step(command) != NOTHING_HAPPENS
    hypothesis.assume(text.strip() not in state.admissible())
    before = state.save()
    assert state.step(text) == NOTHING_HAPPENS and state.save() == before


def test_going_to_the_present_location_is_not_admissible():
    state = make_game(0).initial_state()
    command = next(c for c in state.admissible() if c.startswith('go to '))
    assert state.step(command).startswith('You arrive at')
    assert command not in state.admissible() and state.step(command) == NOTHING_HAPPENS


def test_won_is_a_property_of_the_state_and_can_be_lost_again():
    state = make_game(0).initial_state()  # pick and place
    commands = alfworld_oracle.plan(state)
    for command in commands:
        assert not state.won()
        state.step(command)
    assert state.won()
    obj, place = commands[-1].removeprefix('move ').split(' to ')
    state.step(f'take {obj} from {place}')
    assert not state.won()


@pytest.mark.parametrize('content, message', [
    ('no json', 'not JSON'), ('[]', 'no field'), ('{}', 'no field'),
    (json.dumps({'pddl_problem': '(:init)', 'grammar': 'put {o} in/on {r}'}), 'alfworld >= 0.4'),
    (json.dumps({'pddl_problem': '(:init)', 'grammar': 'move {o} to {r}'}), 'no task sentence'),
    (json.dumps({'pddl_problem': 'x', 'grammar': 'move {o} to {r} "rhs": "Your task is to: a."'}), 'not a PDDL problem'),
])
def test_a_file_that_is_no_game_is_named(tmp_path, content, message):
    path = tmp_path / 'game.tw-pddl'
    path.write_text(content)
    with pytest.raises(GameError, match=message) as error:
        alfworld_engine.read_game(path)
    assert str(path) in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(GameError, match='absent.tw-pddl'):
        alfworld_engine.read_game(tmp_path / 'absent.tw-pddl')


# ---- the oracle


@SETTINGS
@hypothesis.given(st.integers(0, 23), st.integers(0, 999), st.integers(0, 25), st.sampled_from(['tiny', 'medium']))
def test_the_plan_wins_from_any_state_with_legal_commands(index, seed, steps, difficulty):
    state = make_game(index, difficulty).initial_state()
    wander(state, seed, steps)
    commands = alfworld_oracle.plan(state)
    if commands is not None:
        for command in commands:
            assert command in state.admissible()
            state.step(command)
        assert state.won()


def brute_force_length(state: State, limit: int) -> int | None:
    """Breadth-first search over real states: the definition of a shortest plan."""
    frontier, seen = [state], {_key(state)}
    for length in range(limit + 1):
        if any(s.won() for s in frontier):
            return length
        following = []
        for s in frontier:
            for command in s.admissible():
                if command.split()[0] in ('look', 'inventory', 'help', 'examine'):
                    continue
                t = s.copy()
                t.step(command)
                if _key(t) not in seen:
                    seen.add(_key(t))
                    following.append(t)
        frontier = following
    return None


def _key(state: State) -> tuple:
    location, held, contents, *_, opened, clean, hot, cool, toggled, _ = state.save()
    return location, held, tuple(sorted((r, o) for r, o in contents.items() if o)), opened, clean, hot, cool, toggled


@pytest.mark.parametrize('index', [0, 1, 2, 3, 4])
def test_the_plan_is_as_short_as_brute_force(index):
    state = make_game(index).initial_state()
    wander(state, index, 3)
    assert len(alfworld_oracle.plan(state)) == brute_force_length(state, 9)


def test_won_states_need_no_plan_and_blocked_hands_have_none():
    state = make_game(0).initial_state()
    for command in alfworld_oracle.plan(state):
        state.step(command)
    assert alfworld_oracle.plan(state) == []
    for index in range(200):
        game = make_game(index, 'real')
        state = game.initial_state()
        dead = [o for o in game.pickupable if game.object_type[o] in ('papertowelrolltype', 'teddybeartype')]
        if dead and game.goal.target_type != game.object_type[dead[0]]:
            receptacle = next((r for r, objects in state.contents.items() if dead[0] in objects), None)
            state.step(f'go to {game.name[receptacle]}')
            if state.step(f'take {game.name[dead[0]]} from {game.name[receptacle]}') != NOTHING_HAPPENS:
                assert alfworld_oracle.plan(state) is None
                return
    pytest.fail('no game with an object that cannot be put down')


# ---- the explorer


def explore(game: Game, seed: int, steps: int = 50, prefix: int = 0) -> tuple[bool, list[str]]:
    state, rng = game.initial_state(), random.Random(seed)
    explorer, commands = alfworld_explorer.Explorer(game.task, seed), []
    explorer.observe(None, Observation(state.intro(), state.admissible()))
    for step in range(steps):
        command = rng.choice(state.admissible()) if step < prefix else explorer.command()
        assert command in state.admissible()
        commands.append(command)
        explorer.observe(command, Observation(state.step(command), state.admissible()))
        if state.won():
            return True, commands
    return False, commands


@pytest.mark.parametrize('difficulty, prefix, share', [('tiny', 0, 1.0), ('tiny', 8, 0.95), ('real', 0, 0.9)])
def test_the_explorer_wins_knowing_only_what_it_saw(difficulty, prefix, share):
    games = range(60)
    assert sum(explore(make_game(i, difficulty), i, prefix=prefix)[0] for i in games) >= share * len(games)


def test_the_explorer_is_a_function_of_its_seed():
    game = make_game(3)
    assert explore(game, 5) == explore(game, 5)
    assert len({tuple(explore(game, seed)[1]) for seed in range(8)}) > 1


@pytest.mark.parametrize('task, parsed', [
    ('put a clean plate in shelf', ('clean', 'plate', 'shelf')), ('heat some egg and put it in fridge', ('heat', 'egg', 'fridge')),
    ('look at pen under the desklamp', ('light', 'pen', 'desklamp')), ('examine the cd with the desklamp', ('light', 'cd', 'desklamp')),
    ('find two mug and put them in cabinet', ('two', 'mug', 'cabinet')), ('put some book on bed', ('put', 'book', 'bed')),
    ('put a cool tomato in microwave', ('cool', 'tomato', 'microwave')), ('put two soapbar in cabinet', ('two', 'soapbar', 'cabinet')),
])
def test_task_sentences_are_understood(task, parsed):
    assert alfworld_explorer.parse_task(task) == parsed
