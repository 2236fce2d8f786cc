"""How hard a catalogue is, by two customers who cannot read: figures to compare generated with real products.

    python -m covsero_jax.envs.webshop.baselines                      the generated catalogue
    python -m covsero_jax.envs.webshop.baselines --data=FOLDER        real products

`first_hit` searches for the whole instruction and buys the first hit; `first_hit_with_options` also clicks those of the
goal's options that the page lists.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

from covsero_jax.envs.base import evenly_spaced
from covsero_jax.envs.webshop import catalogue, generator, importer
from covsero_jax.envs.webshop.shop import BUY, PAGE_SIZE, Shop


class Difficulty(NamedTuple):
    """Means over goals, in [0, 1]."""

    score: float
    success: float
    score_with_options: float
    success_with_options: float
    first: float  # the target is the first hit
    on_page_one: float
    unattainable: float  # of all goals


def make_shop(data: str, num_products: int = 1000, seed: int = 0) -> Shop:
    """The generated catalogue, or real products, with its synthetic goals."""
    products = generator.generate(num_products, seed) if data == 'generated' else importer.load(data).products
    return Shop(products, catalogue.synthetic_goals(products, catalogue.drawn_limits(seed)))


def measure(shop: Shop, num_goals: int = 2000) -> Difficulty:
    """Over `num_goals` goals, evenly spaced."""
    goals = evenly_spaced(range(len(shop.goals)), num_goals)
    count = len(goals)
    plain, clicked = ([buy_first_hit(shop, goal, options) for goal in goals] for options in (False, True))
    ranks = [rank(shop, goal) for goal in goals]
    return Difficulty(
        sum(plain) / count, plain.count(1.0) / count, sum(clicked) / count, clicked.count(1.0) / count,
        ranks.count(0) / count, sum(r is not None and r < PAGE_SIZE for r in ranks) / count,
        sum(not shop.is_attainable(i) for i in range(len(shop.goals))) / len(shop.goals))  # fmt: skip


def buy_first_hit(shop: Shop, goal: int, with_options: bool) -> float:
    """The score of the purchase; 0 without a hit."""
    state = shop.step(shop.reset(goal), f'search[{_words(shop, goal)}]')
    if not (hits := shop.results(state)):
        return 0.0
    state = shop.step(state, f'click[{hits[0].lower()}]')
    for _, value in shop.goals[goal].options if with_options else ():
        state = shop.step(state, f'click[{value}]')
    return shop.step(state, f'click[{BUY}]').score


def rank(shop: Shop, goal: int) -> int | None:
    """Where the target stands among the hits, from 0; None = it does not."""
    hits = shop.search(_words(shop, goal))
    return hits.index(shop.goals[goal].asin) if shop.goals[goal].asin in hits else None


def _words(shop: Shop, goal: int) -> str:
    return shop.goals[goal].instruction.lower().replace('[', ' ').replace(']', ' ')


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--data', default='generated', help="'generated', or the folder of the official files")
    parser.add_argument('--num_products', type=int, default=1000, help='of the generated catalogue')
    parser.add_argument('--seed', type=int, default=0, help='of the generated catalogue, and of price limits')
    parser.add_argument('--goals', type=int, default=2000)
    options = parser.parse_args(arguments)
    shop = make_shop(options.data, options.num_products, options.seed)
    found = measure(shop, options.goals)
    print(f'{len(shop.products)} products, {len(shop.goals)} goals, {100 * found.unattainable:.1f} % unattainable; '
          f'{min(options.goals, len(shop.goals))} goals measured\n'
          f'first_hit: score {found.score:.3f}, success {100 * found.success:.1f} %\n'
          f'first_hit_with_options: score {found.score_with_options:.3f}, success {100 * found.success_with_options:.1f} %\n'
          f'the target is the first hit {100 * found.first:.1f} %, on page one {100 * found.on_page_one:.1f} %')


if __name__ == '__main__':
    main()
