"""From an episode to prompt tokens, and from reply tokens to a command.

The protocol of the papers (verl-agent; base of GiGPO, HGPO, GraphGPO): every step is a fresh single-turn chat prompt of
fixed blocks: task, the last `history` observation/action pairs, the present observation, the admissible commands, and
how to reply, namely `<think>...</think><action>...</action>`. What the blocks say is `wordings`' business.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from covsero_jax import wordings
from covsero_jax.envs.base import Observation, admits

_TAGS = re.compile(r'<(/?)(think|action)>')
_CJK = re.compile('[\u4e00-\u9fff]')
FALLBACK = 30  # characters of a reply without usable action tags that are sent, as published for ALFWorld


@dataclasses.dataclass(frozen=True)
class ParsedAction:
    """A reply, read. `parsed` is about the format only, `admissible` about the command; both are reported."""

    command: str
    parsed: bool
    admissible: bool
    truncated: bool


class PromptBuilder(Protocol):
    """What a rollout needs to know about text."""

    def build(self, task: str, history: Sequence[tuple[str, str]], observation: Observation, step: int) -> np.ndarray:
        """Prompt tokens, int32 [p]. `history` holds all (observation, command) pairs so far, oldest first."""

    def parse(self, action_tokens: np.ndarray, admissible: Sequence[str], truncated: bool) -> ParsedAction:
        """Read sampled tokens back. The text is never encoded again."""

    def encode_target(self, command: str, *, think: bool) -> tuple[np.ndarray, np.ndarray]:
        """Reply tokens int32 [a] with `command`, and which of them are the command: bool [a], one run of True."""


def parse_reply(text: str, admissible: Sequence[str], truncated: bool = False, *, fallback: int = FALLBACK) -> ParsedAction:
    """The command is the content of the last complete `<action>` pair that stands outside the think block.

    parsed: such a pair exists, a complete `<think>` block precedes it, no CJK character occurs (as published), and the
    reply was not cut by the length limit. Without such a pair the last `fallback` characters are sent, as published: the
    environment answers that nothing happens. Commands are lower-cased and stripped.
    """
    command, thought, opened = None, False, {}
    for tag in _TAGS.finditer(text):
        closing, name = tag.group(1) == '/', tag.group(2)
        if not closing:
            if name == 'think' or 'think' not in opened:  # a tag quoted inside the thoughts is not an action
                opened[name] = tag.end()
        elif name in opened:
            start = opened.pop(name)
            if name == 'think':
                thought = True
            elif thought:
                command = text[start:tag.start()]
    parsed = command is not None and not truncated and not _CJK.search(text)
    command = (text[-fallback:] if command is None else command).strip().lower()
    return ParsedAction(command, parsed, admits(admissible, command), truncated)


class ChatPrompts:
    """PromptBuilder over a Hugging Face tokenizer with a chat template.

    wording: 'full' | 'compact'. environment: a key of `wordings.WORDINGS`. history: pairs shown (2 in the papers).
    max_prompt: tokens; a prompt that would be longer first loses its oldest pairs, then the middle of its text; it never
    raises in mid-run, and `num_cut` counts. hidden: commands that are not listed ('help', as published), though legal.
    """

    def __init__(self, tokenizer, *, wording: str, environment: str = 'alfworld', history: int, max_prompt: int,
                 hidden: Sequence[str] = ('help',)):
        if wording not in ('full', 'compact'):
            raise ValueError(f"prompt wording {wording!r} does not exist; there are 'compact' and 'full'")
        self._words = wordings.WORDINGS[environment]
        self._tokenizer, self._wording = tokenizer, getattr(self._words, wording)
        self._history, self._max_prompt, self._hidden = history, max_prompt, frozenset(hidden)
        self._before, self._after = self._chat_frame()
        self.num_cut = 0

    def _chat_frame(self) -> tuple[str, str]:
        """The template's text around one user message; rendered once, since the template engine is slow."""
        mark = '@MESSAGE@'
        text = self._tokenizer.apply_chat_template([{'role': 'user', 'content': mark}], tokenize=False,
                                                   add_generation_prompt=True)
        before, found, after = text.partition(mark)
        if not found:
            raise ValueError("the tokenizer's chat template does not show the user message")
        return before, after

    def render(self, task: str, history: Sequence[tuple[str, str]], observation: Observation, step: int,
               shown: int) -> str:
        """The prompt as text, with the last `shown` pairs of the history."""
        first = len(history) - min(shown, len(history))
        numbered = [(i + 1, seen, done) for i, (seen, done) in enumerate(history)][first:]
        commands = [c for c in observation.admissible if c not in self._hidden]
        text = self._wording(task, numbered, observation.text, commands, step)
        if numbered and self._words.max_history and len(text) > self._words.max_history:
            text = self._wording(task, [], observation.text, commands, step)
        return self._before + text + self._after

    def build(self, task: str, history: Sequence[tuple[str, str]], observation: Observation, step: int) -> np.ndarray:
        for shown in range(self._history, -1, -1):
            tokens = self._encode(self.render(task, history, observation, step, shown))
            if len(tokens) <= self._max_prompt:
                return np.asarray(tokens, np.int32)
        self.num_cut += 1
        head = self._max_prompt // 2
        return np.asarray(tokens[:head] + tokens[len(tokens) - (self._max_prompt - head):], np.int32)

    def take_num_cut(self) -> int:
        """Prompts that had to be cut since the last call."""
        taken, self.num_cut = self.num_cut, 0
        return taken

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def encode_reply(self, command: str, *, think: str = '') -> np.ndarray:
        """Tokens of a well-formed reply with `command`, end token included: demonstrations."""
        return self._encode_command(f'<think>{think}</think>', command)[0]

    def encode_target(self, command: str, *, think: bool) -> tuple[np.ndarray, np.ndarray]:
        """An oracle's reply: `<action>command</action>` and the end token, int32 [a]; its command tokens, bool [a].

        SERO scores and trains the command tokens only (4.3, B), with this one mask. The reply is encoded as one text,
        as the model would see it, so a token may hold characters of the command and of a tag: Qwen2.5 has ']</', which
        ends a click in WebShop. Such a token is a command token; all others of the tags and the end token are not.

        think: put an empty think block before it, which makes the reply valid for `parse`; tokens are then those of
        `encode_reply`. Raises ValueError if the command is blank or contains a tag, or the tokenizer has no offsets.
        """
        return self._encode_command('<think></think>' if think else '', command)

    def _encode_command(self, thought: str, command: str) -> tuple[np.ndarray, np.ndarray]:
        if not command.strip() or _TAGS.search(command):
            raise ValueError(f'{command!r} cannot be put between action tags: it is blank or contains a tag')
        if not self._tokenizer.is_fast:
            raise ValueError('the tokenizer does not tell which characters a token covers; load a fast one (a folder '
                             'with tokenizer.json)')
        start = len(thought) + len('<action>')
        encoded = self._tokenizer(f'{thought}<action>{command}</action>', add_special_tokens=False,
                                  return_offsets_mapping=True)
        mask = [first < start + len(command) and stop > start for first, stop in encoded['offset_mapping']]
        return np.asarray([*encoded['input_ids'], self._tokenizer.eos_token_id], np.int32), np.asarray([*mask, False])

    def decode(self, action_tokens: np.ndarray) -> str:
        """Reply text without special tokens."""
        return self._tokenizer.decode(action_tokens, skip_special_tokens=True)

    def parse(self, action_tokens: np.ndarray, admissible: Sequence[str], truncated: bool) -> ParsedAction:
        return parse_reply(self.decode(action_tokens), admissible, truncated, fallback=self._words.fallback)
