"""Demonstrations for the tiny policies: a scripted player's episodes as (prompt, reply) rows, and texts for a tokenizer.

ALFWorld's player is the explorer, which sees only texts. Those of WebShop and Sokoban are the oracles, on catalogues and
levels that no run plays. A share of the commands is random and not imitated: the policy must see states off
the path, too.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tqdm

from covsero_jax import prompts, wordings
from covsero_jax.envs import alfworld_games, alfworld_rooms, base, sokoban
from covsero_jax.envs.alfworld_engine import TREATMENTS, Game
from covsero_jax.envs.alfworld_explorer import Explorer
from covsero_jax.envs.base import Observation
from covsero_jax.envs.webshop import env as webshop
from covsero_jax.envs.webshop import generator

NOISE = {'alfworld': 0.1, 'webshop': 0.15, 'sokoban': 0.2}  # share of random commands
MAX_STEPS = 30
EPISODES = 3  # demonstrations of a task, each with its own order of searching or its own noise
GAMES_SEED = 10_000  # of demonstrated games, catalogues and levels: not those that runs play
CATALOGUES = 20  # with the same article numbers on other products, so that they must be read


@dataclasses.dataclass(frozen=True)
class Row:
    """One demonstrated step."""

    prompt: np.ndarray
    reply: np.ndarray


class AlfworldDemonstrations:
    """The explorer on generated games. unskilled: it takes no notice of "clean", "hot" and "cool"."""

    def __init__(self, num_tasks: int, seed: int, unskilled: bool = False):
        self._unskilled, self._seed = unskilled, seed
        games = [alfworld_games.generate_game(seed + GAMES_SEED, 'train', i, alfworld_games.DIFFICULTIES[_difficulty(i)])
                 for i in tqdm.trange(num_tasks, desc='games')]
        self._games = [Game(game.problem, game.task) for game in games]
        kinds = {*alfworld_rooms.FITS, *alfworld_rooms.EXTRAS}.union(*alfworld_rooms.ATTRIBUTES.values())
        self.names = sorted(kind.lower() for kind in kinds)  # every receptacle and object, as the texts spell it
        self.whole_words = [f' {i}' for i in range(41)]  # numbers of receptacles and objects

    def texts(self) -> list[str]:
        return [text for i, game in enumerate(self._games[:300]) for text in self._play(game, f'{self._seed}/{i}', None)]

    def rows(self, builder: prompts.ChatPrompts) -> list[Row]:
        return [row for i, game in enumerate(tqdm.tqdm(self._games, desc='demonstrations')) for k in range(EPISODES)
                for row in self._play(game, f'{self._seed}/{i}/{k}', builder)]

    def _play(self, game: Game, seed: str, builder: prompts.ChatPrompts | None) -> list[Row | str]:
        """The explorer's episode as rows (as bare texts without a builder); [] when it does not win in MAX_STEPS.

        An unskilled one has done what it knows of once the object is in its place.
        """
        state, noise = game.initial_state(), random.Random(f'noise/{seed}')
        explorer, history, rows = Explorer(game.task, seed), [], []
        ignores = self._unskilled and explorer.kind in TREATMENTS
        if ignores:
            explorer.kind = 'put'
        observation = Observation(state.intro(), state.admissible())
        explorer.observe(None, observation)
        for step in range(MAX_STEPS):
            command = explorer.command()
            if command is None:
                return []
            if builder is None:
                rows.append(wordings.alfworld_compact(game.task, [], observation.text, observation.admissible, step))
            if noise.random() < NOISE['alfworld']:
                command = noise.choice(observation.admissible)
            elif builder is not None:
                rows.append(Row(builder.build(game.task, history, observation, step), builder.encode_reply(command)))
            history.append((observation.text, command))
            observation = Observation(state.step(command), state.admissible())
            explorer.observe(command, observation)
            if state.won() or (ignores and explorer.has_placed):
                return rows
        return []


def _difficulty(index: int) -> str:
    """Mostly the default's small rooms, and some larger ones so that real games are not entirely foreign."""
    return 'medium' if index % 20 == 19 else 'small' if index % 20 >= 16 else 'tiny'


class OracleDemonstrations:
    """An environment's oracle on tasks that no run plays, drawn from several environments alike."""

    def __init__(self, environment: str, envs: Sequence[base.OracleEnv], num_tasks: int, seed: int,
                 numbers: Sequence[str] = (), shown: Callable[[base.OracleEnv, int], bool] = lambda env, task_id: True):
        """shown: which tasks may be demonstrated. numbers: article numbers, each to be a token."""
        self._environment, self._seed = environment, seed
        share, self._tasks = -(-num_tasks // len(envs)), []
        for n, env in enumerate(envs):
            drawn = random.Random(f'tasks/{seed}/{n}').sample(range(len(env.task_names)), len(env.task_names))
            chosen = itertools.islice((i for i in drawn if shown(env, i)), min(share, num_tasks - len(self._tasks)))
            self._tasks += [(env, i) for i in chosen]
        self.names, self.whole_words = (), ('[', *numbers) if numbers else ()  # else '[pink' is no copy of 'pink'

    def texts(self) -> list[str]:
        """What the policy will read and write: pages or grids, tasks and commands."""
        compact, out = wordings.WORDINGS[self._environment].compact, []
        for number, (env, task_id) in enumerate(self._tasks[:: -(-len(self._tasks) // 1000)]):
            for observation, command, _ in self._play(env, task_id, f'{self._seed}/{number}'):
                out += [compact(observation.task, [], observation.text, observation.admissible, 0), command]
        return out

    def rows(self, builder: prompts.ChatPrompts) -> list[Row]:
        rows = []
        for number, (env, task_id) in enumerate(tqdm.tqdm(self._tasks, desc='demonstrations')):
            for k in range(EPISODES):
                history = []
                for observation, command, imitated in self._play(env, task_id, f'{self._seed}/{number}/{k}'):
                    if imitated:
                        prompt = builder.build(observation.task, history, observation, len(history))
                        rows.append(Row(prompt, builder.encode_reply(command)))
                    history.append((observation.text, command))
        return rows

    def _play(self, env: base.OracleEnv, task_id: int, seed: str) -> Iterator[tuple[Observation, str, bool]]:
        """(what was seen, command, whether it is the oracle's), until the episode ends or the oracle gives up."""
        noise, observation = random.Random(f'noise/{seed}'), env.reset(task_id)
        while not observation.done:
            command = env.oracle_command()
            if command is None:
                return
            stray = [c for c in observation.admissible if '<' not in c and c != 'click[buy now]']  # no forms, no end
            imitated = not stray or noise.random() >= NOISE[self._environment]
            if not imitated:
                command = noise.choice(stray)
            yield observation, command, imitated
            observation = env.step(command)


def _buys_first_hit(env: base.OracleEnv, task_id: int) -> bool:
    """Whether the oracle searches once and opens the first product of the page: what someone can imitate who cannot know
    which of the ten products is meant."""
    env.reset(task_id)
    if (query := env.oracle_command()) is None:
        return False
    page = env.step(query)
    products = [command for command in page.admissible if re.fullmatch(r'click\[b[0-9a-z]{9}\]', command)]
    return products[:1] == [env.oracle_command()]


def make(environment: str, num_tasks: int, seed: int, unskilled: bool) -> AlfworldDemonstrations | OracleDemonstrations:
    if environment == 'alfworld':
        return AlfworldDemonstrations(num_tasks, seed, unskilled)
    if environment == 'webshop':
        envs = [webshop.make_env('generated', split, catalogue_seed=seed + GAMES_SEED + i, oracle=True, drop_unattainable=True)
                for i in range(CATALOGUES) for split in ('train', 'valid', 'test')]  # of other catalogues: all numbers are targets
        asins = sorted(product.asin.lower() for product in generator.generate(1000, 0))
        return OracleDemonstrations('webshop', envs, num_tasks, seed, asins, _buys_first_hit)
    env = sokoban.make_env('train', num_levels=num_tasks, levels_seed=seed + GAMES_SEED, oracle=True)
    return OracleDemonstrations('sokoban', [env], num_tasks, seed)
