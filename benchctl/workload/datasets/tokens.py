"""An estimate of token counts, by a rule that needs no tokenizer files.

The rule follows the shape of byte-pair tokenizers of the Qwen and Llama 3 family: a word includes the blank before
it, every digit is a token, runs of punctuation and of line ends are tokens, and a blank before a digit is one of
its own. An English word longer than eight letters counts once for every eight letters begun, a word with letters
beyond ASCII once for every four, and of Chinese, Japanese and Korean characters three are two tokens.

It is an estimate: English is within 11 % of current vocabularies and Chinese, Japanese and Korean within about a
third, as measured in ``docs/measurements/prompt-lengths.md``. On the GSM8K test questions with a one-line
instruction it gives 104.6 tokens for a chat prompt, where Qwen's tokenizer is known to give 102 to 106. A
tokenizer's count, and the one that an engine reports in ``usage``, take precedence.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Final

from benchctl.records.record import Message

_LATIN_CHARS: Final = 8
_OTHER_CHARS: Final = 4
"""Letters that a token holds at most, in words of ASCII letters and in others."""
_EAST_ASIAN: Final = (
    r"\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003134f"
)
"""Kana, ideographs and Hangul, of which a tokenizer makes a token for every one and a half."""
_STARTS_EAST_ASIAN: Final = re.compile(rf" ?[{_EAST_ASIAN}]")
_WORD: Final = r"[^\r\n\w]?[^\W\d_]+"  # with the one character before it
_EAST_ASIAN_OR_WORD: Final = rf" ?[{_EAST_ASIAN}]{{1,3}}|[^\r\n\w]?(?:(?![{_EAST_ASIAN}])[^\W\d_])+"


def _pattern(word: str) -> re.Pattern[str]:
    return re.compile(
        r"'(?:s|t|re|ve|m|ll|d)\b"  # contractions
        rf"|{word}"
        r"|\d"
        r"| ?(?:[^\s\w]|_)+[\r\n]*"  # punctuation, with the line ends after it
        r"|\s*[\r\n]+"
        r"|\s+(?!\S)"
        r"|\s+",
        re.IGNORECASE,
    )


_PIECE: Final = _pattern(_EAST_ASIAN_OR_WORD)
_ASCII_PIECE: Final = _pattern(_WORD)
"""The same for ASCII, faster."""


def tokenize(text: str) -> list[str]:
    """The pieces of ``text``; joined they are the text again."""
    return list(_pieces(text))


def count_tokens(text: str) -> int:
    """Tokens of a plain prompt."""
    return len(_ASCII_PIECE.findall(text)) if _has_short_words(text) else sum(1 for _ in _pieces(text))


def _has_short_words(text: str) -> bool:
    """True where no piece is longer than a token: words with single blanks, as those written for a trace."""
    words = text.split(" ") if text.isascii() and text.isprintable() else [""]
    return "" not in words and max(map(len, words)) <= _LATIN_CHARS


def tokenize_chat(messages: Iterable[Message]) -> list[str]:
    """The pieces of a chat prompt in ChatML: five around each message, three that open the answer."""
    pieces: list[str] = []
    for message in messages:
        pieces += ("<|im_start|>", message.role, "\n")
        pieces += _pieces(message.content)
        pieces += ("<|im_end|>", "\n")
    pieces += ("<|im_start|>", "assistant", "\n")
    return pieces


def count_chat_tokens(messages: Iterable[Message]) -> int:
    """Tokens of a chat prompt, the template's own included."""
    return len(tokenize_chat(messages))


def _pieces(text: str) -> Iterator[str]:
    for match in _PIECE.finditer(text):
        piece = match.group()
        if piece.isascii() and len(piece) <= _LATIN_CHARS:
            yield piece
        elif _STARTS_EAST_ASIAN.match(piece):
            yield from _split(piece, 1, 2)
        else:
            num_chars = _LATIN_CHARS if piece.isascii() else _OTHER_CHARS
            yield from _split(piece, num_chars, num_chars)


def _split(piece: str, first_chars: int, num_chars: int) -> Iterator[str]:
    """Cut a piece after ``first_chars`` letters and any blank before them, then after every ``num_chars``."""
    first = first_chars + (0 if piece[0].isalnum() else 1)
    yield piece[:first]
    for start in range(first, len(piece), num_chars):
        yield piece[start : start + num_chars]
