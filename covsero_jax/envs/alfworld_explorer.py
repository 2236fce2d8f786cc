"""A scripted player of ALFWorld that knows only what a player may know: the task, the texts and the listed commands.

It makes the demonstrations from which the tiny policy is cloned, and can serve as a weaker oracle than the planner. It
keeps a map of what it has seen, searches receptacles in an order drawn from its seed, and carries out the task once it
has found the object. It can also *watch*: call `observe` for steps that somebody else chose, then ask for a command.
"""

from __future__ import annotations

import random
import re

from covsero_jax.envs.alfworld_engine import NOTHING_HAPPENS, TREATMENTS
from covsero_jax.envs.base import Observation

_SEEN = re.compile(r'(?:On the|In it)(?: [a-z]+ \d+)?, you see (.*?)\.(?:$|\n)')
_ITEM = re.compile(r'\ba ([a-z]+ \d+)')
_TREATMENT_WORDS = {'clean': 'clean', 'hot': 'heat', 'heat': 'heat', 'cool': 'cool'}


def parse_task(task: str) -> tuple[str, str, str]:
    """Task sentence -> (kind, object class, place or lamp class); kinds as in `alfworld_engine.Goal`. Raises ValueError.

    'put a clean plate in shelf' -> ('clean', 'plate', 'shelf'); 'look at pen under the desklamp' -> ('light', 'pen', 'desklamp').
    """
    words = re.findall(r'[a-z]+', task.lower())
    if len(words) < 4:
        raise ValueError(f'not an ALFWorld task: {task!r}')
    place = words[-1]
    if 'look' in words or 'examine' in words:
        start = words.index('at') if 'at' in words else words.index('examine')
        return 'light', next(w for w in words[start + 1:] if w not in ('the', 'a', 'some')), place
    kind = next((_TREATMENT_WORDS[w] for w in words if w in _TREATMENT_WORDS), 'two' if 'two' in words else 'put')
    skip = {'put', 'find', 'a', 'an', 'some', 'the', 'two', 'clean', 'hot', 'heat', 'cool'}
    return kind, next(w for w in words if w not in skip), place


class Explorer:
    """Give it every observation with `observe`, then `command()` is what it would do next (None when it has no idea)."""

    def __init__(self, task: str, seed: int | str):
        self.kind, self.target, self.place = parse_task(task)
        self._seed = seed
        self._order: list[str] = []  # receptacles in the order of searching
        self._visited: set[str] = set()  # in this round of searching; some were left closed
        self._contents: dict[str, list[str]] = {}
        self._here: str | None = None
        self._held: str | None = None
        self._treated: set[str] = set()
        self._destination: str | None = None
        self._placed: set[str] = set()  # targets that stay at the destination
        self._admissible: tuple[str, ...] = ()

    def observe(self, command: str | None, observation: Observation) -> None:
        """Take in the result of `command` (None for the first observation of an episode)."""
        self._admissible = observation.admissible
        if command is None:
            self._order = [c.removeprefix('go to ') for c in observation.admissible if c.startswith('go to ')]
            random.Random(f'explorer/{self._seed}').shuffle(self._order)
            return
        if observation.text == NOTHING_HAPPENS:
            return
        verb, _, rest = command.strip().partition(' ')
        if verb == 'go':
            self._here = rest.removeprefix('to ')
            self._look_into(self._here, observation.text)
        elif verb in ('open', 'examine') and rest in self._order:
            self._look_into(rest, observation.text)
        elif verb == 'take':
            self._held, source = rest.split(' from ')
            self._contents[source] = [o for o in self._contents.get(source, ()) if o != self._held]
            self._placed.discard(self._held)
        elif verb == 'move':
            obj, place = rest.split(' to ')
            self._contents.setdefault(place, []).append(obj)
            self._held = None
            if self._class(obj) == self.target and self._class(place) == self.place and self._ready(obj):
                # Two objects must be at one receptacle: what somebody brought to another one does not count.
                self._placed = {obj} if place != self._destination else self._placed | {obj}
                self._destination = place
        elif verb in TREATMENTS and verb == self.kind:
            self._treated.add(rest.split(' with ')[0])
        elif {verb, self.kind} == {'heat', 'cool'}:  # each undoes the other
            self._treated.discard(rest.split(' with ')[0])

    @property
    def has_placed(self) -> bool:
        """Whether a target object, treated if need be, has been put where it belongs."""
        return bool(self._placed)

    def command(self) -> str | None:
        """The next command; always one of the admissible ones. None when there is nothing sensible left to do."""
        if self._held is None:
            return self._search(self.target)
        if self._class(self._held) != self.target:
            return self._put_away()
        if self.kind == 'light':
            lamp = next((c for c in self._admissible if c.startswith(f'use {self.place} ')), None)
            return lamp or self._search(self.place)
        if not self._ready(self._held):
            return self._treat()
        return self._deliver()

    def _search(self, wanted: str) -> str | None:
        """Take a known `wanted` object (or stand before a known lamp), else look into the next receptacle."""
        for receptacle, objects in self._contents.items():
            for obj in objects:
                if self._class(obj) == wanted and obj not in self._placed:
                    for command in (f'take {obj} from {receptacle}', f'open {receptacle}', f'go to {receptacle}'):
                        if command in self._admissible:
                            return command
        if self._here not in self._contents and f'open {self._here}' in self._admissible:
            return f'open {self._here}'
        return self._look_further()

    def _look_further(self) -> str | None:
        """Go to the next receptacle: one not visited yet, else one that was left closed, else begin another round."""
        here = {self._here}
        for visited in (self._visited, here | self._contents.keys(), here):
            for receptacle in self._order:
                if receptacle not in visited and f'go to {receptacle}' in self._admissible:
                    self._visited = visited
                    return f'go to {receptacle}'
        return None

    def _put_away(self) -> str | None:
        """The hand holds something useless: put it anywhere, best here."""
        put = next((c for c in self._admissible if c.startswith(f'move {self._held} to ')), None)
        if put or f'open {self._here}' not in self._admissible:
            return put or self._look_further()
        return f'open {self._here}'

    def _treat(self) -> str | None:
        appliance = TREATMENTS[self.kind][0].removesuffix('type')
        treat = next((c for c in self._admissible if c.startswith(f'{self.kind} {self._held} with ')), None)
        return treat or self._go(next((r for r in self._order if self._class(r) == appliance), None))

    def _deliver(self) -> str | None:
        if self._destination is None:
            self._destination = next((r for r in sorted(self._order) if self._class(r) == self.place), None)
        if self._destination is None:
            return None
        for command in (f'move {self._held} to {self._destination}', f'open {self._destination}'):
            if command in self._admissible:
                return command
        return self._go(self._destination)

    def _go(self, receptacle: str | None) -> str | None:
        if receptacle is None:
            return None
        if f'go to {receptacle}' in self._admissible:
            return f'go to {receptacle}'
        # Shares the present location: `go to` is illegal from here, so step away first.
        return next((c for c in self._admissible if c.startswith('go to ')), None)

    def _look_into(self, receptacle: str, text: str) -> None:
        self._visited.add(receptacle)
        found = _SEEN.search(text)
        if found:
            self._contents[receptacle] = _ITEM.findall(found.group(1))

    def _ready(self, obj: str) -> bool:
        return self.kind not in TREATMENTS or obj in self._treated

    @staticmethod
    def _class(name: str) -> str:
        return name.split(' ')[0]
