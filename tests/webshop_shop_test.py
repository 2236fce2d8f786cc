"""The shop's pages and rules, purity, and how goals are split."""

import functools
import pickle
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covsero_jax.envs.webshop import catalogue, shop
from covsero_jax.envs.webshop.catalogue import Goal, Product, WebshopDataError
from covsero_jax.envs.webshop.shop import Shop, State

BOWL = Product(
    asin='B000000001', title='Oak Bowl', description='Turned by hand.', bullets=('deep', 'food safe'), category='garden',
    query='bowls', product_category='Home › Kitchen › Bowls', price=20.0, price_tag='$20.0',
    options=(('color', ('black', 'red')), ('size', ('small', 'large'))), attributes=('handmade',),
    instruction='Find me handmade bowls', instruction_attributes=('handmade',), title_nouns=('oak', 'bowl'))  # fmt: skip
PLATES = tuple(BOWL._replace(asin=f'B0000001{i:02}', title=f'Plate {i}', options=(), instruction=None) for i in range(23))
TWINS = BOWL._replace(asin='B000000002', title='Pine Bowl', description='', bullets=('',), instruction=None,
                      options=(('top', ('red', 'blue')), ('bottom', ('red', 'green')), ('view', ('features', ''))))
TASK = 'Find me handmade bowls with color: black, and size: small'
RESULTS, ITEM = ['search[oak bowl]'], ['search[oak bowl]', 'click[b000000001]']
PAGES = {'index': [], 'results': RESULTS, 'item': ITEM, 'sub': [*ITEM, 'click[features]'], 'done': [*ITEM, 'click[buy now]']}


@functools.cache
def sold(**options) -> Shop:
    products = (BOWL, *PLATES, TWINS)
    return Shop(products, catalogue.synthetic_goals(products, lambda product, number: catalogue.NO_LIMIT), **options)


def after(*actions: str, world: Shop | None = None) -> State:
    world = world or sold()
    return functools.reduce(world.step, actions, world.reset(0))


# ---- pages -----------------------------------------------------------------------------------------------------------


def test_the_index_page():
    assert sold().observe(after()) == f'WebShop [SEP] Instruction: [SEP] {TASK} [SEP] Search'
    assert sold().page(after()) == 'Search'
    assert sold().clickables(after()) == ('search',)


def test_a_page_of_results():
    state = after('search[Oak Bowl]')
    assert sold().observe(state) == f'Instruction: [SEP] {TASK} [SEP] {sold().page(state)}'
    assert sold().page(state) == ('Back to Search [SEP] Page 1 (Total results: 2) [SEP] Next > [SEP] B000000001 [SEP] Oak Bowl '
                                  '[SEP] $20.0 [SEP] B000000002 [SEP] Pine Bowl [SEP] $20.0')
    assert sold().clickables(state) == ('back to search', 'next >', 'b000000001', 'b000000002')


def test_a_product_page_lists_its_values_before_and_offers_them_after_its_buttons():
    assert sold().page(after(*ITEM)) == (
        'Back to Search [SEP] < Prev [SEP] color [SEP] black [SEP] red [SEP] size [SEP] small [SEP] large [SEP] Oak Bowl [SEP] '
        'Price: $20.0 [SEP] Rating: N.A. [SEP] Description [SEP] Features [SEP] Reviews [SEP] Buy Now')
    assert sold().clickables(after(*ITEM)) == ('back to search', '< prev', 'description', 'features', 'reviews', 'buy now',
                                               'black', 'red', 'small', 'large')


@pytest.mark.parametrize('name, content', [
    ('description', ' [SEP] Turned by hand.'), ('features', ' [SEP] deep [SEP] food safe'), ('reviews', ''),
    ('attributes', ' [SEP] handmade [SEP] garden [SEP] bowls [SEP] Home › Kitchen › Bowls')])  # fmt: skip
def test_sub_pages(name, content):
    world = sold(show_attributes=True)
    state = after(*ITEM, f'click[{name}]', world=world)
    assert world.page(state) == f'Back to Search [SEP] < Prev{content}'
    assert world.clickables(state) == ('back to search', '< prev')


def test_attributes_are_shown_only_on_request():
    assert after(*ITEM, 'click[attributes]') == after(*ITEM)
    assert 'attributes' in sold(show_attributes=True).clickables(after(*ITEM))


def test_empty_texts_have_no_segment_and_empty_bullets_an_empty_one():
    pine = ['search[pine]', 'click[b000000002]']
    assert sold().page(after(*pine, 'click[description]')) == 'Back to Search [SEP] < Prev'
    assert sold().page(after(*pine, 'click[features]')) == 'Back to Search [SEP] < Prev [SEP] '


def test_a_choice_changes_the_rich_page_alone():
    chosen, plain = after(*ITEM, 'click[red]'), after(*ITEM)
    assert sold().observe(chosen) == sold().observe(plain)
    rich = sold().observe(chosen, 'text_rich')
    assert rich.startswith(f'You have clicked red.\nInstruction:\n{TASK}\n[button] Back to Search [button_]\n')
    assert '[clicked button] red [clicked button_]' in rich and '[button] black [button_]' in rich
    assert 'clicked' not in sold().observe(plain, 'text_rich')


def test_choices_are_announced_in_the_reverse_order_of_the_page():
    for choices in (('click[red]', 'click[large]'), ('click[large]', 'click[red]')):
        rich = sold().observe(after(*ITEM, *choices), 'text_rich')
        assert rich.startswith('You have clicked large.\nYou have clicked red.\nInstruction:\n')


def test_rich_results_mark_visited_products_until_the_next_start():
    seen = after(*ITEM, 'click[< prev]')
    assert '[clicked button] B000000001 [clicked button_]' in sold().page(seen, 'text_rich')
    assert '[button] B000000002 [button_]' in sold().page(seen, 'text_rich')
    forgotten = after(*ITEM, 'click[back to search]', *RESULTS)
    assert 'clicked' not in sold().page(forgotten, 'text_rich')


def test_the_last_page_tells_what_was_bought_and_its_score():
    state = after(*ITEM, 'click[small]', 'click[black]', 'click[buy now]')
    segments = sold().observe(state).split(' [SEP] ')
    assert segments[0] == 'Thank you for shopping with us!' and sold().page(state) == sold().observe(state)
    assert segments[5:9] == ['asin', 'B000000001', 'options', '{"color": "black", "size": "small"}']
    assert segments[-3:] == ['1.0', 'Reward Details', 'None'] and state.score == 1.0


# ---- rules -----------------------------------------------------------------------------------------------------------


ILLEGAL = (
    '', 'search', 'search[]', 'click[]', 'buy[b000000001]', 'search [oak]', 'click[nothing]', 'click[search]', ' click[< prev]',
    '\nsearch[oak]', 'search[oak\n]', 'search[oak', 'SEARCH[oak]', 'Click[red]', 'click[ red]', 'click[oak bowl]')  # fmt: skip


@pytest.mark.parametrize('page', PAGES)
def test_an_illegal_action_returns_the_same_object(page):
    state = after(*PAGES[page])
    assert state.page == page
    assert all(sold().step(state, action) is state for action in ILLEGAL)


def test_nothing_can_be_clicked_after_a_purchase():
    state = after(*PAGES['done'])
    assert sold().clickables(state) == ()
    assert all(sold().step(state, f'click[{target}]') is state for target in ('back to search', '< prev', 'buy now', 'red'))


@pytest.mark.parametrize('page', PAGES)
def test_searching_works_everywhere_and_forgets_product_and_options(page):
    before = after(*PAGES[page])
    state = sold().step(before, 'search[plate]')
    assert state == State(0, 'results', 'plate', 1, visited=before.visited, score=before.score)


@pytest.mark.parametrize('page', ['results', 'item', 'sub'])
def test_back_to_search_forgets_everything(page):
    assert sold().step(after(*PAGES[page]), 'click[back to search]') == after()


def test_prev_leads_back_through_all_pages():
    second = after('search[plate]', 'click[next >]')
    asin = sold().clickables(second)[3]
    chosen = after('search[plate]', 'click[next >]', f'click[{asin}]')
    sub = sold().step(chosen, 'click[reviews]')
    assert sold().step(sub, 'click[< prev]') == chosen
    back = sold().step(chosen, 'click[< prev]')
    assert back == second._replace(visited=(asin.upper(),))
    assert sold().step(back, 'click[< prev]').page_number == 1
    assert 'click[< prev]' not in sold().clickables(after('search[plate]'))


def test_prev_from_a_sub_page_keeps_options_and_prev_from_a_product_drops_them():
    state = after(*ITEM, 'click[red]', 'click[features]', 'click[< prev]')
    assert state == after(*ITEM, 'click[red]') and state.options == (('color', 'red'),)
    assert sold().step(state, 'click[< prev]').options == ()


def test_next_has_no_end():
    states = [after('search[plate]', *['click[next >]'] * turns) for turns in range(5)]
    assert [len(sold().results(state)) for state in states] == [10, 10, 3, 0, 0]
    assert sold().page(states[4]) == 'Back to Search [SEP] Page 5 (Total results: 23) [SEP] < Prev [SEP] Next >'
    assert sold().step(states[4], 'click[< prev]') == states[3]
    shown = sum((sold().results(state) for state in states), ())
    assert shown == sold().search('plate') and len(set(shown)) == 23


def test_a_second_value_of_an_option_replaces_the_first_in_its_place():
    assert after(*ITEM, 'click[red]', 'click[large]', 'click[black]').options == (('color', 'black'), ('size', 'large'))


def test_of_two_options_with_the_same_value_the_later_one_gets_it():
    pine = ['search[pine]', 'click[b000000002]']
    assert after(*pine, 'click[red]', 'click[blue]').options == (('bottom', 'red'), ('top', 'blue'))
    assert sold().clickables(after(*pine)).count('red') == 1


def test_a_value_named_like_a_sub_page_opens_it():
    assert after('search[pine]', 'click[b000000002]', 'click[features]').sub_page == 'features'


def test_the_argument_of_an_action_stands_in_the_last_brackets_and_is_read_in_lower_case():
    assert shop.parse('search[Oak] Bowl] please') == ('search', 'oak] bowl')
    assert shop.parse('search[Oak [big] Bowl]') == ('search[Oak ', 'big] bowl')  # hence no action
    assert after('search[OAK BOWL]', 'click[B000000001]') == after(*ITEM)


def check_transition(before: State, target: str, state: State) -> None:
    """What the click must have done, from the page it was made on."""
    if target == 'search':
        assert state is before
    elif target == 'back to search':
        assert state == State(before.goal)
    elif before.page == 'results':
        if target in ('next >', '< prev'):
            assert state == before._replace(page_number=before.page_number + (1 if target == 'next >' else -1))
            assert state.page_number >= 1
        else:
            assert state == before._replace(page='item', asin=target.upper(), visited=state.visited)
            assert set(state.visited) == {*before.visited, target.upper()}
            assert state.options == ()
    elif before.page == 'sub':
        assert state == before._replace(page='item', sub_page=None)
    elif target == '< prev':
        assert state == before._replace(page='results', asin=None, options=())
    elif target in shop.SUB_PAGES:
        assert state == before._replace(page='sub', sub_page=target)
    elif target == 'buy now':
        assert state == before._replace(page='done', score=state.score) and 0.0 <= state.score <= 1.0
    elif target:
        name = next(name for name, value in state.options if value == target)
        assert state == before._replace(options=state.options)
        assert dict(state.options) == dict(before.options) | {name: target}


def walk(world: Shop, seed: int, steps: int = 40) -> list[tuple[State, str, State]]:
    """A customer at random: (state, action, next state)."""
    rng, out = random.Random(seed), []
    state = world.reset(rng.randrange(len(world.goals)))
    for _ in range(steps):
        actions = [f'click[{target}]' for target in world.clickables(state)]
        if rng.random() < 0.15 or state.page in ('index', 'done'):
            actions = [f'search[{rng.choice(["oak bowl", "plate", "pine", "zzz", "<r>"])}]']
        elif rng.random() < 0.1:
            actions = list(ILLEGAL)
        action = rng.choice(actions)
        following = world.step(state, action)
        out.append((state, action, following))
        state = following
    return out


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9))
def test_on_random_walks_every_listed_click_does_what_it_says(seed):
    world = sold(show_attributes=True)
    for state, _, _ in walk(world, seed):
        for target in world.clickables(state):
            check_transition(state, target, world.step(state, f'click[{target}]'))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**9))
def test_step_changes_neither_states_nor_the_shop(seed):
    used, fresh = sold(), Shop(sold().products, sold().goals)
    path = walk(used, seed)
    saved = [pickle.dumps(step) for step in path]
    seen = [[used.observe(state, mode) for mode in ('text', 'text_rich')] + [used.clickables(state)] for state, _, _ in path]
    for i in random.Random(seed).sample(range(len(path)), len(path)):  # in any order, on any shop of the same products
        state, action, following = pickle.loads(saved[i])
        assert path[i] == (state, action, following)
        assert fresh.step(state, action) == used.step(state, action) == following
        assert [fresh.observe(state, mode) for mode in ('text', 'text_rich')] + [fresh.clickables(state)] == seen[i]


# ---- what cannot be a shop -------------------------------------------------------------------------------------------


def goals_of(*products: Product) -> tuple[Goal, ...]:
    return catalogue.synthetic_goals(products, lambda product, number: 50.0)


@pytest.mark.parametrize('products, goals, message', [
    ((), goals_of(BOWL), 'the catalogue is empty'),
    ((BOWL,), (), 'no goals: no product has an instruction'),
    (PLATES, goals_of(BOWL), 'wants product B000000001, which is not sold'),
    ((BOWL, BOWL), goals_of(BOWL), 'the same asin'),
])  # fmt: skip
def test_a_shop_without_sense_is_refused(products, goals, message):
    with pytest.raises(WebshopDataError, match=message):
        Shop(products, goals)


def test_unknown_names_and_goals_are_refused():
    with pytest.raises(ValueError, match="'exact'; there are webshop, by_value"):
        Shop((BOWL,), goals_of(BOWL), option_match='exact')
    for goal in (-1, len(sold().goals)):
        with pytest.raises(IndexError, match=f'goal {goal} of'):
            sold().reset(goal)


# ---- splits ----------------------------------------------------------------------------------------------------------


def many_goals(num_products: int, num_values: int) -> tuple[Goal, ...]:
    values = tuple(f'v{i}' for i in range(num_values))
    return goals_of(*(BOWL._replace(asin=f'B{i:09}', options=(('color', values),)) for i in range(num_products)))


def parts(goals, by: str) -> dict[str, tuple[int, ...]]:
    return {split: catalogue.split_goals(goals, split, by) for split in catalogue.SPLITS}


def test_by_product_no_target_is_in_two_splits_and_nothing_is_left_out():
    goals = many_goals(600, 4)
    split = parts(goals, 'product')
    assert sorted(sum(split.values(), ())) == list(range(len(goals)))
    targets = {name: {goals[i].asin for i in chosen} for name, chosen in split.items()}
    assert sum(map(len, targets.values())) == len(set().union(*targets.values())) == 600
    assert all(30 <= len(targets[name]) <= 90 for name in ('valid', 'test'))  # about a tenth each


def test_by_product_the_split_of_a_product_does_not_depend_on_the_others():
    few, many = many_goals(200, 1), many_goals(600, 1)
    for name in catalogue.SPLITS:
        of_few = {few[i].asin for i in catalogue.split_goals(few, name)}
        assert of_few == {many[i].asin for i in catalogue.split_goals(many, name)} & {goal.asin for goal in few}


def test_index233_takes_positions_of_the_originals_shuffle():
    goals, order = many_goals(40, 50), list(range(2000))
    random.seed(233)  # as the original does
    random.shuffle(order)
    split = parts(goals, 'index233')
    assert catalogue.shuffled(2000) == order
    assert split == {name: tuple(sorted(order[positions])) for name, positions in
                     (('train', slice(1500, None)), ('valid', slice(500, 1500)), ('test', slice(500)))}


def test_verl_agents_test_goals_are_also_trained_on():
    split = parts(many_goals(100, 50), 'verl_agent')
    assert split['valid'] == split['test'] and len(split['test']) == 500 and len(split['train']) == 4500
    assert len(set(split['test']) & set(split['train'])) > 400


@pytest.mark.parametrize('by, num_goals', [('product', 2), ('index233', 1500), ('verl_agent', 500)])
def test_too_few_goals_for_a_split_are_an_error(by, num_goals):
    with pytest.raises(ValueError, match=f'{num_goals} goals are too few for split .* by {by!r}: use more products'):
        parts(many_goals(2, num_goals // 2), by)


def test_unknown_splits_are_refused():
    with pytest.raises(ValueError, match="unknown split 'dev'; there are train, valid, test"):
        catalogue.split_goals(many_goals(2, 2), 'dev')
    with pytest.raises(ValueError, match="'seed'; there are product, index233, verl_agent"):
        catalogue.split_goals(many_goals(2, 2), 'train', 'seed')
