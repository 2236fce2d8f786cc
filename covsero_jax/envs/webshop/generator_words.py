"""The words of the made-up shop: departments, types, attributes, options. Brands are invented."""

from __future__ import annotations

from typing import NamedTuple


class Group(NamedTuple):
    """Leaf types that share attributes and options."""

    department: str
    path: str  # of the category, without the leaf
    leaves: tuple[str, ...]
    adjectives: tuple[str, ...]  # attributes: said before the noun,
    parts: tuple[str, ...]  # after 'with',
    uses: tuple[str, ...]  # and after 'for'
    options: dict[str, tuple[str, ...]]  # name -> values; of colours see COLOURS
    prices: tuple[int, int]  # in dollars


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(','))


def _group(department: str, path: str, leaves: str, adjectives: str, parts: str, uses: str, options: dict[str, str],
           prices: tuple[int, int]) -> Group:
    return Group(department, path, _split(leaves), _split(adjectives), _split(parts), _split(uses),
                 {name: _split(values) for name, values in options.items()}, prices)  # fmt: skip


_ANY = ''  # colours
_CLOTHES = 'small, medium, large, x-large, xx-large'
_SCENTS = 'citrus, coconut, lavender, rose, sandalwood, unscented, vanilla'
_OUNCES = '2 ounce, 4 ounce, 8 ounce, 16 ounce'
_PACKS = 'pack of 1, pack of 2, pack of 4, pack of 6, pack of 12'

GROUPS = (
    _group('beauty', 'Beauty › Hair Care', 'shampoo, conditioner, hair mask, hair oil',
           'sulfate free, paraben free, cruelty free, color safe, alcohol free, plant based, silicone free',
           'argan oil, coconut oil, tea tree, keratin, aloe vera, shea butter',
           'dry hair, curly hair, damaged hair, oily scalp, hair growth', {'scent': _SCENTS, 'size': _OUNCES}, (6, 35)),
    _group('beauty', 'Beauty › Skin Care', 'face cream, body lotion, face serum, lip balm',
           'fragrance free, dermatologist tested, long lasting, oil free, non greasy, cruelty free, vegan',
           'hyaluronic acid, vitamin c, green tea, retinol, jojoba oil, sun protection',
           'dry skin, sensitive skin, fine lines, dark circles, daily care', {'scent': _SCENTS, 'size': _OUNCES}, (5, 45)),
    _group('electronics', 'Electronics › Audio', 'headphones, earbuds, bluetooth speaker, soundbar',
           'noise cancelling, water resistant, fast charging, hands free, easy to pair, light weight, high fidelity',
           'deep bass, stereo sound, carrying case, touch control, usb port, volume control',
           'running, travel, home theater, gaming, phone calls', {'color': _ANY, 'style': 'regular, pro, mini, bundle'},
           (15, 160)),
    _group('electronics', 'Electronics › Accessories', 'phone case, charger cable, tablet stand, screen protector, power bank',
           'heavy duty, easy to install, scratch proof, shock proof, ultra slim, high speed, non slip',
           'wireless charging, tempered glass, braided nylon, aluminum alloy, card holder, kick stand',
           'car mount, office desk, outdoor use, small hands, everyday carry',
           {'color': _ANY, 'size': '3 feet, 6 feet, 10 feet, 5 inch, 6 inch'}, (6, 40)),
    _group('garden', 'Home › Bedroom', 'throw blanket, pillow cover, sheet set, mattress pad',
           'machine washable, super soft, easy care, fade resistant, hypo allergenic, double sided, wrinkle free',
           'memory foam, cotton filling, zipper closure, tassel trim, elastic band, bamboo fiber',
           'living room, guest room, dorm room, hot sleepers, toddler bed',
           {'color': _ANY, 'size': 'twin, full, queen, king'}, (12, 90)),
    _group('garden', 'Home › Lighting', 'table lamp, wall light, pendant light, string lights',
           'easy to assemble, energy efficient, space saving, battery powered, brushed nickel, mid century, dimmable',
           'glass shade, linen shade, remote control, wood base, pull chain, led bulbs',
           'dining room, reading corner, hallway, patio, kids room',
           {'color': _ANY, 'shape': 'round, square, oval, rectangular, cone'}, (14, 120)),
    _group('fashion', 'Clothing › Women', "women's dress, women's blouse, women's sandals, women's jacket, women's leggings",
           'machine wash, hand wash, long sleeve, short sleeve, loose fit, slim fit, quick drying',
           'side pockets, button closure, elastic waist, rubber sole, lace trim, v neck',
           'daily wear, beach vacation, work, party, yoga', {'color': _ANY, 'size': _CLOTHES}, (12, 70)),
    _group('fashion', 'Clothing › Men', "men's shirt, men's pants, men's boots, men's hoodie, men's shorts",
           'machine wash, moisture wicking, classic fit, regular fit, stain resistant, wide leg, slip resistant',
           'polyester lining, drawstring closure, front zipper, cotton spandex, steel toe, chest pocket',
           'gym workout, hiking, casual friday, cold weather, school', {'color': _ANY, 'size': _CLOTHES}, (14, 90)),
    _group('grocery', 'Grocery › Snacks', 'granola bars, trail mix, crackers, fruit snacks, popcorn',
           'gluten free, sugar free, non gmo, low sodium, high protein, dairy free, individually wrapped',
           'sea salt, whole grain, real fruit, natural flavors, roasted nuts, olive oil',
           'lunch boxes, road trips, keto diet, movie night, small kids',
           {'flavor': 'apple, blackberry, chocolate, honey, maple, original, strawberry', 'size': _PACKS}, (4, 30)),
    _group('grocery', 'Grocery › Drinks', 'green tea, ground coffee, juice drink, hot cocoa, sparkling water',
           'caffeine free, usda organic, fair trade, low calorie, freshly roasted, keto friendly, sugar free',
           'vitamin d, natural sweetener, citric acid, electrolytes, whole leaf, no preservatives',
           'iced drinks, cold brew, holiday gifts, office breaks, bed time',
           {'flavor': 'cherry, ginger, lemon, mint, original, peach, vanilla', 'size': _PACKS}, (4, 40)),
)

COLOURS = _split('beige, black, blue, brown, gray, green, navy, orange, pink, purple, red, white, yellow')
_HEADS = _split('Nor, Vel, Tam, Kis, Bru, Dal, Fen, Gra, Hol, Jun, Lor, Mar, Ost, Pel, Rin')
_TAILS = _split('vik, dra, lona, mere, sby, tano, wen, zara')
BRANDS = tuple(head + tail for head in _HEADS for tail in _TAILS)
SERIES = _split(
    'Harbor, Meadow, Summit, Willow, Canyon, Prairie, Lagoon, Glacier, Orchard, Valley, Comet, Falcon, Heron, Otter, Badger, '
    'Maple, Cedar, Juniper, Thistle, Clover, Anchor, Beacon, Compass, Lantern, Voyage, Echo, Tempo, Sonnet, Ballad, Rhythm, '
    'Pixel, Orbit, Quartz, Ember, Breeze, Drift, Cascade, Horizon, Island, Village, Market, Studio, Atlas, Nomad, Pioneer, '
    'Scout, Ranger, Harvest, Garden, Cottage')
QUALIFIERS = _split('Classic, Daily, Premium, Modern, Simple, Original, Essential, Deluxe, Basic, Signature')
SUFFIXES = (('Set', ('set',)), ('Gift Box', ('gift', 'box')), ('for Adults', ('adults',)), ('for Home', ('home',)),
            ('Value Pack', ('value', 'pack')), ('New Edition', ('edition',)))
FILLERS = _split('looks good, ships in a box, makes a nice gift, lasts for years, fits many needs, comes ready to use, '
                 'is made with care, keeps its promise')
