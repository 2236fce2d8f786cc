"""WebShop's oracle: listed commands alone, and a sure win within its bound from wherever an episode stands."""

import functools
import random

import pytest

from covsero_jax.envs.webshop import catalogue, env, generator, oracle, shop


@functools.cache
def world(num_products: int = 300) -> tuple[shop.Shop, oracle.Oracle]:
    products = generator.generate(num_products, 1)
    sold = shop.Shop(products, catalogue.synthetic_goals(products, catalogue.drawn_limits(1)))
    return sold, oracle.Oracle(sold)


def listed(sold: shop.Shop, state: shop.State) -> tuple[str, ...]:
    return tuple(f'click[{target}]' for target in sold.clickables(state))


def stroll(sold: shop.Shop, goal: int, rng: random.Random, steps: int) -> shop.State:
    """A customer without a plan, who does not buy."""
    state = sold.reset(goal)
    for _ in range(steps):
        words = sold.goals[rng.randrange(len(sold.goals))].instruction.split()
        choices = [c for c in listed(sold, state) if c not in ('click[buy now]', 'click[search]')]
        state = sold.step(state, rng.choice(choices) if choices else f'search[{" ".join(rng.sample(words, 3))}]')
    return state


def finish(sold: shop.Shop, knowing: oracle.Oracle, state: shop.State) -> tuple[shop.State, int]:
    """What the oracle makes of a state, and in how many steps; every command is listed where it is given."""
    steps = 0
    while state.page != 'done' and (command := knowing.command(state)) is not None:
        assert command in listed(sold, state) or (state.page == 'index' and command.startswith('search['))
        following = sold.step(state, command)
        assert following != state
        state, steps = following, steps + 1
    return state, steps


def test_every_attainable_goal_is_won_from_the_start_and_no_other():
    sold, knowing = world()
    outcomes = []
    for goal in range(len(sold.goals)):
        state, steps = finish(sold, knowing, sold.reset(goal))
        outcomes.append(state.score == 1.0)
        assert outcomes[-1] == sold.is_attainable(goal)
        assert steps <= 3 + len(sold.goals[goal].options) or not outcomes[-1]
    assert 0 < outcomes.count(False) < len(outcomes) / 10


def test_from_anywhere_the_bound_of_steps_suffices():
    sold, knowing = world()
    rng, pages, most = random.Random(0), set(), 0
    for _ in range(1500):
        goal = rng.randrange(len(sold.goals))
        if not sold.is_attainable(goal):
            continue
        root = stroll(sold, goal, rng, rng.randrange(14))
        state, steps = finish(sold, knowing, root)
        assert state.score == 1.0
        assert steps <= 4 + len(sold.goals[goal].options)
        pages.add(root.page)
        most = max(most, steps)
    assert pages == {'index', 'results', 'item', 'sub'}
    assert most >= 6  # roots off the path were among them


def test_the_environment_tells_the_bound_and_the_oracle_keeps_it():
    shopping = env.make_env('generated', 'train', num_products=300, oracle=True, drop_unattainable=True, max_steps=15)
    rng = random.Random(1)
    for _ in range(300):
        task = rng.randrange(len(shopping.task_names))
        observation, taken = shopping.reset(task), rng.randrange(16 - shopping.oracle_steps[task])
        for _ in range(taken):
            choices = [c for c in observation.admissible if '<' not in c and c != 'click[buy now]']
            observation = shopping.step(rng.choice(choices) if choices else 'search[a thing]')
        while not observation.done:
            observation = shopping.step(shopping.oracle_command())
        assert observation.success
        assert observation.score == 1.0


def test_wrong_choices_are_corrected():
    sold, knowing = world()
    goal = next(i for i, g in enumerate(sold.goals) if len(g.options) == 2 and sold.is_attainable(i))
    state = sold.reset(goal)
    while state.page != 'item':
        state = sold.step(state, knowing.command(state))
    for _, values in sold.product(state.asin).options:
        wrong = next(v for v in values if v not in dict(knowing.choices(goal)).values())
        state = sold.step(state, f'click[{wrong}]')
    state, steps = finish(sold, knowing, state)
    assert (state.score, steps) == (1.0, 3)


def test_other_values_that_count_are_found_for_goals_by_people():
    products = generator.generate(300, 1)
    product = next(p for p in products if p.options and p.instruction)
    name, values = product.options[0]
    told = catalogue.Instruction(product.asin, f'a thing in {values[-1]}.', product.instruction_attributes, (values[-1],))
    sold = shop.Shop(products, catalogue.human_goals(products, [told], catalogue.drawn_limits(0)))
    knowing = oracle.Oracle(sold)
    assert finish(sold, knowing, sold.reset(0))[0].score == 1.0
    assert knowing.choices(0)[0][0] == name


def test_queries_are_plain_words_of_the_goal():
    sold, knowing = world()
    for goal in range(0, len(sold.goals), 7):
        query = knowing.query(goal)
        assert query == query.lower() and '[' not in query and ']' not in query and '  ' not in query
        assert 'price lower' not in query


def test_a_product_that_no_query_finds_has_no_plan():
    sold, _ = world()
    goal = next(i for i in range(len(sold.goals)) if sold.is_attainable(i))
    wanted = sold.goals[goal]
    blank = sold.product(wanted.asin)._replace(title='', description='', bullets=(), options=())
    hidden = shop.Shop([blank], [wanted._replace(instruction='find me a', options=())])
    assert oracle.Oracle(hidden).command(hidden.reset(0)) is None


@pytest.mark.slow
def test_targets_are_found_among_ten_thousand_products():
    sold, knowing = world(10_000)
    rng = random.Random(0)
    for _ in range(300):
        goal = rng.randrange(len(sold.goals))
        if sold.is_attainable(goal):
            state, steps = finish(sold, knowing, sold.reset(goal))
            assert state.score == 1.0 and steps <= 4 + len(sold.goals[goal].options)
