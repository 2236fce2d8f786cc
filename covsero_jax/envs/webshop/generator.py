"""A shop that we make up: products as hard to tell apart as the real ones, in few words and short pages.

Every product is a function of (seed, its index) alone, so the first 1,000 of 10,000 are the catalogue of 1,000. A product
has a leaf type with many siblings, and attributes of which most are said where the search engine does not look (it reads
title, description, first bullet and options), so that the words of an instruction find the right product first about half
of the time. `baselines` measures that, here and on real products.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from covsero_jax.envs.webshop.catalogue import Product
from covsero_jax.envs.webshop.generator_words import (
    BRANDS,
    COLOURS,
    FILLERS,
    GROUPS,
    QUALIFIERS,
    SERIES,
    SUFFIXES,
    Group,
)

WITH_INSTRUCTION = 0.42  # shares of products, as in the real set
WITH_OPTIONS, WITH_TWO_OPTIONS = 0.6, 0.5
WITHOUT_PRICE, WITH_PRICE_RANGE, WITHOUT_DESCRIPTION = 0.09, 0.09, 0.3
IN_TITLE, IN_FIRST_BULLET, IN_DESCRIPTION = 0.1, 0.18, 0.1  # where an attribute is said; the rest in later bullets
_LETTERS = 'ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789'
_STEP = 7919  # coprime to the number of names, so that products walk through all of them


def generate(num_products: int, seed: int) -> tuple[Product, ...]:
    """The first `num_products` of the catalogue `seed`. Raises ValueError below 1."""
    if num_products < 1:
        raise ValueError(f'num_products must be at least 1, not {num_products}')
    return tuple(_product(seed, index) for index in range(num_products))


def _product(seed: int, index: int) -> Product:
    draw = random.Random(f'webshop/{seed}/{index}')
    group = draw.choice(GROUPS)
    leaf = draw.choice(group.leaves)
    attributes = _attributes(group, draw)
    said = _places(attributes, draw)
    name = (index * _STEP + seed * 31) % (len(BRANDS) * len(SERIES))
    brand, series = BRANDS[name // len(SERIES)], SERIES[name % len(SERIES)]
    title, nouns = _title(brand, series, leaf, [a for a in attributes if said[a] == 'title'], draw)
    price, tag = _price(group, draw)
    instructed = draw.random() < WITH_INSTRUCTION
    wanted = _wanted(attributes, draw) if instructed else ()
    return Product(
        asin=_asin(index), title=title,
        description=_description(leaf, [a for a in attributes if said[a] == 'description'], draw),
        bullets=_bullets(attributes, said, draw), category=group.department, query=leaf,
        product_category=f'{group.path} › {leaf.title()}', price=price, price_tag=tag, options=_options(group, draw),
        attributes=attributes, instruction=_instruction(group, leaf, wanted) if instructed else None,
        instruction_attributes=wanted, title_nouns=nouns)  # fmt: skip


def _asin(index: int) -> str:
    """'B0' and eight characters: the index in base 36, scrambled by a step that is coprime to 36 ** 8.

    All catalogues number alike: a policy that is to click what it reads, cloned on some, cannot know what others sell.
    """
    number, out = (index * 1_500_450_271 + 5_000_000_029) % 36**8, ''
    for _ in range(8):
        number, digit = divmod(number, 36)
        out += _LETTERS[digit]
    return f'B0{out}'


def _attributes(group: Group, draw: random.Random) -> tuple[str, ...]:
    """One to three that stand before the noun, up to two of 'with ...', often one of 'for ...'."""
    chosen = [*draw.sample(group.adjectives, draw.choice((1, 2, 2, 3))), *draw.sample(group.parts, draw.choice((0, 1, 1, 2)))]
    if draw.random() < 0.6 or len(chosen) == 1:
        chosen.append(draw.choice(group.uses))
    return tuple(chosen)


def _places(attributes: Sequence[str], draw: random.Random) -> dict[str, str]:
    """Where each attribute is said: 'title' (at most one), 'first' bullet, 'description', or a 'later' bullet."""
    places, shares = ('title', 'first', 'description', 'later'), (IN_TITLE, IN_FIRST_BULLET, IN_DESCRIPTION)
    said: dict[str, str] = {}
    for attribute in attributes:
        place = draw.choices(places, (*shares, 1 - sum(shares)))[0]
        said[attribute] = 'later' if place == 'title' and place in said.values() else place
    return said


def _title(brand: str, series: str, leaf: str, attributes: Sequence[str], draw: random.Random) -> tuple[str, tuple[str, ...]]:
    """(four to ten words, its nouns)."""
    suffix, suffix_nouns = draw.choice(SUFFIXES)
    said = attributes[:1]
    words = [brand, series, draw.choice(QUALIFIERS), *(said[0].title().split() if said else ()),
             *leaf.title().split(), *suffix.split()]
    nouns = (brand.lower(), series.lower(), *(said[0].split()[-1:] if said else ()), *leaf.split(), *suffix_nouns)
    return ' '.join(words), nouns


def _description(leaf: str, attributes: Sequence[str], draw: random.Random) -> str:
    if attributes:
        return f'This {leaf}: {", ".join(attributes)}.'
    return '' if draw.random() < WITHOUT_DESCRIPTION else f'A {leaf} that {draw.choice(FILLERS)}.'


def _bullets(attributes: Sequence[str], said: dict[str, str], draw: random.Random) -> tuple[str, ...]:
    """The first one is searched, the later ones only shown."""
    first = [a for a in attributes if said[a] == 'first']
    later = [a for a in attributes if said[a] == 'later']
    head = ', '.join(first) if first else draw.choice(FILLERS)
    return (head, *later[:3]) if len(later) <= 3 else (head, *later[:2], ', '.join(later[2:]))


def _price(group: Group, draw: random.Random) -> tuple[float, str]:
    low, high = group.prices
    price, share = draw.randrange(2 * low, 2 * high) / 2, draw.random()
    if share < WITHOUT_PRICE:
        return 100.0, '$100.0'
    if share < WITHOUT_PRICE + WITH_PRICE_RANGE:
        top = price + draw.randrange(4, 20)
        return round(draw.uniform(price, top), 2), f'${price} to ${top}'
    return price, f'${price}'


def _options(group: Group, draw: random.Random) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Up to two kinds of options, with three to six values each."""
    if draw.random() >= WITH_OPTIONS:
        return ()
    names = draw.sample(sorted(group.options), 2 if draw.random() < WITH_TWO_OPTIONS and len(group.options) > 1 else 1)
    out = []
    for name in names:
        values = COLOURS if name == 'color' else group.options[name]
        offered = set(draw.sample(values, draw.randint(3, min(6, len(values)))))
        out.append((name, tuple(value for value in values if value in offered)))
    return tuple(out)


def _wanted(attributes: tuple[str, ...], draw: random.Random) -> tuple[str, ...]:
    """Two or three of the attributes, in their order."""
    count = min(len(attributes), draw.choice((2, 2, 3)))
    chosen = set(draw.sample(attributes, count))
    return tuple(attribute for attribute in attributes if attribute in chosen)


def _instruction(group: Group, leaf: str, wanted: Sequence[str]) -> str:
    """'Find me a1, a2 leaf with b for c', as the original's."""
    before = ', '.join(a for a in wanted if a in group.adjectives)
    parts, uses = ([a for a in wanted if a in kind] for kind in (group.parts, group.uses))
    text = f'Find me {before} {leaf}' if before else f'Find me {leaf}'
    text += f' with {", ".join(parts)}' if parts else ''
    return text + (f' for {", ".join(uses)}' if uses else '')
