"""Pieces of text that one tokenizer counts as one token each, found with few counts.

``words.txt`` holds frequent English words of 3 to 8 letters that are one token each, both at the beginning of a
text and after a blank, in the vocabularies of Llama 2, Llama 3.1, Qwen3, Gemma 3, DeepSeek-V3, Mistral-Nemo and
GPT-4o. Smaller vocabularies have a token for some of them, or only for characters.
"""

import random
import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

Count: TypeAlias = Callable[[Sequence[str]], Sequence[int]]
"""Tokens of each text, in one call."""

WORDS: Final = tuple(Path(__file__).with_name("words.txt").read_text(encoding="ascii").split())
"""In order of their frequency."""
_BLOCK: Final = 25
"""Words that are tried together: one text each, so that a tokenizer behind HTTP is asked 80 times and no more."""
_NUM_TRIED_ALONE: Final = 400
"""Words of a small vocabulary that are tried one by one."""
_FEWEST_WORDS: Final = 32
_NUM_CHARACTERS_TRIED: Final = 256
_CHARACTERS: Final = (string.ascii_lowercase + string.digits, string.digits, string.ascii_lowercase)


@dataclass(frozen=True, slots=True)
class Alphabet:
    """Pieces, each one token after ``separator`` and at the beginning of a text."""

    pieces: tuple[str, ...]
    separator: str

    def text(self, numbers: Iterable[int]) -> str:
        """One piece for each number: equal numbers give equal pieces, so shared beginnings stay shared."""
        return self.separator.join(self.pieces[number % len(self.pieces)] for number in numbers)


def alphabet_of(count: Count) -> Alphabet:
    """The alphabet of the tokenizer that ``count`` asks.

    Its pieces add one token each, but for a tokenizer without such pieces, whose texts need adjusting.
    """
    words = _one_token_words(count)
    if len(words) >= _FEWEST_WORDS:
        return Alphabet(words, " ")
    for characters in _CHARACTERS:
        alphabet = Alphabet(tuple(characters), "")
        if _adds_one_token_each(alphabet, count):
            return alphabet
    return Alphabet(words or WORDS, " ")


def _one_token_words(count: Count) -> tuple[str, ...]:
    """The words that add one token: whole blocks where all do, else each alone."""
    blocks = [WORDS[start : start + _BLOCK] for start in range(0, len(WORDS), _BLOCK)]
    exact = _added_tokens([" ".join(block) for block in blocks], count)
    unclear = [block for block, num_tokens in zip(blocks, exact, strict=True) if num_tokens != len(block)]
    is_small = len(unclear) > len(blocks) / 2
    alone = WORDS[:_NUM_TRIED_ALONE] if is_small else tuple(word for block in unclear for word in block)
    added = dict(zip(alone, _added_tokens(alone, count), strict=True))
    tried = alone if is_small else WORDS
    return tuple(word for word in tried if added.get(word, 1) == 1)


def _added_tokens(texts: Sequence[str], count: Count) -> list[int]:
    """Tokens that each text adds behind a first word and a blank."""
    if not texts:
        return []
    first = WORDS[0]
    alone, *together = count([first, *(f"{first} {text}" for text in texts)])
    return [num_tokens - alone for num_tokens in together]


def _adds_one_token_each(alphabet: Alphabet, count: Count) -> bool:
    stream = random.Random(0)  # noqa: S311  # repeatable on purpose; nothing here is a secret
    numbers = stream.choices(range(len(alphabet.pieces)), k=2 * _NUM_CHARACTERS_TRIED)
    half, whole = count([alphabet.text(numbers[:_NUM_CHARACTERS_TRIED]), alphabet.text(numbers)])
    return whole - half == _NUM_CHARACTERS_TRIED
