"""Tokenizers in files: ``tokenizer.json`` of a model, and the chat template beside it."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchctl.errors import MissingPackageError, UsageError
from benchctl.untrusted.reading import UnreadableError, decoding_problem, read_bytes
from benchctl.workload.tokenizers.files import TOKENIZER_FILE
from benchctl.workload.tokenizers.tokenizer import Chat

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
        content = _content_of(directory / TOKENIZER_FILE)
        self.source = f"tokenizer {hashlib.sha256(content).hexdigest()}"
        self._tokenizer = _tokenizer_of(content, directory / TOKENIZER_FILE)

    def count_texts(self, texts: Sequence[str]) -> tuple[int, ...]:
        """Tokens of each text as the prompt of a completion, with those that every text is given, such as BOS."""
        return tuple(self._counts(texts, add_special_tokens=True))

    def count_chats(self, chats: Sequence[Chat]) -> tuple[int, ...]:
        """Tokens of each chat: a template writes all special tokens itself, and servers add none to it.

        Raises UsageError for a model without a chat template.
        """
        from benchctl.workload.tokenizers.chat_template import (  # noqa: PLC0415 - many prompts need none
            render_within_bounds,
        )

        batches = (chats[start : start + _BATCH] for start in range(0, len(chats), _BATCH))
        texts = (render_within_bounds(self._directory, self._chat_template_kwargs, batch) for batch in batches)
        return tuple(self._counts(chain.from_iterable(texts), add_special_tokens=False))

    def _counts(self, texts: Iterable[str], *, add_special_tokens: bool) -> Iterator[int]:
        rest = iter(texts)
        while batch := list(islice(rest, _BATCH)):
            yield from map(len, self._tokenizer.encode_batch_fast(batch, add_special_tokens=add_special_tokens))


def _content_of(path: Path) -> bytes:
    try:
        return read_bytes(path)
    except UnreadableError as error:
        raise UsageError(f"{error}; name a directory that has the file {path.name}") from error


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
