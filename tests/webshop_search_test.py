"""The search engine: analysis on examples, BM25 against the textbook formula, ties, and what is indexed."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covsero_jax.envs.webshop import catalogue, search, shop

FAMILY, FLAG, KEYCAP = '\U0001f468\u200d\U0001f469\u200d\U0001f467', '\U0001f1eb\U0001f1f7', '1\ufe0f\u20e3'
BOWL = catalogue.Product(
    asin='A000000000', title='bowl', description='', bullets=(), category='garden', query='bowls',
    product_category='Home › Bowls', price=12.0, price_tag='$12.0',
    options=(), attributes=('handmade',), instruction='find me a bowl',
    instruction_attributes=('handmade',), title_nouns=('bowl',))  # fmt: skip


def shop_of(*products: catalogue.Product) -> shop.Shop:
    return shop.Shop(products, catalogue.synthetic_goals(products, catalogue.drawn_limits(0)))


# ---- analysis --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('text, words', [
    ('red shoe', ['red', 'shoe']),
    ('well-made, (new) & 50% off!', ['well', 'made', 'new', '50', 'off']),
    ('3.5mm 1,000 v1.2 u.s.a. 4.', ['3.5mm', '1,000', 'v1.2', 'u.s.a', '4']),  # dots and commas inside numbers and words
    ("women's rock'n'roll 'quoted'", ["women's", "rock'n'roll", 'quoted']),
    ('size:large 4:3', ['size:large', '4', '3']),  # a colon joins letters alone
    ('snake_case _a _', ['snake_case', '_a']),
    ('nice🙂🙂bag', ['nice', '🙂', '🙂', 'bag']),
    (f'{FAMILY}{FLAG}x', [FAMILY, FLAG, 'x']),
    (KEYCAP, [KEYCAP]),
    ('漢字 かな カタカナ', ['漢', '字', 'か', 'な', 'カタカナ']),
    ('cafe\u0301 naïve', ['cafe\u0301', 'naïve']),
    ('', []),
    ('-- !? ', []),
])  # fmt: skip
def test_texts_are_cut_into_words_as_lucene_does(text, words):
    assert search.tokens(text) == words


def test_overlong_words_are_cut_into_pieces():
    assert search.tokens('a' * 600) == ['a' * 255, 'a' * 255, 'a' * 90]


@given(st.text(max_size=60))
def test_words_stand_in_the_text_in_this_order_without_overlap(text):
    at = 0
    for word in search.tokens(text):
        at = text.index(word, at) + len(word)


@pytest.mark.parametrize('text, terms', [
    ("The Women's shoes", ['women', 'shoe']),
    ('women’s', ['women']),
    ("'s", ['s']),
    ('this is for the', []),
    ('Running runner runs', ['run', 'runner', 'run']),
    ('relational', ['relat']),
    ('as us is', ['us']),  # short words are not stemmed
    ('🙂', ['🙂']),
])  # fmt: skip
def test_terms_are_lower_case_without_possessives_and_stop_words_and_stemmed(text, terms):
    assert search.analyze(text) == terms


def test_porters_later_rules_hold():
    assert search.term('possibly') == search.term('possible') == 'possibl'
    assert search.term('archaeology') == search.term('archaeologies') == 'archaeolog'
    assert search.term('logi') == 'logi'  # nothing before the ending


# ---- ranking ---------------------------------------------------------------------------------------------------------


def rounded(length: int) -> int:
    """The largest length not above this one that has a code of its own: 24 + a number of at most four significant bits."""
    return max(n for n in range(length + 1) if n < 24 or n - 24 < 16 or (n - 24) % 2 ** ((n - 24).bit_length() - 4) == 0)


@pytest.mark.parametrize('length', [*range(130), 255, 256, 279, 280, 281, 1000, 4095])
def test_lengths_are_rounded_down_to_the_next_code(length):
    assert search.stored_length(length) == rounded(length)


def plain_bm25(documents: list[list[str]], query: list[str]) -> list[float]:
    """k1 = 0.9, b = 0.4, in double precision."""
    average = sum(map(len, documents)) / sum(map(bool, documents))
    out = []
    for document in documents:
        score, norm = 0.0, 0.9 * (1 - 0.4 + 0.4 * rounded(len(document)) / average)
        for word in query:
            num = sum(map(bool, documents))
            having = sum(word in other for other in documents)
            idf = math.log(1 + (num - having + 0.5) / (having + 0.5))
            score += idf * document.count(word) / (document.count(word) + norm)
        out.append(score)
    return out


WORDS = st.sampled_from(('red', 'blue', 'green', 'oak', 'bowl'))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.lists(WORDS, max_size=6), st.lists(WORDS, min_size=38, max_size=80)), min_size=1, max_size=12),
       st.lists(st.one_of(WORDS, st.just('unknown')), max_size=6), st.integers(1, 12))  # fmt: skip
def test_scores_are_those_of_the_formula_and_the_best_come_first(documents, query, limit):
    if not any(documents):
        return
    hits = search.LuceneBM25(documents).search(query, limit)
    plain = plain_bm25(documents, query)
    assert len(hits) == min(limit, sum(score > 0 for score in plain))
    for number, score in hits:
        assert score == pytest.approx(plain[number], rel=1e-5)
    assert hits == sorted(hits, key=lambda hit: (-hit[1], hit[0]))  # equal scores: ascending number
    left_out = set(range(len(documents))) - {number for number, _ in hits}
    assert not hits or all(plain[number] <= hits[-1][1] * (1 + 1e-5) for number in left_out)


def test_equal_documents_have_equal_scores_and_the_limit_keeps_the_first():
    index = search.LuceneBM25([['oak'], ['oak', 'bowl'], ['oak'], ['oak']])
    hits = index.search(['oak'], 2)
    assert [number for number, _ in hits] == [0, 2] and hits[0][1] == hits[1][1]


def test_nothing_is_found_for_no_known_word():
    index = search.LuceneBM25([['oak'], []])
    assert index.search([], 5) == index.search(['pine'], 5) == []
    assert search.LuceneBM25([[], []]).search(['oak'], 5) == []


def test_an_index_needs_documents():
    with pytest.raises(ValueError, match='needs documents'):
        search.LuceneBM25([])


# ---- the shop's index ------------------------------------------------------------------------------------------------


def test_ties_are_ranked_by_asin_whatever_the_order_of_the_file():
    asins = [f'A00000000{i}' for i in (5, 2, 9, 1)]
    assert shop_of(*(BOWL._replace(asin=asin) for asin in asins)).search('bowl') == tuple(sorted(asins))


def test_at_most_fifty_products_are_found():
    found = shop_of(*(BOWL._replace(asin=f'A{i:09}') for i in range(60))).search('bowl')
    assert found == tuple(f'A{i:09}' for i in range(50))


def test_titles_descriptions_first_bullets_and_options_are_searched_and_nothing_else():
    sold = shop_of(BOWL._replace(title='walnut', description='pine', bullets=('oak', 'birch'), query='maple', category='elm',
                                 options=(('finish', ('glossy', 'matte')),), attributes=('ash',), instruction='find me fir'))
    assert all(map(sold.search, ('walnut', 'pine', 'oak', 'finish', 'glossy', 'matte')))
    assert not any(map(sold.search, ('birch', 'maple', 'elm', 'ash', 'fir')))


def test_repeated_words_of_a_query_count_repeatedly():
    sold = shop_of(BOWL._replace(asin='A000000001', title='oak'), BOWL._replace(asin='A000000002', title='pine'))
    assert sold.search('oak pine pine')[0] == 'A000000002'
    assert sold.search('oak oak pine')[0] == 'A000000001'


def test_the_originals_special_words_are_plain_words():
    titles = ('r', 'c garden', 'q bowls', 'a wood', 'garden')
    sold = shop_of(*(BOWL._replace(asin=f'A00000000{i}', title=title) for i, title in enumerate(titles, 1)))
    assert sold.search('<r>') == ('A000000001',)
    assert sold.search('<c> garden') == sold.search('c garden') == ('A000000002', 'A000000005')
    assert sold.search('<q> bowls') == sold.search('q bowls') == ('A000000003',)
    assert sold.search('<a> wood') == sold.search('wood') == ('A000000004',)
    assert sold.search('<c>') == ('A000000002',)
