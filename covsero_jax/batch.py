"""What goes to the device: token batches and the minibatches of an update.

Suffix letters: N rows (environment steps) of one update, B rows of a micro-batch, P prompt tokens, A action tokens,
H history depth. -1 in an id column means "not compared".

A minibatch is the rows of one optimizer step, drawn at random; it is a tuple of micro-batches [B, ...], in which rows of
similar length stand together so that little is padded. Shapes never follow the data: B is fixed and (P, A) come from short
fixed lists, so a run compiles its programs once per bucket, not once per batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import flax.struct
import jax
import numpy as np

from covsero_jax import packing
from covsero_jax.trajectory import OracleStep

Array = jax.Array | np.ndarray


@flax.struct.dataclass
class TokenBatch:
    """Left-padded prompts | right-padded actions, so that the action window is the static slice [P-1 : P+A-1].

    Padding is what the masks say, never a token id: eos may well be the padding token, and it is trained.
    """

    prompt_BP: Array  # int32
    prompt_mask_BP: Array  # bool
    action_BA: Array  # int32
    action_mask_BA: Array  # bool; all False on padding rows

    @property
    def num_real(self) -> int:
        return int(np.sum(self.prompt_mask_BP) + np.sum(self.action_mask_BA))

    @property
    def num_slots(self) -> int:
        return self.prompt_mask_BP.size + self.action_mask_BA.size


@flax.struct.dataclass
class PolicyBatch:
    """One micro-batch of the policy loss. None = not computed; the train step refuses what it needs."""

    tokens: TokenBatch | packing.PackedTokens  # packed: B rows here are its B * R places
    advantage_B: Array  # float32
    trajectory_tokens_B: Array | None = None  # float32: action tokens of the row's whole trajectory in this update
    old_logprob_BA: Array | None = None  # float32: by the training graph, before the first update on this batch
    ref_logprob_BA: Array | None = None  # float32: by the reference policy; needed when kl_coef > 0
    sampler_logprob_BA: Array | None = None  # float32: as sampled; a diagnostic on the host, never a training input


@flax.struct.dataclass
class OracleBatch:
    """One micro-batch of oracle targets. The reply is the context of its command; only the command is scored and learned."""

    tokens: TokenBatch
    command_mask_BA: Array  # bool
    weight_B: Array  # float32: branch gate x weight along the branch; 0 on padding rows


Minibatch = tuple[PolicyBatch, ...]


def choose_bucket(lengths: Sequence[int], buckets: Sequence[int], name: str) -> int:
    """The smallest bucket that holds every length. ValueError names the first row that no bucket holds."""
    longest = max(lengths, default=0)
    fitting = [bucket for bucket in buckets if bucket >= longest]
    if fitting:
        return min(fitting)
    row = next(row for row, length in enumerate(lengths) if length > max(buckets))
    raise ValueError(
        f'row {row} has {lengths[row]} {name} tokens, more than the largest {name} bucket ({max(buckets)}): '
        f'add a larger {name} bucket, or shorten the {name}'
    )


def build_tokens(
    prompts: Sequence[np.ndarray], actions: Sequence[np.ndarray], *, num_rows: int, prompt_len: int, action_len: int
) -> TokenBatch:
    """Pad rows to [num_rows, P] and [num_rows, A]; rows beyond the data have all-False masks."""
    tokens = TokenBatch(
        prompt_BP=np.zeros((num_rows, prompt_len), np.int32),
        prompt_mask_BP=np.zeros((num_rows, prompt_len), bool),
        action_BA=np.zeros((num_rows, action_len), np.int32),
        action_mask_BA=np.zeros((num_rows, action_len), bool),
    )
    for row, (prompt, action) in enumerate(zip(prompts, actions, strict=True)):
        tokens.prompt_BP[row, prompt_len - len(prompt) :] = prompt
        tokens.prompt_mask_BP[row, prompt_len - len(prompt) :] = True
        tokens.action_BA[row, : len(action)] = action
        tokens.action_mask_BA[row, : len(action)] = True
    return tokens


def build_minibatches(
    prompts: Sequence[np.ndarray],
    actions: Sequence[np.ndarray],
    advantage_N: np.ndarray,
    trajectory_id_N: np.ndarray,
    *,
    minibatch: int,
    micro_batch: int,
    prompt_buckets: Sequence[int],
    action_buckets: Sequence[int],
    rng: np.random.Generator,
    sampler_logprobs: Sequence[np.ndarray] | None = None,
    pack: packing.PackConfig | None = None,
) -> list[Minibatch]:
    """The minibatches of one update: N rows in random order, each exactly once, `minibatch` of them per optimizer step.

    Which rows share an optimizer step is drawn without regard to their length. Inside a minibatch they are sorted by
    prompt length, longest first, and cut into micro-batches of `micro_batch` rows, each with the smallest buckets that
    hold it. The last minibatch has what is left; only its last micro-batch, the cheapest, has padding rows, at its end.
    With `pack`, a micro-batch is `micro_batch` sequences of several rows instead, and the prompt buckets are not used.
    `rng` is seeded by the caller from (seed, update, purpose). ValueError for columns of unequal length, an empty row, a
    row longer than every bucket, or a `minibatch` that is no multiple of `micro_batch`.
    """
    num_rows = len(prompts)
    if minibatch % micro_batch:
        raise ValueError(f'minibatch={minibatch} is not a multiple of micro_batch={micro_batch}')
    if not len(actions) == len(advantage_N) == len(trajectory_id_N) == num_rows:
        sizes = (num_rows, len(actions), len(advantage_N), len(trajectory_id_N))
        raise ValueError(f'prompts, actions, advantages and trajectory ids have different lengths: {sizes}')
    prompt_len_N = _row_lengths(prompts, prompt_buckets, 'prompt')
    action_len_N = _row_lengths(actions, action_buckets, 'action')
    _, inverse_N = np.unique(trajectory_id_N, return_inverse=True)
    trajectory_tokens_N = np.bincount(inverse_N, weights=action_len_N)[inverse_N] if num_rows else np.zeros(0)

    def build_micro(tokens: TokenBatch | packing.PackedTokens, row_B: np.ndarray) -> PolicyBatch:
        real_B = row_B >= 0
        sampled_BA = None
        if sampler_logprobs is not None:
            sampled_BA = np.zeros(tokens.action_mask_BA.shape, np.float32)
            sampled_BA[tokens.action_mask_BA] = np.concatenate([sampler_logprobs[row] for row in row_B[real_B]])
        return PolicyBatch(
            tokens=tokens,
            sampler_logprob_BA=sampled_BA,
            advantage_B=np.where(real_B, advantage_N[row_B], 0.0).astype(np.float32),
            trajectory_tokens_B=np.where(real_B, trajectory_tokens_N[row_B], 1.0).astype(np.float32),
        )

    def padded_micros(rows: np.ndarray) -> list[PolicyBatch]:
        longest_first = rows[np.argsort(-prompt_len_N[rows], kind='stable')]
        return [
            build_micro(
                build_tokens(
                    [prompts[row] for row in chosen],
                    [actions[row] for row in chosen],
                    num_rows=micro_batch,
                    prompt_len=choose_bucket(prompt_len_N[chosen], prompt_buckets, 'prompt'),
                    action_len=choose_bucket(action_len_N[chosen], action_buckets, 'action'),
                ),
                np.pad(chosen, (0, micro_batch - len(chosen)), constant_values=-1),
            )
            for chosen in _cut(longest_first, micro_batch)
        ]

    def packed_micros(rows: np.ndarray) -> list[PolicyBatch]:
        lengths = (prompt_len_N + action_len_N)[rows].tolist()
        return [
            build_micro(*packing.pack(
                prompts, actions, [[rows[i] for i in places] for places in bins], num_sequences=micro_batch, length=length,
                action_len=max(action_buckets), config=pack))
            for length, bins in packing.plan(lengths, action_len_N[rows].tolist(), pack, micro_batch)
        ]

    return [tuple((packed_micros if pack else padded_micros)(rows)) for rows in _cut(rng.permutation(num_rows), minibatch)]


def build_oracle_batches(
    steps: Sequence[OracleStep],
    weight_B: np.ndarray,
    *,
    micro_batch: int,
    prompt_buckets: Sequence[int],
    action_buckets: Sequence[int],
) -> list[tuple[np.ndarray, OracleBatch]]:
    """Micro-batches of branch steps, longest prompts first: (positions in `steps` of the real rows, batch) each."""
    prompt_len_B = _row_lengths([step.prompt_tokens for step in steps], prompt_buckets, 'prompt')
    action_len_B = _row_lengths([step.reply_tokens for step in steps], action_buckets, 'action')
    batches = []
    for rows in _cut(np.argsort(-prompt_len_B, kind='stable'), micro_batch):
        tokens = build_tokens(
            [steps[row].prompt_tokens for row in rows],
            [steps[row].reply_tokens for row in rows],
            num_rows=micro_batch,
            prompt_len=choose_bucket(prompt_len_B[rows], prompt_buckets, 'prompt'),
            action_len=choose_bucket(action_len_B[rows], action_buckets, 'action'),
        )
        command_mask_BA = np.zeros_like(tokens.action_mask_BA)
        for place, row in enumerate(rows):
            command_mask_BA[place, : len(steps[row].command_mask)] = steps[row].command_mask
        batches.append((rows, OracleBatch(tokens, command_mask_BA, _pad_rows(weight_B[rows], micro_batch, 0.0))))
    return batches


def pad_fraction(micro_batches: Iterable[PolicyBatch]) -> float:
    """Share of token slots that hold padding."""
    tokens = [micro.tokens for micro in micro_batches]
    slots = sum(t.num_slots for t in tokens)
    return 1.0 - sum(t.num_real for t in tokens) / slots if slots else 0.0


def sampler_gap(sampled: Iterable[PolicyBatch], old_logprobs: Iterable[np.ndarray]) -> tuple[float, float]:
    """(mean, largest) |log-prob of the sampler - old log-prob of the training graph| over action tokens, in nats.

    Above 1e-4 in float32, sampler and learner do not agree on the policy (masks, positions, temperature, kernels).
    """
    gaps = np.concatenate([
        np.abs(a.sampler_logprob_BA - old_BA)[a.tokens.action_mask_BA] for a, old_BA in zip(sampled, old_logprobs, strict=True)])
    return float(gaps.mean()), float(gaps.max())


def _row_lengths(column: Sequence[np.ndarray], buckets: Sequence[int], name: str) -> np.ndarray:
    """Tokens of every row. ValueError names an empty row, or one that no bucket holds, by its number in the update."""
    length_N = np.array([len(tokens) for tokens in column], int)
    if 0 in length_N:
        raise ValueError(f'row {np.argmin(length_N)} has no {name} tokens')
    choose_bucket(length_N, buckets, name)
    return length_N


def _cut(rows: np.ndarray, size: int) -> list[np.ndarray]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _pad_rows(column_N: np.ndarray, num_rows: int, value: float) -> np.ndarray:
    return np.pad(np.asarray(column_N, np.float32), (0, num_rows - len(column_N)), constant_values=value)
