"""The rules and texts of ALFWorld, in plain Python: parse a game once, then small states that copy in microseconds.

Equal, character for character, to alfworld 0.4.x on textworld 1.7 (observations, admissible commands, `won`); the tests
compare both. What the official rules do that one might not expect, and this engine therefore does too:

* `go to R` is illegal whenever R is at the agent's own location, even for another receptacle that shares it.
* `examine O` works for the held object only, and heating, cooling and cleaning need no open appliance.
* An object may stand in two receptacles at once; taking it from one leaves it in the other.
* `use L` always turns on. `won` is a property of the present state and may become false again.
* Some objects fit no receptacle: once picked up, the hand is blocked for ever and most games are lost.
"""

from __future__ import annotations

import collections
import json
import pathlib
import re
from collections.abc import Iterable

HELP = """Available commands:
  look:                             look around your current location
  inventory:                        check your current inventory
  go to (receptacle):               move to a receptacle
  open (receptacle):                open a receptacle
  close (receptacle):               close a receptacle
  take (object) from (receptacle):  take an object from a receptacle
  move (object) to (receptacle):  place an object in or on a receptacle
  examine (something):              examine a receptacle or an object
  use (object):                     use an object
  heat (object) with (receptacle):  heat an object using a receptacle
  clean (object) with (receptacle): clean an object using a receptacle
  cool (object) with (receptacle):  cool an object using a receptacle
  slice (object) with (object):     slice an object using a sharp object
"""
NOTHING_HAPPENS = 'Nothing happens.'
WELCOME = '-= Welcome to TextWorld, ALFRED! =-'

# verb -> (type of the appliance, the Game attribute that lists which objects can be treated)
TREATMENTS = {
    'clean': ('sinkbasintype', 'cleanable'),
    'heat': ('microwavetype', 'heatable'),
    'cool': ('fridgetype', 'coolable'),
}
KNIVES = ('knifetype', 'butterknifetype')


class GameError(ValueError):
    """A game file or PDDL problem that cannot be played; the message names it and says why."""


class Goal:
    """What wins. kind: 'light' | 'put' | 'two' | 'clean' | 'heat' | 'cool'; types are lower-case PDDL type names.

    For 'light', `target_type` is the object to hold and `place_type` the lamp; else the receptacle to put it in.
    """

    __slots__ = ('kind', 'place_type', 'target_type')

    def __init__(self, text: str):
        objects = re.findall(r'\(objecttype \?\w+ (\S+?)\)', text)
        receptacles = re.findall(r'\(receptacletype \?\w+ (\S+?)\)', text)
        if 'istoggled' in text:
            if len(objects) < 2:
                raise GameError('the goal names no lamp and object')
            self.kind, self.place_type, self.target_type = 'light', objects[0], objects[1]
            return
        if not objects or not receptacles:
            raise GameError('the goal names no object and receptacle')
        self.target_type, self.place_type = objects[0], receptacles[0]
        if '(not (=' in text:
            self.kind = 'two'
        else:
            marks = (('(isclean ', 'clean'), ('(ishot ', 'heat'), ('(iscool ', 'cool'))
            self.kind = next((kind for mark, kind in marks if mark in text), 'put')


class Game:
    """One parsed game: everything that never changes while it is played.

    problem: the PDDL problem text; task: the task sentence without its full stop. Raises GameError.
    """

    def __init__(self, problem: str, task: str):
        text = problem.lower()
        init, goal = text.find('(:init'), text.find('(:goal')
        if init < 0 or goal < init:
            raise GameError('not a PDDL problem: no (:init ...) followed by (:goal ...)')
        facts: dict[str, set[tuple[str, ...]]] = collections.defaultdict(set)
        for name, arguments in re.findall(r'\(([a-z]+)((?: [^\s()]+)+)\)', text[init:goal]):
            facts[name].add(tuple(arguments.split()))
        if not facts['atlocation'] or not facts['receptacleatlocation']:
            raise GameError('the problem has no agent location or no receptacles')
        self.task = task
        self.goal = Goal(text[goal:])
        self.name = _display_names(a for rows in facts.values() for row in rows for a in row)
        self.receptacle_type = dict(sorted(facts['receptacletype']))
        self.object_type = dict(sorted(facts['objecttype']))  # sorted: oracles break ties by this order, in every process
        self.location = dict(facts['receptacleatlocation'])
        self.receptacles = tuple(sorted(self.location))
        self.receptacles_at: dict[str, list[str]] = collections.defaultdict(list)
        for receptacle in self.receptacles:
            self.receptacles_at[self.location[receptacle]].append(receptacle)
        for attribute in ('openable', 'pickupable', 'cleanable', 'heatable', 'coolable', 'toggleable', 'sliceable'):
            setattr(self, attribute, _first(facts[attribute]))
        self.can_contain = frozenset(facts['cancontain'])
        self.holds_objects = _first(facts['isreceptacleobject'])
        self.inside_objects = sorted(facts['inreceptacleobject'])
        self._facts = facts

    def initial_state(self) -> State:
        """A fresh state. All its fields are immutable values, so copies share them safely."""
        facts, contents = self._facts, collections.defaultdict(list)
        for obj, receptacle in sorted(facts['inreceptacle']):
            contents[receptacle].append(obj)
        return State(self, (
            next(iter(facts['atlocation']))[1],
            next(iter(facts['holds']))[1] if facts['holds'] else None,
            {receptacle: tuple(objects) for receptacle, objects in contents.items()},
            frozenset(facts['objectatlocation']), frozenset(),
            *(_first(facts[name]) for name in ('opened', 'isclean', 'ishot', 'iscool', 'istoggled', 'issliced')),
        ))


class State:
    """A position in a game. `step` changes it in place; `copy` is O(1) because every field is replaced, never edited.

    contents: receptacle -> objects in name order. floor: (object, location) pairs; taken: (object, receptacle) pairs that
    were taken and not put back (the two together are what `look` lists as "next to it").
    """

    FIELDS = ('location', 'held', 'contents', 'floor', 'taken', 'opened', 'clean', 'hot', 'cool', 'toggled', 'sliced')
    __slots__ = ('game', *FIELDS, '_commands')

    def __init__(self, game: Game, fields: tuple):
        self.game = game
        (self.location, self.held, self.contents, self.floor, self.taken, self.opened, self.clean, self.hot, self.cool,
         self.toggled, self.sliced) = fields
        self._commands = None

    def save(self) -> tuple:
        """The fields as one picklable value; `State(game, saved)` is the same position again."""
        return (self.location, self.held, self.contents, self.floor, self.taken, self.opened, self.clean, self.hot,
                self.cool, self.toggled, self.sliced)

    def copy(self) -> State:
        other = State(self.game, self.save())
        other._commands = self._commands
        return other

    def intro(self) -> str:
        """The first observation: welcome line, the room, the task."""
        names = self.game.name
        room = _listing('a ' + names[r] for r in self.game.receptacles)
        return (f'{WELCOME}\n\nYou are in the middle of a room. Looking quickly around you, you see {room}.'
                f'\n\nYour task is to: {self.game.task}.')

    def accessible(self, receptacle: str) -> bool:
        """Its contents can be seen and reached: not openable, or open."""
        return receptacle not in self.game.openable or receptacle in self.opened

    def won(self) -> bool:
        """Whether the goal holds in this state."""
        game, goal = self.game, self.game.goal
        if goal.kind == 'light':
            return (self.held is not None and game.object_type[self.held] == goal.target_type
                    and any(o in self.toggled and o in game.toggleable and game.object_type[o] == goal.place_type
                            for r in game.receptacles_at.get(self.location, ()) for o in self.contents.get(r, ())))
        need = 2 if goal.kind == 'two' else 1
        return any(
            game.receptacle_type[r] == goal.place_type
            and sum(game.object_type[o] == goal.target_type and self.treated(o) for o in objects) >= need
            for r, objects in self.contents.items())

    def treated(self, obj: str) -> bool:
        """The object has had the treatment that the goal asks for (true when it asks for none)."""
        game = self.game
        if game.goal.kind == 'clean':
            return obj in game.cleanable and obj in self.clean
        if game.goal.kind == 'heat':
            return obj in game.heatable and obj in self.hot
        if game.goal.kind == 'cool':
            return obj in game.coolable and obj in self.cool
        return True

    def admissible(self) -> tuple[str, ...]:
        """The legal commands, sorted."""
        return tuple(sorted(self.commands()))

    def commands(self) -> dict[str, tuple]:
        """Legal command -> (verb, arguments)."""
        if self._commands is not None:
            return self._commands
        game, name, held = self.game, self.game.name, self.held
        out: dict[str, tuple] = {f'go to {name[r]}': ('go', r) for r in game.receptacles
                                 if game.location[r] != self.location}
        out['look'], out['inventory'], out['help'] = ('look',), ('inventory',), ('help',)
        for r in game.receptacles_at.get(self.location, ()):
            out[f'examine {name[r]}'] = ('examine receptacle', r)
            if r in game.openable:
                verb = 'close' if r in self.opened else 'open'
                out[f'{verb} {name[r]}'] = (verb, r)
            accessible = self.accessible(r)
            for o in self.contents.get(r, ()):
                if o in game.toggleable:
                    out[f'use {name[o]}'] = ('use', o)
                if accessible and held is None and o in game.pickupable:
                    out[f'take {name[o]} from {name[r]}'] = ('take', o, r)
            if held is not None:
                if accessible and (game.receptacle_type[r], game.object_type[held]) in game.can_contain:
                    out[f'move {name[held]} to {name[r]}'] = ('move', held, r)
                for verb, (appliance, able) in TREATMENTS.items():
                    if game.receptacle_type[r] == appliance and held in getattr(game, able):
                        out[f'{verb} {name[held]} with {name[r]}'] = (verb, held, r)
        if held is not None:
            out[f'examine {name[held]}'] = ('examine object', held)
            if game.object_type[held] in KNIVES:
                for o, location in self.floor:
                    if location == self.location and o in game.sliceable:
                        out[f'slice {name[o]} with {name[held]}'] = ('slice', o, held)
        self._commands = out
        return out

    def step(self, command: str) -> str:
        """Execute `command` (exact match after stripping) and return the feedback; illegal commands change nothing."""
        action = self.commands().get(command.strip())
        if action is None:
            return NOTHING_HAPPENS
        verb, arguments = action[0], action[1:]
        if verb in ('look', 'inventory', 'help', 'examine receptacle', 'examine object'):
            return self._describe(verb, *arguments)
        self._commands = None
        if verb in ('take', 'move'):
            return self._carry(verb, *arguments)
        name, first = self.game.name, arguments[0]
        if verb == 'go':
            self.location = self.game.location[first]
            return f'You arrive at {name[first]}. {self._receptacle_text(first)}'
        if verb == 'open':
            self.opened |= {first}
            return f'You open the {name[first]}. {self._receptacle_text(first)}'
        if verb == 'close':
            self.opened -= {first}
            return f'You close the {name[first]}.'
        if verb == 'use':
            self.toggled |= {first}
            return f'You turn on the {name[first]}.'
        if verb == 'slice':
            self.sliced |= {first}
            return f'You sliced the {name[first]} with the {name[arguments[1]]}.'
        if verb == 'clean':
            self.clean |= {first}
        elif verb == 'heat':
            self.hot, self.cool = self.hot | {first}, self.cool - {first}
        else:
            self.cool, self.hot = self.cool | {first}, self.hot - {first}
        return f'You {verb} the {name[first]} using the {name[arguments[1]]}.'

    def _carry(self, verb: str, obj: str, receptacle: str) -> str:
        name, inside = self.game.name, self.contents.get(receptacle, ())
        if verb == 'take':
            self.contents = {**self.contents, receptacle: tuple(o for o in inside if o != obj)}
            self.held = obj
            self.floor -= {(obj, self.location)}
            self.taken |= {(obj, receptacle)}
            return f'You pick up the {name[obj]} from the {name[receptacle]}.'
        if obj not in inside:
            self.contents = {**self.contents, receptacle: tuple(sorted((*inside, obj)))}
        self.held = None
        self.floor |= {(obj, self.location)}
        self.taken -= {(obj, receptacle)}
        return f'You move the {name[obj]} to the {name[receptacle]}.'

    def _describe(self, verb: str, *arguments: str) -> str:
        if verb == 'look':
            return self._look_text()
        if verb == 'inventory':
            held = self.game.name[self.held] if self.held else None
            return f'You are carrying: a {held}.' if held else 'You are not carrying anything.'
        if verb == 'help':
            return HELP
        return self._receptacle_text(*arguments) if verb == 'examine receptacle' else self._object_text(*arguments)

    def _receptacle_text(self, receptacle: str) -> str:
        name = self.game.name
        if not self.accessible(receptacle):
            return f'The {name[receptacle]} is closed.'
        inside = _listing('a ' + name[o] for o in self.contents.get(receptacle, ()))
        if receptacle in self.game.openable:
            return f'The {name[receptacle]} is open. In it, you see {inside}.'
        return f'On the {name[receptacle]}, you see {inside}.'

    def _object_text(self, obj: str) -> str:
        game, name = self.game, self.game.name[obj]
        if obj in game.holds_objects:
            inside = _listing('a ' + game.name[i] for i, outer in game.inside_objects if outer == obj)
            return f'This is a normal {name}. In it, you see {inside}.'
        temperature = 'hot' if obj in self.hot else 'cool' if obj in self.cool else ''
        words = [temperature] * bool(temperature) + ['clean'] * (obj in self.clean)
        if words:
            if obj in self.sliced:
                return f'This is a {" and ".join(words)} sliced {name}.'
            return f'This is a {"cold" if words == ["cool"] else " and ".join(words)} {name}.'
        if obj in game.toggleable and obj in self.toggled:
            return f'This {name} is on.'
        if obj in game.sliceable and obj in self.sliced:
            return f'This is a sliced {name}.'
        return f"There's nothing special about {name}."

    def _look_text(self) -> str:
        name, here = self.game.name, self.game.receptacles_at.get(self.location, ())
        if not here:
            return 'You are in the middle of a room. Looking quickly around you, you see nothing.'
        beside = [name[o] for o, location in sorted(self.floor) if location == self.location
                  for r in here if (o, r) in self.taken]
        return (f'You are facing the {_listing(name[r] for r in here)}. '
                f'Next to it, you see {_listing("a " + n for n in beside)}.')


def read_game(path: str | pathlib.Path) -> Game:
    """Parse a `game.tw-pddl` file. Raises GameError naming the file and what is wrong with it."""
    path = pathlib.Path(path)
    try:
        record = json.loads(path.read_text(encoding='utf-8'))
        return Game(record['pddl_problem'], task_sentence(record['grammar']))
    except OSError as error:
        raise GameError(f'{path}: cannot be read ({error.strerror})') from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise GameError(f'{path}: not a game.tw-pddl file (not JSON: {error})') from error
    except (KeyError, TypeError) as error:
        raise GameError(f'{path}: not a game.tw-pddl file (no field {error})') from error
    except GameError as error:
        raise GameError(f'{path}: {error}') from error


def task_sentence(grammar: str) -> str:
    """The task of a game, which ALFWorld keeps inside the game's text grammar. Raises GameError for old data."""
    if 'move {o} to {r}' not in grammar:
        raise GameError("an older ALFWorld format ('put ... in/on ...'); download the data of alfworld >= 0.4")
    found = re.search(r'"rhs": "Your task is to: ([^"]*)\."', grammar)
    if not found:
        raise GameError('the grammar contains no task sentence')
    return found.group(1)


def _first(rows: Iterable[tuple[str, ...]]) -> frozenset[str]:
    return frozenset(row[0] for row in rows)


def _listing(items: Iterable[str]) -> str:
    items = list(items)
    if len(items) < 2:
        return items[0] if items else 'nothing'
    return ', '.join(items[:-1]) + ', and ' + items[-1]


def _display_names(ids: Iterable[str]) -> dict[str, str]:
    """'desk_bar_...' -> 'desk 2': numbered per class, the last id in sort order being number 1, as the official engine."""
    classes = {}
    for entity in set(ids):
        head, separator, _ = entity.partition('_bar_')
        if separator and not entity.startswith('loc_bar_'):
            classes[entity] = head + ('basin' if 'basin' in entity else '')
    left, names = collections.Counter(classes.values()), {}
    for entity in sorted(classes):
        names[entity] = f'{classes[entity]} {left[classes[entity]]}'
        left[classes[entity]] -= 1
    return names
