"""The made-up shop: always the same, in few words, and as hard as the real one."""

import collections
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covsero_jax.envs.webshop import baselines, catalogue, generator, shop

PRODUCTS = generator.generate(1000, 0)


def texts(product: catalogue.Product) -> list[str]:
    values = [text for name, values in product.options for text in (name, *values)]
    return [product.title, product.description, *product.bullets, product.instruction or '', *values, *product.attributes]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 60), st.integers(0, 5))
def test_a_smaller_catalogue_is_the_beginning_of_a_larger_one(num_products, seed):
    products = generator.generate(num_products, seed)
    assert len(products) == num_products
    assert products == generator.generate(60, seed)[:num_products]
    assert products[0] != generator.generate(1, seed + 1)[0]


def test_an_empty_catalogue_is_refused():
    with pytest.raises(ValueError, match='at least 1, not 0'):
        generator.generate(0, 0)


def test_products_are_distinct_and_as_products_are():
    assert len({p.asin for p in PRODUCTS}) == 1000
    assert len({p.title for p in PRODUCTS}) > 990
    for p in PRODUCTS:
        assert re.fullmatch(r'B0[A-Z0-9]{8}', p.asin)
        assert p.query == p.query.lower() and len(p.product_category.split(' › ')) == 3
        assert re.fullmatch(r'\$\d+\.\d( to \$\d+\.\d)?', p.price_tag)
        prices = [float(price) for price in p.price_tag.replace('$', '').split(' to ')]
        assert prices[0] <= p.price <= prices[-1]
        assert set(p.title_nouns) <= set(p.title.lower().split())
        assert set(p.instruction_attributes) <= set(p.attributes)
        assert (p.instruction is None) == (p.instruction_attributes == ())
        for name, values in p.options:
            assert len(set(values)) == len(values) >= 2
            assert all(value == value.lower() and value for value in (name, *values))


def test_every_wanted_attribute_is_said_somewhere_on_the_products_pages():
    for p in PRODUCTS:
        said = ' '.join([p.title, p.description, *p.bullets]).lower()
        assert all(attribute in said for attribute in p.attributes)
        assert all(attribute in (p.instruction or attribute) for attribute in p.instruction_attributes)


def test_pages_are_short_and_words_are_few():
    words = collections.Counter(word for p in PRODUCTS for text in texts(p) for word in re.findall(r"[\w'-]+", text.lower()))
    assert len(words) < 1500
    assert all(4 <= len(p.title.split()) <= 10 and len(p.bullets) <= 4 for p in PRODUCTS)
    assert max(len(text) for p in PRODUCTS for text in texts(p)) < 160


def test_names_are_invented_once():
    """Every pair of brand and series comes before one comes again."""
    assert len({tuple(p.title.split()[:2]) for p in PRODUCTS}) == 1000


@pytest.mark.parametrize('seed', [0, 1])
def test_it_is_as_hard_as_the_real_set(seed):
    """Real (baselines, 2,000 goals): score 0.518, success 1.5 %; with options 51.5 %; first 52 %, on page one 91 %."""
    found = baselines.measure(baselines.make_shop('generated', 1000, seed), 1000)
    assert 0.45 <= found.score <= 0.58 and found.success <= 0.05
    assert 0.40 <= found.success_with_options <= 0.55
    assert 0.38 <= found.first <= 0.56 and 0.85 <= found.on_page_one <= 0.95
    assert 0.01 <= found.unattainable <= 0.08


def test_all_splits_have_goals_and_share_no_product():
    goals = catalogue.synthetic_goals(PRODUCTS, catalogue.drawn_limits(0))
    parts = {split: catalogue.split_goals(goals, split) for split in catalogue.SPLITS}
    assert 2000 < len(goals) < 8000
    assert sum(map(len, parts.values())) == len(goals)
    products = [{goals[i].asin for i in part} for part in parts.values()]
    assert min(map(len, products)) > 25
    assert not products[0] & products[1] and not products[0] & products[2] and not products[1] & products[2]


@pytest.mark.slow
def test_a_hundred_thousand_products_are_distinct_and_found_by_their_title():
    products = generator.generate(100_000, 0)
    assert len({p.asin for p in products}) == 100_000
    sold = shop.Shop(products, catalogue.synthetic_goals(products[:1000], catalogue.drawn_limits(0)))
    found = [p.asin in sold.search(p.title.lower())[:10] for p in products[::400]]
    assert sum(found) / len(found) > 0.98
