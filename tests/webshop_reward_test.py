"""What purchases are worth, on numbers worked by hand; and goals: their texts, weights and price limits."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covsero_jax.envs.webshop import catalogue, nouns, reward
from covsero_jax.envs.webshop.catalogue import NO_LIMIT, Goal, Instruction, Product

BOWL = Product(
    asin='A000000001', title='Walnut Salad Bowl', description='Turned by hand.', bullets=('Deep and Wide', 'food safe oil'),
    category='garden', query='bowls', product_category='Home › Kitchen › Bowls', price=20.0, price_tag='$20.0',
    options=(('color', ('black', 'sandalwood')), ('size', ('large', 'xx-large'))), attributes=('handmade', 'dishwasher safe'),
    instruction='Find me handmade bowls', instruction_attributes=('handmade', 'food safe'),
    title_nouns=('walnut', 'salad', 'bowl'))  # fmt: skip


def goal_of(product: Product = BOWL, **changes) -> Goal:
    plain = Goal(product.asin, 'Find me a bowl', product.query, product.product_category, ('handmade', 'food safe'), 30.0,
                 (('color', 'black'), ('size', 'large')), product.title_nouns)
    return plain._replace(**changes)


def score(goal: Goal, *chosen: str, product: Product = BOWL, match: str = 'webshop') -> float:
    return reward.purchase(product, goal, chosen, match)[0]


# ---- parts -----------------------------------------------------------------------------------------------------------


def test_the_target_with_its_options_within_the_limit_scores_one():
    total, details = reward.purchase(BOWL, goal_of(), ('black', 'large'))
    assert total == 1.0 and (details.r_att, details.r_option, details.r_price, details.r_type) == (1.0, 1.0, True, 1.0)
    assert (details.w_att, details.w_option, details.w_price) == (2 / 5, 2 / 5, 1 / 5)


def test_every_attribute_option_and_the_price_count_alike():
    assert score(goal_of(), 'black') == 4 / 5
    assert score(goal_of(), 'large') == 4 / 5
    assert score(goal_of()) == 3 / 5
    assert score(goal_of(attributes=('handmade', 'for camping')), 'black', 'large') == 4 / 5
    assert score(goal_of(price_upper=19.99), 'black', 'large') == 4 / 5
    assert score(goal_of(attributes=('for camping',), price_upper=10.0)) == 0.0


def test_without_options_the_goal_has_two_kinds_of_parts():
    total, details = reward.purchase(BOWL, goal_of(options=(), attributes=('handmade', 'for camping')), ('black',))
    assert total == 2 / 3 and (details.r_option, details.w_option) == (None, 0.0)


def test_a_price_equal_to_the_limit_is_within_it():
    assert reward.purchase(BOWL, goal_of(price_upper=20.0), ())[1].r_price
    assert not reward.purchase(BOWL._replace(price=20.000001), goal_of(price_upper=20.0), ())[1].r_price


@pytest.mark.parametrize('attribute, has', [
    ('handmade', True),
    ('safe dishwasher', True),  # the order of words does not matter,
    ('really safe for dishwasher', True),  # nor do words beyond those listed,
    ('dishwasher proof', False),  # but one of two is too few
    ('walnut', True),  # in the title,
    ('deep and wide food safe', True),  # in the bullets, joined,
    ('turned by', True),  # in the description
    ('owl', True),  # also inside a word
    ('camping', False),
])  # fmt: skip
def test_an_attribute_counts_if_listed_or_told_anywhere(attribute, has):
    assert (reward.purchase(BOWL, goal_of(attributes=(attribute,)), ())[1].r_att == 1.0) == has


@pytest.mark.parametrize('theirs, category, own_nouns, wanted_nouns, factor', [
    ('bowls', 'A › B', 'bowl', 'bowl', 1.0),
    ('cups', 'Home › Kitchen › Cups', 'x bowl', 'bowl a b c d e', 1.0),  # two common path elements
    ('cups', 'Home › Bowls › Kitchen', 'x bowl', 'bowl a b c d e', 1.0),  # in whatever order
    ('cups', 'Home › Cups', 'x bowl', 'bowl a b c d e', 0.5),  # one; a sixth of the nouns
    ('cups', 'Home › Cups', 'bowl', 'bowl a b c d', 0.5),  # a fifth is not more than a fifth
    ('cups', 'Home › Cups', 'bowl', 'bowl a b c', 1.0),  # a quarter is
    ('cups', 'Home › Cups', 'bowl', 'bowl bowl bowl bowl bowl', 0.5),  # repeats count in what is wanted,
    ('cups', 'Home › Cups', 'bowl bowl', 'bowl a b c d', 0.5),  # and nowhere else
    ('cups', 'Home › Cups', 'bowl', '', 0.5),  # no nouns are a fifth
    ('bowls', 'A › B', 'bowl', 'bowl a b c d e f g h i', 1.0),  # a tenth
    ('bowls', 'A › B', 'bowl', 'bowl a b c d e f g h i j', 0.1),  # less, even of the same leaf type
    ('bowls', 'Home › Kitchen › Bowls', 'cup', 'bowl', 0.0),
])  # fmt: skip
def test_the_type_factor(theirs, category, own_nouns, wanted_nouns, factor):
    product = BOWL._replace(query=theirs, product_category=category, title_nouns=tuple(own_nouns.split()))
    total, details = reward.purchase(product, goal_of(title_nouns=tuple(wanted_nouns.split())), ('black', 'large'))
    assert total == details.r_type == factor
    assert details.query_match == (theirs == 'bowls')


# ---- options ---------------------------------------------------------------------------------------------------------


def test_the_right_value_that_contains_a_colour_does_not_count_as_in_the_original():
    goal = goal_of(options=(('color', 'sandalwood'),))
    assert score(goal, 'sandalwood') == 3 / 4
    assert score(goal, 'sandalwood', match='by_value') == 1.0
    assert not reward.is_attainable(BOWL, goal) and reward.is_attainable(BOWL, goal, 'by_value')


def test_human_goals_hold_values_so_that_the_fault_does_not_show():
    goal = goal_of(options=('sandalwood',))
    assert score(goal, 'sandalwood') == score(goal, 'sandalwood', match='by_value') == 1.0
    assert reward.is_attainable(BOWL, goal)


@pytest.mark.parametrize('wanted, chosen, match, counts', [
    (('color', 'black'), 'black', 'webshop', True),
    (('color', 'black'), 'white', 'webshop', False),
    (('color', 'black'), 'jet black matte', 'webshop', True),  # the chosen value is reduced to its colour
    (('color', 'jet black matte'), 'black', 'webshop', True),  # all words of the value are in the pair
    (('color', 'jet black matte'), 'jet black matte', 'webshop', True),
    (('shape', 'rectangular'), 'rectangular', 'webshop', False),  # 'tan' is a listed colour
    (('shape', 'rectangular'), 'rectangular', 'by_value', True),
    (('size', 'xx-large'), 'large', 'webshop', True),  # a wrong one, as published: all its words are in the pair
    (('size', 'xx-large'), 'large', 'by_value', True),
    (('size', 'large'), 'xx-large', 'webshop', False),  # neither side has all words of the other
    (('size', 'large'), 'xx-large', 'by_value', True),
    (('size', 'large'), 'medium', 'by_value', False),
    (('size', '±'), '±', 'by_value', False),  # nothing to compare is left
])  # fmt: skip
def test_an_option_counts_if_the_chosen_value_is_like_it(wanted, chosen, match, counts):
    assert reward.is_chosen(wanted, (chosen,), match) == counts


def test_one_chosen_value_may_count_for_several_options():
    assert score(goal_of(options=(('top', 'black'), ('bottom', 'black'))), 'black') == 1.0


WORDS = st.sampled_from(('handmade', 'oak', 'black', 'large', 'round', 'food', 'safe', 'sandalwood', 'xx-large', 'tan'))
TEXTS = st.lists(WORDS, min_size=1, max_size=3).map(' '.join)


@settings(deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=4), st.lists(st.tuples(WORDS, TEXTS), max_size=3), st.lists(TEXTS, max_size=3),
       st.lists(WORDS, max_size=3), st.floats(1, 60), st.sampled_from(reward.OPTION_MATCHES))  # fmt: skip
def test_a_score_is_the_weighted_sum_of_its_parts_times_the_factor(attributes, options, chosen, title_nouns, limit, match):
    goal = goal_of(attributes=tuple(attributes), options=tuple(options), title_nouns=tuple(title_nouns), price_upper=limit)
    total, d = reward.purchase(BOWL, goal, chosen, match)
    weighted = d.w_att * d.r_att + d.w_option * (d.r_option or 0.0) + d.w_price * d.r_price
    assert 0.0 <= total <= 1.0 and total == pytest.approx(d.r_type * weighted)
    assert d.w_att + d.w_option + d.w_price == pytest.approx(1.0)
    more = reward.purchase(BOWL, goal, [*chosen, 'round'], match)[0]
    assert more >= total  # a further choice never costs anything


@settings(deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=4, unique=True), st.lists(TEXTS, max_size=4, unique=True), st.floats(1, 980))
def test_by_value_every_goal_is_attainable(attributes, values, price):
    product = BOWL._replace(attributes=tuple(attributes), instruction_attributes=tuple(attributes), price=price,
                            options=(('color', tuple(values)),) if values else ())
    goals = catalogue.synthetic_goals([product], catalogue.drawn_limits(0))
    assert len(goals) == max(1, len(values))
    assert all(reward.is_attainable(product, goal, 'by_value') for goal in goals)


# ---- goals -----------------------------------------------------------------------------------------------------------


def test_there_is_one_synthetic_goal_for_every_combination_of_options():
    product = BOWL._replace(options=(('size', ('small', 'large')), ('color', ('red', 'blue'))))
    goals = catalogue.synthetic_goals([product, BOWL._replace(instruction=None)], lambda product, number: 50.0)
    assert [goal.options for goal in goals] == [
        (('color', color), ('size', size)) for color in ('red', 'blue') for size in ('small', 'large')]  # by name, then value
    assert goals[0].instruction == 'Find me handmade bowls with color: red, and size: small, and price lower than 50.00 dollars'
    assert goals[0].attributes == BOWL.instruction_attributes and goals[0].title_nouns == BOWL.title_nouns


def test_no_options_and_no_limit_are_not_told():
    (goal,) = catalogue.synthetic_goals([BOWL._replace(options=())], lambda product, number: NO_LIMIT)
    assert goal.instruction == 'Find me handmade bowls' and goal.price_upper == NO_LIMIT


def test_weights_are_the_mean_rarity_of_attributes():
    products = [BOWL._replace(options=(), instruction_attributes=wanted) for wanted in (('a', 'b'), ('a',), ('a', 'c'))]
    goals = catalogue.synthetic_goals(products, lambda product, number: NO_LIMIT)
    assert [goal.weight for goal in goals] == pytest.approx([(1 / 3 + 1) / 2, 1 / 3, (1 / 3 + 1) / 2])


def test_human_goals_are_those_that_name_an_attribute():
    told = [Instruction('A000000001', 'i want a bowl.', ('handmade',), ('black',)), Instruction('A000000001', 'any', (), ()),
            Instruction('A000000001', 'a deep bowl', ('deep',), ())]
    goals = catalogue.human_goals([BOWL], told, lambda product, number: 30.0 + number)
    assert [goal.instruction for goal in goals] == ['i want a bowl, and price lower than 30.00 dollars',
                                                    'a deep bowl, and price lower than 32.00 dollars']
    assert [(goal.options, goal.weight) for goal in goals] == [(('black',), 1.0), ((), 1.0)]


@given(st.floats(0.01, 1500), st.integers(0, 3))
def test_limits_are_the_second_to_fourth_multiple_of_ten_above_the_price(price, seed):
    limit = catalogue.drawn_limits(seed)(BOWL._replace(price=price), 0)
    if price >= 980:  # fewer than two multiples below 1,000 are above
        assert limit == NO_LIMIT
    else:
        assert limit % 10 == 0 and limit <= 990 and 10 < limit - price <= 40
        assert limit == catalogue.drawn_limits(seed)(BOWL._replace(price=price), 0)


def test_limits_depend_on_seed_product_and_instruction():
    drawn = [[catalogue.drawn_limits(seed)(BOWL._replace(asin=f'A{i:09}'), number) for i in range(40)]
             for seed, number in ((0, 0), (0, 1), (1, 0))]
    assert drawn[0] != drawn[1] != drawn[2] != drawn[0]
    assert set(drawn[0]) == {40.0, 50.0, 60.0}  # 30 is never the larger of two


# ---- nouns -----------------------------------------------------------------------------------------------------------


def test_nouns_by_the_rule_of_thumb_keep_order_and_repeats():
    assert nouns.heuristic("New Men's Shirt, 3 Shirts for the Big Shirt") == ("men's", 'shirt', 'shirts', 'shirt')
    assert nouns.heuristic('') == ()
    assert nouns.find('heuristic', ['Oak Bowl', '']) == ('heuristic', [('oak', 'bowl'), ()])


def test_unknown_ways_to_find_nouns_are_refused():
    with pytest.raises(ValueError, match="'guess'; there are auto, spacy, heuristic"):
        nouns.find('guess', [])
