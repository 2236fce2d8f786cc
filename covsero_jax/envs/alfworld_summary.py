"""What an episode's own commands tell about its state: where the agent is, what it holds, what it has changed.

ALFWorld's texts leave this out, so that different states look alike: a place reads the same with and without the object
in hand, and every command that cannot be executed is answered "Nothing happens.", wherever the agent stands. GraphGPO's public recipe adds such a summary to the observation. It uses
commands and feedback only, never hidden facts. The facts are the recipe's, the wording is ours.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

NOTHING = 'Nothing happens.'
_STATUS = {'heat': 'heated', 'cool': 'cooled', 'clean': 'cleaned', 'slice': 'sliced'}
_COMMAND = re.compile(
    r'(?P<go>go to (?P<place>.+))|take (?P<taken>.+) from (?P<source>.+)|(?:move|put) (?P<put>.+?) (?:to|in/on|in|on) (?P<target>.+)'
    r'|(?P<verb>heat|cool|clean|slice) (?P<treated>.+?) with .+')


@dataclasses.dataclass(frozen=True)
class Summary:
    """Immutable; `after` gives the next one."""

    location: str = 'the middle of a room'
    holding: str = ''
    status: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)  # object -> what was done to it
    moved: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)  # object -> from where, to where

    def after(self, command: str, feedback: str) -> Summary:
        """The summary after a command; unchanged by one that was refused, or that does none of these things."""
        match = _COMMAND.fullmatch(command.strip())
        if match is None or feedback == NOTHING:
            return self
        if match['go']:
            return dataclasses.replace(self, location=match['place'])
        if match['taken']:
            first = self.moved.get(match['taken'], (match['source'], ''))[0]
            return dataclasses.replace(self, holding=match['taken'], moved={**self.moved, match['taken']: (first, 'your hand')})
        if match['put']:
            first = self.moved.get(match['put'], (self.location, ''))[0]
            return dataclasses.replace(self, holding='', moved={**self.moved, match['put']: (first, match['target'])})
        done = self.status.get(match['treated'], ())
        word = _STATUS[match['verb']]
        return dataclasses.replace(self, status={**self.status, match['treated']: done if word in done else (*done, word)})

    def __str__(self) -> str:
        text = f'You are at {self.location}. You hold {self._named(self.holding) if self.holding else "nothing"}.'
        changes = [f'{self._named(name)} from {self.moved[name][0]} to {self.moved[name][1]}' if name in self.moved
                   else self._named(name) for name in sorted({*self.moved, *self.status})]
        return f'{text} So far: {"; ".join(changes)}.' if changes else text

    def _named(self, name: str) -> str:
        return f'{name} ({", ".join(self.status[name])})' if name in self.status else name


def state_key(text: str, admissible: Sequence[str]) -> str:
    """The recipe's key of a state: the enriched text and all legal commands."""
    return f'{text}\n{", ".join(sorted(admissible))}'
