"""The explorer after foreign commands: it knows what they showed and did, recovers from them, and stays legal."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covsero_jax.envs import alfworld_engine, alfworld_explorer, alfworld_games, alfworld_oracle
from covsero_jax.envs.base import Observation

ILLEGAL = ('', 'go to the moon', 'open', 'take nothing from nowhere')
DIFFICULTIES = ('tiny', 'small')


def room(task: str, goal: str, more: dict[str, str] | None = None, facts: str = '', *, pens: str = 'Table_bar_1',
         beside: str = '') -> alfworld_engine.Game:
    """A table, a bin with a cup, a closed drawer, two desks, `more` receptacles (id -> facts); two pens at `pens`.

    beside: a receptacle that shares the table's location.
    """
    receptacles = {
        'Table_bar_1': '(receptacleType Table_bar_1 TableType)',
        'Drawer_bar_1': '(receptacleType Drawer_bar_1 DrawerType) (openable Drawer_bar_1)',
        'Bin_bar_1': '(receptacleType Bin_bar_1 BinType)',
        'Desk_bar_1': '(receptacleType Desk_bar_1 DeskType)',
        'Desk_bar_2': '(receptacleType Desk_bar_2 DeskType)', **(more or {}),
    }
    located = ' '.join(f'(receptacleAtLocation {name} loc_{0 if name == beside else i}) {text}'
                       for i, (name, text) in enumerate(receptacles.items()))
    return alfworld_engine.Game(f"""(define (problem room) (:domain alfred) (:init
        (atLocation agent1 loc_start) {located}
        (objectType Pen_bar_1 PenType) (pickupable Pen_bar_1) (inReceptacle Pen_bar_1 {pens})
        (objectType Pen_bar_2 PenType) (pickupable Pen_bar_2) (inReceptacle Pen_bar_2 {pens})
        (objectType Cup_bar_1 CupType) (pickupable Cup_bar_1) (inReceptacle Cup_bar_1 Bin_bar_1)
        (canContain TableType PenType) (canContain DeskType PenType) (canContain DrawerType PenType)
        (canContain DrawerType CupType) {facts}) (:goal {goal}))""", task)


PEN_ON_DESK = ('put some pen on desk', '(objectType ?o PenType) (receptacleType ?r DeskType)')
ONE = room(*PEN_ON_DESK)
TWO = room('put two pen on desk', '(objectType ?o PenType) (receptacleType ?r DeskType) (not (= ?o ?p))')
INTO = room('put some pen in drawer', '(objectType ?o PenType) (receptacleType ?r DrawerType)')
COOL = room('cool some pen and put it in desk', '(isCool ?o) (objectType ?o PenType) (receptacleType ?r DeskType)', {
    'Fridge_bar_1': '(receptacleType Fridge_bar_1 FridgeType) (openable Fridge_bar_1)',
    'Microwave_bar_1': '(receptacleType Microwave_bar_1 MicrowaveType) (openable Microwave_bar_1)',
}, '(coolable Pen_bar_1) (coolable Pen_bar_2) (heatable Pen_bar_1) (heatable Pen_bar_2)')


class Play:
    """One episode, with the explorer watching."""

    def __init__(self, game: alfworld_engine.Game, seed: str = '0'):
        self.state, self.explorer = game.initial_state(), alfworld_explorer.Explorer(game.task, seed)
        self.explorer.observe(None, Observation(self.state.intro(), self.state.admissible()))

    def do(self, command: str) -> None:
        text = self.state.step(command)
        self.explorer.observe(command, Observation(text, self.state.admissible()))

    def finish(self, limit: int) -> list[str]:
        """Its commands until the goal holds, or `limit` of them; each legal, and the same when asked again."""
        commands = []
        while not self.state.won() and len(commands) < limit:
            command = self.explorer.command()
            assert command in self.state.admissible() and self.explorer.command() == command
            self.do(command)
            commands.append(command)
        return commands


def continuation(game: alfworld_engine.Game, *prefix: str, seed: str = '0', limit: int = 25) -> list[str]:
    play = Play(game, seed)
    for command in prefix:
        assert command.strip() in play.state.admissible()
        play.do(command)
    commands = play.finish(limit)
    assert play.state.won()
    return commands


LOCKED_AWAY = (
    'go to table 1', 'take pen 1 from table 1', 'go to drawer 1', 'open drawer 1', 'move pen 1 to drawer 1',
    'go to table 1', 'take pen 2 from table 1', 'go to drawer 1', 'move pen 2 to drawer 1', 'close drawer 1',
)


@pytest.mark.parametrize('away', [(), ('go to bin 1',)])
def test_what_somebody_locked_away_is_fetched_again(away):
    there = ('go to drawer 1',) * len(away)
    commands = continuation(ONE, *LOCKED_AWAY, *away)
    assert tuple(commands[:-3]) == (*there, 'open drawer 1')
    assert [command.split(' ')[0] for command in commands[-3:]] == ['take', 'go', 'move']


def test_two_objects_that_somebody_brought_to_two_places_are_brought_together():
    apart = ('go to table 1', 'take pen 1 from table 1', 'go to desk 1', 'move pen 1 to desk 1',
             'go to table 1', 'take pen 2 from table 1', 'go to desk 2', 'move pen 2 to desk 2')
    together = ['go to desk 1', 'take pen 1 from desk 1', 'go to desk 2', 'move pen 1 to desk 2']
    assert continuation(TWO, *apart) == together
    taken_again = (*apart, 'take pen 2 from desk 2')
    assert continuation(TWO, *taken_again) == ['move pen 2 to desk 2', *together]


@pytest.mark.parametrize('seed', ['0', '1', '2'])
def test_something_useless_is_put_where_it_fits(seed):
    """The cup fits into the drawer only, and that is closed."""
    commands = continuation(ONE, 'go to bin 1', 'take cup 1 from bin 1', seed=seed)
    assert commands.index('open drawer 1') + 1 == commands.index('move cup 1 to drawer 1')
    assert commands[-1].startswith('move pen')


def test_a_destination_that_somebody_closed_is_opened():
    prefix = ('go to drawer 1', 'open drawer 1', 'close drawer 1', 'go to table 1', 'take pen 1 from table 1')
    assert continuation(INTO, *prefix) == ['go to drawer 1', 'open drawer 1', 'move pen 1 to drawer 1']


def test_a_treatment_is_remembered_and_so_is_what_undid_it():
    cooled = ('go to table 1', 'take pen 1 from table 1', 'go to fridge 1', 'cool pen 1 with fridge 1')
    assert continuation(COOL, *cooled) == ['go to desk 1', 'move pen 1 to desk 1']
    back = ('go to table 1', 'move pen 1 to table 1', 'go to bin 1')
    assert continuation(COOL, *cooled, *back)[1].startswith('take pen')
    heated = continuation(COOL, *cooled, 'go to microwave 1', 'heat pen 1 with microwave 1')
    assert heated == ['go to fridge 1', 'cool pen 1 with fridge 1', 'go to desk 1', 'move pen 1 to desk 1']


def test_a_target_that_was_brought_untreated_is_fetched_again():
    prefix = ('go to table 1', 'take pen 1 from table 1', 'go to desk 1', 'move pen 1 to desk 1', 'go to bin 1')
    assert any(command.startswith('cool pen') for command in continuation(COOL, *prefix))


@pytest.mark.parametrize('seed', ['0', '1', '2'])
def test_what_was_left_closed_comes_after_what_is_unseen_and_before_another_round(seed):
    """The pens are in the drawer, which somebody has passed by."""
    commands = continuation(room(*PEN_ON_DESK, pens='Drawer_bar_1'), 'go to drawer 1', 'go to bin 1', seed=seed)
    assert sorted(commands[:3]) == ['go to desk 1', 'go to desk 2', 'go to table 1']
    assert commands[3:5] == ['go to drawer 1', 'open drawer 1']


def test_blanks_around_a_command_hide_nothing():
    assert continuation(ONE, ' go to table 1', 'take pen 1 from table 1 ') == continuation(
        ONE, 'go to table 1', 'take pen 1 from table 1')


def test_it_learns_from_a_second_look():
    """`examine` shows what stands on a receptacle beside the one that was gone to."""
    play = Play(room(*PEN_ON_DESK, {'Shelf_bar_1': '(receptacleType Shelf_bar_1 ShelfType)'}, beside='Shelf_bar_1'))
    for command in ('go to shelf 1', 'examine table 1', 'go to bin 1'):
        play.do(command)
    assert play.explorer.command() == 'go to table 1'


@pytest.fixture(scope='module')
def games() -> list[alfworld_engine.Game]:
    return [alfworld_engine.Game(game.problem, game.task) for game in (
        alfworld_games.generate_game(0, 'train', i, alfworld_games.DIFFICULTIES[name])
        for name in DIFFICULTIES for i in range(18))]


moves = st.lists(st.tuples(st.integers(0, 999), st.booleans()), max_size=40)


@settings(max_examples=300, deadline=None)
@given(number=st.integers(0, 35), moves=moves, busy=st.booleans())
def test_it_wins_from_every_state_that_can_be_won_by_legal_commands(games, number, moves, busy):
    """busy: the prefix takes, moves, opens, closes and treats whenever it can."""
    play = Play(games[number], str(number))
    for choice, legal in moves:
        options = play.state.admissible() if legal else ILLEGAL
        acts = [c for c in options if c.split(' ')[0] in ('take', 'move', 'open', 'close', *alfworld_engine.TREATMENTS)]
        options = acts if busy and acts and choice % 2 else options
        play.do(options[choice % len(options)])
        if play.state.won():
            return
    winnable = alfworld_oracle.plan(play.state) is not None
    play.finish(limit=100)
    assert play.state.won() == winnable


def test_a_lost_game_is_wandered_through_legally():
    play = Play(room(
        *PEN_ON_DESK, {'Rack_bar_1': '(receptacleType Rack_bar_1 RackType)'},
        '(objectType Bear_bar_1 BearType) (pickupable Bear_bar_1) (inReceptacle Bear_bar_1 Rack_bar_1)'))
    for command in ('go to rack 1', 'take bear 1 from rack 1'):
        play.do(command)
    assert alfworld_oracle.plan(play.state) is None
    assert len(play.finish(limit=60)) == 60
