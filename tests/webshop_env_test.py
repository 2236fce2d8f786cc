"""WebShop as an environment: the protocol, on a dozen invented products in the official format."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import pickle
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from covsero_jax.envs import base
from covsero_jax.envs.webshop import env, reward, shop
from covsero_jax.envs.webshop.catalogue import WebshopDataError

NUMBERS = (5, 1, 4, 3, 2, 6, 22, 12, 16, 43, 47, 53)  # by the asin alone: 4 train, 3 valid, 5 test
KINDS = ('bowl', 'cup', 'plate')


def official(number: int) -> dict:
    kind = KINDS[number % 3]
    options = {'color': ['black', 'sandalwood'], 'size': ['small', 'large']} if number % 2 else {'color': ['red', 'blue']}
    return {
        'asin': f'B{number:09}', 'name': f'Oak {kind} number {number}', 'full_description': 'Turned by hand.',
        'small_description': ['food safe', 'deep'], 'pricing': f'${10 + number}.50', 'category': 'garden', 'query': f'{kind}s',
        'product_category': f'Home › Kitchen › {kind}s',
        'customization_options': {name: [{'value': value} for value in values] for name, values in options.items()},
    }  # fmt: skip


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> pathlib.Path:
    """Official files."""
    out = tmp_path_factory.mktemp('official')
    asins = [f'B{number:09}' for number in NUMBERS]
    told = {asin: {'attributes': ['handmade', 'food safe'], 'instruction': f'Find me handmade {KINDS[number % 3]}s',
                   'instruction_attributes': ['handmade', 'food safe']} for asin, number in zip(asins, NUMBERS, strict=True)}
    thing = {'instruction': 'i want a handmade thing.', 'instruction_attributes': ['handmade'], 'instruction_options': []}
    human = {asin: [thing] for asin in asins}
    for name, content in (('items_shuffle', list(map(official, NUMBERS))), ('items_ins_v2', told), ('items_human_ins', human)):
        (out / f'{name}_12.json').write_text(json.dumps(content), encoding='utf-8')
    return out


@pytest.fixture(autouse=True, scope='module')
def own_cache(tmp_path_factory):
    """Nothing is written at home, and no test sees the user's data."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('COVSERO_CACHE', str(tmp_path_factory.mktemp('cache')))
        patch.delenv('WEBSHOP_DATA', raising=False)
        env._world.cache_clear()
        env._tasks.cache_clear()
        yield
    env._world.cache_clear()
    env._tasks.cache_clear()


def shop_of(folder: pathlib.Path, split: str = 'train', **options) -> env.WebshopEnv:
    return env.make_env(folder, split, **options)


def purchase_of(made: env.WebshopEnv, task: int, values: tuple[str, ...] | None = None) -> list[str]:
    """Commands that buy the target of a task with the goal's options, or with these values."""
    goal = made._shop.goals[made._tasks.goals[task]]
    values = [value for _, value in goal.options] if values is None else values
    title = made._shop.product(goal.asin).title
    return [f'search[{title.lower()}]', f'click[{goal.asin.lower()}]', *(f'click[{value}]' for value in values), 'click[buy now]']


def attainable(made: env.WebshopEnv, is_so: bool = True) -> int:
    """The first task that can, or cannot, be won by exact choices."""
    return next(i for i, goal in enumerate(made._tasks.goals) if made._shop.is_attainable(goal) == is_so)


# ---- the protocol ----------------------------------------------------------------------------------------------------


def test_keeps_the_protocol(folder):
    made = shop_of(folder)
    assert isinstance(made, base.Env)
    assert list(made.task_names) == sorted(set(made.task_names))
    assert len(made.task_types) == len(made.task_names) == len(made.oracle_steps)
    assert set(made.task_types) == {'garden'} and set(made.oracle_steps) == {4 + 1, 4 + 2}


def test_reset_shows_the_index_page_and_the_task(folder):
    made = shop_of(folder)
    for task, name in enumerate(made.task_names):
        first = made.reset(task)
        assert first == made.reset(task) == shop_of(folder).reset(task)
        assert (first.text, first.admissible) == ('Search', ('search[<your query>]',))
        assert first.task.startswith('Find me handmade') and first.task not in first.text
        assert (first.reward, first.done, first.success, first.score, first.state) == (0.0, False, False, 0.0, None)
        assert name.startswith(made._shop.goals[made._tasks.goals[task]].asin)


def test_the_task_is_the_same_on_every_step(folder):
    made = shop_of(folder)
    observations = [made.reset(3), *map(made.step, purchase_of(made, 3))]
    assert len({observation.task for observation in observations}) == 1


def test_every_listed_command_has_an_effect_but_a_choice_made_before(folder):
    made = shop_of(folder)
    made.reset(0)
    for command in purchase_of(made, 0):
        here, page = made.snapshot(), made._observe()
        assert base.admits(page.admissible, command)
        for listed in page.admissible:
            made.restore(here)
            made.step(listed.replace('<your query>', 'oak'))
            is_chosen = listed in {f'click[{value}]' for _, value in here.state.options}
            assert (made.snapshot().state == here.state) == is_chosen, listed
        made.restore(here)
        made.step(command)


def test_option_values_that_no_click_can_reach_are_not_listed():
    assert [shop.click(target) for target in ('red', '', 'a [b]', 'a\nb', 'search', 'a] b')] == [
        'click[red]', '', '', '', '', 'click[a] b]']  # fmt: skip


def test_an_illegal_command_shows_the_same_page_and_costs_a_step(folder):
    made = shop_of(folder, max_steps=3)
    page = [made.reset(0), made.step('click[nothing]'), made.step('look around')]
    assert page[0] == page[1] == page[2]
    last = made.step('click[search]')
    assert (last.text, last.done, last.success) == (page[0].text, True, False)


def test_searching_works_on_pages_that_do_not_list_it(folder):
    made = shop_of(folder)
    made.reset(0)
    made.step('search[bowl]')
    again = made.step('search[plate]')
    assert again == base.replay(shop_of(folder), 0, ['search[plate]'])


# ---- how episodes end ------------------------------------------------------------------------------------------------


def test_only_a_purchase_that_scores_one_is_a_success(folder):
    made = shop_of(folder)
    task = attainable(made)
    good = base.replay(made, task, purchase_of(made, task))
    assert (good.done, good.success, good.reward, good.score, good.admissible) == (True, True, 10.0, 1.0, ())
    wanted = [value for _, value in made._shop.goals[made._tasks.goals[task]].options]
    for number in range(len(wanted)):  # two attributes, the price and some options, of all
        poor = base.replay(made, task, purchase_of(made, task, wanted[:number]))
        assert (poor.done, poor.success, poor.reward) == (True, False, 0.0)
        assert poor.score == (3 + number) / (3 + len(wanted))


def test_the_published_fault_costs_a_right_purchase_its_success(folder):
    published, by_value = shop_of(folder), shop_of(folder, option_match='by_value')
    assert published.task_names == by_value.task_names
    task = attainable(published, False)
    assert 'sandalwood' in published.reset(task).task
    assert base.replay(published, task, purchase_of(published, task)).score < 1.0
    assert base.replay(by_value, task, purchase_of(by_value, task)).success


def test_the_score_is_that_of_the_rules(folder):
    made, values = shop_of(folder), ('small', 'sandalwood')
    task = attainable(made, False)
    last = base.replay(made, task, purchase_of(made, task, values))
    goal = made._shop.goals[made._tasks.goals[task]]
    assert last.score == reward.purchase(made._shop.product(goal.asin), goal, values)[0]


def test_the_success_reward_is_a_choice(folder):
    made = shop_of(folder, success_reward=1.0)
    assert base.replay(made, attainable(made), purchase_of(made, attainable(made))).reward == 1.0


def test_an_episode_ends_after_max_steps_without_a_purchase(folder):
    made = shop_of(folder, max_steps=4)
    ends = [base.replay(made, 0, ['search[oak]'] * steps).done for steps in range(1, 5)]
    assert ends == [False, False, False, True]
    assert base.replay(made, 0, ['search[oak]'] * 4).score == 0.0


@pytest.mark.parametrize('ending', ['purchase', 'steps'])
def test_stepping_after_the_end_raises(folder, ending):
    made = shop_of(folder, max_steps=8)
    base.replay(made, 0, purchase_of(made, 0) if ending == 'purchase' else ['search[oak]'] * 8)
    with pytest.raises(RuntimeError, match='over; call reset'):
        made.step('search[oak]')
    assert not made.reset(0).done


def test_nothing_works_before_the_first_reset(folder):
    made = shop_of(folder, oracle=True)
    for attempt in (lambda: made.step('search[oak]'), made.snapshot, made.oracle_command):
        with pytest.raises(RuntimeError, match='call reset first'):
            attempt()


@pytest.mark.parametrize('task', [-1, 10**6])
def test_tasks_that_do_not_exist_are_refused(folder, task):
    with pytest.raises(IndexError, match=f'task {task} of'):
        shop_of(folder).reset(task)


# ---- snapshots -------------------------------------------------------------------------------------------------------


def stroll(made: env.WebshopEnv, rng: random.Random, steps: int) -> list[base.Observation]:
    """What a customer at random sees who continues from here."""
    out, page = [], made._observe()
    for _ in range(steps):
        if page.done:
            break
        command = rng.choice((*page.admissible, 'search[oak bowl]', 'click[nothing]'))
        page = made.step(command.replace('<your query>', rng.choice(KINDS)))
        out.append(page)
    return out


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10**9), st.integers(0, 10), st.sampled_from(env.OBSERVATIONS))
def test_a_branch_from_a_snapshot_leaves_the_episode_alone(folder, seed, cut, observation):
    made, other = shop_of(folder, observation=observation), shop_of(folder, observation=observation)
    made.reset(seed % len(made.task_names))
    stroll(made, random.Random(seed), cut)
    root, page = pickle.loads(pickle.dumps(made.snapshot())), made._observe()
    branches = []
    for environment in (made, other, made):
        assert environment.restore(root) == page
        branches.append(stroll(environment, random.Random(seed + 1), 20))
        stroll(environment, random.Random(seed + 2), 3)
    assert branches[0] == branches[1] == branches[2]
    assert made.restore(root) == page and made.snapshot() == root


def test_a_snapshot_keeps_the_number_of_steps(folder):
    made = shop_of(folder, max_steps=3)
    base.replay(made, 0, ['search[oak]'] * 2)
    root = made.snapshot()
    made.reset(1)
    made.restore(root)
    assert made.step('search[oak]').done


def test_snapshots_of_another_shop_or_of_other_tasks_are_refused(folder):
    made = shop_of(folder)
    made.reset(0)
    for other in (shop_of(folder, catalogue_seed=1), shop_of(folder, goals='human'), shop_of(folder, option_match='by_value'),
                  shop_of(folder, show_attributes=True)):  # fmt: skip
        with pytest.raises(ValueError, match='does not belong to the shop'):
            other.restore(made.snapshot())
    with pytest.raises(ValueError, match='an environment with other tasks'):
        shop_of(folder, 'test').restore(made.snapshot())


# ---- observations ----------------------------------------------------------------------------------------------------


def test_a_choice_shows_in_text_rich_in_the_text_and_in_rich_state_in_the_state(folder):
    pages = {}
    for observation in env.OBSERVATIONS:
        made = shop_of(folder, observation=observation)
        *before, choice, _ = purchase_of(made, 0)
        pages[observation] = base.replay(made, 0, before), made.step(choice)
    before, after = pages['text']
    assert before == after and before.state is None
    before, after = pages['text_rich']
    assert before.text != after.text and '[clicked button]' in after.text and after.state is None
    before, after = pages['rich_state']
    assert before.text == after.text == pages['text'][0].text
    assert (before.state, after.state) == tuple(page.text for page in pages['text_rich'])


def test_the_list_of_attributes_is_shown_on_request(folder):
    for shown in (False, True):
        made = shop_of(folder, show_attributes=shown)
        page = base.replay(made, 0, purchase_of(made, 0)[:2])
        assert ('click[attributes]' in page.admissible) == ('Attributes' in page.text) == shown


# ---- tasks -----------------------------------------------------------------------------------------------------------


def test_splits_share_no_target(folder):
    targets = [{name.split('-')[0] for name in shop_of(folder, split).task_names} for split in ('train', 'valid', 'test')]
    assert list(map(len, targets)) == [4, 3, 5] and len(set.union(*targets)) == 12


def test_unattainable_goals_can_be_dropped_and_are_counted(folder):
    everything, rest = shop_of(folder), shop_of(folder, drop_unattainable=True)
    lost = [i for i, goal in enumerate(everything._tasks.goals) if not everything._shop.is_attainable(goal)]
    assert lost and rest.num_dropped == len(lost) == len(everything.task_names) - len(rest.task_names)
    assert set(rest.task_names) == {name for i, name in enumerate(everything.task_names) if i not in lost}
    assert everything.num_dropped == 0
    assert shop_of(folder, drop_unattainable=True, option_match='by_value').num_dropped == 0


def test_a_subset_of_tasks_is_spread_evenly(folder):
    everything = shop_of(folder).task_names
    assert shop_of(folder, max_tasks=3).task_names == tuple(everything[i * len(everything) // 3] for i in range(3))
    assert shop_of(folder, max_tasks=10**6).task_names == everything


def test_human_goals_are_what_people_wrote(folder):
    made = shop_of(folder, goals='human')
    assert len(made.task_names) == 4  # one for each product
    assert made.reset(0).task.startswith('i want a handmade thing, and price lower than')


def test_a_compiled_file_and_the_variable_serve_like_the_folder(folder, monkeypatch):
    made = shop_of(folder)
    (compiled,) = (pathlib.Path(os.environ['COVSERO_CACHE']) / 'webshop').iterdir()
    monkeypatch.setenv('WEBSHOP_DATA', str(folder))
    for other in (shop_of(compiled), env.make_env(None, 'train')):
        assert other.task_names == made.task_names and other.reset(2) == made.reset(2)
        assert other.restore(made.snapshot()) == made.reset(2)  # it is the same world


def test_the_factory_is_picklable_and_builds_the_same(folder):
    factory = functools.partial(env.make_env, folder, 'test', oracle=True, max_steps=5)
    made, other = factory(), pickle.loads(pickle.dumps(factory))()
    assert made.task_names == other.task_names
    assert base.replay(made, 1, purchase_of(made, 1)) == base.replay(other, 1, purchase_of(other, 1))


@pytest.mark.parametrize('options, message', [
    ({'split': 'dev'}, "unknown split 'dev'; there are train, valid, test"),
    ({'goals': 'all'}, "unknown goals 'all'; there are synthetic, human"),
    ({'split_by': 'seed'}, "unknown split_by 'seed'; there are product, index233, verl_agent"),
    ({'option_match': 'exact'}, "unknown option_match 'exact'; there are webshop, by_value"),
    ({'observation': 'html'}, "unknown observation 'html'; there are text, text_rich, rich_state"),
    ({'max_steps': 0}, 'max_steps must be at least 1, not 0'),
    ({'max_tasks': 0}, 'max_tasks must be at least 1, not 0'),
    ({'split_by': 'index233'}, 'goals are too few for split'),
])  # fmt: skip
def test_flags_that_make_no_sense_are_refused(folder, options, message):
    with pytest.raises(ValueError, match=message):
        env.make_env(folder, **{'split': 'train'} | options)


def test_missing_data_is_explained(tmp_path):
    with pytest.raises(WebshopDataError, match='WEBSHOP_DATA is not set'):
        env.make_env(None, 'train')
    with pytest.raises(WebshopDataError, match='no such file'):
        env.make_env(tmp_path / 'nothing', 'train')


# ---- the oracle ------------------------------------------------------------------------------------------------------


def test_the_oracle_is_forbidden_unless_asked_for(folder):
    made = shop_of(folder)
    made.reset(0)
    with pytest.raises(base.OracleForbidden, match='without an oracle'):
        made.oracle_command()


def test_the_oracle_wins_attainable_tasks_within_its_bound(folder):
    made = shop_of(folder, oracle=True, drop_unattainable=True)
    for task, bound in enumerate(made.oracle_steps):
        page, steps = made.reset(task), 0
        while not page.done:
            command = made.oracle_command()
            assert base.admits(page.admissible, command)
            page, steps = made.step(command), steps + 1
        assert page.success and steps <= bound
    with pytest.raises(RuntimeError, match='over'):
        made.oracle_command()


def test_generated_products_serve_like_real_ones():
    made = env.make_env('generated', 'valid', num_products=100)
    page = made.reset(0)
    assert page == env.make_env('generated', 'valid', num_products=100).reset(0) and page.text == 'Search'
    assert page.task != env.make_env('generated', 'valid', num_products=100, catalogue_seed=1).reset(0).task
    with pytest.raises(ValueError, match='no product has an instruction by a person'):
        env.make_env('generated', 'train', goals='human')
    with pytest.raises(ValueError, match='num_products must be at least 1'):
        env.make_env('generated', 'train', num_products=0)
