"""A person plays every environment from the terminal, takes steps back, asks the oracle, and watches recorded episodes."""

from __future__ import annotations

import json

import pytest

from experiments import play


class Keyboard:
    """Types these lines, then end-of-file."""

    def __init__(self, *lines: str):
        self._lines = iter(lines)

    def __call__(self, prompt: str) -> str:
        print(prompt, end='')
        try:
            return next(self._lines)
        except StopIteration:
            raise EOFError from None


class Oracle:
    """Does what the oracle says, read from the screen."""

    def __init__(self, capsys):
        self._capsys, self._answer, self.screen = capsys, None, ''

    def __call__(self, prompt: str) -> str:
        new = self._capsys.readouterr().out
        self.screen += new
        told = [line for line in new.splitlines() if line.startswith('the oracle: ')]
        return told[-1].removeprefix('the oracle: ') if told else '?'


@pytest.mark.parametrize('environment', ['webshop', 'sokoban'])
def test_an_episode_by_the_oracles_advice_is_solved(environment, capsys):
    keyboard = Oracle(capsys)
    play.main([f'--env={environment}', '--split=test', '--task=0', '--data=generated'], ask=keyboard)
    screen = keyboard.screen + capsys.readouterr().out
    if environment == 'sokoban' or 'no way to win' not in screen:
        assert '\nsolved after ' in screen and ('task score 100.0' in screen) == (environment == 'webshop')


def test_steps_can_be_taken_back_and_numbers_stand_for_commands(capsys):
    play.main(['--env=sokoban', '--task=0'], ask=Keyboard('0', 'b', '0', 'q'))
    screen = capsys.readouterr().out
    assert screen.count('> down') == 2 and 'ended after 1 steps' in screen  # 'down' is the first of the sorted four


def test_end_of_file_ends(capsys):
    play.main(['--env=sokoban'], ask=Keyboard())
    assert capsys.readouterr().out.rstrip().endswith('ended')


def test_images_show_every_position(tmp_path, capsys):
    play.main(['--env=sokoban', '--task=0', f'--images={tmp_path}'], ask=Keyboard('up', 'down', 'q'))
    files = sorted(tmp_path.glob('*.png'))
    assert len(files) == 3 and all(file.read_bytes().startswith(b'\x89PNG') for file in files)
    assert '3 images' in capsys.readouterr().out


def test_a_recorded_episode_is_shown_step_by_step(tmp_path, capsys):
    step = {'observation': 'a page', 'reply': '<action>click[x]</action>', 'command': 'click[x]', 'parsed': False,
            'admissible': True, 'reward': 1.5, 'advantage': 0.25}
    episode = {'group': 1, 'member': 2, 'task': 'T', 'success': False, 'stop_reason': 'max_steps', 'steps': [step] * 2,
               'last_observation': 'the end'}
    path = tmp_path / 'update_00001.jsonl'
    path.write_text(json.dumps(episode) + '\n')
    play.main([f'--replay={path}'], ask=Keyboard('', ''))
    screen = capsys.readouterr().out
    assert screen.count('a page') == 2 and 'advantage +0.250, format broken' in screen and 'the end' in screen
    with pytest.raises(SystemExit, match='no recorded episode'):
        play.main([f'--replay={path}', '--episode=7'], ask=Keyboard())


@pytest.mark.parametrize('arguments, message', [
    (['--env=sokoban', '--task=no_such_task'], 'give a number below'),
    (['--env=webshop', '--images=x', '--task=0'], 'Sokoban positions only'),
    (['--replay=no_such_file.jsonl'], 'no recorded episode'),
])
def test_bad_arguments_end_with_one_line(arguments, message):
    with pytest.raises(SystemExit, match=message):
        play.main(arguments, ask=Keyboard())
