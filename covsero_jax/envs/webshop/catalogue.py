"""What a shop sells and what customers want: products, goals, and the file that holds a compiled catalogue.

A goal names a target product, some of its attributes and options, and a price limit. The reward of a purchase compares
what was bought with the goal (`reward`), so a product is described here by exactly what pages, search and reward read.
"""

from __future__ import annotations

import bisect
import gzip
import itertools
import json
import os
import pathlib
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from covsero_jax.envs import cache


class WebshopDataError(ValueError):
    """Product data that cannot be used; the message names the file, the product and the field."""


class Product(NamedTuple):
    """One product. Texts are as shown; `options` values are lower case, as they are clicked."""

    asin: str  # ten characters, upper case; clicks use it in lower case
    title: str
    description: str
    bullets: tuple[str, ...]
    category: str  # department: beauty, electronics, garden, fashion, grocery
    query: str  # leaf type, lower case
    product_category: str  # path, joined by ' › '
    price: float  # what the reward compares with the limit
    price_tag: str  # what is shown: '$34.0', or '$10.99 to $18.99'
    options: tuple[tuple[str, tuple[str, ...]], ...]  # (name, values) in page order
    attributes: tuple[str, ...]
    instruction: str | None  # synthetic instruction without options and price; None: no goals
    instruction_attributes: tuple[str, ...]
    title_nouns: tuple[str, ...]  # nouns of the title, lower case, in order, repeats kept


class Goal(NamedTuple):
    """What a customer wants."""

    asin: str  # of the target product
    instruction: str  # the task, options and price limit included
    query: str
    product_category: str
    attributes: tuple[str, ...]
    price_upper: float
    options: tuple[tuple[str, str], ...] | tuple[str, ...]  # (name, value) of synthetic goals, values of human ones
    title_nouns: tuple[str, ...]  # of the target product
    weight: float = 1.0  # of weighted drawing, as the original defines it


class Instruction(NamedTuple):
    """What a person wrote for a product."""

    asin: str
    text: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]  # values


class Catalogue(NamedTuple):
    """Products in the order of their file, and what is known about where they come from."""

    products: tuple[Product, ...]
    instructions: tuple[Instruction, ...]  # by people, for these products; grouped by product
    source: str  # a fingerprint of what it was made from; equal sources give equal catalogues
    nouns: str  # how title nouns were found: 'spacy ...', 'heuristic' or 'generated'


# ---------------------------------------------------------------------------------------------------------- goals

NO_LIMIT = 1_000_000.0  # a price limit that is none, and is not told
PRICE_LIMITS = tuple(10.0 * i for i in range(1, 100))

PriceLimits = Callable[[Product, int], float]  # (product, number of its instruction) -> price limit


def drawn_limits(seed: int) -> PriceLimits:
    """The larger of two different limits among the first four multiples of ten above the price, below 1,000.

    Each product draws for itself, so that its limit does not depend on what else is sold. (The original draws from an
    unseeded generator.)
    """

    def limit(product: Product, number: int) -> float:
        above = bisect.bisect_right(PRICE_LIMITS, product.price)
        limits = PRICE_LIMITS[above : above + 4]
        return max(random.Random(f'{seed}/{product.asin}/{number}').sample(limits, 2)) if len(limits) > 1 else NO_LIMIT

    return limit


def synthetic_goals(products: Iterable[Product], limits: PriceLimits) -> tuple[Goal, ...]:
    """One goal for every combination of option values of every product that has an instruction, in product order."""
    goals = []
    for product in products:
        if product.instruction is None:
            continue
        told = limits(product, 0)
        pairs = [[(name, value) for value in values] for name, values in sorted(product.options)]
        for options in itertools.product(*pairs):
            wanted = ', and '.join(f'{name}: {value}' for name, value in options)
            text = f'{product.instruction} with {wanted}' if wanted else product.instruction
            goals.append(_goal(product, text, product.instruction_attributes, told, options))
    return _weighted(goals)


def human_goals(products: Iterable[Product], instructions: Iterable[Instruction], limits: PriceLimits) -> tuple[Goal, ...]:
    """One goal for every instruction by a person that names an attribute, in product order; all weights are 1."""
    of_product: dict[str, list[Instruction]] = {}
    for instruction in instructions:
        of_product.setdefault(instruction.asin, []).append(instruction)
    return tuple(
        _goal(product, told.text.strip('.'), told.attributes, limits(product, number), told.options)
        for product in products for number, told in enumerate(of_product.get(product.asin, ())) if told.attributes
    )  # fmt: skip


def _goal(product: Product, text: str, attributes: tuple[str, ...], limit: float, options: tuple) -> Goal:
    if limit < NO_LIMIT:
        text = f'{text}, and price lower than {limit:.2f} dollars'
    return Goal(product.asin, text, product.query, product.product_category, attributes, limit, options, product.title_nouns)


def _weighted(goals: list[Goal]) -> tuple[Goal, ...]:
    """A goal weighs as much as its attributes are rare: the mean of 1 / (number of goals with that attribute)."""
    count = Counter(attribute for goal in goals for attribute in goal.attributes)
    return tuple(goal._replace(weight=sum(1.0 / count[a] for a in goal.attributes) / len(goal.attributes)) for goal in goals)


# --------------------------------------------------------------------------------------------------------- splits

SPLITS = ('train', 'valid', 'test')
SPLITS_BY = ('product', 'index233', 'verl_agent')


def shuffled(num_goals: int, seed: int = 233) -> list[int]:
    """Positions of goals after the original's shuffle (its seed is 233): the goal that stands at 0, at 1, ..."""
    order = list(range(num_goals))
    random.Random(seed).shuffle(order)
    return order


def split_goals(goals: Sequence[Goal], split: str, by: str = 'product') -> tuple[int, ...]:
    """Indices of the goals of one split, ascending.

    by='product': no target product is in two splits; about 80, 10 and 10 % of the products, decided by their asin alone.
    by='index233': positions in the original's shuffle, 0-499 test, 500-1499 valid, the rest train: the published split
      when the goals are all 12,087 human ones. Goals of one product fall into several splits.
    by='verl_agent': as that code base does it, for comparison only. Test and valid are positions 0-499 of one shuffle,
      train is 500- of another, so nearly every test goal is also trained on. Its workers each shuffle anew; here it is
      one shuffle for training (seed 0) and one for evaluation (seed 1000).
    Raises ValueError for names that do not exist, and where the goals do not fill all splits.
    """
    if split not in SPLITS:
        raise ValueError(f'unknown split {split!r}; there are {", ".join(SPLITS)}')
    if by == 'product':
        chosen = [i for i, goal in enumerate(goals) if _split_of(goal.asin) == split]
    elif by == 'index233':
        positions = {'test': slice(500), 'valid': slice(500, 1500), 'train': slice(1500, None)}[split]
        chosen = shuffled(len(goals))[positions] if len(goals) > 1500 else []
    elif by == 'verl_agent':
        order = shuffled(len(goals), 0 if split == 'train' else 1000) if len(goals) > 500 else []
        chosen = order[500:] if split == 'train' else order[:500]
    else:
        raise ValueError(f'unknown way to split goals {by!r}; there are {", ".join(SPLITS_BY)}')
    if not chosen:
        raise ValueError(f'{len(goals)} goals are too few for split {split!r} by {by!r}: use more products, or another '
                         f'way to split ({", ".join(SPLITS_BY)})')
    return tuple(sorted(chosen))


def _split_of(asin: str) -> str:
    share = zlib.crc32(asin.encode()) / 2**32
    return 'test' if share < 0.1 else 'valid' if share < 0.2 else 'train'


# ---------------------------------------------------------------------------------------------------------- files

FORMAT = 'covsero_jax WebShop catalogue'
VERSION = 1


def save(catalogue: Catalogue, path: str | os.PathLike) -> None:
    """Writes one gzip file of JSON lines: a header, the products, the instructions. Readers never see a part of it."""
    header = {'format': FORMAT, 'version': VERSION, 'source': catalogue.source, 'nouns': catalogue.nouns,
              'num_products': len(catalogue.products), 'num_instructions': len(catalogue.instructions)}
    with (cache.replacing(pathlib.Path(path)) as temporary, open(temporary, 'wb') as file,
          gzip.GzipFile('', 'wb', 6, file, mtime=0) as packed):
        for line in itertools.chain([header], catalogue.products, catalogue.instructions):
            packed.write(json.dumps(line, ensure_ascii=False).encode('utf-8', 'surrogatepass') + b'\n')


def load(path: str | os.PathLike) -> Catalogue:
    """Reads what `save` wrote. Raises WebshopDataError for anything else."""
    advice = 'make it anew with  python -m covsero_jax.envs.webshop.importer FOLDER --out FILE'
    try:
        with gzip.open(path, 'rb') as file:
            lines = (json.loads(line.decode('utf-8', 'surrogatepass')) for line in file)
            header = next(lines, None)
            if not isinstance(header, dict) or (header.get('format'), header.get('version')) != (FORMAT, VERSION):
                raise WebshopDataError(f'{path} is not a compiled catalogue of version {VERSION}; {advice}')
            products = tuple(Product(*map(_frozen, line)) for line in itertools.islice(lines, header['num_products']))
            instructions = tuple(Instruction(*map(_frozen, line)) for line in lines)
            made = Catalogue(products, instructions, header['source'], header['nouns'])
            is_whole = (len(products), len(instructions)) == (header['num_products'], header['num_instructions'])
    except FileNotFoundError as error:
        raise WebshopDataError(f'{path}: no such file; {advice}') from error
    except WebshopDataError:
        raise
    except (OSError, EOFError, KeyError, TypeError, ValueError, zlib.error) as error:
        raise WebshopDataError(f'{path} is not a compiled catalogue, or is damaged ({error}); {advice}') from error
    if not is_whole:
        raise WebshopDataError(f'{path} is cut short; {advice}')
    return made


def _frozen(value: object) -> object:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
