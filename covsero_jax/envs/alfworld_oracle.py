"""The privileged oracle of ALFWorld: a shortest plan from any state, in closed form, or None when the game is lost.

Every solution has the same shape: empty the hand if it holds the wrong thing, fetch a target, treat it (clean, heat,
cool) if the goal asks for it, bring it to its place; twice for the two-object goal. There are few choices (which object,
from where, through which appliance, to which receptacle, where to drop what is in the way), so all are tried and the
shortest is kept. One case is not searched: the official planner sometimes wins with an object that stands in two
receptacles at once (101 of 4,027 games); the plan here is then two commands longer.

Only training code may ask: environments for evaluation are built without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from covsero_jax.envs.alfworld_engine import TREATMENTS, State


class _Walk(NamedTuple):
    """A partial plan: commands so far, and where they leave the agent."""

    commands: tuple[str, ...]
    location: str
    opened: frozenset[str]


def plan(state: State) -> list[str] | None:
    """The shortest command sequence that wins from `state`: [] when already won, None when no sequence wins."""
    if state.won():
        return []
    search = _Search(state)
    goal = state.game.goal
    solutions = search.light() if goal.kind == 'light' else search.deliveries()
    best = _shortest(solutions)
    return None if best is None else list(best.commands)


def _shortest(walks: Iterable[_Walk | None]) -> _Walk | None:
    return min((walk for walk in walks if walk is not None), key=lambda walk: len(walk.commands), default=None)


class _Search:
    """The choices that exist in one state. Methods yield candidate walks, or None for a choice that cannot be made."""

    def __init__(self, state: State):
        self.state, self.game, self.name = state, state.game, state.game.name
        self.start = _Walk((), state.location, state.opened)
        self.places: dict[str, list[str]] = {}  # object -> receptacles that it is in
        for receptacle in self.game.receptacles:
            for obj in state.contents.get(receptacle, ()):
                self.places.setdefault(obj, []).append(receptacle)

    def light(self) -> Iterator[_Walk | None]:
        """Hold a target at a lit lamp. Lamp first is never shorter: the object must be in hand at the lamp."""
        goal, types = self.game.goal, self.game.object_type
        lamps = [(lamp, r) for lamp, rs in self.places.items()
                 if types[lamp] == goal.place_type and lamp in self.game.toggleable for r in rs]
        for target, source in self._targets():
            fetched = self._fetch(self.start, self.state.held, target, source)
            for lamp, receptacle in lamps if fetched else ():
                use = () if lamp in self.state.toggled else (f'use {self.name[lamp]}',)
                yield self._go(fetched, receptacle, use)

    def deliveries(self) -> Iterator[_Walk | None]:
        """Bring the missing number of targets, each treated, to one receptacle of the wanted type."""
        game, goal, state = self.game, self.game.goal, self.state
        for place in self._of_type(goal.place_type):
            if (goal.place_type, goal.target_type) not in game.can_contain:
                continue
            there = [o for o in state.contents.get(place, ())
                     if game.object_type[o] == goal.target_type and state.treated(o)]
            missing = (2 if goal.kind == 'two' else 1) - len(there)
            candidates = [(o, source) for o, source in self._targets() if o not in there]
            for first, source in candidates:
                one = self._deliver(self.start, state.held, first, source, place)
                if missing == 1 or one is None:
                    yield one
                    continue
                for second, second_source in candidates:
                    if second not in (first, state.held):
                        yield self._deliver(one, None, second, second_source, place)

    def _targets(self) -> Iterator[tuple[str, str | None]]:
        """(object, receptacle it can be taken from; None when in hand) for everything that could fulfil the goal."""
        game, goal = self.game, self.game.goal
        able = getattr(game, TREATMENTS[goal.kind][1]) if goal.kind in TREATMENTS else game.pickupable
        for obj, kind in game.object_type.items():
            if kind == goal.target_type and obj in game.pickupable and obj in able:
                yield from [(obj, None)] if obj == self.state.held else [(obj, r) for r in self.places.get(obj, ())]

    def _of_type(self, receptacle_type: str) -> list[str]:
        return [r for r in self.game.receptacles if self.game.receptacle_type[r] == receptacle_type]

    def _go(self, walk: _Walk, receptacle: str, then: tuple[str, ...] = (), *, must_open: bool = False) -> _Walk:
        location, opened = self.game.location[receptacle], walk.opened
        commands = () if walk.location == location else (f'go to {self.name[receptacle]}',)
        if must_open and receptacle in self.game.openable and receptacle not in opened:
            commands, opened = (*commands, f'open {self.name[receptacle]}'), opened | {receptacle}
        return _Walk(walk.commands + commands + then, location, opened)

    def _fetch(self, walk: _Walk, held: str | None, obj: str, source: str | None) -> _Walk | None:
        """Take `obj` from `source`, first putting down what is in the hand. None when the hand cannot be emptied."""
        if held == obj:
            return walk
        if held is not None:
            walk = self._drop(walk, held, toward=source)
        return walk and self._go(walk, source, (f'take {self.name[obj]} from {self.name[source]}',), must_open=True)

    def _drop(self, walk: _Walk, held: str, toward: str) -> _Walk | None:
        """Put `held` where it costs least on the way to `toward`."""
        game = self.game
        drops = [self._go(walk, r, (f'move {self.name[held]} to {self.name[r]}',), must_open=True)
                 for r in game.receptacles if (game.receptacle_type[r], game.object_type[held]) in game.can_contain]
        return min(drops, key=lambda drop: len(self._go(drop, toward, must_open=True).commands), default=None)

    def _deliver(self, walk: _Walk, held: str | None, obj: str, source: str | None, place: str) -> _Walk | None:
        fetched = self._fetch(walk, held, obj, source)
        if fetched is None:
            return None
        put = (f'move {self.name[obj]} to {self.name[place]}',)
        if self.state.treated(obj):
            return self._go(fetched, place, put, must_open=True)
        verb = self.game.goal.kind
        return _shortest(
            self._go(self._go(fetched, r, (f'{verb} {self.name[obj]} with {self.name[r]}',)), place, put, must_open=True)
            for r in self._of_type(TREATMENTS[verb][0]))
