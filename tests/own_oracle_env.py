"""Own environments with oracles, good and bad, trained by name in train_sero_test."""

from __future__ import annotations

import own_env


class WithOracle(own_env.HiddenNumber):
    """HiddenNumber, whose oracle knows the number."""

    def oracle_command(self) -> str:
        return f'open door {self._task}'


class Uncopyable(WithOracle):
    def snapshot(self):
        raise NotImplementedError('this game cannot be saved')


class Raising(WithOracle):
    """Its oracle fails from the second step on, and in every second task at once."""

    def oracle_command(self) -> str:
        if self._steps or self._task % 2:
            raise ArithmeticError('the oracle has lost its notes')
        return super().oracle_command()


def make(*, split: str, max_steps: int, oracle: bool) -> WithOracle:
    del split, oracle
    return WithOracle(max_steps)


def make_uncopyable(*, split: str, max_steps: int, oracle: bool) -> WithOracle:
    del split, oracle
    return Uncopyable(max_steps)


def make_raising(*, split: str, max_steps: int, oracle: bool) -> WithOracle:
    del split, oracle
    return Raising(max_steps)
