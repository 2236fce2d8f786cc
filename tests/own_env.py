"""An own environment, as short as they get: find the hidden number. Used by train_test as a user would use it."""

from __future__ import annotations

from covsero_jax.envs.base import Observation

DOORS = 6


class HiddenNumber:
    """Task i hides number i; every try says whether the number is higher or lower."""

    def __init__(self, max_steps: int):
        self.task_names = [f'number-{i}' for i in range(DOORS)]
        self.task_types = ['low' if i < DOORS / 2 else 'high' for i in range(DOORS)]
        self._max_steps = max_steps

    def reset(self, task_id: int) -> Observation:
        self._task, self._steps, self._success = task_id, 0, False
        return self._observe('You stand before a row of doors.')

    def step(self, command: str) -> Observation:
        if self._success or self._steps >= self._max_steps:
            raise RuntimeError('the episode is over')
        self._steps += 1
        if command not in self._commands():
            return self._observe('Nothing happens.')
        door = int(command.split()[-1])
        self._success = door == self._task
        word = 'right' if self._success else 'higher' if door < self._task else 'lower'
        return self._observe(f'You open the door {door}. The number is {word}.')

    def snapshot(self):
        return self._task, self._steps, self._success, self._text

    def restore(self, snapshot) -> Observation:
        self._task, self._steps, self._success, text = snapshot
        return self._observe(text)

    def _commands(self) -> tuple[str, ...]:
        return tuple(f'open door {i}' for i in range(DOORS))

    def _observe(self, text: str) -> Observation:
        self._text = text
        done = self._success or self._steps >= self._max_steps
        return Observation(text, self._commands(), 10.0 * self._success, done, self._success, 'find the door')


def make_env(*, split: str, max_steps: int, oracle: bool) -> HiddenNumber:
    del split, oracle  # one set of tasks, no oracle
    return HiddenNumber(max_steps)
