"""WebShop as an `Env`. `make_env` is what worker processes call; `shop` has the rules."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from covsero_jax.envs import base
from covsero_jax.envs.webshop import catalogue, generator, importer, oracle, pages, reward, shop
from covsero_jax.envs.webshop.catalogue import WebshopDataError

GOALS = ('synthetic', 'human')
OBSERVATIONS = (*pages.MODES, 'rich_state')
SEARCH_FORM = 'search[<your query>]'


class World(NamedTuple):
    """What all environments over one catalogue share."""

    shop: shop.Shop
    oracle: oracle.Oracle
    names: tuple[str, ...]  # of the goals: asin and the goal's number within its product
    fingerprint: str  # worlds with the same one are the same


class Tasks(NamedTuple):
    """Some goals of a world in the order of their names; shared, for there may be a million."""

    goals: tuple[int, ...]
    names: tuple[str, ...]
    types: tuple[str, ...]  # departments
    oracle_steps: tuple[int, ...]
    known: frozenset[str]  # the names
    num_dropped: int  # unattainable goals that were left out


class Snapshot(NamedTuple):
    """A position in an episode."""

    world: str
    task: str
    state: shop.State
    num_steps: int


class WebshopEnv:
    """An `Env` (and `OracleEnv` when built with oracle=True) over some goals of a world, in the order of their names.

    reward = success_reward on a purchase that scores exactly 1, else 0; success = that purchase; score = the original's
    reward of the purchase, 0 before; done = a purchase, or max_steps commands were executed (illegal ones count).
    As in the original, a search works on every page, although only the index page lists it; any other illegal command
    changes nothing and shows the same page again.
    `oracle_steps`: 4 (back to search, search, product, buy) + the number of the goal's options, for attainable goals.
    """

    def __init__(self, world: World, tasks: Tasks, *, observation: str = 'text', max_steps: int = 15,
                 use_oracle: bool = False, success_reward: float = 10.0):
        _check('observation', observation, OBSERVATIONS)
        if max_steps < 1:
            raise ValueError(f'max_steps must be at least 1, not {max_steps}')
        self._tasks = tasks
        self.task_names, self.task_types, self.oracle_steps = tasks.names, tasks.types, tasks.oracle_steps
        self.num_dropped = tasks.num_dropped
        self._world, self._shop = world, world.shop
        self._mode, self._max_steps, self._success_reward = observation, max_steps, success_reward
        self._oracle = world.oracle if use_oracle else None
        self._state: shop.State | None = None
        self._num_steps, self._is_done = 0, False

    def reset(self, task_id: int) -> base.Observation:
        if not 0 <= task_id < len(self.task_names):
            raise IndexError(f'task {task_id} of {len(self.task_names)} goals')
        self._state, self._num_steps = self._shop.reset(self._tasks.goals[task_id]), 0
        return self._observe()

    def step(self, command: str) -> base.Observation:
        state = self._current()
        if self._is_done:
            raise RuntimeError('the episode is over; call reset before the next step')
        self._state, self._num_steps = self._shop.step(state, command), self._num_steps + 1
        return self._observe()

    def snapshot(self) -> Snapshot:
        state = self._current()
        return Snapshot(self._world.fingerprint, self._world.names[state.goal], state, self._num_steps)

    def restore(self, snapshot: Snapshot) -> base.Observation:
        """Raises ValueError for a snapshot of another catalogue, of other goals, of other rules or of a task not among these."""
        if snapshot.world != self._world.fingerprint:
            raise ValueError(f'a snapshot of the shop {snapshot.world} does not belong to the shop {self._world.fingerprint}')
        if snapshot.task not in self._tasks.known:
            raise ValueError(f'a snapshot of task {snapshot.task} belongs to an environment with other tasks')
        self._state, self._num_steps = snapshot.state, snapshot.num_steps
        return self._observe()

    def oracle_command(self) -> str | None:
        """The next command towards the target product, its options and the purchase; None where the goal is lost.

        Raises OracleForbidden, see `base`.
        """
        if self._oracle is None:
            raise base.OracleForbidden('this environment was built without an oracle')
        state = self._current()
        if self._is_done:
            raise RuntimeError('the episode is over; there is no next command')
        return self._oracle.command(state)

    def _current(self) -> shop.State:
        if self._state is None:
            raise RuntimeError('no episode has been started; call reset first')
        return self._state

    def _observe(self) -> base.Observation:
        state = self._state
        bought = state.page == 'done'
        success = bought and state.score == 1.0
        self._is_done = bought or self._num_steps >= self._max_steps
        mode = 'text_rich' if self._mode == 'text_rich' else 'text'
        return base.Observation(
            text=self._shop.page(state, mode),
            admissible=admissible(self._shop, state),
            reward=self._success_reward if success else 0.0,
            done=self._is_done,
            success=success,
            task=self._shop.goals[state.goal].instruction,
            state=self._shop.page(state, 'text_rich') if self._mode == 'rich_state' else None,
            score=state.score if bought else 0.0,
        )


def admissible(world: shop.Shop, state: shop.State) -> tuple[str, ...]:
    """The listed commands of a page, in its order; the search bar as a form, see `base.admits`."""
    if state.page == 'index':
        return (SEARCH_FORM,)
    return tuple(filter(None, map(shop.click, world.clickables(state))))


def make_env(data: str | os.PathLike | None, split: str, *, num_products: int = 1000, catalogue_seed: int = 0,
             goals: str = 'synthetic', split_by: str = 'product', option_match: str = 'webshop',
             drop_unattainable: bool = False, observation: str = 'text', show_attributes: bool = False,
             max_steps: int = 15, oracle: bool = False, success_reward: float = 10.0,
             max_tasks: int | None = None) -> WebshopEnv:
    """An environment over the goals of one split; `functools.partial(make_env, ...)` is picklable.

    data: 'generated', or the folder of the official files or a compiled catalogue; None = the variable WEBSHOP_DATA.
    split: 'train', 'valid' or 'test', made by split_by, see `catalogue.split_goals`.
    num_products: of the generated catalogue. catalogue_seed decides it, and the price limits of all goals.
    goals: 'synthetic' (one for each combination of a product's options) or 'human' (of people; real data only).
    option_match: 'webshop', with the original's fault, or 'by_value'; see `reward.purchase`.
    drop_unattainable: leave out goals that this fault makes impossible; `WebshopEnv.num_dropped` tells how many.
    observation: the page below the instruction as 'text'; as 'text_rich', which marks what was clicked (the original's
      two modes); or 'rich_state', which shows the text and lets step-level estimators compare the rich page.
      In 'text' a chosen option does not change the page.
    show_attributes: item pages have a button for the list of the product's attributes.
    max_tasks: an evenly spaced subset.
    All environments of a process share the shop. Raises ValueError (WebshopDataError for data).
    """
    for name, value, choices in (('split', split, catalogue.SPLITS), ('goals', goals, GOALS),
                                 ('split_by', split_by, catalogue.SPLITS_BY),
                                 ('option_match', option_match, reward.OPTION_MATCHES),
                                 ('observation', observation, OBSERVATIONS)):  # fmt: skip
        _check(name, value, choices)
    if max_tasks is not None and max_tasks < 1:
        raise ValueError(f'max_tasks must be at least 1, not {max_tasks}')
    if data is None and not (data := os.environ.get('WEBSHOP_DATA')):
        raise WebshopDataError('the variable WEBSHOP_DATA is not set: set it to the folder of the official product files or to '
                               'a compiled catalogue, or use the generated one')
    place = (str(data), num_products, catalogue_seed, goals, option_match, show_attributes)
    return WebshopEnv(_world(*place), _tasks(place, split, split_by, drop_unattainable, max_tasks), observation=observation,
                      max_steps=max_steps, use_oracle=oracle, success_reward=success_reward)


@functools.lru_cache(maxsize=8)
def _world(data: str, num_products: int, seed: int, goals: str, option_match: str, show_attributes: bool) -> World:
    if data == 'generated':
        if num_products < 1:
            raise ValueError(f'num_products must be at least 1, not {num_products}')
        made = catalogue.Catalogue(generator.generate(num_products, seed), (), f'generated/{num_products}/{seed}', 'generated')
    else:
        made = importer.load(data)
    limits = catalogue.drawn_limits(seed)
    if goals == 'human' and not made.instructions:
        raise WebshopDataError(f'{data}: no product has an instruction by a person, which goals=human needs')
    wanted = (catalogue.synthetic_goals(made.products, limits) if goals == 'synthetic' else
              catalogue.human_goals(made.products, made.instructions, limits))
    world = shop.Shop(made.products, wanted, option_match=option_match, show_attributes=show_attributes)
    count: Counter[str] = Counter()
    names = []
    for goal in wanted:
        names.append(f'{goal.asin}-{count[goal.asin]:04d}')
        count[goal.asin] += 1
    return World(world, oracle.Oracle(world), tuple(names), f'{made.source}/{seed}/{goals}/{option_match}/{show_attributes}')


@functools.lru_cache(maxsize=32)
def _tasks(place: tuple, split: str, split_by: str, drop_unattainable: bool, max_tasks: int | None) -> Tasks:
    world = _world(*place)
    sold, chosen = world.shop, catalogue.split_goals(world.shop.goals, split, split_by)
    kept = [i for i in chosen if sold.is_attainable(i)] if drop_unattainable else chosen
    if not kept:
        raise WebshopDataError(f'no goal of split {split!r} is attainable')
    ordered = sorted(kept, key=world.names.__getitem__)
    if max_tasks is not None:
        ordered = base.evenly_spaced(ordered, max_tasks)
    wanted, names = [sold.goals[i] for i in ordered], tuple(world.names[i] for i in ordered)
    return Tasks(tuple(ordered), names, tuple(sold.product(goal.asin).category for goal in wanted),
                 tuple(4 + len(goal.options) for goal in wanted), frozenset(names), len(chosen) - len(kept))


def _check(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f'unknown {name} {value!r}; there are {", ".join(choices)}')
