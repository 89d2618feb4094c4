"""Token counts of prompts: by an estimate that needs no file, or by the tokenizer of a model.

The estimate follows the shape of byte-pair tokenizers of the Qwen and Llama 3 family: a word includes the blank
before it, every digit is a token, runs of punctuation and of line ends are tokens, and a blank before a digit is
one of its own. An English word longer than eight letters counts once for every eight letters begun, a word with
letters beyond ASCII once for every four, and of Chinese, Japanese and Korean characters three are two tokens.

English is within 11 % of current vocabularies and Chinese, Japanese and Korean within about a third, as measured
in ``docs/measurements/prompt-lengths.md``. On the GSM8K test questions with a one-line instruction it gives 104.6
tokens for a chat prompt, where Qwen's tokenizer is known to give 102 to 106. A tokenizer's count, and the one that
an engine reports in ``usage``, take precedence. Prompts are counted and written before the load; the request set
records by whom (``PreparedRequest.prompt_tokens_from``).
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from benchctl.errors import MissingPackageError, UsageError
from benchctl.records.record import ESTIMATE, Message
from benchctl.untrusted.files import UnreadableError, decoding_problem, read_bytes

_LATIN_CHARS: Final = 8
_EAST_ASIAN: Final = (
    r"\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003134f"
)
"""Kana, ideographs and Hangul, of which a tokenizer makes a token for every one and a half."""
_STARTS_EAST_ASIAN: Final = re.compile(rf" ?[{_EAST_ASIAN}]")
_PIECE: Final = re.compile(
    r"'(?i:s|t|re|ve|m|ll|d)\b"  # contractions; to compile the rest without case takes three times as long
    rf"| ?[{_EAST_ASIAN}]{{1,3}}"
    rf"|[^\r\n\w]?(?:(?![{_EAST_ASIAN}])[^\W\d_])+"  # a word with the one character before it
    r"|\d"
    r"| ?(?:[^\s\w]|_)+[\r\n]*"  # punctuation, with the line ends after it
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)


def tokenize(text: str) -> list[str]:
    """The pieces of ``text``; joined they are the text again. Words that single blanks part are looked up."""
    first, *others = text.split(" ")
    words = [tuple(_pieces(first)), *map(_pieces_of_word, others)]
    return list(chain.from_iterable(words) if all(words[1:]) else _pieces(text))


def count_tokens(text: str) -> int:
    """Tokens of a plain prompt."""
    return len(tokenize(text))


@lru_cache(maxsize=1 << 14)
def _pieces_of_word(word: str) -> tuple[str, ...]:
    """The pieces of a word and the blank before it; none where more white space may join them to others."""
    return () if word != word.strip() or not word else tuple(_pieces(f" {word}"))


def tokenize_chat(messages: Iterable[Message]) -> list[str]:
    """The pieces of a chat prompt in ChatML: five around each message, three that open the answer."""
    pieces: list[str] = []
    for message in messages:
        pieces += ("<|im_start|>", message.role, "\n", *tokenize(message.content), "<|im_end|>", "\n")
    pieces += ("<|im_start|>", "assistant", "\n")
    return pieces


def count_chat_tokens(messages: Iterable[Message]) -> int:
    """Tokens of a chat prompt, the template's own included."""
    return sum(5 + count_tokens(message.content) for message in messages) + 3


def _pieces(text: str) -> Iterator[str]:
    return chain.from_iterable(map(_pieces_of_match, _PIECE.findall(text)))


def _pieces_of_match(match: str) -> tuple[str, ...]:
    """The pieces of a word, a run of punctuation or one of white space."""
    if match.isascii() and len(match) <= _LATIN_CHARS:
        return (match,)
    if _STARTS_EAST_ASIAN.match(match):
        return tuple(_split(match, 1, 2))
    # Letters that a token holds at most, in words of ASCII letters and in others
    num_chars = _LATIN_CHARS if match.isascii() else 4
    return tuple(_split(match, num_chars, num_chars))


def _split(piece: str, first_chars: int, num_chars: int) -> Iterator[str]:
    """Cut a piece after ``first_chars`` letters and any blank before them, then after every ``num_chars``."""
    first = first_chars + (0 if piece[0].isalnum() else 1)
    yield piece[:first]
    for start in range(first, len(piece), num_chars):
        yield piece[start : start + num_chars]


Chat: TypeAlias = Sequence[Message]


class Tokenizer(Protocol):
    """Counts prompts as a server does."""

    @property
    def source(self) -> str:
        """Source of its counts: ``tokenizer <sha256>`` for a file, ``server``, or ``estimate``."""

    def count_texts(self, texts: Sequence[str]) -> tuple[int, ...]:
        """Tokens of each text as the prompt of a completion, with those that the server adds itself."""

    def count_chats(self, chats: Sequence[Chat]) -> tuple[int, ...]:
        """Tokens of each chat, with those of the model's chat template."""


class Estimate:
    """Counts by a rule that needs no file."""

    source: Final = ESTIMATE

    def count_texts(self, texts: Sequence[str]) -> tuple[int, ...]:
        """Tokens of each text, estimated."""
        return tuple(map(count_tokens, texts))

    def count_chats(self, chats: Sequence[Chat]) -> tuple[int, ...]:
        """Tokens of each chat in ChatML, estimated."""
        return tuple(map(count_chat_tokens, chats))


TOKENIZER_FILE: Final = "tokenizer.json"
TEMPLATE_FILES: Final = ("chat_template.jinja", "tokenizer_config.json", "chat_template.json")
"""Files that may hold a chat template; the first that has one counts."""
TOKEN_FILES: Final = ("special_tokens_map.json", "tokenizer_config.json")
"""Files that name special tokens; the last that names one counts."""
KEY: Final = "workload.tokenizer"
_FILES: Final = sorted({TOKENIZER_FILE, *TOKEN_FILES, *TEMPLATE_FILES})


def directory_on_disk(model: str, repository: str | None) -> Path | None:
    """The directory of a model, or of its repository in the cache of the hub, if it has a tokenizer.json."""
    directory = Path(model).expanduser()
    if (directory / TOKENIZER_FILE).is_file():
        return directory
    return None if repository is None else _cached(repository)


def directory_named(name: str) -> Path:
    """The directory that ``workload.tokenizer`` names, or that of its repository, fetched from the hub if need be.

    Raises UsageError where neither is to be had.
    """
    directory = Path(name).expanduser()
    if directory.is_dir() or name.startswith(("/", "~", ".")):
        if (directory / TOKENIZER_FILE).is_file():
            return directory
        problem = f"has no {TOKENIZER_FILE}" if directory.is_dir() else "is not a directory"
        raise UsageError(f"{KEY} is {name!r}, which {problem}; name the directory of a model that has the file")
    return _cached(name) or _fetched(name)


def _cached(repository: str) -> Path | None:
    """The files of a repository that a server or another program has fetched; None without them."""
    try:
        from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - its import takes a while

        path = try_to_load_from_cache(repository, TOKENIZER_FILE)
    except (ImportError, ValueError):  # ValueError: what cannot be a repository
        return None
    return Path(path).parent if isinstance(path, str) else None


def _fetched(repository: str) -> Path:
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415 - its import takes a while

        directory = Path(snapshot_download(repository, allow_patterns=_FILES))
        problem = None if (directory / TOKENIZER_FILE).is_file() else "it has none"
    except ImportError as error:
        purpose = f"{KEY} {repository!r}, which is not a directory, cannot be looked for at the hub"
        otherwise = f"name a directory with {TOKENIZER_FILE}"
        raise MissingPackageError(("huggingface_hub",), purpose, otherwise=otherwise) from error
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        problem = f"{type(error).__name__}: {reason}"
    if problem is not None:
        raise UsageError(
            f"{KEY} is {repository!r}, which is neither a directory nor a repository whose {TOKENIZER_FILE} can be "
            f"had ({problem}); correct it, or name a directory with {TOKENIZER_FILE}"
        )
    return directory


if TYPE_CHECKING:
    import tokenizers

_BATCH: Final = 256
"""Texts encoded at once: enough for all cores, while the encodings of thousands of long prompts fill gigabytes."""


class LocalTokenizer:
    """Tokenizer in a directory with ``tokenizer.json``; counts as a server that loads the same files."""

    def __init__(self, directory: Path, chat_template_kwargs: Mapping[str, Any] | None = None) -> None:
        """``chat_template_kwargs`` are variables of the chat template, as requests send them.

        Raises UsageError where the file is missing or damaged, and without the package ``tokenizers``.
        """
        self._directory = directory
        self._chat_template_kwargs = chat_template_kwargs
        try:
            content = read_bytes(directory / TOKENIZER_FILE)
        except UnreadableError as error:
            raise UsageError(f"{error}; name a directory that has the file {TOKENIZER_FILE}") from error
        self.source = f"tokenizer {hashlib.sha256(content).hexdigest()}"
        self._tokenizer = _tokenizer_of(content, directory / TOKENIZER_FILE)

    def count_texts(self, texts: Sequence[str]) -> tuple[int, ...]:
        """Tokens of each text as the prompt of a completion, with those that every text is given, such as BOS."""
        return tuple(self._counts(texts, add_special_tokens=True))

    def count_chats(self, chats: Sequence[Chat]) -> tuple[int, ...]:
        """Tokens of each chat: a template writes all special tokens itself, and servers add none to it.

        Raises UsageError for a model without a chat template.
        """
        from benchctl.workload.chat_template import (  # noqa: PLC0415 - many prompts need none
            render_within_bounds,
        )

        batches = (chats[start : start + _BATCH] for start in range(0, len(chats), _BATCH))
        texts = (render_within_bounds(self._directory, self._chat_template_kwargs, batch) for batch in batches)
        return tuple(self._counts(chain.from_iterable(texts), add_special_tokens=False))

    def _counts(self, texts: Iterable[str], *, add_special_tokens: bool) -> Iterator[int]:
        rest = iter(texts)
        while batch := list(islice(rest, _BATCH)):
            yield from map(len, self._tokenizer.encode_batch_fast(batch, add_special_tokens=add_special_tokens))


def _tokenizer_of(content: bytes, path: Path) -> "tokenizers.Tokenizer":
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415 - its import takes a while
    except ImportError as error:
        raise MissingPackageError(("tokenizers",), f"prompts cannot be counted with {path}") from error
    try:
        tokenizer: tokenizers.Tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # the package has no errors of its own, and raises this very class
        raise UsageError(
            f"{path} is damaged or no tokenizer: {decoding_problem(error)}; get it again, or a newer package "
            "tokenizers"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
