"""Reading a streamed completion: server-sent events to choices, usage and errors.

Pure and incremental: bytes come in with the time at which they arrived, and any way of cutting the same bytes
into reads gives the same result but for those times. An event has arrived when its closing blank line has.

What counts as output of a choice, and so as a chunk: text, reasoning text, a part of a tool call, or token ids.
A first event that only names the role is no output; an event with token ids and no text is (a token that
completes no character), and so is one by which a running count grew.
"""

from array import array
from collections import defaultdict
from typing import Final

import msgspec

from benchctl.load.answer.events import (
    CR,
    UNREADABLE,
    ChoiceEvent,
    Delta,
    Event,
    EventSplitter,
    Usage,
    decode_event,
)
from benchctl.records.request import ChoiceRecord, RequestError

_SHOWN_BYTES: Final = 200

_UNCOUNTED: Final = -1


class _Choice:
    """One choice while it is being read: of each chunk its arrival, the lateness of its read and its tokens.

    Kept in columns, because a stream of ten thousand tokens is to weigh little while it is open.
    """

    __slots__ = (
        "add_count", "add_late", "add_ns", "add_text", "chars", "counts", "finish_reason", "head", "is_told_empty",
        "lates_ns", "silent", "texts", "times_ns",
    )  # fmt: skip

    def __init__(self) -> None:
        self.times_ns = array("q")
        self.lates_ns = array("q")
        self.counts = array("q")
        """``_UNCOUNTED`` where the server does not say it."""
        self.texts: list[str] = []
        """Of each chunk since the choice was last compacted; empty for a silent one."""
        self.head = ""
        """The text of the chunks before those, and in ``chars`` the length of each."""
        self.chars = array("i")
        self.silent: list[int] = []
        """Chunks of which nothing but a count says that there was output: chunks only if the server goes on
        counting."""
        self.finish_reason: str | None = None
        self.is_told_empty = False
        """A list of token ids came and held none: the server counts, also when there is nothing to count."""
        self.add_ns = self.times_ns.append
        self.add_late = self.lates_ns.append
        self.add_count = self.counts.append
        self.add_text = self.texts.append

    def add(self, t_ns: int, late_ns: int, count: int | None, text: str | None) -> None:
        """Take a chunk; its text is None where it is silent."""
        if text is None:
            self.silent.append(len(self.times_ns))
        self.texts.append(text or "")
        self.times_ns.append(t_ns)
        self.lates_ns.append(late_ns)
        self.counts.append(_UNCOUNTED if count is None else count)

    @property
    def is_counted(self) -> bool:
        """Whether the server counts the tokens of all chunks."""
        return _UNCOUNTED not in self.counts and (bool(self.counts) or self.is_told_empty)

    def compact(self) -> None:
        """Keep texts as one, and of each its length: while tokens arrive, nobody measures them."""
        self.chars.extend(map(len, self.texts))
        self.head += "".join(self.texts)
        self.texts.clear()

    def drop_silent(self) -> None:
        """The count did not go on running, so it was none that could show a chunk. Of a compacted choice."""
        for i in reversed(self.silent):
            del self.times_ns[i], self.lates_ns[i], self.counts[i], self.chars[i]
        self.silent.clear()


class CompletionReader:
    """One streamed completion of ``num_choices`` choices, read event by event."""

    __slots__ = (
        "_choices",
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
        """The last one stated."""
        self.error: RequestError | None = None
        """The first error event or unreadable event."""
        self.is_terminated = False
        """Whether ``[DONE]`` arrived; not every server sends it."""
        self.cut_event = b""
        """What had arrived of an event in whose middle the stream ended."""
        self._num_choices = num_choices
        self._choices: defaultdict[int, _Choice] = defaultdict(_Choice)
        self._splitter = EventSplitter()
        self._is_ending = False
        self._is_counting = False
        """The server states a running count: each event until now that could have carried it did."""
        self._tokens_so_far: int | None = None

    def feed(self, t_ns: int, data: bytes, late_ns: int = 0) -> None:
        """Take what arrived at ``t_ns`` and was read ``late_ns`` after that."""
        line, _, rest = data.partition(b"\n")
        if rest == b"\n" and line[:7] == b"data: {" and CR not in line and self._splitter.is_between:
            payloads = [line[6:]]  # nearly always; the splitter would find the same
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
            for told in choices or ():
                text, ids = told.text, told.token_ids
                if text is None:
                    text = _text(told.delta)
                if (text or ids) and counted is None and told.finish_reason is None:
                    # Nearly all events come here; the long way gives the same for them.
                    self._is_counting = False
                    choice = self._choices[told.index]
                    choice.add_ns(t_ns)
                    choice.add_late(late_ns)
                    choice.add_count(_UNCOUNTED if ids is None else len(ids))
                    choice.add_text(text)
                else:
                    self._take_choice(t_ns, late_ns, told, text, counted)

    def finish(self, t_ns: int, late_ns: int = 0) -> None:
        """Take what is left when the stream has ended; a last event may lack its blank line."""
        self._is_ending = True
        self.feed(t_ns, b"\n\n", late_ns)

    def compact(self) -> None:
        """Keep in less memory what has come until now."""
        for choice in self._choices.values():
            choice.compact()

    @property
    def num_finished(self) -> int:
        """Choices that came with a finish reason."""
        return sum(choice.finish_reason is not None for choice in self._choices.values())

    @property
    def indices(self) -> tuple[int, ...]:
        """Of the choices that the stream speaks of, ascending."""
        return tuple(sorted(self._choices))

    @property
    def last_chunk_ns(self) -> int:
        """When output last arrived; 0 before there was any."""
        return max((choice.times_ns[-1] for choice in self._choices.values() if choice.times_ns), default=0)

    @property
    def has_events(self) -> bool:
        return bool(self._choices) or self.usage is not None or self.error is not None or self.is_terminated

    @property
    def output_tokens(self) -> int | None:
        """Tokens of all choices: as ``usage`` states them, or else the sum of what the events count."""
        if self.usage is not None and self.usage.completion_tokens is not None:
            return self.usage.completion_tokens
        counts = [self._output_tokens(choice) for choice in self._choices.values()]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) == self._num_choices else None

    def choices(self, stamps_late: bool = False) -> tuple[ChoiceRecord, ...]:
        """What arrived for each choice, by index; with ``stamps_late`` also how late each chunk was read."""
        return tuple(self._record(index, self._choices[index], stamps_late) for index in self.indices)

    def _record(self, index: int, choice: _Choice, stamps_late: bool) -> ChoiceRecord:
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
            text=choice.head,
        )

    def _output_tokens(self, choice: _Choice) -> int | None:
        if self._num_choices == 1:
            stated = self.usage.completion_tokens if self.usage is not None else None
            stated = self._tokens_so_far if stated is None else stated
            if stated is not None:
                return stated
        return sum(choice.counts) if choice.is_counted else None

    def _take_choice(self, t_ns: int, late_ns: int, told: ChoiceEvent, text: str, counted: int | None) -> None:
        choice = self._choices[told.index]
        if told.finish_reason is not None:
            choice.finish_reason = told.finish_reason
        # A usage that only the last event carries is no running count: it would claim all tokens for that event.
        is_running = counted is not None and (self._is_counting or not choice.times_ns)
        if is_running and told.finish_reason is None:
            self._is_counting = True
        num_ids = None if told.token_ids is None else len(told.token_ids)
        if text or num_ids or _calls_tool(told.delta):
            self._is_counting = is_running
            count = num_ids if num_ids is not None else counted if is_running else None
            choice.add(t_ns, late_ns, count, text)
        elif is_running and counted and self._is_counting:
            choice.add(t_ns, late_ns, counted, None)
        elif num_ids is not None:
            choice.is_told_empty = True

    def _take_silent(self, t_ns: int, late_ns: int, counted: int) -> None:
        """The last token completed no character, and the server sent no event of its own for it."""
        if self._is_counting and self._choices:
            self._take_choice(t_ns, late_ns, ChoiceEvent(index=next(iter(self._choices))), "", counted)

    def _note(self, event: Event) -> int | None:
        """Take what an event says beside its choices; the tokens since the last one that counted them.

        Known for a single choice only: with several, servers differ in whose tokens they count.
        """
        if event.error is not None or (event.object == "error" and not event.choices):
            said = event.message if event.error is None else event.error
            self._fail("server-error", shown(said.encode() if isinstance(said, str) else msgspec.json.encode(said)))
        if event.usage is not None:
            self.usage = event.usage
        total = event.tokens_so_far
        if self._num_choices != 1 or total is None:
            return None
        since, self._tokens_so_far = total - (self._tokens_so_far or 0), total
        return since if since >= 0 else None

    def _take_unreadable(self, payload: bytes, error: Exception) -> None:
        if payload == b"[DONE]":
            self.is_terminated = True
        elif self._is_ending:
            self.cut_event = payload
        else:
            self._fail("malformed-stream", f"an event cannot be read ({error}): {shown(payload)}")

    def _fail(self, kind: str, message: str) -> None:
        if self.error is None:
            self.error = RequestError(kind=kind, message=message)


def _text(delta: Delta | None) -> str:
    if delta is None:
        return ""
    text = delta.content or delta.refusal or ""
    reasoning = delta.reasoning_content or delta.reasoning
    return reasoning + text if reasoning else text


def _calls_tool(delta: Delta | None) -> bool:
    return delta is not None and bool(delta.tool_calls or delta.function_call)


def shown(data: bytes) -> str:
    """Foreign bytes as a message shows them: short, on one line."""
    text = " ".join(data[:_SHOWN_BYTES].decode(errors="replace").split())
    return text + ("…" if len(data) > _SHOWN_BYTES else "")
