"""The shop's search engine: Lucene's English analysis and BM25, to the bit.

Analysis: StandardTokenizer (UAX #29 words, emoji as words of their own), possessive 's removed, lower case, 33 stop
words, Porter's stemmer as Lucene has it. Ranking: BM25 with k1 = 0.9 and b = 0.4 over one field, document lengths
rounded to the one byte that Lucene stores, float32 arithmetic in Lucene's order.
"""

from __future__ import annotations

import array
import functools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable

import numpy as np
import Stemmer

K1, B = np.float32(0.9), np.float32(0.4)
MAX_TOKEN = 255  # UTF-16 units; Lucene cuts longer tokens into pieces
_LISTED = (
    'a an and are as at be but by for if in into is it no not of on or such that the their then there these they this to '
    'was will with')
STOP_WORDS = frozenset(_LISTED.split())

# Characters are first mapped to one of these classes (' ' for all others); words are then found in the string of classes.
#   a letter  h Hebrew letter  0 digit  k katakana  g hiragana or Chinese character  t South East Asian letter
#   _ connector  ' " . : , what may stand inside a word or number  x mark or format character  z zero-width joiner
#   v presentation selector  K keycap mark  # keycap base  e pictograph  m skin tone  r regional indicator
_SPECIAL = {
    "'": "'", '"': '"', '_': '_', '#': '#', '*': '#',
    **dict.fromkeys('.\u2018\u2019\u2024\ufe52\uff07\uff0e', '.'),
    **dict.fromkeys(':\u00b7\u0387\u02d7\u05f4\u2027\ufe13\ufe55\uff1a', ':'),
    **dict.fromkeys(',;\u037e\u0589\u060c\u060d\u066c\u07f8\u2044\ufe10\ufe14\ufe50\ufe54\uff0c\uff1b', ','),
    **dict.fromkeys('\u202f\u203f\u2040\u2054\ufe33\ufe34\ufe4d\ufe4e\ufe4f\uff3f', '_'),
    **dict.fromkeys('\u055a\u055b\u055c\u055e\u058a\u05f3', 'a'),
    **dict.fromkeys('\u3031\u3032\u3033\u3034\u3035\u309b\u309c\u30a0', 'k'),
    **dict.fromkeys('\u3005\u3007\u3038\u3039\u303a\u303b', 'g'),
    '\u200b': ' ', '\u200d': 'z', '\ufe0e': 'v', '\ufe0f': 'v', '\u20e3': 'K', '\uff9e': 'x', '\uff9f': 'x',
}  # fmt: skip
_PICTOGRAPHS = (  # Unicode's Extended_Pictographic without letters, as inclusive ranges
    '\u00a9\u00a9\u00ae\u00ae\u203c\u203c\u2049\u2049\u2122\u2122\u2194\u2199\u21a9\u21aa\u231a\u231b\u2328\u2328\u2388\u2388'
    '\u23cf\u23cf\u23e9\u23f3\u23f8\u23fa\u25aa\u25ab\u25b6\u25b6\u25c0\u25c0\u25fb\u25fe\u2600\u2605\u2607\u2612\u2614\u2685'
    '\u2690\u2705\u2708\u2712\u2714\u2714\u2716\u2716\u271d\u271d\u2721\u2721\u2728\u2728\u2733\u2734\u2744\u2744\u2747\u2747'
    '\u274c\u274c\u274e\u274e\u2753\u2755\u2757\u2757\u2763\u2767\u2795\u2797\u27a1\u27a1\u27b0\u27b0\u27bf\u27bf\u2934\u2935'
    '\u2b05\u2b07\u2b1b\u2b1c\u2b50\u2b50\u2b55\u2b55\u3030\u3030\u303d\u303d\u3297\u3297\u3299\u3299'
    '\U0001f000\U0001f0ff\U0001f10d\U0001f10f\U0001f12f\U0001f12f\U0001f16c\U0001f16f\U0001f17e\U0001f17f\U0001f18e\U0001f18e'
    '\U0001f191\U0001f19a\U0001f1ad\U0001f1e5\U0001f201\U0001f20f\U0001f21a\U0001f21a\U0001f22f\U0001f22f\U0001f232\U0001f23a'
    '\U0001f23c\U0001f23f\U0001f249\U0001f3fa\U0001f400\U0001f53d\U0001f546\U0001f64f\U0001f680\U0001f6ff\U0001f774\U0001f77f'
    '\U0001f7d5\U0001f7ff\U0001f80c\U0001f80f\U0001f848\U0001f84f\U0001f85a\U0001f85f\U0001f888\U0001f88f\U0001f8ae\U0001faff')


def _classify(character: str) -> str:
    code, category = ord(character), unicodedata.category(character)
    if character in _SPECIAL:
        return _SPECIAL[character]
    if 0x1F1E6 <= code <= 0x1F1FF:
        return 'r'
    if 0x1F3FB <= code <= 0x1F3FF:
        return 'm'
    if category[0] == 'L' or category == 'Nl' or 0x24B6 <= code <= 0x24E9 or 0x1F130 <= code <= 0x1F189:
        return _letter_class(unicodedata.name(character, ''))
    if category == 'Nd':
        return '0'
    if category[0] == 'M' or category == 'Cf' or 0xE0020 <= code <= 0xE007F:
        return 't' if category != 'Cf' and unicodedata.name(character, '').startswith(_SOUTH_EAST_ASIAN) else 'x'
    if unicodedata.name(character, '').startswith(('CJK RADICAL', 'KANGXI RADICAL')):
        return 'g'
    ranges = zip(_PICTOGRAPHS[::2], _PICTOGRAPHS[1::2])
    return 'e' if any(first <= character <= last for first, last in ranges) else ' '


_SOUTH_EAST_ASIAN = ('THAI', 'LAO', 'MYANMAR', 'KHMER', 'NEW TAI', 'TAI ')


def _letter_class(name: str) -> str:
    if name.startswith('HEBREW'):
        return 'h'
    if name.startswith(_SOUTH_EAST_ASIAN):
        return 't'
    if name.startswith(('KATAKANA', 'HALFWIDTH KATAKANA')):
        return 'k'
    return 'g' if name.startswith(('HIRAGANA', 'CJK UNIFIED', 'CJK COMPATIBILITY', 'HANGZHOU')) else 'a'


class _Classes(dict):
    """For str.translate: the class of every character, found when it is first met."""

    def __missing__(self, code: int) -> str:
        self[code] = out = _classify(chr(code))
        return out


_CLASSES = _Classes()


def _token_pattern() -> re.Pattern:
    """The longest words of Lucene's grammar, over classes; every character drags the marks that follow it along.

    One simplification: a skin tone joins any pictograph before it, not only those that show skin.
    """
    x, s = '[xzvK]*', '[xzK]*'  # marks with and without presentation selectors
    letters = rf"a{x}(?:[.:']{x}(?=[ah]))?|h{x}(?:'{x}|\"{x}(?=h)|[.:]{x}(?=[ah]))?"
    run = rf"(?:(?:{letters}|0{x}(?:[.,']{x}(?=0))?)+|(?:k{x})+)"
    word = rf'(?:_{x})*{run}(?:(?:_{x})+{run})*(?:_{x})*'
    picture = f'(?:e(?:{s}m)?|m)'
    emoji = f'z*{picture}(?:{s}v?z+{picture})*{s}v?|r{x}r{x}|#{s}v?K{s}'
    return re.compile(f'{word}|{emoji}|(?:t{x})+|g{x}')


_TOKEN = _token_pattern()


def tokens(text: str) -> list[str]:
    """Words of a text in Lucene's sense, neither lower-cased nor stemmed."""
    classes, out, at = text.translate(_CLASSES), [], 0
    while match := _TOKEN.search(classes, at):
        start, at = match.span()
        if at - start > MAX_TOKEN // 2 and (end := _cut(text, start)) < at:
            at = _TOKEN.match(classes, start, end).end()  # what follows is read as a new token
        out.append(text[start:at])
    return out


def _cut(text: str, start: int) -> int:
    """Where a token from `start` has MAX_TOKEN UTF-16 units."""
    units, at = 0, start
    while at < len(text) and (units := units + 1 + (text[at] > '\uffff')) <= MAX_TOKEN:
        at += 1
    return at


_STEMMER = Stemmer.Stemmer('porter', 0)
_POSSESSIVE = ("'s", '’s', '\uff07s', "'S", '’S', '\uff07S')
_MEASURED = re.compile('(?:[aeiou]|(?<=[^aeiou])y)(?:[^aeiouy]|(?<=[aeiou])y)')  # Porter's m > 0: a vowel, then a consonant


@functools.lru_cache(200_000)
def term(token: str) -> str | None:
    """What is indexed for a token; None for a stop word."""
    token = (token[:-2] if token.endswith(_POSSESSIVE) else token).lower()
    if not token or token in STOP_WORDS:
        return None
    if len(token) < 3:  # Porter leaves them alone, and so does Lucene
        return token
    stem = _STEMMER.stemWord(token)
    # two rules that Porter added later, which Lucene has and Snowball's 'porter' has not
    if stem.endswith('logi') and _MEASURED.search(stem[:-4]):
        return stem[:-1]
    if stem.endswith('bli') and _MEASURED.search(stem[:-3]):
        return _STEMMER.stemWord(f'{stem[:-1]}e')
    return stem


def analyze(text: str) -> list[str]:
    """The terms of a document or query, in order."""
    return [t for t in map(term, tokens(text)) if t is not None]


def stored_length(length: int) -> int:
    """A document length after Lucene's one-byte code: exact up to 39, then four significant bits (above an offset of 24)."""
    if length < 40:
        return length
    rest = length - 24
    shift = rest.bit_length() - 4
    return 24 + (rest >> shift << shift)


class LuceneBM25:
    """An inverted index over documents given as lists of terms. Immutable.

    What a term adds to each of its documents is computed once. Equal scores are ranked by document number.
    """

    def __init__(self, documents: Iterable[list[str]]):
        """Raises ValueError without documents."""
        vocabulary: dict[str, int] = {}
        occurrences, lengths = array.array('i'), array.array('i')
        for terms in documents:
            occurrences.extend(vocabulary.setdefault(t, len(vocabulary)) for t in terms)
            lengths.append(len(terms))
        if not lengths:
            raise ValueError('a search index needs documents')
        self._vocabulary, self._num_documents = vocabulary, len(lengths)
        lengths = np.asarray(lengths, dtype=np.int64)
        owner = np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)
        postings, counts = np.unique(np.asarray(occurrences, dtype=np.int64) * len(lengths) + owner, return_counts=True)
        term_of, document_of = np.divmod(postings, len(lengths))
        self._documents = document_of.astype(np.int32)
        self._starts = np.searchsorted(term_of, np.arange(len(vocabulary) + 1))
        self._impacts = self._compute_impacts(term_of, counts.astype(np.float32), lengths)

    def _compute_impacts(self, term_of: np.ndarray, counts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        num = int(np.count_nonzero(lengths))  # Lucene counts documents that have a term
        frequency = np.diff(self._starts)
        self._idf = np.log(1 + (num - frequency + 0.5) / (frequency + 0.5)).astype(np.float32)
        average = np.float32(lengths.sum() / max(num, 1))
        stored = np.array([stored_length(int(n)) for n in lengths], np.float32)
        inverse = np.float32(1) / (K1 * ((1 - B) + B * stored / average)) if num else stored
        return counts * inverse[self._documents]

    def search(self, terms: list[str], limit: int) -> list[tuple[int, float]]:
        """The best documents (number, score), best first; only those that contain one of the terms."""
        scores = np.zeros(self._num_documents)  # Lucene adds in double precision and rounds the sum
        for t, count in Counter(terms).items():
            if (i := self._vocabulary.get(t)) is not None:
                of_term = slice(self._starts[i], self._starts[i + 1])
                weight = np.float32(count) * self._idf[i]
                scores[self._documents[of_term]] += weight - weight / (1 + self._impacts[of_term])
        scores = scores.astype(np.float32)
        hits = np.flatnonzero(scores)
        if len(hits) > limit:
            hits = hits[scores[hits] >= -np.partition(-scores[hits], limit - 1)[limit - 1]]
        hits = hits[np.argsort(-scores[hits], kind='stable')][:limit]
        return [(int(i), float(scores[i])) for i in hits]
