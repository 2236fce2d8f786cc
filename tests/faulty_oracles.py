"""Environments whose oracle, or whose restoration, goes wrong on purpose. Worker processes import this module."""

from __future__ import annotations

from collections.abc import Callable

import scripted

from covsero_jax.envs import base, keydoor

SICK = 'two_doors/chain'  # the task in which it goes wrong; the others are well


class OracleKeyDoor(keydoor.KeyDoorEnv):
    """`mischief` answers for the oracle in task SICK."""

    def __init__(self, mischief: Callable[[base.Observation], str | None] | None = None):
        super().__init__(oracle=True)
        self._mischief = mischief

    def oracle_command(self) -> str | None:
        if self._mischief and self._level == keydoor.LEVELS[SICK]:
            return self._mischief(self._observation)
        return super().oracle_command()


def raises(observation: base.Observation) -> str:
    raise ArithmeticError(f'no plan for {observation.text!r}')


def hangs(observation: base.Observation) -> str:
    del observation
    scripted.hang()


def dies(observation: base.Observation) -> str:
    del observation
    scripted.die()


def leaves(observation: base.Observation) -> str:
    del observation
    scripted.leave()


def loops(observation: base.Observation) -> str:
    del observation
    return 'look'


def forbidden_word(observation: base.Observation) -> str:
    del observation
    return 'open sesame'


def gives_up(observation: base.Observation) -> None:
    del observation


def jumps(observation: base.Observation) -> str:
    """Ends the episode, unsolved."""
    return 'climb out of the window' if 'climb out of the window' in observation.admissible else 'go west'


class Forgetful(keydoor.KeyDoorEnv):
    """In task SICK the second episode differs from the first, in `what`: a restoration that does not restore."""

    def __init__(self, what: str):
        super().__init__(oracle=True)
        self._what, self._episodes = what, 0

    def reset(self, task_id: int) -> base.Observation:
        self._episodes += self.task_names[task_id] == SICK
        return self._changed(super().reset(task_id))

    def step(self, command: str) -> base.Observation:
        return self._changed(super().step(command))

    def restore(self, snapshot: object) -> base.Observation:
        self._episodes += snapshot[0] == keydoor.LEVELS[SICK]
        return self._changed(super().restore(snapshot))

    def _changed(self, observation: base.Observation) -> base.Observation:
        if self._level != keydoor.LEVELS[SICK] or self._episodes < 2:
            return observation
        if self._what == 'raises':
            raise ArithmeticError('the save game is damaged')
        change = {
            'text': {'text': observation.text + ' It rains.'},
            'admissible': {'admissible': (*observation.admissible, 'sing')},
            'task': {'task': 'Reach the first room.'},
            'done': {'done': True},
        }[self._what]
        return base.Observation(**(vars(observation) | change))
