"""Play an environment yourself, or watch a recorded episode step by step, in the terminal.

    python -m experiments.play --env=webshop                              a random task of the training split
    python -m experiments.play --env=sokoban --split=test --task=3        by number, or by name
    python -m experiments.play --env=alfworld --data=FOLDER               your own data, as --config.env.data of a run
    python -m experiments.play --replay=runs/NAME/trajectories/update_00024.jsonl --episode=5
    python -m experiments.play --env=sokoban --images=FOLDER              also one PNG per position

Type a command or its number. ? asks the oracle, b takes the last command back, q ends.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import sys
import textwrap
from collections.abc import Callable, Sequence

from configs import base as configs
from covsero_jax.envs import base, sokoban_image
from experiments import environments, wiring

WIDTH = 110
Ask = Callable[[str], str]


def build(options: argparse.Namespace) -> base.OracleEnv:
    """The environment with its oracle, as a run of the default preset has it in training."""
    config = configs.get_config('tiny', options.env)
    config.env.data = options.data or config.env.data
    config.env.observation = options.observation or config.env.observation
    config.env.max_steps = options.max_steps or config.env.max_steps
    config.eval.max_tasks = 0
    return environments.env_factory(config, options.split or config.env.train_split, oracle=config.sero.oracle)()


def task_id(env: base.Env, wanted: str) -> int:
    """A task by number or name; a random one for ''. Raises wiring.ConfigError."""
    if not wanted:
        return random.randrange(len(env.task_names))
    if wanted in env.task_names:
        return list(env.task_names).index(wanted)
    if wanted.isdigit() and int(wanted) < len(env.task_names):
        return int(wanted)
    raise wiring.ConfigError(f'--task={wanted}: give a number below {len(env.task_names)} or a name such as {env.task_names[0]}')


def show(text: str) -> str:
    """Long lines wrapped, WebShop's pieces one per line."""
    lines = text.replace(' [SEP] ', '\n').splitlines()
    return '\n'.join(part for line in lines for part in (textwrap.wrap(line, WIDTH) or ['']))


def menu(admissible: Sequence[str]) -> str:
    return '\n'.join(textwrap.wrap('   '.join(f'{i}:{c.replace(" ", chr(160))}' for i, c in enumerate(admissible)), WIDTH)
                     ).replace('\xa0', ' ')


class Images:
    """Numbered PNG files of Sokoban positions; does nothing without a folder."""

    def __init__(self, folder: str):
        self._folder, self._count = pathlib.Path(folder) if folder else None, 0
        if self._folder:
            self._folder.mkdir(parents=True, exist_ok=True)

    def add(self, grid: str) -> None:
        if self._folder:
            (self._folder / f'{self._count:04d}.png').write_bytes(sokoban_image.from_text(grid))
            self._count += 1

    def where(self) -> str:
        return f'\nresults: {self._count} images in {self._folder}' if self._folder else ''


def play(env: base.OracleEnv, task: int, ask: Ask, images: Images) -> str:
    """One episode with a person at the keyboard; returns the closing line."""
    observation, before = env.reset(task), []
    print(f'{env.task_names[task]}\n{show(observation.task)}\n')
    images.add(observation.text)
    while not observation.done:
        print(f'{show(observation.text)}\n\n{menu(observation.admissible)}')
        typed = ask(f'[{len(before)} steps] > ').strip()
        if typed == 'q':
            return f'ended after {len(before)} steps{images.where()}'
        if typed == '?':
            print(f'the oracle: {env.oracle_command() or "there is no way to win from here"}\n')
            continue
        if typed == 'b':
            if before:
                observation = env.restore(before.pop())
            continue
        if typed.isdigit() and int(typed) < len(observation.admissible):
            typed = observation.admissible[int(typed)]
        if not typed:
            continue
        before.append(env.snapshot())
        observation = env.step(typed.lower())
        images.add(observation.text)
        print(f'\n> {typed}' + (f'   reward {observation.reward:g}' if observation.reward else ''))
    score = '' if observation.score is None else f', task score {100 * observation.score:.1f}'
    outcome = 'solved' if observation.success else 'not solved'
    return f'{show(observation.text)}\n\n{outcome} after {len(before)} steps{score}{images.where()}'


def replay(path: pathlib.Path, number: int, ask: Ask, images: Images) -> str:
    """A recorded episode (trajectories/update_*.jsonl of a run), a step at each Enter. Raises wiring.ConfigError."""
    try:
        lines = path.read_text().splitlines()
        episode = json.loads(lines[number])
        steps = episode['steps']
    except (OSError, IndexError, ValueError, KeyError) as error:
        raise wiring.ConfigError(f'--replay={path}, --episode={number}: there is no recorded episode there ({error!r})') from error
    outcome = 'solved' if episode['success'] else f'not solved ({episode["stop_reason"]})'
    print(f'{episode["task"]}, group {episode["group"]}, member {episode["member"]}: {outcome}, {len(steps)} steps\n')
    for i, step in enumerate(steps):
        images.add(step['observation'])
        marks = ''.join(f', {word}' for word, wrong in (('format broken', not step['parsed']),
                                                        ('not admissible', not step['admissible'])) if wrong)
        credit = f', advantage {step["advantage"]:+.3f}' if 'advantage' in step else ''
        print(f'--- step {i}: reward {step["reward"]:g}{credit}{marks}\n{show(step["observation"])}\n\n{step["reply"]}\n')
        if ask('Enter: next, q: end > ').strip() == 'q':
            return f'ended at step {i}{images.where()}'
    images.add(episode['last_observation'])
    return f'{show(episode["last_observation"])}\n\n{outcome}{images.where()}'


def main(arguments: Sequence[str] | None = None, ask: Ask = input) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--env', choices=configs.ENVIRONMENTS, default='alfworld')
    parser.add_argument('--split', default='', help='default: the training split')
    parser.add_argument('--task', default='', help='number or name; default: a random one')
    parser.add_argument('--data', default='', help="'generated', or a folder of real data")
    parser.add_argument('--observation', default='', help='as --config.env.observation')
    parser.add_argument('--max_steps', type=int, default=0)
    parser.add_argument('--replay', help='a trajectories/*.jsonl file')
    parser.add_argument('--episode', type=int, default=0, help='its line, from 0')
    parser.add_argument('--images', default='', help='folder for PNGs of Sokoban positions')
    options = parser.parse_args(arguments)
    with wiring.one_line_errors():
        if options.images and options.env != 'sokoban':
            raise wiring.ConfigError('--images draws Sokoban positions only: add --env=sokoban')
        images = Images(options.images)
        try:
            if options.replay:
                print(replay(pathlib.Path(options.replay), options.episode, ask, images))
            else:
                env = build(options)
                print(play(env, task_id(env, options.task), ask, images))
        except EOFError:
            print(images.where() or 'ended')


if __name__ == '__main__':
    sys.exit(main())
