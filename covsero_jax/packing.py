"""Several rows in one sequence: less padding where prompts are ragged, and the same numbers.

A row (prompt and reply) becomes a segment: its tokens see only each other, and positions start anew. Suffix letters: B
sequences of L tokens, R rows at most in each, T action tokens at most in each, A action tokens at most of a row; the rows
of a batch are the B * R places, of which unused ones are masked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array | np.ndarray


@dataclasses.dataclass(frozen=True)
class PackConfig:
    """length: of a sequence; must hold the longest prompt and reply. rows: R. actions: T, 0 = a quarter of the length.

    Each sequence's share of the vocabulary product is T positions, whatever is in it. Raises ValueError for a length that
    no row fits into.
    """

    length: int
    rows: int = 16
    actions: int = 0

    def __post_init__(self):
        if self.length < 4 or self.rows < 1:
            raise ValueError(f'pack_length={self.length} must be at least 4 and pack_rows={self.rows} at least 1')

    @property
    def lengths(self) -> tuple[int, ...]:
        """What sequences may be shortened to when little is left: a program is compiled for each."""
        return (self.length // 2, self.length)

    def max_actions(self, length: int) -> int:
        return max((self.actions or self.length // 4) * length // self.length, 1)


@flax.struct.dataclass
class PackedTokens:
    """Rows in sequences. `target_BT` points at the position whose hidden state predicts `action_BT`."""

    token_BL: Array  # int32
    segment_BL: Array  # int32: 1.. counts the rows of a sequence, 0 is padding
    position_BL: Array  # int32: within the segment
    target_BT: Array  # int32 index into L; 0 on padding
    action_BT: Array  # int32
    slot_BRA: Array  # int32 index into T of a row's action tokens; 0 on padding
    action_mask_BA: Array  # bool [B * R, A]

    @property
    def num_real(self) -> int:
        return int(np.sum(np.asarray(self.segment_BL) > 0))

    @property
    def num_slots(self) -> int:
        return self.segment_BL.size


def segment_mask(segment_BL: Array) -> Array:
    """Who may look at whom: causal and in the same segment. Padding sees itself, so that no softmax row is empty."""
    index_L = jnp.arange(segment_BL.shape[1])
    causal_LL = index_L[:, None] >= index_L[None, :]
    same_BLL = segment_BL[:, :, None] == segment_BL[:, None, :]
    return same_BLL & causal_LL[None] & (segment_BL > 0)[:, None, :] | (index_L[:, None] == index_L[None, :])[None]


def first_fit(lengths: Sequence[int], actions: Sequence[int], length: int, max_rows: int, max_actions: int) -> list[list[int]]:
    """Rows to bins: the longest first, each into the first bin with room for its tokens, its action tokens, and one row more.

    Within 22 % of the fewest bins, and usually within 2 % (first-fit decreasing). Rows that fit nowhere alone: ValueError.
    """
    bins: list[list[int]] = []
    room: list[list[int]] = []  # tokens, rows, action tokens left
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        need = (lengths[row], 1, actions[row])
        if need[0] > length or need[2] > max_actions:
            raise ValueError(f'row {row} has {need[0]} tokens, {need[2]} of them of the reply; a packed sequence holds {length} '
                             f'and {max_actions}: raise learner.pack_length')
        place = next((i for i, left in enumerate(room) if all(n <= m for n, m in zip(need, left, strict=True))), len(bins))
        if place == len(bins):
            bins.append([])
            room.append([length, max_rows, max_actions])
        bins[place].append(row)
        room[place] = [m - n for n, m in zip(need, room[place], strict=True)]
    return bins


def plan(lengths: Sequence[int], actions: Sequence[int], config: PackConfig, num_sequences: int) -> list[tuple[int, list[list[int]]]]:
    """The micro-batches of a minibatch: (length of the sequences, rows of each of at most `num_sequences`).

    All but the last are full. The rows of the last one are packed anew into the shortest of config.lengths that will do.
    """
    bins = first_fit(lengths, actions, config.length, config.rows, config.max_actions(config.length))
    whole = len(bins) // num_sequences * num_sequences
    micros = [(config.length, bins[i : i + num_sequences]) for i in range(0, whole, num_sequences)]
    rest = [row for rows in bins[whole:] for row in rows]
    if not rest:
        return micros
    for length in config.lengths:
        limits = (length, config.rows, config.max_actions(length))
        if max(lengths[r] for r in rest) > limits[0] or max(actions[r] for r in rest) > limits[2]:
            continue
        shorter = first_fit([lengths[r] for r in rest], [actions[r] for r in rest], *limits)
        if len(shorter) <= num_sequences:
            return [*micros, (length, [[rest[i] for i in rows] for rows in shorter])]
    return [*micros, (config.length, bins[whole:])]


def pack(prompts: Sequence[np.ndarray], actions: Sequence[np.ndarray], bins: Sequence[Sequence[int]], *, num_sequences: int,
         length: int, action_len: int, config: PackConfig) -> tuple[PackedTokens, np.ndarray]:
    """The rows of `bins` as one batch, and which row stands at each of its B * R places (-1 = none)."""
    B, L, R, T, A = num_sequences, length, config.rows, config.max_actions(length), action_len
    tokens = PackedTokens(
        token_BL=np.zeros((B, L), np.int32), segment_BL=np.zeros((B, L), np.int32), position_BL=np.zeros((B, L), np.int32),
        target_BT=np.zeros((B, T), np.int32), action_BT=np.zeros((B, T), np.int32), slot_BRA=np.zeros((B, R, A), np.int32),
        action_mask_BA=np.zeros((B * R, A), bool))
    row_N = np.full(B * R, -1)
    for b, rows in enumerate(bins):
        start = used = 0
        for r, row in enumerate(rows):
            p, a = len(prompts[row]), len(actions[row])
            end = start + p + a
            tokens.token_BL[b, start:end] = np.concatenate([prompts[row], actions[row]])
            tokens.segment_BL[b, start:end] = r + 1
            tokens.position_BL[b, start:end] = np.arange(p + a)
            tokens.target_BT[b, used : used + a] = np.arange(start + p - 1, end - 1)
            tokens.action_BT[b, used : used + a] = actions[row]
            tokens.slot_BRA[b, r, :a] = np.arange(used, used + a)
            tokens.action_mask_BA[b * R + r, :a] = True
            row_N[b * R + r] = row
            start, used = end, used + a
    return tokens, row_N
