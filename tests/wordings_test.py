"""Every wording shows what a reply depends on; forms admit what fills them in."""

from __future__ import annotations

import pytest

from covsero_jax import prompts, wordings
from covsero_jax.envs import base

PAGE = 'Back to Search [SEP] Page 1 (Total results: 2) [SEP] Next > [SEP] B0AAAAAAAA [SEP] Red Shoe [SEP] $34.0'
COMMANDS = {
    'alfworld': ('go to desk 1', 'look'),
    'webshop': ('click[back to search]', 'click[next >]', 'click[b0aaaaaaaa]'),
    'sokoban': ('down', 'left', 'right', 'up'),
}
OBSERVATION = {'alfworld': 'On the desk 1, you see nothing.', 'webshop': PAGE, 'sokoban': '# # #\n# P #\n# # #'}
PAST = [(3, 'seen before', 'done before'), (4, 'seen last', 'done last')]


@pytest.mark.parametrize('environment', wordings.WORDINGS)
def test_full_wordings_show_task_past_observation_and_commands(environment):
    full = wordings.WORDINGS[environment].full
    pieces = OBSERVATION[environment].split(wordings.SEPARATOR)
    first, later = (full('THE TASK', past, OBSERVATION[environment], COMMANDS[environment], 4) for past in ([], PAST))
    for command in COMMANDS[environment]:
        assert command in first and command in later
    for piece in pieces:
        assert piece in first and piece in later
    assert 'THE TASK' in later and 'done last' in later and 'seen before' in later and 'seen before' not in first
    assert '<think>' in first and '<action>' in first
    assert 'THE TASK' in first or environment == 'alfworld'  # ALFWorld's first observation states the task


@pytest.mark.parametrize('environment', wordings.WORDINGS)
def test_compact_wordings_keep_the_observation_and_the_commands_of_the_past(environment):
    text = wordings.WORDINGS[environment].compact('The task', PAST, OBSERVATION[environment], COMMANDS[environment], 4)
    for piece in OBSERVATION[environment].split(wordings.SEPARATOR):
        assert piece.lower() in text.lower()
    assert '> done before\n> done last\n' in text if environment != 'alfworld' else '> done last\n' in text


def test_webshop_pieces_are_quoted_one_by_one():
    text = wordings.webshop_full('buy it', [], PAGE, COMMANDS['webshop'], 0)
    assert "'Back to Search' [SEP] 'Page 1 (Total results: 2)' [SEP] 'Next >'" in text
    assert "'[button] Search [button_]'" not in wordings.webshop_full('buy it', [], '[button] Search [button_]', (), 0)


def test_all_that_can_be_clicked_stands_in_a_compact_page():
    text = wordings.webshop_compact('buy it', [], PAGE, COMMANDS['webshop'], 0)
    for command in COMMANDS['webshop']:
        assert command[len('click['):-1] in text.splitlines()


@pytest.mark.parametrize('command, admitted', [
    ('search[red shoes]', True), ('search[a [b] c]', True), ('click[x]', True), ('search[]', False), ('search[  ]', False),
    ('search', False), ('search[red', False), ('click[y]', False), ('buy[red shoes]', False), ('', False),
])
def test_a_form_admits_what_fills_it_in(command, admitted):
    assert base.admits(('search[<your query>]', 'click[x]'), command) is admitted


def test_an_option_value_in_angle_brackets_is_no_form():
    assert not base.admits(('click[<5 inch>]',), 'click[7 inch]') and base.admits(('click[<5 inch>]',), 'click[<5 inch>]')


def test_the_fallback_is_as_long_as_published():
    reply = 'x' * 50
    assert [len(prompts.parse_reply(reply, (), fallback=words.fallback).command) for words in wordings.WORDINGS.values()
            ] == [30, 20, 30]
