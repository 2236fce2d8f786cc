"""What the contenders of `experiments.bench_peers` share: the work, and how it is timed. Needs NumPy alone."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import resource
import time
from collections.abc import Callable, Sequence

import numpy as np

Round = Callable[[int], int]  # round -> useful tokens; the first one compiles and is not timed


@dataclasses.dataclass(frozen=True)
class Work:
    """Rows of (prompt, reply), the same for everybody. `folder`: Hugging Face weights."""

    folder: str
    prompts: list[np.ndarray]
    replies: list[np.ndarray]
    eos_ids: tuple[int, ...]
    max_new: int
    rows_at_once: int
    buckets: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.prompts)) + sum(map(len, self.replies))

    @property
    def advantages(self) -> np.ndarray:
        return np.where(np.arange(len(self.prompts)) % 2, 1.0, -1.0).astype(np.float32)

    def batches(self) -> list[np.ndarray]:
        """Row numbers of each batch of `rows_at_once`, the longest prompts together."""
        order = np.argsort([-len(prompt) for prompt in self.prompts], kind='stable')
        return [order[i : i + self.rows_at_once] for i in range(0, len(order), self.rows_at_once)]

    def padded(self, rows: Sequence[int], length: int, pad: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """(left-padded prompts, mask)."""
        tokens, mask = np.full((len(rows), length), pad, np.int32), np.zeros((len(rows), length), bool)
        for i, row in enumerate(rows):
            tokens[i, length - len(self.prompts[row]) :] = self.prompts[row]
            mask[i, length - len(self.prompts[row]) :] = True
        return tokens, mask

    def padded_replies(self, rows: Sequence[int], length: int, pad: int = 0) -> tuple[np.ndarray, np.ndarray]:
        tokens, mask = np.full((len(rows), length), pad, np.int32), np.zeros((len(rows), length), bool)
        for i, row in enumerate(rows):
            tokens[i, : len(self.replies[row])] = self.replies[row]
            mask[i, : len(self.replies[row])] = True
        return tokens, mask

    def write(self, path: pathlib.Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self) | {
            'prompts': [p.tolist() for p in self.prompts], 'replies': [r.tolist() for r in self.replies]}))


def read(path: str) -> Work:
    stored = json.loads(pathlib.Path(path).read_text())
    rows = {name: [np.array(row, np.int32) for row in stored[name]] for name in ('prompts', 'replies')}
    return Work(**stored | rows | {'eos_ids': tuple(stored['eos_ids']), 'buckets': tuple(stored['buckets'])})


def bucket(work: Work, length: int) -> int:
    return next(size for size in work.buckets if size >= length)


def peak_mib() -> float:
    """Most memory that this process has held. On Linux not from getrusage, which a process inherits from its parent."""
    status = pathlib.Path('/proc/self/status')
    if status.exists():
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith('VmHWM')) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run(argv: Sequence[str], tasks: dict[str, Callable[[Work], Round]], ceiling: Callable[[], float] | None = None) -> None:
    """argv: [_, task, work file, result file, rounds]. Writes useful tokens/s (best round) and the peak of memory in MiB."""
    _, task, work_file, out, rounds = argv
    work = read(work_file)
    best = ceiling() if ceiling else None
    before = peak_mib()
    once = tasks[task](work)
    began = time.perf_counter()
    once(0)
    first, rates = time.perf_counter() - began, []
    for round_ in range(1, int(rounds) + 1):
        began = time.perf_counter()
        tokens = once(round_)
        rates.append(tokens / (time.perf_counter() - began))
    pathlib.Path(out).write_text(json.dumps({
        'tokens_per_s': max(rates), 'all': rates, 'first_s': first, 'peak_mib': peak_mib() - before, 'ceiling_gflops': best}))
