"""The contract of a tokenizer, and the estimate that stands in for one.

Prompts are counted and written before the load; the request set records by whom
(``PreparedRequest.prompt_tokens_from``).
"""

from collections.abc import Sequence
from typing import Final, Protocol, TypeAlias

from benchctl.records.record import ESTIMATE, Message
from benchctl.workload.datasets.tokens import count_chat_tokens, count_tokens

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
    """Counts by the rule of ``datasets.tokens``, which needs no file."""

    source: Final = ESTIMATE

    def count_texts(self, texts: Sequence[str]) -> tuple[int, ...]:
        """Tokens of each text, estimated."""
        return tuple(map(count_tokens, texts))

    def count_chats(self, chats: Sequence[Chat]) -> tuple[int, ...]:
        """Tokens of each chat in ChatML, estimated."""
        return tuple(map(count_chat_tokens, chats))
