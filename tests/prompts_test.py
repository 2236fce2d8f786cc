"""Prompts hold the published blocks; replies are read by stated rules; tokens are never encoded twice."""

from __future__ import annotations

import numpy as np
import pytest

from covsero_jax import pretrained, prompts
from covsero_jax.envs.base import Observation
from experiments import wiring

ADMISSIBLE = ('go to desk 1', 'help', 'look', 'take pen 1 from desk 1')
GOOD = '<think>it is there</think><action>go to desk 1</action>'


@pytest.fixture(scope='module')
def builder():
    tokenizer = pretrained.load_tokenizer(wiring.TINY_POLICY)
    return prompts.ChatPrompts(tokenizer, wording='compact', history=2, max_prompt=448)


@pytest.mark.parametrize('text, command, parsed, admissible', [
    (GOOD, 'go to desk 1', True, True),
    ('<think></think><action> Go To Desk 1 </action>', 'go to desk 1', True, True),
    ('<think></think><action>go to desk 1.</action>', 'go to desk 1.', True, False),
    ('<think></think><action>put pen 1 in/on desk 1</action>', 'put pen 1 in/on desk 1', True, False),
    ('<think></think><action>look</action> or <action>go to desk 1</action>', 'go to desk 1', True, True),
    ('<think>maybe <action>look</action>?</think><action>go to desk 1</action>', 'go to desk 1', True, True),
    ('<think>maybe <action>look</action></think>', '<action>look</action></think>', False, False),
    ('<action>look</action>', '<action>look</action>', False, False),
    ('<action>look</action><think>late</think>', '<action>look</action><think>late</think>'[-30:], False, False),
    ('<think></think></action>look<action>', '<think></think></action>look<action>'[-30:], False, False),
    ('<think></think><action>look', '<think></think><action>look', False, False),
    ('<think>open <action>look</action>', '<think>open <action>look</action>'[-30:], False, False),
    ('<think></think><action></action>', '', True, False),
    ('<think>\u770b</think><action>look</action>', 'look', False, True),
    ('', '', False, False),
    ('look', 'look', False, True),
])
def test_replies_are_read_by_the_stated_rule(text, command, parsed, admissible):
    reply = prompts.parse_reply(text, ADMISSIBLE)
    assert (reply.command, reply.parsed, reply.admissible) == (command, parsed, admissible)


def test_a_truncated_reply_is_not_parsed_even_if_it_looks_whole():
    assert prompts.parse_reply(GOOD, ADMISSIBLE, truncated=False).parsed
    reply = prompts.parse_reply(GOOD, ADMISSIBLE, truncated=True)
    assert not reply.parsed and reply.truncated


def test_encoded_reply_reads_back(builder):
    for command in ('go to desk 1', 'take butterknife 3 from countertop 12', 'clean cd 1 with sinkbasin 1'):
        reply = builder.parse(builder.encode_reply(command), (command,), False)
        assert reply == prompts.ParsedAction(command, True, True, False)


@pytest.mark.parametrize('wording', ['full', 'compact'])
def test_every_block_is_in_the_prompt(wording):
    builder = prompts.ChatPrompts(pretrained.load_tokenizer(wiring.TINY_POLICY), wording=wording, history=2,
                                  max_prompt=4000)
    history = [('first view', 'look'), ('second view', 'go to bed 1'), ('third view', 'open drawer 1')]
    text = builder.render('find it', history, Observation('now here', ADMISSIBLE, task='find it'), 3, 2)
    for block in ('find it', 'second view', 'go to bed 1', 'third view', 'open drawer 1', 'now here', 'take pen 1 from desk 1'):
        assert block in text
    assert 'first view' not in text and 'help' not in text.split('now here')[1]
    assert text.index('second view') < text.index('third view') < text.index('now here')


def test_chat_frame_equals_the_template(builder):
    tokenizer = pretrained.load_tokenizer(wiring.TINY_POLICY)
    observation = Observation('now here', ADMISSIBLE)
    text = builder.render('find it', [], observation, 0, 2)
    content = prompts.compact_wording('find it', [], 'now here', [c for c in ADMISSIBLE if c != 'help'], 0)
    expected = tokenizer.apply_chat_template([{'role': 'user', 'content': content}], add_generation_prompt=True,
                                             tokenize=False)
    assert text == expected


def test_a_long_history_loses_its_oldest_pairs_first(builder):
    observation = Observation('now here', ADMISSIBLE)
    history = [('oldest ' * 150, 'look'), ('newest', 'look')]
    text = builder.decode(builder.build('find it', history, observation, 2))
    assert 'newest' in text and 'oldest' not in text
    assert builder.num_cut == 0


def test_a_prompt_that_cannot_fit_is_cut_and_counted_not_raised(builder):
    before = builder.num_cut
    tokens = builder.build('find it', [], Observation('far ' * 1000, ADMISSIBLE), 0)
    assert tokens.dtype == np.int32 and len(tokens) == 448 and builder.num_cut == before + 1
    text = builder.decode(tokens)
    assert 'find it' in text and 'take pen 1 from desk 1' in text


def test_unknown_wording_lists_those_that_exist():
    with pytest.raises(ValueError, match='compact'):
        prompts.ChatPrompts(None, wording='verbose', history=2, max_prompt=10)
