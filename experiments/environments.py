"""From a configuration to environments: ALFWorld, WebShop, Sokoban, or one of your own."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import pathlib
from collections.abc import Callable

import tqdm
from ml_collections import ConfigDict

from covsero_jax import wordings
from covsero_jax.envs import alfworld, alfworld_data, alfworld_games, base, cache, sokoban
from covsero_jax.envs.webshop import env as webshop

ASSETS = pathlib.Path(wordings.__file__).parent / 'assets'
TINY_POLICIES = {'alfworld': ASSETS / 'tiny', 'webshop': ASSETS / 'tiny_webshop', 'sokoban': ASSETS / 'tiny_sokoban'}
MakeEnv = Callable[[], base.Env]


class ConfigError(ValueError):
    """A configuration that cannot run here; the message names the field and what to do."""


def family(config: ConfigDict) -> str:
    """Whose wordings and tiny policy a run uses: an own environment has ALFWorld's."""
    return config.env.name if config.env.name in TINY_POLICIES else 'alfworld'


def env_factory(config: ConfigDict, split: str, *, oracle: str) -> MakeEnv:
    """What builds one environment over the tasks of `split`. Raises ConfigError, or the environment's own data error.

    oracle: '' = none. ALFWorld has several; any other environment is told whether it may have one, True or False.
    Evaluation splits are cut to config.eval.max_tasks, an evenly spaced subset; 0 = all.
    """
    max_tasks = (config.eval.max_tasks or None) if split != config.env.train_split else None
    if config.env.name == 'alfworld':
        return functools.partial(
            alfworld.make_env, data_folder(config), split, engine=config.env.engine, max_steps=config.env.max_steps,
            oracle=oracle, success_reward=config.env.success_reward, observation=config.env.observation,
            max_games=max_tasks)
    if config.env.name == 'webshop':
        return functools.partial(
            webshop.make_env, _webshop_data(config), split, max_steps=config.env.max_steps, oracle=bool(oracle),
            success_reward=config.env.success_reward, observation=config.env.observation, max_tasks=max_tasks,
            **config.env.webshop)
    if config.env.name == 'sokoban':
        return functools.partial(
            sokoban.make_env, split, levels=config.env.data, levels_seed=config.env.games_seed, max_steps=config.env.max_steps,
            num_levels=config.env.num_train if split == config.env.train_split else config.env.num_valid,
            oracle=bool(oracle), success_reward=config.env.success_reward, **config.env.sokoban)
    module, _, factory = config.env.name.partition(':')
    try:
        build = getattr(importlib.import_module(module), factory)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"env.name={config.env.name!r} is neither one of {', '.join(map(repr, TINY_POLICIES))} nor an "
                          f"importable 'module:factory' ({error})") from error
    return functools.partial(build, split=split, max_steps=config.env.max_steps, oracle=bool(oracle))


def data_folder(config: ConfigDict) -> str | None:
    """Where ALFWorld's games are; generated ones are written on first use. None = the variable ALFWORLD_DATA."""
    if config.env.data == 'ALFWORLD_DATA':
        return None
    if config.env.data != 'generated':
        return config.env.data
    if config.env.difficulty not in alfworld_games.DIFFICULTIES:
        raise ConfigError(f'env.difficulty={config.env.difficulty!r}; there are {", ".join(alfworld_games.DIFFICULTIES)}')
    return _generated_games(config.env.difficulty, config.env.games_seed, config.env.num_train, config.env.num_valid)


@functools.lru_cache  # checking that the games are whole reads all of them: once a process is enough
def _generated_games(difficulty: str, seed: int, num_train: int, num_valid: int) -> str:
    with tqdm.tqdm(desc='writing games', unit='game', leave=False, delay=1) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        return str(alfworld_games.ensure_games(
            cache.folder() / 'games', difficulty=alfworld_games.DIFFICULTIES[difficulty], seed=seed,
            num_games={'train': num_train, 'valid_seen': num_valid, 'valid_unseen': num_valid}, progress=progress))


def _webshop_data(config: ConfigDict) -> str:
    """'generated', or the folder of the official files."""
    if config.env.data != 'WEBSHOP_DATA':
        return config.env.data
    folder = os.environ.get('WEBSHOP_DATA')
    if not folder:
        raise ConfigError('env.data=WEBSHOP_DATA, but the variable WEBSHOP_DATA is not set; set it to the folder of the official '
                          'product files, or use --config.env.data=generated')
    return folder


def check(config: ConfigDict) -> None:
    """Builds every split once: data that is missing or malformed, and options that do not exist, are named now."""
    splits = (config.env.train_split, *config.eval.splits)
    if config.env.name == 'alfworld':
        if config.env.engine not in alfworld.ENGINES:
            raise ConfigError(f'env.engine={config.env.engine!r}; there are {", ".join(alfworld.ENGINES)}')
        if config.env.observation not in alfworld.OBSERVATIONS:
            raise ConfigError(f'env.observation={config.env.observation!r}; there are {", ".join(alfworld.OBSERVATIONS)}')
        if config.env.engine == 'textworld' and importlib.util.find_spec('textworld') is None:
            raise ConfigError("env.engine='textworld' is the official engine; install it with  pip install -e '.[alfworld]'")
        for split in splits:
            alfworld_data.find_games(data_folder(config), split)
        return
    for split in splits:
        try:
            env = env_factory(config, split, oracle='')()
        except (TypeError, ValueError) as error:
            if config.env.name not in TINY_POLICIES:
                raise
            raise ConfigError(f'env, split {split!r}: {error}') from error
        if not isinstance(env, base.Env) or not env.task_names:
            raise ConfigError(f'env.name={config.env.name!r}: what it builds for split {split!r} lacks a method or attribute of '
                              'covsero_jax.envs.base.Env, or has no tasks')


def check_oracle(config: ConfigDict) -> None:
    """The training environment has the oracle, and the restoration, that SERO needs. Raises ConfigError."""
    s = config.sero
    if config.env.name == 'alfworld':
        if s.oracle not in alfworld.ORACLES or not s.oracle:
            raise ConfigError(f'sero.oracle={s.oracle!r}; there are {", ".join(filter(None, alfworld.ORACLES))}')
        return
    env = env_factory(config, config.env.train_split, oracle=s.oracle)()
    advice = 'give it one (covsero_jax/envs/base.py, OracleEnv), or set sero.variant=off'
    if not hasattr(env, 'oracle_command'):
        raise ConfigError(f'sero.variant={s.variant!r} needs an oracle, and env.name={config.env.name!r} has no '
                          f'oracle_command: {advice}')
    env.reset(0)
    try:
        env.oracle_command()
    except base.OracleForbidden as error:
        raise ConfigError(f'env.name={config.env.name!r}: its oracle is forbidden though it was built with oracle=True '
                          f'({error}): {advice}') from error
    if s.restoration == 'copy':
        try:
            env.restore(env.snapshot())
        except (NotImplementedError, AttributeError, TypeError) as error:
            raise ConfigError(f'env.name={config.env.name!r} cannot be copied ({error!r}): use sero.restoration=replay, '
                              'which any deterministic environment supports') from error
