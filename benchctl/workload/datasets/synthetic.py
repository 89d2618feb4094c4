"""Synthetic prompts of exact length.

A word is consonant-vowel-consonant-vowel-consonant ("bator"): one token under ``count_tokens``, readable, and
there are enough of them to give each entry of a model's vocabulary its own.
"""

from collections.abc import Iterable
from itertools import islice
from typing import Final

from benchctl.errors import ProfileError
from benchctl.profile.workload import Length, Workload
from benchctl.workload.datasets.dataset import MadeDataset
from benchctl.workload.datasets.prompt import Prompt
from benchctl.workload.seeded import draw_lengths, named_stream
from benchctl.workload.tokenizers.tokenizer import Tokenizer

_CONSONANTS = "bcdfghjklmnpqrstvwxyz"
_VOWELS = "aeiou"
NUM_WORDS = len(_CONSONANTS) ** 3 * len(_VOWELS) ** 2


def word(number: int) -> str:
    """The word for a number; distinct below NUM_WORDS (231,525), then words repeat."""
    rest, last = divmod(number % NUM_WORDS, len(_CONSONANTS))
    rest, second_vowel = divmod(rest, len(_VOWELS))
    rest, middle = divmod(rest, len(_CONSONANTS))
    first, first_vowel = divmod(rest, len(_VOWELS))
    return (
        _CONSONANTS[first] + _VOWELS[first_vowel] + _CONSONANTS[middle] + _VOWELS[second_vowel] + _CONSONANTS[last]
    )


_FILLER: Final = tuple(word(number) for number in range(0, NUM_WORDS, 113))
"""About two thousand words of which most of a text consists."""


def text_from_numbers(numbers: Iterable[int]) -> str:
    """One word for each number, so that shared beginnings stay shared."""
    return " ".join(map(word, numbers))


def text_of_length(num_tokens: int, index: int, seed: int) -> str:
    """Text of exactly ``num_tokens`` tokens, its own for each ``index``.

    The first word is that of the index, so that no two prompts share a prefix that a server could cache; the
    others are drawn from a stream of this prompt alone.
    """
    stream = named_stream(seed, f"text:{index}")
    return " ".join([word(index), *stream.choices(_FILLER, k=num_tokens - 1)])


def synthetic_prompts(input_len: Length, num_prompts: int, seed: int) -> tuple[Prompt, ...]:
    """Prompts whose lengths are ``input_len``, in turn from a list, or drawn from the stream ``input-len``."""
    lengths = named_stream(seed, "input-len")
    return tuple(
        Prompt(
            prompt_id=f"synthetic-{i:05d}",
            source=f"synthetic:{i}",
            text=text_of_length(num_tokens, i, seed),
            prompt_tokens=num_tokens,
        )
        for i, num_tokens in enumerate(islice(draw_lengths(input_len, lengths), num_prompts))
    )


def _make(workload: Workload, seed: int, tokenizer: Tokenizer) -> tuple[Prompt, ...]:  # noqa: ARG001
    if workload.input_len is None:
        raise ProfileError("workload.input_len is null with dataset synthetic, which needs it; set a length")
    return synthetic_prompts(workload.input_len, workload.num_prompts, seed)


DATASET: Final = MadeDataset(make=_make, needs_input_len=True)
