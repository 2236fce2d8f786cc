"""From configurations to WebShop and Sokoban: what a run plays, and what is refused before it starts, by name."""

import json

import pytest

from configs import base as configs
from covsero_jax.envs import base, sokoban
from covsero_jax.envs.webshop.catalogue import WebshopDataError
from experiments import checks, environments, wiring


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv('COVSERO_CACHE', str(tmp_path / 'cache'))
    monkeypatch.delenv('WEBSHOP_DATA', raising=False)
    sokoban._tasks.cache_clear()


def changed(environment: str, changes: dict[str, object], preset: str = 'tiny'):
    config = configs.get_config(preset, environment)
    config.mesh.min_memory_gib = 0
    config.update_from_flattened_dict(changes)
    return config


@pytest.mark.parametrize('environment', ['webshop', 'sokoban'])
def test_the_default_is_fine_and_evaluates_the_same_tasks_every_time(environment):
    config = changed(environment, {})
    checks.check(config)
    for split in config.eval.splits:
        env = environments.env_factory(config, split, oracle='')()
        assert len(env.task_names) == {"webshop": 120, "sokoban": 240}[environment]
        assert list(env.task_names) == sorted(env.task_names)
        with pytest.raises(base.OracleForbidden):
            env.reset(0)
            env.oracle_command()


@pytest.mark.parametrize('changes, message', [
    ({'env.webshop.goals': 'human'}, 'instruction by a person'), ({'env.webshop.goals': 'mine'}, "unknown goals 'mine'"),
    ({'env.webshop.split_by': 'luck'}, "unknown split_by 'luck'"), ({'env.webshop.option_match': 'x'}, 'unknown option_match'),
    ({'env.observation': 'raw'}, "unknown observation 'raw'"), ({'env.webshop.num_products': 0}, 'num_products must be at least 1'),
    ({'env.webshop.num_products': 3}, 'too few'), ({'env.data': 'WEBSHOP_DATA'}, 'WEBSHOP_DATA is not set'),
    ({'env.data': 'absent/folder'}, 'absent/folder'), ({'env.max_steps': 0}, 'max_steps must be at least 1'),
    ({'env.train_split': 'valid_seen'}, "unknown split 'valid_seen'"), ({'sero.variant': 'sero', 'sero.roots': 'x'}, "sero.roots='x'"),
])  # fmt: skip
def test_what_webshop_cannot_do_is_named(changes, message):
    with pytest.raises((wiring.ConfigError, WebshopDataError), match=message):
        checks.check(changed('webshop', changes))


@pytest.mark.parametrize('changes, message', [
    ({'env.sokoban.reward': 'huge'}, "unknown reward 'huge'"), ({'env.sokoban.boxes': 9}, 'has no place for 9 boxes'),
    ({'env.sokoban.min_moves': 13}, 'min_moves=13'), ({'env.data': 'absent.txt'}, 'absent.txt: no such file'),
    ({'env.sokoban.reward': 'native', 'coverage.variant': 'covgpo'}, 'gate can never open'),
])  # fmt: skip
def test_what_sokoban_cannot_do_is_named(changes, message):
    with pytest.raises(wiring.ConfigError, match=message):
        checks.check(changed('sokoban', changes))


def test_native_rewards_are_fine_without_the_gate():
    checks.check(changed('sokoban', {'env.sokoban.reward': 'native'}))
    checks.check(changed('sokoban', {'env.sokoban.reward': 'native', 'coverage.variant': 'always_on'}))


def test_bad_product_files_end_a_run_before_it_starts(tmp_path):
    product = {'asin': 'A000000001', 'name': 'a lamp', 'full_description': '', 'small_description': ['x'], 'pricing': '$1.00',
               'category': 'garden', 'query': 'lamp', 'product_category': 'A › B'}
    (tmp_path / 'items_ins_v2_1000.json').write_text('{}')
    for changes, message in (({'pricing': 'cheap'}, "A000000001.*field 'pricing'"), ({'name': None}, "A000000001.*field 'name'"), ({}, 'no goals')):
        (tmp_path / 'items_shuffle_1000.json').write_text(json.dumps([product | changes]))
        with pytest.raises((wiring.ConfigError, WebshopDataError), match=message):
            checks.check(changed('webshop', {'env.data': str(tmp_path)}))
    (tmp_path / 'items_shuffle_1000.json').write_text('[]')
    with pytest.raises((wiring.ConfigError, WebshopDataError), match='no products'):
        checks.check(changed('webshop', {'env.data': str(tmp_path)}))
