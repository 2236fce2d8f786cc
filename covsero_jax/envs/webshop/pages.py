"""What the shop's pages show, as the original's templates do: pieces of text, rendered in one of two modes.

`text`: stripped pieces, joined by ' [SEP] '. A chosen option leaves such a page unchanged.
`text_rich`: one line a piece; buttons are marked, and so are chosen options and visited products.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from covsero_jax.envs.webshop.catalogue import Product

MODES = ('text', 'text_rich')
SEPARATOR = ' [SEP] '


class Piece(NamedTuple):
    """One text node. Blanks around it, and `lead`, are seen in mode text_rich alone."""

    text: str
    mark: str = ''  # '' | 'button' | 'clicked button'
    lead: str = ''


def render(pieces: Iterable[Piece], mode: str) -> str:
    """The text of pieces in one of MODES."""
    if mode == 'text':
        return SEPARATOR.join(piece.text.strip() for piece in pieces)
    return ''.join(f'{lead}[{mark}] {text} [{mark}_]\n' if mark else f'{lead}{text}\n' for text, mark, lead in pieces)


def _node(text: str) -> list[str]:
    """Text as an HTML parser leaves it: none at all, or a blank, for what has nothing to show."""
    if text.strip(' \t\n\r\f'):
        return [text]
    return [] if not text or '\n' in text else [' ']


def _nodes(texts: Iterable[str]) -> list[Piece]:
    return [Piece(node) for text in texts for node in _node(text)]


def before_instruction(page: str, options: Sequence[str]) -> list[Piece]:
    """What stands above the instruction. options: chosen values that a rich item page announces."""
    if page == 'index':
        return [Piece('WebShop'), Piece('Instruction: ')]
    return [*(Piece(f'You have clicked {value}.') for value in options), Piece('Instruction:')]


def index() -> list[Piece]:
    return [Piece('Search', 'button')]


def results(products: Sequence[Product], page_number: int, hits: int, visited: Sequence[str]) -> list[Piece]:
    """A page of results; `hits` on all pages together."""
    pieces = [Piece('Back to Search', 'button'), Piece(f'Page {page_number} (Total results: {hits})')]
    if page_number > 1:
        pieces.append(Piece('< Prev', 'button'))
    pieces.append(Piece('Next >', 'button'))
    for product in products:
        mark = 'clicked button' if product.asin in visited else 'button'
        pieces += [Piece(product.asin, mark, '\n'), *_nodes([product.title, product.price_tag])]
    return pieces


def item(product: Product, show_attributes: bool, chosen: frozenset[str] = frozenset()) -> list[Piece]:
    """A product's page. chosen: option values that are marked, see `marked_options`."""
    pieces = [Piece('Back to Search', 'button'), Piece('< Prev', 'button')]
    for name, values in product.options:
        pieces += _nodes([name])
        pieces += [Piece(node, 'clicked button' if value in chosen else 'button', '  ')
                   for value in values for node in _node(value)]
    pieces += _nodes([product.title, f'Price: {product.price_tag}', 'Rating: N.A.'])
    buttons = ['Description', 'Features', 'Reviews', *(['Attributes'] if show_attributes else []), 'Buy Now']
    return pieces + [Piece(button, 'button') for button in buttons]


def marked_options(product: Product, query: str, page_number: int, options: Sequence[tuple[str, str]]) -> list[str]:
    """The option values that a rich page takes for chosen, in page order.

    The original looks for the quoted value in the page's address, which holds the search words and the options as JSON.
    So a value with a quotation mark or a letter outside ASCII is never marked, and a quoted search word may be.
    """
    address = f'{product.asin}/{query.replace(" ", "+")}/{page_number}/{json.dumps(dict(options))}'
    return [value for _, values in product.options for value in values if f'"{value}"' in address]


def sub(product: Product, name: str) -> list[Piece]:
    """The page 'description', 'features', 'reviews' (always empty, as published) or 'attributes' of a product."""
    pieces = [Piece('Back to Search', 'button'), Piece('< Prev', 'button')]
    if name == 'description':
        return pieces + _nodes([product.description])
    if name == 'features':
        return pieces + _nodes(f' {bullet}' for bullet in product.bullets)
    if name == 'attributes':
        attributes = _nodes(f' {attribute}' for attribute in product.attributes)
        return pieces + attributes + _nodes([product.category, product.query, product.product_category])
    return pieces


def done(asin: str, options: Sequence[tuple[str, str]], score: float) -> list[Piece]:
    """The page after a purchase: of its many fields the original fills only these three."""
    as_json = json.dumps(dict(options), sort_keys=True)
    for character in "<>&'":
        as_json = as_json.replace(character, f'\\u{ord(character):04x}')
    return [Piece(text) for text in (
        'Thank you for shopping with us!', 'Your code: ', 'None', ' (Paste it in your MTurk interface.)',
        'Purchased', 'asin', asin, 'options', as_json, 'attrs', 'None', 'category', 'None', 'query', 'None',
        'product category', 'None',
        'Target', 'asin', 'options', 'attrs', 'price upper', 'instuction text', 'category', 'product category', 'query',
        'Goal ', 'None',
        'Reward', 'Your score (min 0.0, max 1.0)', str(score), 'Reward Details ', 'None')]  # fmt: skip
