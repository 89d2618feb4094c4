"""Texts of exactly the planned number of tokens, for any tokenizer that counts.

A plan is a sequence of numbers, one for each token: equal numbers become equal tokens, so that prompts share the
beginnings that their numbers share. Text works on every engine. A server adds tokens of its own, those of a chat
template or one that begins a text; they belong to the planned length, and the last numbers make room for them.

    alphabet ▸ texts ▸ counted together ▸ those of another length adjusted at their ends, and counted again

``words.txt`` holds frequent English words of 3 to 8 letters that are one token each, both at the beginning of a
text and after a blank, in the vocabularies of Llama 2, Llama 3.1, Qwen3, Gemma 3, DeepSeek-V3, Mistral-Nemo and
GPT-4o. Smaller vocabularies have a token for some of them, or only for characters.
"""

import random
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final, TypeAlias

from msgspec.structs import replace

from benchctl.errors import ProfileError
from benchctl.records.record import Message
from benchctl.workload.datasets.base import Prompt
from benchctl.workload.tokenizers import Tokenizer

Count: TypeAlias = Callable[[Sequence[str]], Sequence[int]]
"""Tokens of each text, in one call."""

WORDS: Final = tuple(Path(__file__).with_name("words.txt").read_text(encoding="ascii").split())
"""In order of their frequency."""
_BLOCK: Final = 25
"""Words that are tried together: one text each, so that a tokenizer behind HTTP is asked 80 times and no more."""
_NUM_CHARACTERS_TRIED: Final = 256
_AT_ONCE: Final = 1024
"""Prompts that are counted together: a few calls, and little memory."""
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
    if len(words) >= 32:
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
    # Words of a small vocabulary that are tried one by one
    alone = WORDS[:400] if is_small else tuple(word for block in unclear for word in block)
    added = dict(zip(alone, _added_tokens(alone, count), strict=True))
    return tuple(word for word in (alone if is_small else WORDS) if added.get(word, 1) == 1)


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


Plan: TypeAlias = tuple[int, ...]

_PROBE: Final = range(8)
_ENDINGS: Final = tuple(f"{blank}{end}" for blank in ("", " ") for end in ("", *".,;:!?-x1aZé"))
"""Ends that are tried where adding and removing pieces misses a length."""


@dataclass(frozen=True, slots=True)
class WrittenText:
    """A text and its tokens as counted, with those that the server adds."""

    text: str
    num_tokens: int


def write_texts(plans: Iterable[Plan], count: Count, alphabet: Alphabet) -> dict[Plan, WrittenText]:
    """A text for each plan, of as many tokens as it has numbers by ``count``, whose alphabet this is.

    Laws: each text depends on its own plan alone, and plans that share a beginning give texts that share theirs. A
    text that cannot be made exact is as near as was found and says its true length. Raises ProfileError for a plan
    that is no longer than what the server adds by itself.
    """
    distinct = list(dict.fromkeys(plans))
    if not distinct:
        return {}
    num_added = _num_added(alphabet, distinct, count)
    lengths = {plan: len(plan) - num_added for plan in distinct}
    texts: dict[Plan, WrittenText] = {}
    # Lengths are adjusted four times; the alphabet makes nearly all texts exact at once
    for _ in range(5):
        latest = _counted(alphabet, lengths, count)
        inexact = {plan: text for plan, text in latest.items() if text.num_tokens != len(plan)}
        nearest = {plan: _nearest(plan, (texts.get(plan, text), text)) for plan, text in inexact.items()}
        texts |= latest | nearest
        lengths = {plan: max(lengths[plan] + len(plan) - text.num_tokens, 1) for plan, text in inexact.items()}
        if not lengths:
            return texts
    return texts | _with_other_endings(nearest, count)


def _num_added(alphabet: Alphabet, plans: Sequence[Plan], count: Count) -> int:
    """Tokens that the server adds to each text; ProfileError for plans that leave no room for them."""
    (num_probe_tokens,) = count([alphabet.text(_PROBE)])
    num_added = max(num_probe_tokens - len(_PROBE), 0)
    shortest = min(map(len, plans))
    if shortest <= num_added:
        raise ProfileError(
            f"a prompt is planned with {shortest} tokens, but the server adds {num_added} of its own to each "
            f"(chat template, beginning of text); plan at least {num_added + 1}, as in workload.input_len, or set "
            "workload.chat to false"
        )
    return num_added


def _counted(alphabet: Alphabet, lengths: dict[Plan, int], count: Count) -> dict[Plan, WrittenText]:
    """The beginning of each plan in pieces, or all of it and pieces that go on behind its end."""
    texts = [alphabet.text([*plan[:length], *range(len(plan), length)]) for plan, length in lengths.items()]
    counted = zip(texts, count(texts), strict=True)
    return {plan: WrittenText(*text) for plan, text in zip(lengths, counted, strict=True)}


def _nearest(plan: Plan, texts: Iterable[WrittenText]) -> WrittenText:
    return min(texts, key=lambda text: abs(text.num_tokens - len(plan)))


def _with_other_endings(texts: dict[Plan, WrittenText], count: Count) -> dict[Plan, WrittenText]:
    """The texts, each with the ending of ``_ENDINGS`` that brings it nearest."""
    tried: dict[Plan, list[str]] = {
        plan: [stem + ending for stem in (text.text, text.text[:-1]) for ending in _ENDINGS]
        for plan, text in texts.items()
    }
    candidates = [text for variants in tried.values() for text in variants]
    counted = dict(zip(candidates, count(candidates), strict=True))
    return {
        plan: _nearest(plan, [WrittenText(text, counted[text]) for text in variants])
        for plan, variants in tried.items()
    }


def counted_prompts(prompts: Iterable[Prompt], tokenizer: Tokenizer, *, chat: bool) -> Iterator[Prompt]:
    """Each prompt as it is sent, planned ones written, with the tokens of its messages or its text.

    ``chat`` sends plain text as one message of the user. Thousands are counted in few calls. Raises ProfileError
    for a planned length that leaves no text beside what the server adds.
    """

    def count(texts: Sequence[str]) -> Sequence[int]:
        return tokenizer.count_chats([_user_chat(text) for text in texts]) if chat else tokenizer.count_texts(texts)

    rest, alphabet = iter(prompts), None
    while batch := tuple(islice(rest, _AT_ONCE)):
        plans = [prompt.token_numbers for prompt in batch if prompt.token_numbers is not None]
        if plans and alphabet is None:
            alphabet = alphabet_of(count)
        written = write_texts(plans, count, alphabet) if alphabet is not None else {}
        texts = [prompt.text for prompt in batch if prompt.text is not None and (chat or prompt.num_tokens is None)]
        lengths = dict(zip(texts, count(texts), strict=True)) if texts else {}
        chats = [prompt.messages for prompt in batch if prompt.messages is not None]
        chat_lengths = iter(tokenizer.count_chats(chats) if chats else ())
        for prompt in batch:
            if prompt.messages is not None:
                yield replace(prompt, num_tokens=next(chat_lengths))
                continue
            text, shared_chars = prompt.text or "", 0
            num_tokens = lengths.get(text, prompt.num_tokens)
            if alphabet is not None and prompt.token_numbers is not None:
                own = written[prompt.token_numbers]
                text, num_tokens = own.text, own.num_tokens
                shared_chars = len(alphabet.text(prompt.token_numbers[: prompt.shared]))
            if 0 < len(text) <= shared_chars:
                raise ProfileError(
                    f"workload.prefix has {prompt.shared} tokens, and a prompt of {num_tokens} has no room "
                    "for it beside a token of its own and what the server adds (chat template, beginning of text); "
                    "lower the prefix, or raise workload.input_len"
                )
            form = {"messages": _user_chat(text), "text": None} if chat else {"text": text}
            yield replace(prompt, token_numbers=None, num_tokens=num_tokens, shared_chars=shared_chars, **form)


def _user_chat(text: str) -> tuple[Message, ...]:
    return (Message(role="user", content=text),)
