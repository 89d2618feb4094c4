"""Redaction of text that comes in pieces, such as a log while it is written, in bounded memory."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from benchctl.untrusted.secrets import Redactor, Span, open_key_from, replaced

_LINE_BYTES: Final = 65_536
"""Of a longer line the beginning is passed on before its end has come."""
_HELD_BYTES: Final = 32_768
"""Held back at least, of such a line."""
_CONTEXT_BYTES: Final = 512
"""Of what was passed on of a line, so much is remembered: it may name the secret that comes next."""
_OF_KEYS: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.+/=~%"


def copy_redacted(source: Path, target: Path, redactor: Redactor) -> None:
    """Copy a file of any size without its secrets."""
    stream = RedactedStream(redactor)
    with source.open("rb") as read, target.open("wb") as written:
        while piece := read.read(_LINE_BYTES):
            written.write(stream.feed(piece))
        written.write(stream.end())


class RedactedStream:
    """Passes a stream of bytes on without its secrets, also those that are split between pieces.

    Whole lines are passed on at once, the beginning of a line at a ``pause``. ``counts`` are the secrets replaced.
    """

    def __init__(self, redactor: Redactor) -> None:
        self.counts: Counter[str] = Counter()
        self._redactor = redactor
        self._held_bytes = max(_HELD_BYTES, 2 * redactor.longest_bytes)
        self._context = b""
        self._pending = b""
        self._is_in_key = False
        """True after a mark for a key whose end has not come."""

    @property
    def is_waiting(self) -> bool:
        """True while the beginning of a line is held back that a ``pause`` may pass on."""
        return bool(self._pending)

    def feed(self, piece: bytes) -> bytes:
        """Take the next piece; returns what can be passed on."""
        pending = self._pending = self._without_rest_of_key(self._pending + piece)
        cut = max(pending.rfind(b"\n"), pending.rfind(b"\r")) + 1
        if (key_start := open_key_from(pending)) < cut and len(pending) - key_start < self._held_bytes:
            cut = key_start
        if len(pending) - cut > _LINE_BYTES + self._held_bytes:
            cut = len(pending) - self._held_bytes
        return self._pass_on(cut) if cut else b""

    def pause(self) -> bytes:
        """Nothing has come for a moment; returns what can be passed on of the line that has begun."""
        text = self._context + self._pending
        cut = self._redactor.unfinished_from(text) - len(self._context)
        return self._pass_on(cut) if cut > 0 else b""

    def end(self) -> bytes:
        """Nothing more comes; returns the rest."""
        return self._pass_on(len(self._pending))

    def _pass_on(self, length: int) -> bytes:
        """Pass on this many of the pending bytes, or fewer where a secret would be cut in two."""
        text, begin = self._context + self._pending, len(self._context)
        spans = [span for span in self._redactor.spans(text) if span.end > begin]
        cut = self._cut_outside(spans, begin + length)
        passed = [
            span._replace(start=max(span.start, begin) - begin, end=span.end - begin)
            for span in spans
            if span.start < cut
        ]
        self.counts.update(span.label for span in passed)
        self._context = text[
            max(0, cut - _CONTEXT_BYTES, text.rfind(b"\n", 0, cut) + 1, text.rfind(b"\r", 0, cut) + 1) : cut
        ]
        self._pending = text[cut:]
        return replaced(text[begin:cut], passed)

    def _cut_outside(self, spans: Iterable[Span], cut: int) -> int:
        """``cut``, or where to cut instead of within a secret: before it, or after one that is too long to hold."""
        for span in spans:
            if span.start < cut < span.end:
                if cut - span.start <= self._held_bytes:
                    return span.start
                self._is_in_key = True
                return span.end
        return cut

    def _without_rest_of_key(self, pending: bytes) -> bytes:
        """``pending`` without the rest of a key whose mark has been passed on."""
        if not self._is_in_key:
            return pending
        rest = pending.lstrip(_OF_KEYS)
        self._is_in_key = not rest
        return rest
