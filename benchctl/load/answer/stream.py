"""A streamed completion, read from server-sent events into choices, usage and errors.

Pure and incremental: bytes come in with the time at which they arrived, and any way of cutting the same bytes
into reads gives the same result except for those times. An event has arrived when its closing blank line has.

Output of a choice, which makes a chunk, is text, reasoning text, a part of a tool call, or token ids. A first event
that only names the role does not count; an event with token ids and no text does (a token that completes no
character), and so does one by which a running count grew.
"""

from typing import Any, Final

import msgspec

from benchctl.load.answer.choice import UNCOUNTED, Choice, Choices
from benchctl.load.answer.events import (
    CR,
    UNREADABLE,
    AnyJson,
    ChoiceEvent,
    Delta,
    Event,
    EventSplitter,
    FinishObject,
    TailSplitter,
    Usage,
    decode_event,
)
from benchctl.load.answer.excess import ExcessError
from benchctl.records.finish_reasons import MOST_WORD_CHARS, finish_error
from benchctl.records.record import ChoiceRecord, RequestError
from benchctl.untrusted.reading import decoding_problem

_EXCERPT_BYTES: Final = 200
_EMPTY: Final = frozenset({b"null", b"[]", b"{}"})
_MOST_ERROR_BYTES: Final = 64 << 10
"""A larger error is shown as it is, by its beginning."""


class CompletionReader:
    """One streamed completion of ``num_choices`` choices, read event by event."""

    __slots__ = (
        "_choices",
        "_finish_stated",
        "_is_counting",
        "_is_ending",
        "_num_choices",
        "_splitter",
        "_tokens_so_far",
        "cut_event",
        "error",
        "is_terminated",
        "usage",
    )

    def __init__(self, num_choices: int) -> None:
        self.usage: Usage | None = None
        """The last usage that the server sent."""
        self.error: RequestError | None = None
        """The first error event or unreadable event."""
        self.is_terminated = False
        """True when ``[DONE]`` arrived; not every server sends it."""
        self.cut_event = b""
        """The part of an event that arrived before the stream ended."""
        self._num_choices = num_choices
        self._choices = Choices(num_choices)
        self._splitter: EventSplitter | TailSplitter = EventSplitter()
        self._finish_stated = ""
        """What the server says of the finish reason of a choice."""
        self._is_ending = False
        self._is_counting = False
        """True while the server sends a running count: every event that could have one has one."""
        self._tokens_so_far: int | None = None

    def feed(self, t_ns: int, data: bytes, late_ns: int = 0) -> None:
        """Take ``data``, which arrived at ``t_ns`` and was read ``late_ns`` later.

        Raises ExcessError for what no honest stream holds; there is no use in feeding more then.
        """
        line, _, rest = data.partition(b"\n")
        if rest == b"\n" and line[:7] == b"data: {" and CR not in line and self._splitter.is_between:
            payloads = [line[6:]]  # nearly always; the splitter would give the same
        else:
            payloads = self._splitter.feed(data)
        for payload in payloads:
            try:
                event = decode_event(payload)
            except UNREADABLE as error:
                self._take_unreadable(payload, error)
                continue
            choices, counted = event.choices, None
            if not choices or event.usage is not None or event.timings is not None or event.error is not None:
                counted = self._note(event)
                if counted and not choices:
                    self._take_silent(t_ns, late_ns, counted)
            for part in choices or ():
                text, ids = part.text, part.token_ids
                if text is None:
                    text = _text(part.delta)
                if (text or ids) and counted is None and part.finish_reason is None:
                    # Nearly all events come here; the long way gives the same for them.
                    self._is_counting = False
                    choice = self._choices[part.index]
                    choice.add_ns(t_ns)
                    choice.add_late(late_ns)
                    choice.add_count(UNCOUNTED if ids is None else len(ids))
                    choice.add_text(text)
                else:
                    self._take_choice(t_ns, late_ns, part, text, counted)

    def finish(self, t_ns: int, late_ns: int = 0) -> None:
        """Take the rest when the stream has ended; a last event may lack its blank line."""
        self._is_ending = True
        self.feed(t_ns, b"\n\n", late_ns)

    def compact(self) -> None:
        """Store everything until now in less memory."""
        for choice in self._choices.values():
            choice.compact()

    @property
    def num_finished(self) -> int:
        return sum(choice.finish_reason is not None for choice in self._choices.values())

    @property
    def finish_error(self) -> RequestError | None:
        """The failure that a finish reason means; None where all answers that ended are answers."""
        return finish_error((choice.finish_reason for choice in self._choices.values()), self._finish_stated)

    @property
    def indices(self) -> tuple[int, ...]:
        return tuple(sorted(self._choices))

    @property
    def last_chunk_ns(self) -> int:
        """The last arrival of output; 0 before the first."""
        return max((choice.times_ns[-1] for choice in self._choices.values() if choice.times_ns), default=0)

    @property
    def most_record_bytes(self) -> int:
        """The most that the choices can take in a record."""
        return sum(choice.most_record_bytes for choice in self._choices.values())

    @property
    def has_events(self) -> bool:
        return bool(self._choices) or self.usage is not None or self.error is not None or self.is_terminated

    @property
    def output_tokens(self) -> int | None:
        """Tokens of all choices: from ``usage``, or else the sum of the counts of events."""
        if self.usage is not None and self.usage.completion_tokens is not None:
            return self.usage.completion_tokens
        counts = [self._output_tokens(choice) for choice in self._choices.values()]
        stated = [count for count in counts if count is not None]
        return sum(stated) if len(stated) == len(counts) == self._num_choices else None

    def choices(self, stamps_late: bool = False) -> tuple[ChoiceRecord, ...]:
        """The chunks of each choice, by index; with ``stamps_late`` also the read delay of each."""
        return tuple(self._record(index, self._choices[index], stamps_late) for index in self.indices)

    def _record(self, index: int, choice: Choice, stamps_late: bool) -> ChoiceRecord:
        is_counted, output_tokens = choice.is_counted, self._output_tokens(choice)
        choice.compact()
        if not is_counted:
            choice.drop_silent()
        return ChoiceRecord(
            index=index,
            chunk_ns=tuple(choice.times_ns),
            chunk_late_ns=tuple(choice.lates_ns) if stamps_late else None,
            chunk_tokens=tuple(choice.counts) if is_counted else None,
            chunk_chars=tuple(choice.chars),
            output_tokens=output_tokens,
            finish_reason=choice.finish_reason,
            text="".join(choice.heads),
        )

    def _output_tokens(self, choice: Choice) -> int | None:
        if self._num_choices == 1:
            stated = self.usage.completion_tokens if self.usage is not None else None
            stated = self._tokens_so_far if stated is None else stated
            if stated is not None:
                return stated
        return sum(choice.counts) if choice.is_counted else None

    def _take_choice(self, t_ns: int, late_ns: int, part: ChoiceEvent, text: str, counted: int | None) -> None:
        choice = self._choices[part.index]
        if (reason := part.finish_reason) is not None:
            self._finish(choice, reason)
        # A usage in the last event only is not a running count: it would assign all tokens to that event.
        is_running = counted is not None and (self._is_counting or not choice.times_ns)
        if is_running and part.finish_reason is None:
            self._is_counting = True
        num_ids = None if part.token_ids is None else len(part.token_ids)
        delta = part.delta
        calls_tool = delta is not None and not (_is_empty(delta.tool_calls) and _is_empty(delta.function_call))
        if text or num_ids or calls_tool:
            self._is_counting = is_running
            count = num_ids if num_ids is not None else counted if is_running else None
            choice.add(t_ns, late_ns, count, text)
        elif is_running and counted and self._is_counting:
            choice.add(t_ns, late_ns, counted, None)
        elif num_ids is not None:
            choice.has_empty_ids = True

    def _finish(self, choice: Choice, reason: str | FinishObject) -> None:
        """Note why a choice ended. An empty word says nothing: the choice goes on."""
        if isinstance(reason, FinishObject):
            self._finish_stated = self._finish_stated or excerpt((reason.message or "").encode())
            reason = reason.type or ""
        choice.finish_reason = reason[:MOST_WORD_CHARS] or choice.finish_reason

    def _take_silent(self, t_ns: int, late_ns: int, counted: int) -> None:
        """Take a count without a choice: a token that completed no character and got no event of its own."""
        if self._is_counting and self._choices:
            self._take_choice(t_ns, late_ns, ChoiceEvent(index=next(iter(self._choices))), "", counted)

    def _note(self, event: Event) -> int | None:
        """Take the parts of an event other than its choices; returns the tokens since the last count.

        None with several choices: servers differ in which of them they count.
        """
        stated = None if _is_null(event.error) else event.error
        if stated is not None or (event.object == "error" and not event.choices):
            stated = stated or event.message
            self._note_error(b"null" if stated is None else bytes(stated))
        if event.usage is not None:
            self.usage = event.usage
        total = event.tokens_so_far
        if self._num_choices != 1 or total is None:
            return None
        since, self._tokens_so_far = total - (self._tokens_so_far or 0), total
        return since if since >= 0 else None

    def _note_error(self, content: bytes) -> None:
        """Take an error event by the JSON that it states."""
        stated: Any = msgspec.json.decode(content) if len(content) <= _MOST_ERROR_BYTES else None
        code = stated.get("code") if isinstance(stated, dict) else None
        if isinstance(stated, str):
            content = stated.encode()
        elif stated is not None:
            content = msgspec.json.encode(stated)
        self._fail("server-error", excerpt(content), code if type(code) is int else None)

    def _take_unreadable(self, payload: bytes, error: Exception) -> None:
        if payload == b"[DONE]":
            self.is_terminated = True
            if isinstance(self._splitter, EventSplitter):
                self._splitter = TailSplitter(self._splitter)
        elif self._is_ending:
            self.cut_event = payload
        else:
            self._fail(
                "malformed-stream", f"an event cannot be read ({decoding_problem(error)}): {excerpt(payload)}"
            )

    def break_off(self, error: ExcessError) -> None:
        """Note that the stream is not read to its end, and drop the event that is incomplete."""
        self._splitter = EventSplitter()
        self._fail(error.kind, str(error))

    def _fail(self, kind: str, message: str, status: int | None = None) -> None:
        if self.error is None:
            self.error = RequestError(kind=kind, message=message, status=status)


def _text(delta: Delta | None) -> str:
    if delta is None:
        return ""
    text = delta.content or delta.refusal or ""
    reasoning = delta.reasoning_content or delta.reasoning
    return reasoning + text if reasoning else text


def _is_null(value: AnyJson) -> bool:
    return value is None or bytes(value) == b"null"


def _is_empty(value: AnyJson) -> bool:
    return value is None or bytes(value) in _EMPTY


def excerpt(data: bytes) -> str:
    """Bytes of a server for a message: short, on one line."""
    text = " ".join(data[:_EXCERPT_BYTES].decode(errors="replace").split())
    return text + ("…" if len(data) > _EXCERPT_BYTES else "")
