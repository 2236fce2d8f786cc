"""Every experiment file builds at every preset; the papers' presets hold the published values in every field."""

from __future__ import annotations

import importlib
import inspect
import pathlib

import pytest

from configs import base
from covsero_jax import advantages
from experiments import wiring

FILES = sorted(path.stem for path in (pathlib.Path(__file__).parent.parent / 'configs').glob('*_*.py') if path.stem[0] != '_')


@pytest.mark.parametrize('name', FILES)
@pytest.mark.parametrize('preset', base.PRESETS)
def test_every_file_builds_at_every_preset(name, preset):
    config = importlib.import_module(f'configs.{name}').get_config(preset)
    assert config.experiment == name and config.preset == preset
    assert config.advantage.estimator in advantages.ESTIMATORS
    wiring.coverage_config(config), wiring.loss_config(config), wiring.optimizer_config(config)
    assert set(config.keys()) == set(base.get_config(preset).keys())
    assert config.prompt.max_action % config.loss.chunk == 0 and config.learner.minibatch % config.learner.micro_batch == 0


def test_paper_presets_hold_the_published_values():
    for preset in ('1.5b', '7b'):
        c = base.get_config(preset)
        assert (c.rollout.num_groups, c.rollout.group_size, c.env.max_steps, c.updates) == (16, 8, 50, 150)
        assert (max(c.prompt.buckets), c.prompt.max_action, c.prompt.history, c.prompt.wording) == (2048, 512, 2, 'full')
        assert (c.optimizer.learning_rate, c.loss.kl_coef, c.loss.entropy_coef, c.learner.minibatch) == (1e-6, 0.01, 0.001, 256)
        assert (c.loss.clip_low, c.loss.clip_high, c.loss.dual_clip) == (0.2, 0.2, 3.0)
        assert (c.advantage.discount, c.advantage.invalid_penalty, c.env.success_reward) == (0.95, 0.1, 10.0)
        assert (c.rollout.temperature, c.eval.temperature, c.eval.every) == (1.0, 0.4, 5)
        assert c.model.dtype == 'bfloat16' and c.optimizer.weight_decay == 0.01 and c.optimizer.max_grad_norm == 1.0


@pytest.mark.parametrize('preset', ['1.5b', '7b'])
def test_paper_presets_of_webshop_and_sokoban(preset):
    shop, boxes = base.get_config(preset, 'webshop'), base.get_config(preset, 'sokoban')
    assert (shop.rollout.num_groups, boxes.rollout.num_groups) == (16, 32)
    for c in (shop, boxes):
        assert (c.rollout.group_size, c.env.max_steps, c.learner.minibatch, c.prompt.max_action) == (8, 15, 64, 512)
        assert (c.advantage.normalisation, c.advantage.discount, c.prompt.history, c.loss.kl_coef) == ('mean', 0.95, 2, 0.01)
    assert (shop.advantage.goal_discount, boxes.advantage.goal_discount) == (0.2, 0.8)
    assert (max(shop.prompt.buckets), max(boxes.prompt.buckets)) == (4096, 1024)
    assert (shop.env.data, shop.env.observation, shop.env.webshop.option_match) == ('WEBSHOP_DATA', 'text', 'webshop')
    assert boxes.env.sokoban.reward == 'native'
    assert (boxes.env.sokoban.height, boxes.env.sokoban.width, boxes.env.sokoban.boxes) == (6, 6, 1)


def test_every_estimator_has_its_options_with_its_defaults():
    options = base.get_config().advantage.options.to_dict()
    assert options == {name: {key: parameter.default for key, parameter in inspect.signature(estimator).parameters.items()
                              if parameter.kind is parameter.KEYWORD_ONLY}
                       for name, estimator in advantages.ESTIMATORS.items()}


def test_coverage_is_the_only_difference_between_gigpo_and_covgpo():
    gigpo, covgpo = (importlib.import_module(f'configs.alfworld_{name}').get_config() for name in ('gigpo', 'covgpo'))
    covgpo.experiment, covgpo.coverage.variant = gigpo.experiment, gigpo.coverage.variant
    assert gigpo.to_json() == covgpo.to_json()


@pytest.mark.parametrize('environment', ['webshop', 'sokoban'])
def test_coverage_and_sero_are_the_only_differences_on_other_environments(environment):
    plain, *others = (importlib.import_module(f'configs.{environment}_{name}').get_config() for name in ('gigpo', 'covgpo', 'covsero'))
    for config in others:
        config.experiment, config.coverage.variant, config.sero.variant = plain.experiment, 'off', 'off'
        assert config.to_json() == plain.to_json()


def test_unknown_environments_list_those_that_exist():
    with pytest.raises(ValueError, match='alfworld, webshop'):
        base.get_config('tiny', 'minecraft')


def test_unknown_presets_list_those_that_exist():
    with pytest.raises(ValueError, match='tiny, smoke'):
        base.get_config('13b')
