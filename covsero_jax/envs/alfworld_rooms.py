"""The rooms of generated ALFWorld games: what real rooms hold, what fits where, and scenes drawn from that.

The tables are facts about the public games (ALFWorld, json_2.1.2, MIT licence, (c) 2020 Mohit Shridhar and others),
measured over all 4,027 of them and written down here. Names are the data's CamelCase types.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Mapping

from covsero_jax.envs import alfworld_pddl


def _types(names: str) -> frozenset[str]:
    return frozenset(names.split())


# Receptacle -> the objects that may be put there (`canContain`, the union over all games).
FITS = {
    'ArmChair': _types('Book Box CellPhone Cloth CreditCard KeyChain Laptop Newspaper Pillow RemoteControl'),
    'BathtubBasin': _types('Cloth DishSponge HandTowel SoapBar'),
    'Bed': _types('BaseballBat BasketBall Book CellPhone Laptop Pillow TennisRacket'),
    'Cabinet': _types("""
        Book Bowl Box CD Candle Cloth Cup DishSponge Glassbottle HandTowel Kettle Ladle Mug Newspaper Pan PepperShaker
        Plate Plunger Pot SaltShaker SoapBar SoapBottle SprayBottle TissueBox ToiletPaper Vase WateringCan WineBottle
    """),
    'Cart': _types('Candle Cloth DishSponge HandTowel Plunger SoapBar SoapBottle SprayBottle TissueBox ToiletPaper'),
    'CoffeeMachine': _types('Mug'),
    'CoffeeTable': _types("""
        Book Bowl Box Candle CellPhone CreditCard KeyChain Laptop Newspaper Pen Pencil Plate RemoteControl Statue
        TissueBox Vase Watch WateringCan
    """),
    'CounterTop': _types("""
        AlarmClock Apple Book Bowl Bread ButterKnife CD Candle CellPhone Cloth CreditCard Cup DishSponge Egg Fork
        Glassbottle HandTowel Kettle KeyChain Knife Ladle Laptop Lettuce Mug Pan Pen Pencil PepperShaker Plate Pot
        Potato RemoteControl SaltShaker SoapBar SoapBottle Spatula Spoon SprayBottle Statue TissueBox ToiletPaper
        Tomato Vase WineBottle
    """),
    'Desk': _types("""
        AlarmClock BasketBall Book Bowl Box CD CellPhone Cloth CreditCard KeyChain Laptop Mug Pen Pencil RemoteControl
        Statue TennisRacket TissueBox Vase Watch WateringCan
    """),
    'DiningTable': _types("""
        AlarmClock Apple BaseballBat BasketBall Book Bowl Box Bread ButterKnife CD Candle CellPhone Cloth CreditCard
        Cup DishSponge Egg Fork Glassbottle Kettle KeyChain Knife Ladle Laptop Lettuce Mug Newspaper Pan Pen Pencil
        PepperShaker Plate Pot Potato RemoteControl SaltShaker SoapBottle Spatula Spoon SprayBottle Statue TennisRacket
        TissueBox Tomato Vase Watch WateringCan WineBottle
    """),
    'Drawer': _types("""
        Book ButterKnife CD Candle CellPhone Cloth CreditCard DishSponge Fork HandTowel KeyChain Knife Ladle Newspaper
        Pen Pencil PepperShaker RemoteControl SaltShaker SoapBar SoapBottle Spatula Spoon SprayBottle TissueBox
        ToiletPaper Watch WateringCan
    """),
    'Dresser': _types("""
        AlarmClock BasketBall Book Bowl Box CD Candle CellPhone Cloth CreditCard KeyChain Laptop Mug Newspaper Pen
        Pencil Plate RemoteControl SprayBottle Statue TennisRacket TissueBox ToiletPaper Vase Watch WateringCan
    """),
    'Fridge': _types('Apple Bowl Bread Cup Egg Glassbottle Lettuce Mug Pan Plate Pot Potato Tomato WineBottle'),
    'GarbageCan': _types("""
        Apple Bread CD Cloth DishSponge Egg HandTowel Lettuce Newspaper Pen Pencil Potato SoapBar SoapBottle
        SprayBottle TissueBox ToiletPaper Tomato WineBottle
    """),
    'HandTowelHolder': _types('HandTowel'),
    'LaundryHamper': _types('Cloth'),
    'Microwave': _types('Apple Bowl Bread Cup Egg Glassbottle Mug Plate Potato Tomato'),
    'Ottoman': _types('Book Box CellPhone CreditCard KeyChain Laptop Newspaper Pillow RemoteControl'),
    'Safe': _types('CD CellPhone CreditCard KeyChain Statue Vase Watch'),
    'Shelf': _types("""
        AlarmClock Book Bowl Box CD Candle CellPhone Cloth CreditCard Cup DishSponge Glassbottle HandTowel Kettle
        KeyChain Mug Newspaper Pen Pencil PepperShaker Plate Pot RemoteControl SaltShaker SoapBar SoapBottle
        SprayBottle Statue TissueBox ToiletPaper Vase Watch WateringCan WineBottle
    """),
    'SideTable': _types("""
        AlarmClock Apple BaseballBat BasketBall Book Bowl Box Bread ButterKnife CD Candle CellPhone Cloth CreditCard
        Cup DishSponge Egg Fork HandTowel Kettle KeyChain Knife Laptop Lettuce Mug Newspaper Pan Pen Pencil
        PepperShaker Plate Pot Potato RemoteControl SaltShaker SoapBar SoapBottle Spatula Spoon SprayBottle Statue
        TennisRacket TissueBox ToiletPaper Tomato Vase Watch WateringCan WineBottle
    """),
    'SinkBasin': _types("""
        Apple Bowl ButterKnife Cloth Cup DishSponge Egg Fork Glassbottle HandTowel Kettle Knife Ladle Lettuce Mug Pan
        Plate Pot Potato SoapBar Spatula Spoon Tomato
    """),
    'Sofa': _types('Book Box CellPhone CreditCard KeyChain Laptop Newspaper Pillow RemoteControl'),
    'StoveBurner': _types('Kettle Pan Pot'),
    'TVStand': _types('TissueBox'),
    'Toilet': _types('Candle Cloth DishSponge HandTowel SoapBar SoapBottle SprayBottle TissueBox ToiletPaper'),
    'ToiletPaperHanger': _types('ToiletPaper'),
    'TowelHolder': _types('Towel'),
}

CLEANABLE = _types("""
    Apple Bowl ButterKnife Cloth Cup DishSponge Egg Fork Kettle Knife Ladle Lettuce Mug Pan Plate Pot Potato SoapBar
    Spatula Spoon Tomato
""")
HEATABLE = _types('Apple Bread Cup Egg Mug Plate Potato Tomato')
COOLABLE = _types('Apple Bowl Bread Cup Egg Lettuce Mug Pan Plate Pot Potato Tomato WineBottle')

OPENABLE = _types('Cabinet Drawer Fridge Microwave Safe')
STUCK = _types('Cabinet Drawer')  # in real games one in six of these cannot be opened and shows its contents

# Objects that no receptacle accepts, and where they stand. Those in DEAD_ENDS can be picked up and then never put down.
EXTRAS = {
    'DeskLamp': _types('CoffeeTable Desk Dresser Shelf SideTable'),
    'HousePlant': _types('CoffeeTable CounterTop Desk DiningTable Dresser Shelf SideTable'),
    'PaperTowelRoll': _types('CounterTop DiningTable GarbageCan Shelf Toilet'),
    'TeddyBear': _types('Bed'),
    'Television': _types('CoffeeTable Dresser TVStand'),
}
DEAD_ENDS = _types('PaperTowelRoll TeddyBear')

# Object attribute of the PDDL domain -> the types that have it.
ATTRIBUTES = {
    'pickupable': frozenset().union(*FITS.values()) | DEAD_ENDS,
    'isReceptacleObject': _types('Bowl Box Cup Mug Pan Plate Pot'),
    'cleanable': CLEANABLE,
    'heatable': HEATABLE,
    'coolable': COOLABLE,
    'sliceable': _types('Apple Bread Egg Lettuce Potato Tomato'),
    'toggleable': _types('DeskLamp'),
}

# Never the destination of a task: what is put there is on its way (sinks) or lives there (towel holders).
NOT_A_DESTINATION = _types('BathtubBasin HandTowelHolder LaundryHamper SinkBasin TowelHolder')


@dataclasses.dataclass(frozen=True)
class Room:
    """One kind of room.

    scenes: numbers of its scenes, as in ALFRED. needed: receptacles that every such room has, as alternatives (one of
    each entry is drawn). receptacles: type -> (mean, largest) count per scene. usual: objects in every room of this
    kind; occasional: in some. extras: keys of EXTRAS.
    """

    scenes: range
    needed: tuple[tuple[str, ...], ...]
    receptacles: Mapping[str, tuple[float, int]]
    usual: frozenset[str]
    occasional: frozenset[str]
    extras: tuple[str, ...]


ROOMS = {
    'kitchen': Room(
        scenes=range(1, 31),
        needed=(('Fridge',), ('Microwave',), ('SinkBasin',), ('CounterTop',)),
        receptacles={
            'Cabinet': (14.5, 27), 'CoffeeMachine': (1, 1), 'CounterTop': (2.4, 4), 'DiningTable': (0.7, 3),
            'Drawer': (6, 27), 'Fridge': (1, 1), 'GarbageCan': (1, 1), 'Microwave': (1, 1), 'Safe': (0.04, 1),
            'Shelf': (0.5, 3), 'SideTable': (0.1, 1), 'SinkBasin': (1, 1), 'StoveBurner': (4.1, 6), 'Toaster': (1, 1),
        },
        usual=_types("""
            Apple Bowl Bread ButterKnife Cup DishSponge Egg Fork Knife Lettuce Mug Pan PepperShaker Plate Pot Potato
            SaltShaker SoapBottle Spatula Spoon Tomato
        """),
        occasional=_types("""
            Book CellPhone CreditCard Glassbottle Kettle Ladle Pen Pencil SprayBottle Statue Vase WineBottle
        """),
        extras=('HousePlant', 'PaperTowelRoll')),
    'livingroom': Room(
        scenes=range(201, 231),
        needed=(('Sofa',), ('CoffeeTable', 'SideTable', 'Dresser'), ('ArmChair', 'Drawer')),
        receptacles={
            'ArmChair': (1.3, 3), 'Cabinet': (0.6, 8), 'CoffeeTable': (1, 2), 'Desk': (0.04, 1),
            'DiningTable': (0.6, 2),
            'Drawer': (4.1, 21), 'Dresser': (0.4, 2), 'GarbageCan': (1, 1), 'Ottoman': (0.14, 1), 'Safe': (0.07, 1),
            'Shelf': (2.6, 14), 'SideTable': (1.5, 5), 'Sofa': (1.2, 2), 'TVStand': (0.5, 2),
        },
        usual=_types('Box CreditCard KeyChain Laptop Pillow RemoteControl Statue'),
        occasional=_types('Book Bowl Candle CellPhone Newspaper Pen Pencil Plate TissueBox Vase Watch WateringCan'),
        extras=('DeskLamp', 'HousePlant', 'Television')),
    'bedroom': Room(
        scenes=range(301, 331),
        needed=(('Bed',), ('Desk', 'SideTable', 'Dresser'), ('Drawer',)),
        receptacles={
            'ArmChair': (0.3, 3), 'Bed': (1.1, 2), 'Cabinet': (0.4, 4), 'CounterTop': (0.04, 1), 'Desk': (0.8, 2),
            'DiningTable': (0.14, 1), 'Drawer': (5.5, 17), 'Dresser': (0.5, 2), 'GarbageCan': (1, 1),
            'LaundryHamper': (0.3, 1), 'Safe': (0.2, 1), 'Shelf': (3.1, 14), 'SideTable': (0.9, 2),
        },
        usual=_types('AlarmClock Book CD CellPhone CreditCard KeyChain Laptop Pen Pencil Pillow'),
        occasional=_types('Bowl Cloth Mug RemoteControl Statue TissueBox Vase Watch'),
        extras=('DeskLamp', 'HousePlant', 'TeddyBear', 'Television')),
    'bathroom': Room(
        scenes=range(401, 431),
        needed=(('SinkBasin',), ('Toilet',), ('CounterTop', 'Cabinet', 'Drawer')),
        receptacles={
            'BathtubBasin': (0.7, 1), 'Cabinet': (2.2, 9), 'Cart': (0.07, 1), 'CounterTop': (1, 2), 'Drawer': (2.7, 8),
            'Dresser': (0.07, 1), 'GarbageCan': (1, 1), 'HandTowelHolder': (1.5, 4), 'Shelf': (0.4, 4),
            'SideTable': (0.07, 1), 'SinkBasin': (1.5, 2), 'Toilet': (1, 1), 'ToiletPaperHanger': (1, 1),
            'TowelHolder': (1.3, 2),
        },
        usual=_types('Candle Cloth HandTowel SoapBar SoapBottle SprayBottle ToiletPaper Towel'),
        occasional=_types('DishSponge TissueBox'),
        extras=('HousePlant', 'PaperTowelRoll')),
}

# The scenes that ALFRED keeps for unseen validation and test; no training game plays there.
UNSEEN_SCENES = frozenset({9, 10, 29, 215, 219, 226, 308, 315, 325, 404, 424, 425})


@dataclasses.dataclass(frozen=True)
class Difficulty:
    """How large and how awkward games are. Ranges are inclusive.

    receptacles, kitchen_receptacles: per scene. distractors: object types besides the task's own (never more than the
    room has); copies: largest number of objects of one type. shared: chance that a receptacle stands at the location of
    the one before it; stuck: that a cabinet or drawer cannot be opened; extras: that each object that fits nowhere is
    there (lamps, plants, dead ends). max_plan: the longest shortest plan. Raises ValueError.
    """

    receptacles: tuple[int, int]
    kitchen_receptacles: tuple[int, int]
    distractors: tuple[int, int]
    copies: int
    shared: float = 0.0
    stuck: float = 0.0
    extras: float = 0.0
    max_plan: int | None = None

    def __post_init__(self):
        for name, least in (('receptacles', 4), ('kitchen_receptacles', 5), ('distractors', 0)):
            low, high = getattr(self, name)
            if not least <= low <= high:
                raise ValueError(f'Difficulty.{name} = ({low}, {high}): need {least} <= low <= high')
        if self.copies < 1:
            raise ValueError(f'Difficulty.copies = {self.copies}: need at least 1')


DIFFICULTIES = {
    'tiny': Difficulty((6, 6), (6, 6), (2, 4), copies=1),
    'small': Difficulty((7, 10), (8, 12), (5, 9), copies=2, shared=0.05),
    'medium': Difficulty((8, 16), (12, 22), (8, 14), copies=2, shared=0.1, stuck=0.1, extras=0.2),
    'real': Difficulty((6, 24), (20, 50), (16, 26), copies=3, shared=0.15, stuck=0.17, extras=0.4),
}


@dataclasses.dataclass(frozen=True)
class Receptacle:
    """One receptacle of a scene. name and location are PDDL identifiers, kind is a key of FITS (or Toaster)."""

    name: str
    kind: str
    location: str
    openable: bool


def room_kind(scene: int) -> str:
    """The key of ROOMS that a scene number belongs to."""
    return next(kind for kind, room in ROOMS.items() if scene in room.scenes)


@functools.lru_cache(maxsize=256)
def build_scene(seed: int, scene: int, difficulty: Difficulty) -> tuple[Receptacle, ...]:
    """The receptacles of a scene. Raises ValueError when a room of its kind cannot have that many."""
    kind = room_kind(scene)
    room = ROOMS[kind]
    rng = random.Random(f'{seed}/scene {scene}/{difficulty}')
    size = rng.randint(*(difficulty.kitchen_receptacles if kind == 'kitchen' else difficulty.receptacles))
    most = sum(largest for _, largest in room.receptacles.values())
    if size > most:
        raise ValueError(f'a {kind} has at most {most} receptacles, not {size}: lower the difficulty')
    counts = dict.fromkeys(room.receptacles, 0)
    for alternatives in room.needed:
        counts[rng.choice(alternatives)] += 1
    while sum(counts.values()) < size:  # highest averages, drawn: counts approach the means, small rooms stay varied
        counts[weighted_choice(rng, {t: mean / (1 + counts[t]) for t, (mean, largest) in room.receptacles.items()
                                     if counts[t] < largest})] += 1
    named = [(name, t) for t, count in counts.items() for name in alfworld_pddl.entity_names(rng, t, count)]
    locations = alfworld_pddl.location_names(rng, size)
    for i in range(1, size):
        if rng.random() < difficulty.shared:
            locations[i] = locations[i - 1]
    stuck = [t in STUCK and rng.random() < difficulty.stuck for _, t in named]
    return tuple(sorted((Receptacle(name, t, location, t in OPENABLE and not fixed)
                         for (name, t), location, fixed in zip(named, locations, stuck, strict=True)),
                        key=lambda receptacle: receptacle.name))


def weighted_choice(rng: random.Random, weights: Mapping[str, float]) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]
