"""Real parts for tests without a model: a prompt builder, policies, and environments that fail on purpose.

Worker processes import this module, so it imports neither pytest nor JAX.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np

from covsero_jax import trajectory
from covsero_jax.envs import base, keydoor
from covsero_jax.prompts import ParsedAction


def encode(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def decode(tokens: np.ndarray) -> str:
    return bytes(tokens.tolist()).decode()


class JsonPrompts:
    """Tokens are bytes, the prompt is the builder's arguments. A reply 'do X' has the required format."""

    def build(self, task, history, observation, step) -> np.ndarray:
        return encode(json.dumps([task, list(history), observation.text, observation.admissible, step]))

    def parse(self, action_tokens, admissible, truncated) -> ParsedAction:
        text = decode(action_tokens).rstrip('.')
        parsed = text.startswith('do ') and not truncated
        command = text.removeprefix('do ')
        return ParsedAction(command, parsed, command in admissible, truncated)

    def encode_target(self, command, *, think) -> tuple[np.ndarray, np.ndarray]:
        before = 'do ' if think else ''
        return encode(before + command), np.arange(len(before + command)) >= len(before)


class RandomPolicy:
    """Mostly sensible commands, now and then nonsense: a function of (seed, row id, prompt). Remembers its row ids."""

    def __init__(self, seed: int = 0):
        self.seed = seed
        self.rows: list[tuple[int, ...]] = []

    def __call__(self, prompts: Sequence[np.ndarray], row_ids: np.ndarray) -> list[trajectory.SampledAction]:
        self.rows += map(tuple, row_ids.tolist())
        return [self._reply(prompt, row_id) for prompt, row_id in zip(prompts, row_ids, strict=True)]

    def _reply(self, prompt: np.ndarray, row_id: np.ndarray) -> trajectory.SampledAction:
        rng = np.random.default_rng([self.seed, *row_id.tolist()])
        admissible = json.loads(decode(prompt))[3]
        sensible = [command for command in admissible if command not in ('look', 'climb out of the window')]
        choices = sensible if sensible and rng.random() < 0.7 else [*admissible, 'xyzzy']
        text = ('do ' if rng.random() < 0.9 else '') + rng.choice(choices)
        tokens = encode(text + '.' * rng.integers(4))
        return trajectory.SampledAction(tokens, -rng.random(tokens.size, np.float32), bool(rng.random() < 0.1))


def scripted_policy(scripts: dict[int, Sequence[str]]) -> trajectory.Policy:
    """Group g says `scripts[g][step]`, the last entry for ever."""

    def policy(prompts, row_ids):
        del prompts
        texts = [scripts[group][min(step, len(scripts[group]) - 1)] for group, _, step in row_ids.tolist()]
        return [trajectory.SampledAction(encode(text), np.zeros(len(text), np.float32), False) for text in texts]

    return policy


def plain(groups: Sequence) -> list:
    """Groups as nested built-in values, arrays as (dtype, bytes): == compares everything bit for bit."""

    def value(x):
        if isinstance(x, np.ndarray):
            return x.dtype.str, x.tobytes()
        return tuple(map(value, x)) if isinstance(x, tuple) else x

    return [
        (group.task_id, t.task_id, t.success, t.stop_reason, *[value(tuple(vars(step).values())) for step in t.steps])
        for group in groups
        for t in group.trajectories
    ]


def hang() -> None:
    time.sleep(3600)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_with_child() -> None:
    subprocess.Popen(['sleep', '5'], close_fds=False)  # outlives its parent and inherits whatever can be inherited
    die()


def leave() -> None:
    sys.exit('the game has had enough')


def crash() -> None:
    raise ArithmeticError('the game divides by zero')


class Faulty(keydoor.KeyDoorEnv):
    """Calls `fault` in the third step of an episode of the task in file `flag`; each such call removes the file first."""

    def __init__(self, fault: Callable[[], None], flag: pathlib.Path, *, always: bool = False):
        super().__init__()
        self._fault, self._flag, self._always = fault, flag, always

    def reset(self, task_id: int) -> base.Observation:
        self._task, self._steps = self.task_names[task_id], 0
        return super().reset(task_id)

    def step(self, command: str) -> base.Observation:
        self._steps += 1
        if self._steps == 3 and self._claims():
            self._fault()
        return super().step(command)

    def _claims(self) -> bool:
        """The file names this task; another process may remove it at any moment, then the fault is that one's."""
        try:
            if self._flag.read_text() != self._task:
                return False
            if not self._always:
                self._flag.unlink()
        except FileNotFoundError:
            return False
        return True


class WithPid(keydoor.KeyDoorEnv):
    """Leaves a file named after its process in `folder`."""

    def __init__(self, folder: pathlib.Path):
        super().__init__()
        (folder / str(os.getpid())).touch()


class Reporter(WithPid):
    """Its first observation tells what it sees of its process."""

    def reset(self, task_id: int) -> base.Observation:
        super().reset(task_id)
        return self._observe(
            json.dumps(
                {
                    'jax': 'jax' in sys.modules,
                    'platforms': os.environ.get('JAX_PLATFORMS'),
                    'devices': os.environ.get('CUDA_VISIBLE_DEVICES'),
                    'ignores_interrupt': signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
                    'pid': os.getpid(),
                }
            )
        )
