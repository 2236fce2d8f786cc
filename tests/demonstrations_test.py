"""What the tiny policies are cloned from: admissible commands of an oracle, on tasks that no run plays."""

import numpy as np
import pytest

from configs import base as configs
from covsero_jax import pretrained, prompts
from covsero_jax.envs import base, sokoban
from covsero_jax.envs.webshop import env as webshop
from experiments import demonstrations, environments, wiring


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv('COVSERO_CACHE', str(tmp_path / 'cache'))
    sokoban._tasks.cache_clear()


@pytest.mark.parametrize('environment', ['webshop', 'sokoban'])
def test_rows_are_prompts_with_admissible_replies_and_the_same_again(environment, monkeypatch):
    monkeypatch.setattr(demonstrations, 'CATALOGUES', 2)
    tokenizer = pretrained.load_tokenizer(environments.TINY_POLICIES[environment])
    config = configs.get_config('tiny', environment)
    builder = wiring.make_prompts(config, tokenizer)
    made = [demonstrations.make(environment, 6, 3, False) for _ in range(2)]
    rows, again = (m.rows(builder) for m in made)
    assert len(rows) == len(again) > 30
    assert all(np.array_equal(a.prompt, b.prompt) and np.array_equal(a.reply, b.reply) for a, b in zip(rows, again, strict=True))
    assert all(prompts.parse_reply(tokenizer.decode(row.reply), ()).parsed for row in rows[:20])
    longest = max(len(row.prompt) for row in rows)
    assert longest <= max(config.prompt.buckets)


def test_episodes_imitate_the_oracle_and_lead_to_a_win():
    env = sokoban.make_env('train', num_levels=5, oracle=True)
    shown = demonstrations.OracleDemonstrations('sokoban', [env], 5, 0)
    kinds = []
    for task in range(5):
        for observation, command, imitated in shown._play(env, task, f'seed/{task}'):
            assert base.admits(observation.admissible, command)
            kinds.append(imitated)
    assert 0.05 < kinds.count(False) / len(kinds) < 0.5  # noise, which is not imitated


def test_demonstrated_catalogues_sell_other_things_under_the_same_numbers(monkeypatch):
    monkeypatch.setattr(demonstrations, 'CATALOGUES', 1)
    shown = demonstrations.make('webshop', 3, 0, False)
    played = webshop.make_env('generated', 'train')
    env, _ = shown._tasks[0]
    tasks = {env.reset(i).task for i in range(len(env.task_names))} & {played.reset(i).task for i in range(len(played.task_names))}
    assert len(tasks) < 0.02 * len(played.task_names)  # short instructions may coincide; products do not
    asins = {product.asin for product in played._shop.products}
    assert {name[:10] for name in env.task_names} <= asins
    assert set(shown.whole_words) == {asin.lower() for asin in asins} | {'['}
    for env, task_id in shown._tasks:  # the first product of the first page wins
        env.reset(task_id)
        page = env.step(env.oracle_command())
        first = next(c for c in page.admissible if c.startswith('click[b0'))
        assert env.oracle_command() == first
