"""Real products: WebShop's official JSON files, compiled once to one small file that loads fast.

    python -m covsero_jax.envs.webshop.importer FOLDER [--out FILE] [--nouns auto|spacy|heuristic]

FOLDER holds items_shuffle*.json (the products), items_ins_v2*.json (attributes and synthetic instructions) and, for
human goals, items_human_ins*.json. `load` takes the folder or the compiled file. Set WEBSHOP_DATA to either.
"""

from __future__ import annotations

import argparse
import contextlib
import decimal
import hashlib
import json
import os
import pathlib
import random
import re
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from covsero_jax.envs import cache
from covsero_jax.envs.webshop import catalogue, nouns
from covsero_jax.envs.webshop.catalogue import Catalogue, Instruction, Product, WebshopDataError

DEFAULT_PRICE, NO_ATTRIBUTES = 100.0, ('DUMMY_ATTR',)  # the original's, for products without


class Files(NamedTuple):
    products: pathlib.Path
    attributes: pathlib.Path
    instructions: pathlib.Path | None  # by people


def load(source: str | os.PathLike, *, noun_finder: str = 'auto', price_seed: int = 0) -> Catalogue:
    """The catalogue of a compiled file, or of a folder of official files, which is compiled once into the cache folder.

    noun_finder: see `nouns.resolve`. price_seed decides the price of products that are offered for a range of prices.
    Raises WebshopDataError, which names the file, the product and the field.
    """
    source = pathlib.Path(source).expanduser()
    if not source.is_dir():
        return catalogue.load(source)
    files, finder = find_files(source), nouns.resolve(noun_finder)
    fingerprint = _fingerprint(files, finder, price_seed)
    compiled = cache.folder() / 'webshop' / f'{fingerprint}.jsonl.gz'
    with contextlib.suppress(WebshopDataError):  # absent, or of an older version
        return catalogue.load(compiled)
    made = compile_files(files, noun_finder=noun_finder, price_seed=price_seed)
    catalogue.save(made, compiled)
    return made


def find_files(folder: str | os.PathLike, products: str | None = None) -> Files:
    """The official files of a folder. products: the name of the file to use where there are several."""
    folder = pathlib.Path(folder)
    if products is None:
        path = _only(folder, 'items_shuffle*.json', 'products', '')
    elif not (path := folder / products).is_file():
        raise WebshopDataError(f'{path}: no such file')
    size = ''.join(re.findall(r'\d+', path.name))  # '1000' of items_shuffle_1000.json
    instructions = None
    if any(folder.glob('items_human_ins*.json')):
        instructions = _only(folder, 'items_human_ins*.json', 'human instructions', size)
    return Files(path, _only(folder, 'items_ins_v2*.json', 'attributes', size), instructions)


def _only(folder: pathlib.Path, pattern: str, what: str, size: str) -> pathlib.Path:
    paths = sorted(folder.glob(pattern))
    if len(paths) > 1 and what != 'products':  # prefer the one for as many products
        paths = [path for path in paths if ''.join(re.findall(r'\d+', path.stem.replace('_v2', ''))) == size] or paths
    if not paths:
        raise WebshopDataError(f'{folder} has no {pattern} ({what}): put the official files there, or a compiled catalogue')
    if len(paths) > 1:
        advice = ('compile one with  python -m covsero_jax.envs.webshop.importer FOLDER --products NAME --out FILE'
                  if what == 'products' else 'leave the one that belongs to the products')
        raise WebshopDataError(f'{folder} has several files of {what}: {", ".join(path.name for path in paths)}; {advice}')
    return paths[0]


def _fingerprint(files: Files, finder: str, price_seed: int) -> str:
    digest = hashlib.sha256(f'{catalogue.VERSION}/{finder}/{price_seed}'.encode())
    for path in filter(None, files):
        with open(path, 'rb') as file:
            digest.update(hashlib.file_digest(file, 'sha256').digest())
    return digest.hexdigest()[:24]


def compile_files(files: Files, *, noun_finder: str = 'auto', price_seed: int = 0, skip_bad_asins: bool = False) -> Catalogue:
    """Reads and checks official files. Says on stderr how nouns are found, and what was left out.

    skip_bad_asins: leave out products whose asin is missing ('nan'), over-long or a repetition, as the original does,
    instead of raising.
    Raises WebshopDataError.
    """
    attributes = _read_object(files.attributes)
    entries, seen, skipped = [], set(), 0
    for index, raw in enumerate(_read_array(files.products)):
        entry = Entry(files.products, index, raw)
        problem = _asin_problem(entry, seen)
        if problem and not skip_bad_asins:
            raise entry.error('asin', f'{problem}; the original leaves such products out: so does --skip_bad_asins')
        if problem:
            skipped += 1
            continue
        seen.add(raw['asin'])
        entries.append(_product(entry, attributes, files.attributes, price_seed))
    if not entries:
        raise WebshopDataError(f'{files.products} has no products')
    finder, found = nouns.find(noun_finder, [product.title for product in entries])
    products = tuple(product._replace(title_nouns=own) for product, own in zip(entries, found, strict=True))
    instructions, foreign = _instructions(files.instructions, products)
    notes = [f'{len(products)} products of {files.products.name}', f'title nouns: {finder}']
    notes += [f'{skipped} products with a bad asin left out'] if skipped else []
    notes += [f'{foreign} human instructions are for other products'] if foreign else []
    print('; '.join(notes), file=sys.stderr)
    return Catalogue(products, instructions, _fingerprint(files, finder, price_seed), finder)


class Entry(NamedTuple):
    """A product, or an instruction, as a file has it; knows its place for error messages."""

    path: pathlib.Path
    index: int | None
    raw: dict

    def error(self, field: str, problem: str) -> WebshopDataError:
        asin = self.raw.get('asin') if isinstance(self.raw, dict) else None
        place = f'product {asin!r}' + ('' if self.index is None else f' (index {self.index})')
        return WebshopDataError(f'{self.path}: {place}{f", field {field!r}" if field else ""}: {problem}')

    def text(self, field: str) -> str:
        value = self.raw.get(field)
        if not isinstance(value, str):
            raise self.error(field, 'is missing' if value is None else f'must be a string, not {value!r:.60}')
        return value

    def texts(self, field: str) -> tuple[str, ...]:
        value = self.raw.get(field)
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise self.error(field, 'is missing' if value is None else f'must be a list of strings, not {value!r:.60}')
        return tuple(value)


def _asin_problem(entry: Entry, seen: set[str]) -> str:
    if not isinstance(entry.raw, dict):
        raise entry.error('', f'a product must be an object, not {entry.raw!r:.60}')
    asin = entry.text('asin')
    if asin == 'nan' or not asin:
        return 'is missing'
    if len(asin) > 10:
        return 'has more than ten characters'
    if asin in seen:
        return 'was used by an earlier product'
    if asin != asin.upper():
        raise entry.error('asin', 'must be upper case: clicks are lower case')
    return ''


def _product(entry: Entry, attributes: dict, attributes_path: pathlib.Path, price_seed: int) -> Product:
    asin = entry.raw['asin']
    bullets = entry.raw.get('small_description')
    about = Entry(attributes_path, None, {'asin': asin} | _object(attributes, asin, attributes_path))
    instruction = about.text('instruction') if about.raw.get('instruction') is not None else None
    wanted = about.texts('instruction_attributes') if instruction is not None else ()
    if instruction is not None and not wanted:
        raise about.error('instruction_attributes', 'is empty, but there is an instruction')
    price, tag = _price(entry, price_seed)
    return Product(
        asin=asin, title=entry.text('name'), description=entry.text('full_description'),
        bullets=(bullets,) if isinstance(bullets, str) else entry.texts('small_description'),
        category=entry.text('category'), query=entry.text('query').lower().strip(),
        product_category=entry.text('product_category'), price=price, price_tag=tag, options=_options(entry),
        attributes=about.texts('attributes') if 'attributes' in about.raw else NO_ATTRIBUTES,
        instruction=instruction, instruction_attributes=wanted, title_nouns=())  # fmt: skip


def _price(entry: Entry, seed: int) -> tuple[float, str]:
    """(price, what is shown). '$a - $b' is a range, from which the price is drawn; '' costs the default."""
    if not entry.raw.get('pricing'):
        return DEFAULT_PRICE, f'${DEFAULT_PRICE}'
    text = entry.text('pricing')
    try:
        low, *high = [float(decimal.Decimal(re.sub(r'[^\d.]', '', part))) for part in text.split('$')[1:]]
    except (decimal.InvalidOperation, ValueError) as error:
        raise entry.error('pricing', f'{text!r:.60} is neither a price such as "$34.00" nor a range "$10.99 - $18.99"') from error
    if not high:
        return low, f'${low}'
    return random.Random(f'price/{seed}/{entry.raw["asin"]}').uniform(low, high[0]), f'${low} to ${high[0]}'


def _options(entry: Entry) -> tuple[tuple[str, tuple[str, ...]], ...]:
    raw, out = entry.raw.get('customization_options'), {}
    if raw in ('', None):
        return ()
    if not isinstance(raw, dict):
        raise entry.error('customization_options', f'must be "" or an object, not {raw!r:.60}')
    for name, contents in raw.items():
        if contents is None:
            continue
        try:
            out[name.lower()] = tuple(content['value'].strip().replace('/', ' | ').lower() for content in contents)
        except (AttributeError, KeyError, TypeError) as error:
            raise entry.error(f'customization_options/{name}',
                              'must be null or a list of objects, each with a string "value"') from error
    return tuple(out.items())


def _instructions(path: pathlib.Path | None, products: Iterable[Product]) -> tuple[tuple[Instruction, ...], int]:
    """What people wrote for these products, and how many instructions there are for others."""
    raw = _read_object(path) if path else {}
    out = []
    for product in products:
        told = raw.pop(product.asin, [])
        if not isinstance(told, list) or not all(isinstance(entry, dict) for entry in told):
            raise Entry(path, None, {'asin': product.asin}).error('', 'must have a list of objects')
        for entry in (Entry(path, None, entry | {'asin': product.asin}) for entry in told):
            out.append(Instruction(product.asin, entry.text('instruction'), entry.texts('instruction_attributes'),
                                   entry.texts('instruction_options')))
    return tuple(out), sum(len(told) for told in raw.values() if isinstance(told, list))


def _object(attributes: dict, asin: str, path: pathlib.Path) -> dict:
    value = attributes.get(asin, {})
    if not isinstance(value, dict):
        raise Entry(path, None, {'asin': asin}).error('', f'must be an object, not {value!r:.60}')
    return value


def _read_object(path: pathlib.Path) -> dict:
    try:
        value = json.loads(path.read_text('utf-8'))
    except ValueError as error:
        raise WebshopDataError(f'{path} is not JSON, or is cut short ({error})') from error
    if not isinstance(value, dict):
        raise WebshopDataError(f'{path} must be an object with products as keys, not {value!r:.60}')
    return value


def _read_array(path: pathlib.Path, chunk: int = 1 << 20) -> Iterator[object]:
    """The elements of a JSON array, one at a time: the full product file has gigabytes."""
    decoder, index = json.JSONDecoder(), 0
    try:
        with open(path, encoding='utf-8') as file:
            text = file.read(chunk)
            if not (start := re.match(r'\s*\[', text)):
                raise WebshopDataError(f'{path} must be an array of products')
            at = start.end()
            while True:
                at = _SPACE.match(text, at).end()
                if text.startswith(']', at):
                    return
                try:
                    element, at = decoder.raw_decode(text, at)
                except json.JSONDecodeError as error:
                    if not (read := file.read(max(chunk, len(text)))):
                        raise WebshopDataError(f'{path} is not JSON, or is cut short, at product {index}: {error.msg}') from error
                    text, at = text[at:] + read, 0
                    continue
                yield element
                index += 1
    except UnicodeDecodeError as error:
        raise WebshopDataError(f'{path} is not UTF-8 ({error})') from error


_SPACE = re.compile(r'[\s,]*')


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folder', help='of the official JSON files')
    parser.add_argument('--out', help='the compiled file; default: FOLDER.webshop.gz beside the folder')
    parser.add_argument('--products', help='name of the products file, where there are several')
    parser.add_argument('--nouns', choices=nouns.FINDERS, default='auto', help='how the nouns of titles are found')
    parser.add_argument('--price_seed', type=int, default=0, help='decides the price of products with a range of prices')
    parser.add_argument('--skip_bad_asins', action='store_true', help='leave out products whose asin is unusable')
    options = parser.parse_args(arguments)
    out = pathlib.Path(options.out or f'{pathlib.Path(options.folder).resolve()}.webshop.gz')
    try:
        files = find_files(options.folder, options.products)
        made = compile_files(files, noun_finder=options.nouns, price_seed=options.price_seed,
                             skip_bad_asins=options.skip_bad_asins)
        catalogue.save(made, out)
    except (OSError, ValueError, ImportError) as error:
        raise SystemExit(f'error: {error}') from error
    print(f'{out}: {len(made.products)} products, {len(made.instructions)} human instructions, '
          f'{out.stat().st_size / 1e6:.1f} MB; use it with WEBSHOP_DATA={out}')


if __name__ == '__main__':
    main()
