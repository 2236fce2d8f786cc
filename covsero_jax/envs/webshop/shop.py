"""The shop: every page and every rule of WebShop's text mode.

A `Shop` is the immutable world, shared by all episodes; a `State` is everything that changes, a small tuple. `step`,
`observe` and `clickables` are pure functions of states, so that a reference to a state is a snapshot.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import NamedTuple

from covsero_jax.envs.webshop import pages, reward, search
from covsero_jax.envs.webshop.catalogue import Goal, Product, WebshopDataError

MAX_HITS, PAGE_SIZE = 50, 10
SEARCH, BACK, PREVIOUS, NEXT, BUY = 'search', 'back to search', '< prev', 'next >', 'buy now'
SUB_PAGES = ('description', 'features', 'reviews', 'attributes')


class State(NamedTuple):
    """Where a customer stands."""

    goal: int  # index into Shop.goals
    page: str = 'index'  # index | results | item | sub | done
    query: str | None = None
    page_number: int = 0  # of the results, from 1
    asin: str | None = None
    sub_page: str | None = None  # one of SUB_PAGES
    options: tuple[tuple[str, str], ...] = ()  # (name, value), in order of first choice
    visited: tuple[str, ...] = ()  # asins, in order of first visit
    score: float = 0.0  # of the last purchase


class Shop:
    """Products, goals and the search engine.

    option_match: see `reward.purchase`. show_attributes: item pages have a button for the list of attributes.
    Raises WebshopDataError without products or goals, and for goals whose product is not sold; ValueError for an unknown
    option_match.
    """

    def __init__(self, products: Sequence[Product], goals: Sequence[Goal], *, option_match: str = 'webshop',
                 show_attributes: bool = False):
        if option_match not in reward.OPTION_MATCHES:
            raise ValueError(f'unknown option_match {option_match!r}; there are {", ".join(reward.OPTION_MATCHES)}')
        self.products, self.goals = tuple(products), tuple(goals)
        self.option_match, self.show_attributes = option_match, show_attributes
        self._by_asin = {product.asin: product for product in self.products}
        self._check()
        ranked = sorted(self.products, key=lambda product: product.asin)  # equal scores: ascending asin
        self._ranked = [product.asin for product in ranked]
        self._index = search.LuceneBM25(search.analyze(indexed_text(product)) for product in ranked)
        self.search = functools.lru_cache(4096)(self._search)
        self.option_names = functools.lru_cache(4096)(self._find_option_names)
        self._item_clickables = functools.lru_cache(4096)(self._list_item_clickables)
        self._item_text = functools.lru_cache(4096)(self._render_item)
        self._results_text = functools.lru_cache(2048)(self._render_results)

    def _check(self) -> None:
        if not self.products:
            raise WebshopDataError('the catalogue is empty: a shop needs products')
        if len(self._by_asin) < len(self.products):
            raise WebshopDataError('two products have the same asin')
        if not self.goals:
            raise WebshopDataError('there are no goals: no product has an instruction')
        for i, goal in enumerate(self.goals):
            if goal.asin not in self._by_asin:
                raise WebshopDataError(f'goal {i} ({goal.instruction[:60]!r}) wants product {goal.asin}, which is not sold')

    def product(self, asin: str) -> Product:
        return self._by_asin[asin]

    def _search(self, query: str) -> tuple[str, ...]:
        """The asins of the best hits of a lower-case query, at most MAX_HITS."""
        return tuple(self._ranked[i] for i, _ in self._index.search(search.analyze(query), MAX_HITS))

    def results(self, state: State) -> tuple[str, ...]:
        """The asins on the present page of results."""
        first = (state.page_number - 1) * PAGE_SIZE
        return self.search(state.query)[first : first + PAGE_SIZE]

    # ------------------------------------------------------------------------------------------------------ rules

    def reset(self, goal: int) -> State:
        """The state in which every episode of goal `goal` starts."""
        if not 0 <= goal < len(self.goals):
            raise IndexError(f'goal {goal} of {len(self.goals)}')
        return State(goal)

    def step(self, state: State, action: str) -> State:
        """The state after an action, 'search[words]' or 'click[what]'; the same object where it has no effect.

        A click must be listed by `clickables`. As in the original, searching works on every page, also after a purchase,
        although only the index page has a search bar; and clicking 'search' does nothing.
        """
        name, argument = parse(action)
        if name == 'search' and argument:
            return state._replace(page='results', query=argument, page_number=1, asin=None, sub_page=None, options=())
        if name == 'click' and argument != SEARCH and argument in self.clickables(state):
            return self._click(state, argument)
        return state

    def _click(self, state: State, target: str) -> State:
        if target == BUY:
            return state._replace(page='done', score=self.purchase(state)[0])
        if target == BACK:
            return State(state.goal)
        if state.page == 'results':
            if target in (NEXT, PREVIOUS):
                return state._replace(page_number=state.page_number + (1 if target == NEXT else -1))
            asin = target.upper()
            visited = state.visited if asin in state.visited else (*state.visited, asin)
            return state._replace(page='item', asin=asin, visited=visited)
        if target == PREVIOUS:
            if state.page == 'sub':
                return state._replace(page='item', sub_page=None)
            return state._replace(page='results', asin=None, options=())
        if target in SUB_PAGES:  # also where an option value has such a name
            return state._replace(page='sub', sub_page=target)
        options = dict(state.options) | {self.option_names(state.asin)[target]: target}
        return state._replace(options=tuple(options.items()))

    def purchase(self, state: State) -> tuple[float, reward.Details]:
        """What buying the present product with the chosen options is worth."""
        chosen = [value for _, value in state.options]
        return reward.purchase(self._by_asin[state.asin], self.goals[state.goal], chosen, self.option_match)

    def is_attainable(self, goal: int) -> bool:
        """Whether buying the goal's own product with the goal's own options, chosen exactly, scores 1."""
        wanted = self.goals[goal]
        return reward.is_attainable(self._by_asin[wanted.asin], wanted, self.option_match)

    def clickables(self, state: State) -> tuple[str, ...]:
        """What can be clicked, in page order, lower case."""
        if state.page == 'index':
            return (SEARCH,)
        if state.page == 'results':
            turn = (PREVIOUS, NEXT) if state.page_number > 1 else (NEXT,)
            return (BACK, *turn, *(asin.lower() for asin in self.results(state)))
        if state.page == 'item':
            return self._item_clickables(state.asin)
        return (BACK, PREVIOUS) if state.page == 'sub' else ()

    def _list_item_clickables(self, asin: str) -> tuple[str, ...]:
        sub_pages = SUB_PAGES if self.show_attributes else SUB_PAGES[:-1]
        return tuple(dict.fromkeys((BACK, PREVIOUS, *sub_pages, BUY, *self.option_names(asin))))

    def _find_option_names(self, asin: str) -> dict[str, str]:
        """Which option a clicked value belongs to; of two options with the same value it is the later one."""
        return {value: name for name, values in self._by_asin[asin].options for value in values}

    # ------------------------------------------------------------------------------------------------------ pages

    def observe(self, state: State, mode: str = 'text') -> str:
        """The whole page in mode 'text' or 'text_rich'."""
        if state.page == 'done':
            return self.page(state, mode)
        chosen = ()
        if mode == 'text_rich' and state.page == 'item':
            chosen = self._marked_options(state)[::-1]  # the original writes each on top of the last
        head = [*pages.before_instruction(state.page, chosen), pages.Piece(self.goals[state.goal].instruction)]
        separator = pages.SEPARATOR if mode == 'text' else ''
        return f'{pages.render(head, mode)}{separator}{self.page(state, mode)}'

    def page(self, state: State, mode: str = 'text') -> str:
        """The page below the instruction, which is the same on all pages; after a purchase the whole page."""
        if mode == 'text' and state.page == 'results':
            return self._results_text(state.query, state.page_number)
        if mode == 'text' and state.page == 'item':
            return self._item_text(state.asin)
        return pages.render(self._pieces(state), mode)

    def _pieces(self, state: State) -> list[pages.Piece]:
        if state.page == 'index':
            return pages.index()
        if state.page == 'results':
            products = [self._by_asin[asin] for asin in self.results(state)]
            return pages.results(products, state.page_number, len(self.search(state.query)), state.visited)
        if state.page == 'done':
            return pages.done(state.asin, state.options, state.score)
        product = self._by_asin[state.asin]
        if state.page == 'sub':
            return pages.sub(product, state.sub_page)
        return pages.item(product, self.show_attributes, frozenset(self._marked_options(state)))

    def _marked_options(self, state: State) -> list[str]:
        return pages.marked_options(self._by_asin[state.asin], state.query, state.page_number, state.options)

    def _render_item(self, asin: str) -> str:
        return pages.render(pages.item(self._by_asin[asin], self.show_attributes), 'text')

    def _render_results(self, query: str, page_number: int) -> str:
        return pages.render(self._pieces(State(0, 'results', query, page_number)), 'text')


_ACTION = re.compile(r'(.+)\[(.+)\]')


def parse(action: str) -> tuple[str, str]:
    """(name, argument in lower case) of 'name[argument]', split at the last '['; what follows the last ']' is ignored.

    Else ('', ''). So an argument never holds a '['.
    """
    match = _ACTION.match(action)
    return (match[1], match[2].lower()) if match else ('', '')


@functools.lru_cache(50_000)
def click(target: str) -> str:
    """The command that clicks; '' where none does, as for an empty option value or one with a '[', see `parse`."""
    command = f'click[{target}]'
    return command if parse(command) == ('click', target) and target != SEARCH else ''


def indexed_text(product: Product) -> str:
    """What the search engine reads of a product: title, description, first bullet and options."""
    options = ', and '.join(f'{name}: {", ".join(values)}' for name, values in product.options)
    return ' '.join((product.title, product.description, *(product.bullets[:1] or ('',)), options)).lower()
