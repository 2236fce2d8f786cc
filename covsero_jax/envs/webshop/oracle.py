"""The customer who knows what the goal says: a rule-based oracle on the goal's metadata, for training only.

It looks for the target product with words of the instruction, or else of its title, opens it, chooses the goal's options
and buys: SERO's oracle on WebShop (4.3 has it act in the real environment). It uses listed commands alone; searching
without a search bar, which the original allows, is not among them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

from covsero_jax.envs.webshop import reward
from covsero_jax.envs.webshop.catalogue import Goal, Product
from covsero_jax.envs.webshop.shop import BACK, BUY, NEXT, PAGE_SIZE, PREVIOUS, SUB_PAGES, Shop, State, click

_LIMIT = re.compile(r', and price lower than [0-9.]+ dollars$')
_OPENING = re.compile(r'^(?:find me|show me|give me|buy me|i am looking for|i\'?m looking for|i want|i need)\s+', re.IGNORECASE)


class Oracle:
    """Plans for the goals of a shop; nothing about an episode is kept, so one serves all environments.

    From any state but a purchase it buys within 4 + |options| steps (back to search, search, product, options, buy) as long
    as some query puts the target on the first page of results; each further page costs one step.
    """

    def __init__(self, shop: Shop):
        self._shop = shop
        self.query = functools.lru_cache(20_000)(self._find_query)
        self.choices = functools.lru_cache(20_000)(self._find_choices)

    def command(self, state: State) -> str | None:
        """The next command; None where no purchase of the target can score 1, or no query finds it."""
        goal = self._shop.goals[state.goal]
        choices, query = self.choices(state.goal), self.query(state.goal)
        if choices is None or query is None or state.page == 'done':
            return None
        if state.page == 'index':
            return f'search[{query}]'
        if state.page == 'results':
            return f'click[{self._on_results(state, goal.asin)}]'
        if state.asin == goal.asin:
            missing = [value for name, value in choices if dict(state.options).get(name) != value]
            return f'click[{PREVIOUS if state.page == "sub" else missing[0] if missing else BUY}]'
        on_this_page = state.page == 'item' and goal.asin in self._shop.results(state)
        return f'click[{PREVIOUS if on_this_page else BACK}]'

    def _on_results(self, state: State, asin: str) -> str:
        """The product, a step towards its page, or a new search when that is nearer."""
        hits = self._shop.search(state.query)
        if asin not in hits:
            return BACK
        turns = hits.index(asin) // PAGE_SIZE + 1 - state.page_number
        if turns == 0:
            return asin.lower()
        anew = 2 + self._shop.search(self.query(state.goal)).index(asin) // PAGE_SIZE
        return BACK if abs(turns) > anew else NEXT if turns > 0 else PREVIOUS

    def _find_query(self, goal: int) -> str | None:
        """The first of `queries` that shows the target on its first page, else the one that ranks it best."""
        wanted, best = self._shop.goals[goal], None
        for query in queries(wanted, self._shop.product(wanted.asin)):
            hits = self._shop.search(query)
            if wanted.asin in hits[:PAGE_SIZE]:
                return query
            if wanted.asin in hits and (best is None or hits.index(wanted.asin) < best[0]):
                best = (hits.index(wanted.asin), query)
        return best[1] if best else None

    def _find_choices(self, goal: int) -> tuple[tuple[str, str], ...] | None:
        """The (name, value) pairs to choose on the target's page so that buying it scores 1; None = there are none."""
        wanted = self._shop.goals[goal]
        product = self._shop.product(wanted.asin)
        names = {value: name for value, name in self._shop.option_names(wanted.asin).items()
                 if click(value) and value not in (*SUB_PAGES, BACK, PREVIOUS, BUY)}  # others do something else, or nothing
        for chosen in _combinations(wanted, names, {}, self._shop.option_match):
            if reward.purchase(product, wanted, list(chosen.values()), self._shop.option_match)[0] == 1.0:
                return tuple(chosen.items())
        return None


def _combinations(goal: Goal, name_of: dict[str, str], chosen: dict[str, str], match: str, done: int = 0) -> Iterator[dict]:
    """Choices that satisfy every option of the goal, exact values first. name_of: clickable value -> its option's name."""
    if done == len(goal.options):
        yield chosen
        return
    wanted = goal.options[done]
    exact = wanted[1] if isinstance(wanted, tuple) else wanted
    values = sorted(name_of, key=lambda value: value != exact)
    for value in values:
        name = name_of[value]
        if chosen.get(name, value) == value and reward.is_chosen(wanted, [value], match):
            yield from _combinations(goal, name_of, chosen | {name: value}, match, done + 1)


def queries(goal: Goal, product: Product) -> Iterator[str]:
    """What to search for: the instruction without its options, with them, the title, both; as lower-case words."""
    told = _OPENING.sub('', _LIMIT.sub('', goal.instruction))
    options = ', and '.join(f'{name}: {value}' for name, value in goal.options) if _has_names(goal) else ''
    core = told.removesuffix(f' with {options}') if options else told
    values = ' '.join(option[1] if isinstance(option, tuple) else option for option in goal.options)
    for text in (core, told, product.title, f'{product.title} {values}', f'{product.title} {told}',
                 f'{product.title} {product.title} {" ".join(product.bullets[:1])}'):
        if words := ' '.join(text.lower().replace('[', ' ').replace(']', ' ').split()):
            yield words


def _has_names(goal: Goal) -> bool:
    return bool(goal.options) and isinstance(goal.options[0], tuple)
