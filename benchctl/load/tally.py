"""Counts of a load, updated with each record, and its signs of life."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from benchctl.records.record import RequestRecord

_REFUSALS: Final = frozenset({400, 401, 403, 404, 422})
"""Status codes by which a server refuses a request for its content: asked again, it would refuse it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """Signs of life of a server under load, in monotonic ns."""

    num_open: int = 0
    oldest_sent_ns: int = 0
    """When the oldest of the open requests was sent."""
    last_arrival_ns: int = 0
    """When something last arrived for any request, open or ended; 0 before."""


@dataclass(slots=True)
class LoadSummary:
    """The counts of one load, until now."""

    num_sent: int = 0
    num_failed: int = 0
    first_send_ns: int | None = None
    last_token_ns: int | None = None
    first_error: str | None = None
    """The error of the first request that failed."""
    failures: Counter[str] = field(default_factory=Counter)
    """Number of failed requests by the class of their errors."""
    num_refused: int = 0
    """Requests that the server refused for their content."""
    first_refusal: str | None = None
    """The status code and the words of the first refusal."""

    def count(self, record: RequestRecord) -> None:
        self.num_sent += 1
        if record.sent_ns is not None:
            first_ns = self.first_send_ns
            self.first_send_ns = record.sent_ns if first_ns is None else min(record.sent_ns, first_ns)
        last_ns = max((choice.chunk_ns[-1] for choice in record.choices if choice.chunk_ns), default=None)
        if last_ns is not None:
            self.last_token_ns = max(last_ns, self.last_token_ns or last_ns)
        if record.error is not None:
            self.num_failed += 1
            self.failures[record.error.kind] += 1
            self.first_error = self.first_error or f"{record.error.kind}: {record.error.message}"
            # vLLM refuses a bad schema in the stream that it has begun, with the code that it would have answered
            if record.error.kind in {"http-status", "server-error"} and record.error.status in _REFUSALS:
                self.num_refused += 1
                self.first_refusal = self.first_refusal or f"{record.error.status}: {record.error.message}"
