"""What a purchase is worth: the original's rules, faults included, as pure functions."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from rapidfuzz import fuzz, utils

from covsero_jax.envs.webshop.catalogue import Goal, Product

OPTION_MATCHES = ('webshop', 'by_value')
FUZZY_MATCH = 85  # two phrases are the same if their token-set ratio, 0 to 100, is above
_LISTED = (
    'alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel camo '
    'caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry cream crystal '
    'dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey heather indigo ivory '
    'ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight mint mocha multicolor mushroom '
    'mustard natural navy nude olive orange peach pewter pink plum purple rainbow red rose royal rust sand sapphire '
    'seashell silver skull slate steel stone stonewash sunflower tan taupe teal tiger turquoise violet walnut wheat white '
    'wine yellow')
COLOURS = tuple(_LISTED.split())


class Details(NamedTuple):
    """How a total came about. Parts are shares of what the goal asks for; weights are shares of the sum before `r_type`."""

    r_type: float  # factor: 1, 0.5, 0.1 or 0
    query_match: bool  # same leaf type
    category_match: bool  # at least two common elements of the category path
    title_score: float  # share of the wanted title's nouns
    r_att: float
    r_option: float | None  # None: the goal wants no options
    r_price: bool
    w_att: float
    w_option: float
    w_price: float


def purchase(product: Product, goal: Goal, chosen: Sequence[str], option_match: str = 'webshop') -> tuple[float, Details]:
    """The score, in [0, 1], of buying `product` with the option values `chosen`; and its details.

    option_match='webshop' has the original's fault: a synthetic goal's option is there a (name, value) pair, which is
    compared with the list of colours as a whole, while a chosen value is reduced to the first colour it *contains*. So
    the right value 'sandalwood' becomes 'sand' and does not match: of the real 1,000 products' 6,910 goals, 458 can not
    reach 1. 'by_value' treats both sides alike. Human goals hold values, so that the two do not differ.
    Both score some wrong values in full, such as 'large' for 'xx-large'.
    """
    r_type, query_match, category_match, title_score = _type(product, goal)
    num_attributes = sum(_has_attribute(product, attribute) for attribute in goal.attributes)
    num_options = sum(is_chosen(option, chosen, option_match) for option in goal.options)
    r_price = product.price <= goal.price_upper
    parts = len(goal.attributes) + len(goal.options) + 1
    total = (num_attributes + num_options + r_price) / parts * r_type
    return total, Details(
        r_type, query_match, category_match, title_score, num_attributes / len(goal.attributes),
        num_options / len(goal.options) if goal.options else None, r_price, len(goal.attributes) / parts,
        len(goal.options) / parts, 1 / parts)  # fmt: skip


def is_attainable(product: Product, goal: Goal, option_match: str = 'webshop') -> bool:
    """Whether buying the target with the goal's own options, chosen exactly, scores 1."""
    return purchase(product, goal, [o[1] if isinstance(o, tuple) else o for o in goal.options], option_match)[0] == 1.0


def _type(product: Product, goal: Goal) -> tuple[float, bool, bool, float]:
    query_match = product.query == goal.query
    category_match = len(_path(product.product_category) & _path(goal.product_category)) >= 2
    common = len(set(product.title_nouns) & set(goal.title_nouns))
    title_score = common / len(goal.title_nouns) if goal.title_nouns else 0.2
    if title_score < 0.1:  # even for the same leaf type
        return 0.0 if title_score == 0.0 else 0.1, query_match, category_match, title_score
    alike = query_match or category_match or title_score > 0.2
    return 1.0 if alike else 0.5, query_match, category_match, title_score


@functools.lru_cache(10_000)
def _path(category: str) -> frozenset[str]:
    return frozenset(element.strip() for element in category.split('›'))


@functools.lru_cache(20_000)
def _has_attribute(product: Product, attribute: str) -> bool:
    return (
        any(_ratio(own, attribute) > FUZZY_MATCH for own in product.attributes)
        or attribute in product.title.lower()
        or attribute in ' '.join(product.bullets).lower()
        or attribute in product.description.lower()
    )


def is_chosen(option: str | tuple[str, str], chosen: Sequence[str], option_match: str = 'webshop') -> bool:
    """Whether one of the chosen values counts as a goal's option, see `purchase`."""
    wanted = _colour(option[1] if option_match == 'by_value' and isinstance(option, tuple) else option)
    return any(_ratio(_colour(value), wanted) > FUZZY_MATCH for value in chosen)


@functools.lru_cache(100_000)
def _colour(option: str | tuple[str, str]) -> str | tuple[str, str]:
    """The first colour that a value contains, in alphabetical order, else the value. In a pair `in` means equality."""
    return next((colour for colour in COLOURS if colour in option), option)


_NO_ASCII = {i: None for i in range(128, 256)}


@functools.lru_cache(200_000)
def _ratio(a: str | tuple[str, str], b: str | tuple[str, str]) -> int:
    """thefuzz's token_set_ratio: blanks for what is not alphanumeric, lower case, rounded; 0 where nothing is left."""
    a, b = (utils.default_process(str(text).translate(_NO_ASCII)) for text in (a, b))
    return round(fuzz.token_set_ratio(a, b))
