"""What the text of an optimised XLA program says: its collectives and largest temporary arrays. Sizes are of one device."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Collection, Iterator

COLLECTIVES = ('all-gather', 'reduce-scatter', 'all-reduce', 'all-to-all', 'collective-permute')
_BYTES = {'pred': 1, 's8': 1, 'u8': 1, 's16': 2, 'u16': 2, 'f16': 2, 'bf16': 2, 's32': 4, 'u32': 4, 'f32': 4, 's64': 8,
          'u64': 8, 'f64': 8, 'c64': 8}
_COMPUTATION = re.compile(r'(ENTRY )?%?([\w.-]+) \(.*\{$')
_INSTRUCTION = re.compile(r'\s+(?:ROOT )?%?[\w.-]+ = (.*?) ([a-z][a-z-]*)\(')
_ARRAY = re.compile(r'\b([a-z]+\d*)\[([\d,]*)\]')
_NO_MEMORY = {'parameter', 'get-tuple-element', 'tuple', 'bitcast', 'constant', 'while', 'conditional', 'after-all', 'iota'}


@dataclasses.dataclass(frozen=True)
class Array:
    """One array that an instruction makes."""

    shape: str  # as 'bf16[8,64]'
    nbytes: int
    made_by: str


def collectives(text: str) -> dict[str, int]:
    """Kind -> how many instructions of it the program has; one inside a loop counts once.

    TPUs scatter a sum by a fusion whose computation is named all-reduce-scatter and holds an all-reduce.
    """
    count = collections.Counter(dict.fromkeys(COLLECTIVES, 0))
    for computation, _, operation, line in _instructions(text):
        if operation == 'fusion' and 'calls=%all-reduce-scatter' in line:
            count['reduce-scatter'] += 1
        elif not computation.startswith('all-reduce-scatter'):
            kind = operation.removesuffix('-start')
            if kind in COLLECTIVES:
                count[kind] += 1
    return dict(count)


def temporaries(text: str) -> list[Array]:
    """Arrays that the program makes for itself, largest first; one for each shape. Inside a fusion none has memory.

    Arrays shaped like a result of the program are left out: they are taken for that result.
    """
    fused = set(re.findall(r'fusion\(.*calls=%?([\w.-]+)', text)) | set(re.findall(r'to_apply=%?([\w.-]+)', text))
    header = text.partition('\n')[0].partition('entry_computation_layout=')[2]
    results = {match.group() for match in _ARRAY.finditer(header.rpartition('->')[2])}
    found: dict[str, Array] = {}
    for computation, shape, operation, _ in _instructions(text):
        if computation in fused or operation in _NO_MEMORY or operation.endswith('-done'):
            continue
        for match in _ARRAY.finditer(shape):
            if match.group() not in results and match[1] in _BYTES:
                found.setdefault(match.group(), Array(match.group(), _nbytes(match), operation))
    return sorted(found.values(), key=lambda array: -array.nbytes)


def logits(arrays: list[Array], vocabulary: Collection[int], embedding: Collection[int]) -> Array | None:
    """The first array with a dimension of the vocabulary that is no matrix of vocabulary x embedding (weights, gradients)."""
    for array in arrays:
        dimensions = [int(d) for d in array.shape.partition('[')[2].rstrip(']').split(',') if d]
        is_weight = len(dimensions) == 2 and bool(set(dimensions) & set(embedding))
        if set(dimensions) & set(vocabulary) and not is_weight:
            return array
    return None


def out_of_memory(message: str) -> tuple[float, float] | None:
    """(GiB that the program needs at least, GiB that the device has), from the compiler's error; None for another error."""
    for pattern in (r'Used ([\d.]+[KMGT]?) of ([\d.]+[KMGT]?) hbm',
                    r'\(([\d.]+[KMGT]?)\) exceeds available HBM \(([\d.]+[KMGT]?)\)'):
        match = re.search(pattern, message)
        if match:
            return _gib(match[1]), _gib(match[2])
    return None


def _instructions(text: str) -> Iterator[tuple[str, str, str, str]]:
    """(computation, shape, operation, line) of every instruction."""
    computation = ''
    for line in text.splitlines():
        if not line.startswith(' '):
            match = _COMPUTATION.match(line)
            computation = match[2] if match else computation
        elif match := _INSTRUCTION.match(line):
            yield computation, match[1], match[2], line


def _nbytes(match: re.Match) -> int:
    return math.prod(int(d) for d in match[2].split(',') if d) * _BYTES[match[1]]


def _gib(size: str) -> float:
    unit = {'K': 2**-20, 'M': 2**-10, 'G': 1, 'T': 2**10}.get(size[-1])
    return float(size) / 2**30 if unit is None else float(size[:-1]) * unit
