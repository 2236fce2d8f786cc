"""What a prompt says, per environment: the same blocks in sentences (`full`) or in few tokens (`compact`).

Blocks, after the published protocol (verl-agent): task, the last observation/action pairs, the present observation, the
admissible commands, how to reply. `full` is for instruction-tuned models; `compact` for the tiny policies, whose context
is short, and which learnt the reply format from demonstrations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

Past = Sequence[tuple[int, str, str]]  # (step number from 1, observation, command), oldest first
Wording = Callable[[str, Past, str, Sequence[str], int], str]  # (task, past, observation, commands, steps taken)

_REPLY = ('It is your turn to act. Reason step by step about the situation first, inside <think> </think> tags. '
          'Then choose one of the admissible actions and give it inside <action> </action> tags.')
SEPARATOR = ' [SEP] '  # of a WebShop page's pieces


class Wordings(NamedTuple):
    """One environment's wordings, and what its published parser does beside reading tags."""

    full: Wording
    compact: Wording
    fallback: int  # characters of a reply without usable tags that are sent to the environment
    max_history: int | None = None  # characters; a longer prompt is built without its history


def alfworld_full(task: str, past: Past, observation: str, commands: Sequence[str], step: int) -> str:
    listed = '\n'.join(f"'{command}'," for command in commands)
    if not past:
        return (f'You are an expert agent in a text-based household environment.\nYour current observation is: '
                f'{observation}\nThe admissible actions in this situation are: [\n{listed}\n].\n\n{_REPLY}')
    return (f'You are an expert agent in a text-based household environment. Your task is to: {task}\n'
            f'You have taken {step} step(s) so far. The most recent {len(past)} observations and the actions that '
            f'you took:\n{_pairs(past)}\nYou are now at step {step + 1} and your current observation is: {observation}\n'
            f'The admissible actions in this situation are: [\n{listed}\n].\n\n{_REPLY}')


def alfworld_compact(task: str, past: Past, observation: str, commands: Sequence[str], step: int) -> str:
    shown = ''.join(f'{seen}\n> {done}\n' for _, seen, done in past)
    return f'{task}\n{shown}{observation}\n' + '\n'.join(commands)


def webshop_full(task: str, past: Past, observation: str, commands: Sequence[str], step: int) -> str:
    """Pieces of a page are quoted one by one; the task is in every prompt, since a page text does not hold it."""
    listed = '\n'.join(f"'{command}'," for command in commands)
    past = [(i, _quoted(seen), done) for i, seen, done in past]
    taken = (f'You have taken {step} step(s) so far. The most recent {len(past)} observations and the actions that you '
             f'took:\n{_pairs(past)}\nYou are now at step {step + 1} and your current observation is: ' if past else
             'Your current observation is: ')
    return (f'You are an expert agent that shops in a web store. Your task is to: {task}\n{taken}{_quoted(observation)}\n'
            f'The admissible actions in this situation are: [\n{listed}\n].\n\n{_REPLY}')


def webshop_compact(task: str, past: Past, observation: str, commands: Sequence[str], step: int) -> str:
    """Lower case, as commands are; one piece a line, which is at the same time the list of what can be clicked.

    Of the past only the commands: in mode `text` they alone tell which options are chosen.
    """
    done = ''.join(f'> {command}\n' for _, _, command in past)
    return f'{task.lower()}\n{done}' + observation.lower().replace(SEPARATOR.lower(), '\n')


def sokoban_full(task: str, past: Past, observation: str, commands: Sequence[str], step: int) -> str:
    taken = (f'You have taken {step} step(s) so far. The most recent {len(past)} observations and the actions that you '
             f'took:\n{_pairs(past)}\nYou are now at step {step + 1}. ' if past else '')
    return (f'You are an expert agent that plays Sokoban. {task}\n{taken}The current grid is:\n{observation}\n'
            f'The admissible actions are: {", ".join(commands)}.\n\n{_REPLY}')


def sokoban_compact(task: str, past: Past, observation: str, commands: Sequence[str], step: int) -> str:
    """The grid, and in numbers (row, column) where the player, the boxes and the targets are: a small model cannot count."""
    cells = [(cell, f'{y} {x}') for y, row in enumerate(observation.splitlines()) for x, cell in enumerate(row.split(' '))]
    places = {name: ' '.join(place for cell, place in cells if cell in symbols)
              for name, symbols in (('player', 'PS'), ('boxes', 'X√'), ('targets', 'O√S'))}
    done = ''.join(f'> {command}\n' for _, _, command in past)
    return f'{done}{observation}\n' + '\n'.join(f'{name} {place}' for name, place in places.items())


def _pairs(past: Past) -> str:
    return '\n'.join(f"[Observation {i}: '{seen}', Action {i}: '{done}']" for i, seen, done in past)


def _quoted(page: str) -> str:
    """'a' [SEP] 'b': text_rich pages have no separators and stay as they are."""
    return SEPARATOR.join(f"'{piece}'" for piece in page.split(SEPARATOR)) if SEPARATOR in page else page


WORDINGS = {
    'alfworld': Wordings(alfworld_full, alfworld_compact, fallback=30),  # also of own environments
    'webshop': Wordings(webshop_full, webshop_compact, fallback=20, max_history=13_000),
    'sokoban': Wordings(sokoban_full, sokoban_compact, fallback=30),
}
