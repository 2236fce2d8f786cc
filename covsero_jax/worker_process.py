"""One worker of a pool: the environments it holds, and the process or the plain object they live in.

A worker process is a fresh interpreter that imports this module and `make_env`'s, and nothing of the script being run:
no `__main__` guard is needed, and JAX, which the script has surely imported, is not loaded again. It is not a fork, which
would deadlock once JAX has started its threads. It sees no accelerator, leaves Ctrl-C to its parent, and ends with it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection as mp_connection
from typing import NamedTuple

from covsero_jax.envs import base

MakeEnv = Callable[[], base.Env]
# (slot, 'reset', task_id) | (slot, 'step', command) | (slot, 'replay', task_id, commands) | (slot, 'snapshot')
# | (slot, 'attempt', a request without its slot): an error is an answer, a base.Refusal, and restarts nothing
Request = tuple

_START_TIMEOUT_S = 600.0  # make_env may read thousands of game files
STOP_TIMEOUT_S = 2.0
ENV_ERRORS = (Exception, SystemExit)  # a game that calls sys.exit() has failed; Ctrl-C is the user's
INTERRUPTED = 'the previous call was interrupted or failed'
_CHILD_VARIABLES = {'JAX_PLATFORMS': 'cpu', 'CUDA_VISIBLE_DEVICES': '', 'OMP_NUM_THREADS': '1'}
_CHILD_PROGRAM = (
    'import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.path[:] = {path!r}; '
    'from covsero_jax import worker_process; worker_process.serve({fd})'
)


class Manifest(NamedTuple):
    """What the environments of a pool have in common, one entry per task."""

    task_names: tuple[str, ...]
    task_types: tuple[str, ...]
    oracle_steps: tuple[int, ...] = ()  # () = the oracle has no known bound


class Failure(Exception):
    """A worker did not answer. args: (cause, slot it was working for, None where that is not known)."""


class Host:
    """The environments of one worker, wherever it lives."""

    def __init__(self, make_env: MakeEnv, slots: range):
        self._envs = {slot: make_env() for slot in slots}
        first = self._envs[slots[0]]
        bound = tuple(first.oracle_steps) if hasattr(first, 'oracle_steps') else ()
        self.manifest = Manifest(tuple(first.task_names), tuple(first.task_types), bound)

    def answer(self, requests: list[Request]) -> list | Failure:
        """One result per request, in order; or the first failure, after which the environments are of no use."""
        results = []
        for slot, method, *arguments in requests:
            try:
                results.append(_call(self._envs[slot], method, arguments))
            except ENV_ERRORS:
                return Failure(traceback.format_exc(), slot)
        return results


def _call(env: base.Env, method: str, arguments: list) -> object:
    if method == 'attempt':
        try:
            return _call(env, arguments[0], arguments[1:])
        except ENV_ERRORS:
            return base.Refusal(traceback.format_exc())
    if method == 'snapshot':
        return env.snapshot()
    if method == 'oracle_command':
        if not hasattr(env, method):
            return base.OracleForbidden(f'{type(env).__name__} has no oracle')
        try:
            return env.oracle_command()
        except base.OracleForbidden as error:
            return error  # an answer like any other: nothing has happened to the environment
    observation = base.replay(env, *arguments) if method == 'replay' else getattr(env, method)(*arguments)
    if not isinstance(observation, base.Observation):
        raise TypeError(f'{type(env).__name__}.{method} must return an Observation, got {type(observation).__name__}')
    return observation


class InProcess:
    """A worker that is no process: everything happens in `receive`, and no time limit can be enforced."""

    name = 'environment in this process'

    def __init__(self, make_env: MakeEnv, slots: range):
        self._make_env = make_env
        self.slots = slots
        self._host = None

    def start(self) -> None:
        """Nothing to start: `manifest` builds the environments."""

    def manifest(self) -> Manifest:
        try:
            self._host = Host(self._make_env, self.slots)
        except ENV_ERRORS:
            raise Failure(traceback.format_exc(), None) from None
        return self._host.manifest

    def send(self, requests: list[Request]) -> None:
        self._requests = requests

    def receive(self, deadline: float) -> list:
        del deadline
        if self._host is None:
            raise Failure(INTERRUPTED, None)
        return _raise_failure(self._host.answer(self._requests))

    def hang_up(self) -> None:
        self._host = None

    def kill(self, patience_s: float = 0.0) -> None:
        del patience_s
        self._host = None


class Process:
    """A worker in a process of its own, at the other end of a socket."""

    def __init__(self, make_env: MakeEnv, slots: range):
        self._program = _pickle_program(make_env, slots)
        self.slots = slots
        self._process = None

    def start(self) -> None:
        """Returns at once; `manifest` waits until the environments are built."""
        self._connection, theirs = mp_connection.Pipe()
        with theirs:
            program = _CHILD_PROGRAM.format(path=sys.path, fd=theirs.fileno())
            self._process = subprocess.Popen(
                [sys.executable, '-c', program],
                stdin=subprocess.DEVNULL,
                env=os.environ | _CHILD_VARIABLES,
                pass_fds=[theirs.fileno()],
            )
        self.name = f'worker process {self._process.pid}'
        with contextlib.suppress(OSError):  # dead already; `manifest` says of what
            self._connection.send_bytes(self._program)

    def manifest(self) -> Manifest:
        return self.receive(time.monotonic() + _START_TIMEOUT_S)

    def send(self, requests: list[Request]) -> None:
        with contextlib.suppress(OSError):  # dead; `receive` says of what
            self._connection.send(requests)

    def receive(self, deadline: float) -> list | Manifest:
        try:
            if not self._connection.poll(max(0.0, deadline - time.monotonic())):
                raise Failure('no answer within the time limit', None)
            return _raise_failure(self._connection.recv())
        except (EOFError, OSError):
            raise Failure(self._exit_cause(), None) from None

    def hang_up(self) -> None:
        """Ask the process to end, which it does once it has finished what it is at."""
        if self._process is not None:
            self._connection.close()

    def kill(self, patience_s: float = 0.0) -> None:
        """Make sure that the process has ended, giving it `patience_s` seconds to do so itself."""
        self.hang_up()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience_s)
            self._process.kill()
            self._process.wait()

    def _exit_cause(self) -> str:
        if self._connection.closed:
            return INTERRUPTED
        try:
            code = self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return 'it closed its connection'
        return f'it was killed by {signal.Signals(-code).name}' if code < 0 else f'it exited with code {code}'


def _pickle_program(make_env: MakeEnv, slots: range) -> bytes:
    advice = 'use an importable function or class, or functools.partial of one; or num_workers=0'
    try:
        program = pickle.dumps((make_env, slots))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f'make_env cannot be sent to a worker process ({error}): {advice}') from error
    if b'__main__' in program:
        raise ValueError(
            f'make_env is defined in the script or notebook being run, which workers do not import: {advice}'
        )
    return program


def _raise_failure(answer: list | Manifest | Failure) -> list | Manifest:
    if isinstance(answer, Failure):
        raise answer
    return answer


def serve(fd: int) -> None:
    """The whole life of a worker process: build the environments, answer messages until the parent hangs up."""
    os.set_inheritable(fd, False)  # a grandchild that outlives this process must not keep the connection open
    connection = mp_connection.Connection(fd)
    with contextlib.suppress(EOFError, ConnectionError):
        program = connection.recv_bytes()
        try:
            host = Host(*pickle.loads(program))
        except ENV_ERRORS:
            connection.send(Failure(traceback.format_exc(), None))
            return
        connection.send(host.manifest)
        while True:
            connection.send(host.answer(connection.recv()))
