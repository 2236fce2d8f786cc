"""Official files are read exactly, compiled once, and refused with file, product and field where they are wrong."""

from __future__ import annotations

import gzip
import json
import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covsero_jax.envs.webshop import catalogue, importer, nouns
from covsero_jax.envs.webshop.catalogue import Catalogue, Instruction, Product, WebshopDataError

ASIN, OTHER = 'B000000001', 'B000000002'


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv('COVSERO_CACHE', str(tmp_path / 'cache'))


def raw(asin: str = ASIN, **changes) -> dict:
    """A product as the official file has it, as far as it is read."""
    choices = [{'value': value, 'is_selected': False, 'is_available': True, 'asin': asin} for value in (' Red/Blue ', 'GREEN')]
    return {
        'name': 'Oak Bowl', 'full_description': 'Turned by hand.', 'small_description': ['deep', 'food safe'],
        'pricing': '$12.50', 'product_category': 'Home › Kitchen › Bowls', 'category': 'garden', 'query': 'Bowls ', 'asin': asin,
        'customization_options': {'Color': choices, 'Size': None}, 'images': [], 'average_rating': ''} | changes  # fmt: skip


ATTRIBUTES = {ASIN: {'attributes': ['handmade'], 'instruction': 'Find me handmade bowls', 'instruction_attributes': ['handmade']}}
TOLD = {ASIN: [{'asin': ASIN, 'instruction': 'i want a bowl', 'instruction_attributes': ['handmade'],
                'instruction_options': ['green'], 'worker_id': 'X'}]}  # fmt: skip


def write(folder: pathlib.Path, products: object = None, attributes: object = ATTRIBUTES, told: object = None) -> pathlib.Path:
    """A folder of official files; strings are written as they are, None is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (('items_shuffle_1000', [raw()] if products is None else products),
                          ('items_ins_v2_1000', attributes), ('items_human_ins', told)):  # fmt: skip
        if content is not None:
            text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
            (folder / f'{name}.json').write_text(text, encoding='utf-8')
    return folder


def compiled(folder: pathlib.Path, **options) -> Catalogue:
    return importer.compile_files(importer.find_files(folder), noun_finder='heuristic', **options)


def product_of(folder: pathlib.Path, **changes) -> Product:
    return compiled(write(folder, [raw(**changes)])).products[0]


# ---- what is read ----------------------------------------------------------------------------------------------------


def test_a_product_is_read_as_the_original_reads_it(tmp_path, capsys):
    made = compiled(write(tmp_path, told=TOLD))
    assert made.products == (Product(
        asin=ASIN, title='Oak Bowl', description='Turned by hand.', bullets=('deep', 'food safe'), category='garden',
        query='bowls', product_category='Home › Kitchen › Bowls', price=12.5, price_tag='$12.5',
        options=(('color', ('red | blue', 'green')),),
        attributes=('handmade',), instruction='Find me handmade bowls', instruction_attributes=('handmade',),
        title_nouns=('oak', 'bowl')),)  # fmt: skip
    assert made.instructions == (Instruction(ASIN, 'i want a bowl', ('handmade',), ('green',)),)
    assert made.nouns == 'heuristic'
    assert '1 products of items_shuffle_1000.json; title nouns: heuristic' in capsys.readouterr().err


@pytest.mark.parametrize('pricing, price, tag', [
    ('$34.00', 34.0, '$34.0'), ('$1,299.99', 1299.99, '$1299.99'), ('', 100.0, '$100.0'), (None, 100.0, '$100.0')])  # fmt: skip
def test_prices(tmp_path, pricing, price, tag):
    product = product_of(tmp_path, pricing=pricing)
    assert (product.price, product.price_tag) == (price, tag)


def test_a_range_of_prices_is_shown_and_one_of_it_drawn_by_seed_and_product(tmp_path):
    folder = write(tmp_path, [raw(pricing='$10.99 - $18.99'), raw(OTHER, pricing='$10.99 - $18.99')])
    drawn = [[product.price for product in compiled(folder, price_seed=seed).products] for seed in (0, 0, 1)]
    assert compiled(folder).products[0].price_tag == '$10.99 to $18.99'
    assert drawn[0] == drawn[1] and len({*drawn[0], *drawn[2]}) == 4
    assert all(10.99 <= price <= 18.99 for prices in drawn for price in prices)


def test_fields_that_may_be_empty_or_of_another_kind(tmp_path):
    product = product_of(tmp_path, name='', full_description='', small_description='one text', customization_options='')
    assert (product.title, product.description, product.bullets, product.options) == ('', '', ('one text',), ())
    bare = compiled(write(tmp_path, attributes={})).products[0]
    assert (bare.attributes, bare.instruction, bare.instruction_attributes) == (('DUMMY_ATTR',), None, ())


def test_human_instructions_for_other_products_are_left_out_and_counted(tmp_path, capsys):
    made = compiled(write(tmp_path, told=TOLD | {OTHER: TOLD[ASIN] * 2}))
    assert [told.asin for told in made.instructions] == [ASIN]
    assert '2 human instructions are for other products' in capsys.readouterr().err


@settings(deadline=None, max_examples=50)
@given(st.lists(st.dictionaries(st.text(max_size=4), st.text(max_size=12), max_size=3), max_size=6), st.integers(1, 40),
       st.sampled_from([None, 1]))  # fmt: skip
def test_products_are_read_one_by_one_whatever_the_size_of_pieces(tmp_path_factory, entries, chunk, indent):
    path = tmp_path_factory.mktemp('array') / 'items.json'
    path.write_text(json.dumps(entries, indent=indent, ensure_ascii=chunk % 2 == 0), encoding='utf-8')
    assert list(importer._read_array(path, chunk)) == entries


# ---- what is wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('products, words', [
    ('no json', ['must be an array of products']),
    ('{}', ['must be an array of products']),
    ('', ['must be an array of products']),
    (json.dumps([raw(), raw(OTHER)])[:-40], ['not JSON, or is cut short, at product 1']),
    ('[{"asin": nope}]', ['not JSON, or is cut short, at product 0']),
    ('[', ['cut short']),
    ([], ['has no products']),
    ([raw(), 7], ['index 1', 'must be an object, not 7']),
    ([raw(), raw()], [f"product '{ASIN}' (index 1)", "field 'asin'", 'used by an earlier product', '--skip_bad_asins']),
    ([raw('nan')], ["product 'nan'", "field 'asin'", 'is missing']),
    ([raw('B' * 11)], ["field 'asin'", 'more than ten characters']),
    ([raw('b000000001')], ["product 'b000000001'", "field 'asin'", 'upper case']),
    ([raw(name=None)], [ASIN, "field 'name'", 'is missing']),
    ([raw(name=7)], [ASIN, "field 'name'", 'must be a string, not 7']),
    ([{key: value for key, value in raw().items() if key != 'query'}], [ASIN, "field 'query'", 'is missing']),
    ([{key: value for key, value in raw().items() if key != 'asin'}], ['index 0', "field 'asin'", 'is missing']),
    ([raw(small_description=['a', 1])], [ASIN, "field 'small_description'", 'must be a list of strings']),
    ([raw(pricing='cheap')], [ASIN, "field 'pricing'", "'cheap'", '"$34.00"']),
    ([raw(pricing='$1.2.3')], [ASIN, "field 'pricing'"]),
    ([raw(pricing='$')], [ASIN, "field 'pricing'"]),
    ([raw(pricing=12.5)], [ASIN, "field 'pricing'", 'must be a string, not 12.5']),
    ([raw(customization_options=['red'])], [ASIN, "field 'customization_options'", 'must be "" or an object']),
    ([raw(customization_options={'Color': ['red']})], [ASIN, "field 'customization_options/Color'", 'string "value"']),
    ([raw(customization_options={'Color': [{'value': 7}]})], [ASIN, "field 'customization_options/Color'"]),
])  # fmt: skip
def test_bad_product_files_are_refused_with_their_place(tmp_path, products, words):
    folder = write(tmp_path, products)
    with pytest.raises(WebshopDataError) as error:
        compiled(folder)
    for word in (str(folder / 'items_shuffle_1000.json'), *words):
        assert word in str(error.value)


@pytest.mark.parametrize('attributes, words', [
    ('{"B0', ['not JSON, or is cut short']),
    ([], ['must be an object with products as keys']),
    ({ASIN: []}, [ASIN, 'must be an object']),
    ({ASIN: {'attributes': 'handmade'}}, [ASIN, "field 'attributes'", 'must be a list of strings']),
    ({ASIN: {'attributes': [], 'instruction': 7}}, [ASIN, "field 'instruction'", 'must be a string']),
    ({ASIN: {'attributes': [], 'instruction': 'x'}}, [ASIN, "field 'instruction_attributes'", 'is missing']),
    ({ASIN: {'instruction': 'x', 'instruction_attributes': []}}, [ASIN, "field 'instruction_attributes'", 'is empty']),
])  # fmt: skip
def test_bad_attribute_files_are_refused_with_their_place(tmp_path, attributes, words):
    folder = write(tmp_path, attributes=attributes)
    with pytest.raises(WebshopDataError) as error:
        compiled(folder)
    for word in (str(folder / 'items_ins_v2_1000.json'), *words):
        assert word in str(error.value)


@pytest.mark.parametrize('told, words', [
    ('[', ['not JSON, or is cut short']),
    ({ASIN: {}}, [ASIN, 'must have a list of objects']),
    ({ASIN: [{'instruction': 'x', 'instruction_attributes': []}]}, [ASIN, "field 'instruction_options'", 'is missing']),
])  # fmt: skip
def test_bad_human_instructions_are_refused_with_their_place(tmp_path, told, words):
    folder = write(tmp_path, told=told)
    with pytest.raises(WebshopDataError) as error:
        compiled(folder)
    for word in (str(folder / 'items_human_ins.json'), *words):
        assert word in str(error.value)


def test_files_that_are_no_text_are_refused(tmp_path):
    (write(tmp_path) / 'items_shuffle_1000.json').write_bytes(b'[{"asin": "\xff"}]')
    with pytest.raises(WebshopDataError, match='not UTF-8'):
        compiled(tmp_path)


def test_products_with_bad_asins_can_be_left_out_as_the_original_does(tmp_path, capsys):
    folder = write(tmp_path, [raw(), raw('nan'), raw('B' * 11), raw(), raw(OTHER)])
    assert [product.asin for product in compiled(folder, skip_bad_asins=True).products] == [ASIN, OTHER]
    assert '3 products with a bad asin left out' in capsys.readouterr().err


# ---- which files -----------------------------------------------------------------------------------------------------


def test_missing_files_are_named(tmp_path):
    with pytest.raises(WebshopDataError, match=r'has no items_shuffle\*\.json \(products\)'):
        importer.load(tmp_path)
    with pytest.raises(WebshopDataError, match=r'has no items_ins_v2\*\.json \(attributes\)'):
        importer.load(write(tmp_path, attributes=None))
    with pytest.raises(WebshopDataError, match='nowhere: no such file'):
        importer.load(tmp_path / 'nowhere')


def test_of_several_product_files_one_must_be_named_and_the_others_follow_its_size(tmp_path):
    write(tmp_path, told=TOLD)
    for name in ('items_shuffle', 'items_ins_v2', 'items_human_ins_1000'):
        (tmp_path / f'{name}.json').write_text('{}')
    with pytest.raises(WebshopDataError, match='files of products: items_shuffle.json, items_shuffle_1000.json; .*--products'):
        importer.find_files(tmp_path)
    for size in ('', '_1000'):
        files = importer.find_files(tmp_path, f'items_shuffle{size}.json')
        stems = ('items_shuffle', 'items_ins_v2', 'items_human_ins')
        assert [path.name for path in files] == [f'{stem}{size}.json' for stem in stems]
    (tmp_path / 'items_ins_v2_1000.json').rename(tmp_path / 'items_ins_v2_7.json')
    with pytest.raises(WebshopDataError, match='files of attributes: .*; leave the one that belongs to the products'):
        importer.find_files(tmp_path, 'items_shuffle_1000.json')
    with pytest.raises(WebshopDataError, match='other.json: no such file'):
        importer.find_files(tmp_path, 'other.json')


def test_a_folder_is_compiled_once_and_anew_when_it_changes(tmp_path, monkeypatch, capsys):
    folder = write(tmp_path / 'data')
    first = importer.load(folder, noun_finder='heuristic')
    (path,) = (tmp_path / 'cache' / 'webshop').iterdir()
    assert capsys.readouterr().err != ''
    assert importer.load(folder, noun_finder='heuristic') == importer.load(path) == first
    assert capsys.readouterr().err == ''  # nothing was compiled
    path.write_bytes(path.read_bytes()[:50])
    assert importer.load(folder, noun_finder='heuristic') == first  # what is damaged is made again
    write(folder, [raw(name='Pine Bowl')])
    changed = importer.load(folder, noun_finder='heuristic')
    assert changed.products[0].title == 'Pine Bowl' and changed.source != first.source
    assert importer.load(folder, noun_finder='heuristic', price_seed=1).source != changed.source


# ---- the compiled file -----------------------------------------------------------------------------------------------

NAMES = st.text(max_size=8)
TEXTS = st.lists(NAMES, max_size=3).map(tuple)
PRODUCTS = st.builds(Product, NAMES, NAMES, NAMES, TEXTS, NAMES, NAMES, NAMES, st.floats(0, 1e6), NAMES,
                     st.lists(st.tuples(NAMES, TEXTS), max_size=2).map(tuple), TEXTS, st.none() | NAMES, TEXTS, TEXTS)
CATALOGUES = st.builds(Catalogue, st.lists(PRODUCTS, max_size=3).map(tuple),
                       st.lists(st.builds(Instruction, NAMES, NAMES, TEXTS, TEXTS), max_size=2).map(tuple), NAMES, NAMES)


@settings(deadline=None, max_examples=60)
@given(CATALOGUES)
def test_what_is_saved_is_loaded_equal(tmp_path_factory, made):
    path = tmp_path_factory.mktemp('saved') / 'sub' / 'catalogue.gz'
    catalogue.save(made, path)
    assert catalogue.load(path) == made
    assert [other.name for other in path.parent.iterdir()] == ['catalogue.gz']


def packed(*lines: object) -> bytes:
    return gzip.compress(b''.join(json.dumps(line).encode() + b'\n' for line in lines), mtime=0)


HEADER = {'format': catalogue.FORMAT, 'version': catalogue.VERSION, 'source': 's', 'nouns': 'n', 'num_products': 1,
          'num_instructions': 0}


@pytest.mark.parametrize('content, problem', [
    (b'', 'not a compiled catalogue'),
    (b'[{}]', 'is damaged'),
    (packed(HEADER)[:-12], 'is damaged'),
    (packed([1]), 'not a compiled catalogue'),
    (packed(HEADER | {'version': 0}), 'not a compiled catalogue of version'),
    (packed(HEADER), 'is cut short'),
    (packed(HEADER, ['A']), 'is damaged'),
    (packed(HEADER, list(range(14)), 7), 'is damaged'),
    (packed({key: value for key, value in HEADER.items() if key != 'source'} | {'num_products': 0}), 'is damaged'),
])  # fmt: skip
def test_damaged_catalogues_are_refused(tmp_path, content, problem):
    path = tmp_path / 'catalogue.gz'
    path.write_bytes(content)
    with pytest.raises(WebshopDataError, match=f'{problem}.*make it anew') as error:
        importer.load(path)
    assert str(path) in str(error.value)


def test_the_command_writes_a_file_and_says_how_to_use_it(tmp_path, capsys):
    folder, out = write(tmp_path / 'data', told=TOLD), tmp_path / 'own.gz'
    importer.main([str(folder), '--out', str(out), '--nouns', 'heuristic'])
    assert f'{out}: 1 products, 1 human instructions' in (told := capsys.readouterr().out) and f'WEBSHOP_DATA={out}' in told
    assert importer.load(out) == compiled(folder)
    with pytest.raises(SystemExit, match='error: .*has no items_shuffle'):
        importer.main([str(tmp_path)])


def test_spacy_is_used_where_it_is_installed_and_missed_by_name_where_not():
    found = nouns.resolve('auto')
    if found == 'heuristic':
        with pytest.raises(ImportError, match='pip install spacy'):
            nouns.resolve('spacy')
    else:
        name, titles = nouns.find('spacy', ['Wooden Salad Bowl for the Kitchen'])
        assert name == found and {'bowl', 'kitchen'} <= set(titles[0])
