"""A pool of environments in worker processes, or in this process when `num_workers` is 0.

Environment i lives in worker i mod num_workers. Each call sends one message to every worker concerned and then collects
the answers, so that the workers run side by side.

The parent records task and commands of every episode. A worker that dies, hangs or raises is started anew, its episodes
are replayed to the same point, the last observation of each is compared with the recorded one, and the interrupted call
is made again: environments are deterministic, so results do not depend on the failure. Its cause is logged.
"""

from __future__ import annotations

import dataclasses
import logging
import time
import weakref
from collections.abc import Sequence
from typing import Self

from covsero_jax import worker_process
from covsero_jax.envs import base
from covsero_jax.trajectory import Root

logger = logging.getLogger(__name__)

Worker = worker_process.InProcess | worker_process.Process


class WorkerError(RuntimeError):
    """An environment cannot be built, fails again and again at the same point, or is not deterministic."""


@dataclasses.dataclass
class _Episode:
    """What is needed to bring an environment back to its present state, and to see that it is."""

    task_id: int
    observation: base.Observation
    commands: list[str] = dataclasses.field(default_factory=list)


class WorkerPool:
    """`num_envs` environments (slots) behind batched `reset` and `step`.

    make_env: builds one environment; called once per slot, and again after a failure. For worker processes it must be
      picklable and importable (not defined in the script or notebook being run).
    num_workers: processes to spread the environments over; 0 = this process, with the same results and the same
      recovery from exceptions, but no time limit.
    timeout_s: seconds a worker may take for one step of all its environments (in a replay: per replayed step).
    max_restarts: restarts at one point of an episode before WorkerError.

    Raises WorkerError with the worker's traceback when `make_env` fails.
    """

    def __init__(
        self,
        make_env: worker_process.MakeEnv,
        *,
        num_envs: int,
        num_workers: int,
        timeout_s: float,
        max_restarts: int = 3,
    ):
        if num_envs < 1 or num_workers < 0:
            raise ValueError(f'need num_envs >= 1 and num_workers >= 0, got {num_envs} and {num_workers}')
        self.num_envs = num_envs
        self._timeout_s = timeout_s
        self._max_restarts = max_restarts
        self._episodes: list[_Episode | None] = [None] * num_envs
        kind = worker_process.Process if num_workers else worker_process.InProcess
        stride = min(max(num_workers, 1), num_envs)
        self._workers = [kind(make_env, range(first, num_envs, stride)) for first in range(stride)]
        self._finalizer = weakref.finalize(self, _close_workers, self._workers)  # runs at exit, too
        try:
            self.task_names, self.task_types, self.oracle_steps = self._start_all()
        except BaseException:
            self.close()
            raise

    def reset(self, task_ids: Sequence[int | None]) -> list[base.Observation | None]:
        """Start task `task_ids[i]` in slot i. None leaves the slot as it is and is answered by None."""
        started = self._used_slots(task_ids)
        for slot in started:
            if not 0 <= task_ids[slot] < len(self.task_names):
                raise ValueError(f'task id {task_ids[slot]} is outside 0..{len(self.task_names) - 1}')
        for slot in started:
            self._episodes[slot] = None  # the old episode must not be replayed if a worker fails now
        observations = self._exchange([(slot, 'reset', int(task_ids[slot])) for slot in started])
        for slot in started:
            self._episodes[slot] = _Episode(int(task_ids[slot]), observations[slot])
        return [observations.get(slot) for slot in range(self.num_envs)]

    def step(self, commands: Sequence[str | None]) -> list[base.Observation | None]:
        """Execute `commands[i]` in slot i. None leaves the slot as it is and is answered by None."""
        stepped = self._used_slots(commands)
        self._check_unfinished(stepped)
        observations = self._exchange([(slot, 'step', commands[slot]) for slot in stepped])
        for slot in stepped:
            episode = self._episodes[slot]
            episode.commands.append(commands[slot])
            episode.observation = observations[slot]
        return [observations.get(slot) for slot in range(self.num_envs)]

    def snapshots(self, slots: Sequence[int]) -> list[object]:
        """The present state of each of `slots`, for `restore`."""
        self._check_unfinished(slots)
        taken = self._exchange([(slot, 'snapshot') for slot in slots])
        return [taken[slot] for slot in slots]

    def restore(self, roots: Sequence[Root], *, by_copy: bool) -> list[base.Observation | base.Refusal]:
        """Bring slot i to the point of `roots[i]`: by its snapshot, or by a reset and its commands.

        Where that cannot be done the answer is a Refusal and the slot has no episode. Whether it is the recorded point
        is the caller's to check.
        """
        if len(roots) > self.num_envs:
            raise ValueError(f'{len(roots)} roots for {self.num_envs} slots')
        requests = []
        for slot, root in enumerate(roots):
            self._episodes[slot] = None
            how = ('restore', root.snapshot) if by_copy else ('replay', root.task_id, root.commands)
            requests.append((slot, 'attempt', *how))
        longest = 0 if by_copy else max((len(root.commands) for root in roots), default=0)
        answers = self._exchange(requests, self._timeout_s * (1 + longest))
        for slot, root in enumerate(roots):
            if not isinstance(answers[slot], base.Refusal):
                self._episodes[slot] = _Episode(root.task_id, answers[slot], list(root.commands))
        return [answers[slot] for slot in range(len(roots))]

    def oracle_commands(self, slots: Sequence[int]) -> list[str | None | base.Refusal]:
        """The oracle's next command in each of `slots`: None where it knows none, a Refusal where it raised, hung or
        killed its worker. Raises base.OracleForbidden if the environments have no oracle."""
        self._check_unfinished(slots)
        commands = self._exchange([(slot, 'attempt', 'oracle_command') for slot in slots])
        for command in commands.values():
            if isinstance(command, base.OracleForbidden):
                raise command
        return [commands[slot] for slot in slots]

    def close(self) -> None:
        """End the workers. The pool cannot be used afterwards."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _start_all(self) -> worker_process.Manifest:
        for worker in self._workers:
            worker.start()
        try:
            manifests = [worker.manifest() for worker in self._workers]
        except worker_process.Failure as failure:
            raise WorkerError(f'make_env failed. Cause: {failure.args[0]}') from None
        if any(manifest != manifests[0] for manifest in manifests):
            raise WorkerError('make_env gives different task names or types in different workers: sort the tasks')
        return manifests[0]

    def _used_slots(self, arguments: Sequence) -> list[int]:
        if len(arguments) != self.num_envs:
            raise ValueError(f'need one entry per slot ({self.num_envs}, None where unused), got {len(arguments)}')
        return [slot for slot, argument in enumerate(arguments) if argument is not None]

    def _check_unfinished(self, slots: Sequence[int]) -> None:
        for slot in slots:
            episode = self._episodes[slot]
            if episode is None:
                raise ValueError(f'slot {slot} has no episode: reset it first')
            if episode.observation.done:
                raise ValueError(f'slot {slot} (task {self.task_names[episode.task_id]}) is over: reset it first')

    def _exchange(self, requests: list[worker_process.Request], timeout_s: float | None = None) -> dict[int, object]:
        """One message to each worker concerned, then the answers, by slot. timeout_s: the pool's unless given."""
        if not self._finalizer.alive:
            raise ValueError('the pool is closed')
        batches: dict[Worker, list[worker_process.Request]] = {}
        for request in requests:
            batches.setdefault(self._workers[request[0] % len(self._workers)], []).append(request)
        answers, failures = {}, []
        try:
            for worker, batch in batches.items():
                worker.send(batch)
            timeout_s = timeout_s or self._timeout_s
            deadline = time.monotonic() + timeout_s
            for worker, batch in batches.items():
                try:
                    answers |= _by_slot(batch, worker.receive(deadline))
                except worker_process.Failure as failure:
                    failures.append((worker, batch, failure))
            for worker, batch, failure in failures:
                recover = self._recover_attempts if batch[0][1] == 'attempt' else self._recover
                answers |= recover(worker, batch, failure, timeout_s)
        except BaseException:
            # After Ctrl-C nobody knows who has executed what. Killed, these workers are brought back to the recorded
            # point by the next call, which would otherwise read stale answers.
            for worker in batches:
                worker.kill()
            raise
        return answers

    def _recover(
        self, worker: Worker, batch: list[worker_process.Request], failure: worker_process.Failure, timeout_s: float
    ) -> dict[int, object]:
        """Restart `worker`, replay its unfinished episodes and make the interrupted call again."""
        for restart in range(1, self._max_restarts + 1):
            logger.warning(
                '%s; restart %d of %d. Cause: %s',
                self._describe(worker, batch, failure), restart, self._max_restarts, failure.args[0],
            )  # fmt: skip
            try:
                self._restart(worker)
                return _ask(worker, batch, timeout_s)
            except worker_process.Failure as error:
                failure = error
        raise WorkerError(
            f'{self._describe(worker, batch, failure)}, {self._max_restarts + 1} times at the same point. '
            f'Cause: {failure.args[0]}'
        )

    def _recover_attempts(
        self, worker: Worker, batch: list[worker_process.Request], failure: worker_process.Failure, timeout_s: float
    ) -> dict[int, object]:
        """Make every attempt again, alone: the one that hangs or kills the worker gets a Refusal, the others an answer."""
        logger.warning('%s; restart. Cause: %s', self._describe(worker, batch, failure), failure.args[0])
        answers, is_broken = {}, True
        for request in batch:
            try:
                if is_broken:
                    self._restart(worker)
                answers |= _ask(worker, [request], timeout_s)
                is_broken = False
            except worker_process.Failure as error:
                answers[request[0]], is_broken = base.Refusal(error.args[0]), True
                self._episodes[request[0]] = None  # nobody knows its state
        return answers

    def _restart(self, worker: Worker) -> None:
        worker.kill()
        worker.start()
        worker.manifest()
        self._replay(worker)

    def _replay(self, worker: Worker) -> None:
        episodes = {slot: episode for slot in worker.slots if (episode := self._episodes[slot]) is not None}
        batch = [
            (slot, 'replay', episode.task_id, tuple(episode.commands))
            for slot, episode in episodes.items()
            if not episode.observation.done
        ]
        longest = max((len(episode.commands) for episode in episodes.values()), default=0)
        for slot, observation in _ask(worker, batch, self._timeout_s * (1 + longest)).items():
            episode = episodes[slot]
            if observation != episode.observation:
                raise WorkerError(
                    f'task {self.task_names[episode.task_id]} is not deterministic: replaying '
                    f'{len(episode.commands)} commands gives\n{observation}\ninstead of\n{episode.observation}'
                )

    def _describe(self, worker: Worker, batch: list[worker_process.Request], failure: worker_process.Failure) -> str:
        calls = {slot: (method, *arguments) for slot, method, *arguments in batch}
        slots = list(calls) if failure.args[1] is None else [failure.args[1]]
        attempts = []
        for slot in slots:
            method, *arguments = calls.get(slot, ('replay',))
            if method == 'attempt':
                method, *arguments = arguments
            episode = self._episodes[slot]
            task_id = arguments[0] if method in ('reset', 'replay') and arguments else episode and episode.task_id
            attempts.append(method if task_id is None else f'{method} of task {self.task_names[task_id]}')
        return f'{worker.name} failed in {" or ".join(attempts)}'


def _ask(worker: Worker, batch: list[worker_process.Request], timeout_s: float) -> dict[int, object]:
    worker.send(batch)
    return _by_slot(batch, worker.receive(time.monotonic() + timeout_s))


def _by_slot(batch: list[worker_process.Request], results: list) -> dict[int, object]:
    return {request[0]: result for request, result in zip(batch, results, strict=True)}


def _close_workers(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.hang_up()
    deadline = time.monotonic() + worker_process.STOP_TIMEOUT_S
    for worker in workers:
        worker.kill(patience_s=max(0.0, deadline - time.monotonic()))
