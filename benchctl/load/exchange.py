"""One request on its way: its bytes, its times, its answer, and the record that these make."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal

import httpx
import msgspec

from benchctl.errors import OWN_LIMITS
from benchctl.load.answer import Answer, error_of
from benchctl.load.clocks import TIMESPEC, KernelClock
from benchctl.load.limits import limit_passed
from benchctl.load.sockets import OVERHEAD_BYTES, Connection, HeldBytes, Read
from benchctl.profile.sections import Timeouts
from benchctl.records.finish_reasons import FINISH_ERROR_KINDS
from benchctl.records.record import Call, PreparedRequest, RequestError, RequestRecord
from benchctl.units import NS_PER_S
from benchctl.untrusted import LINE_BYTES, MESSAGE_CHARS
from benchctl.untrusted.secrets import redacted

_SLICE_BYTES: Final = 32_768
"""Decoded at once, in a quarter of a millisecond; then other streams are read."""
_OF_THE_CLIENT: Final = frozenset(
    {
        "cancelled", "connect-refused", "connect-timeout", "connect-failed",
        "first-token-timeout", "between-tokens-timeout", "total-timeout", *OWN_LIMITS,
    }
)  # fmt: skip
"""Failures that nothing in the answer explains better."""
_OF_THE_SERVER: Final = frozenset({"http-status", "server-error", "malformed-http"}) | FINISH_ERROR_KINDS


_UNRECORDABLE: Final = RequestError(
    kind="oversized-answer", message=f"the answer takes over {LINE_BYTES >> 20} MiB as a record, and is not kept"
)


@dataclass(slots=True, kw_only=True, eq=False)
class Exchange:
    """The request of one call and its answer. Times are monotonic ns, 0 before they are known."""

    call: Call
    wire: bytes
    """The request as HTTP/1.1 puts it on the wire."""
    timeouts: Timeouts
    clock: KernelClock
    held: HeldBytes
    on_end: "Callable[[Exchange], None]"
    """Called once, when it has ended and before any of it is decoded."""
    scheduled_ns: int = 0
    connected_ns: int = 0
    sent_ns: int = 0
    done_ns: int = 0
    connecting_ns: int = 0
    """Time at which the opening of its connection began."""
    slot_freed: tuple[int, bytes] | None = None
    """The read that freed its slot, if it waited for one: its time and the kernel's timestamp."""
    last_arrival_ns: int = 0
    """The last arrival that has been decoded."""
    reads: list[Read] = field(default_factory=list)
    """Reads that are not yet decoded."""
    failure: RequestError | None = None
    """An error of the transport, or a limit that was reached; errors of the server are in the answer."""
    route: Literal["stream", "httpx"] = "stream"
    """``stream`` for our own transport, ``httpx`` for the fallback."""
    url: httpx.URL | None = None
    """The address that the server redirected it to; None without a redirect."""
    num_redirects: int = 0
    is_stamped: bool = True
    """True while every read has a timestamp of the kernel."""
    is_launched: bool = False
    """True when it is to be sent as soon as its connection is open."""
    is_check_due: bool = False
    """True when a check of its answer is scheduled."""
    is_resent: bool = False
    """True when it was sent twice, because the server closed an idle connection just as it was used."""
    connection: Connection | None = None
    task: "asyncio.Task[None] | None" = None
    """The task that opens its connection, or that carries it by httpx."""
    _answer: Answer | None = None

    @property
    def answer(self) -> Answer:
        """The decoded part of the answer; created on first use, which is after the last byte."""
        if self._answer is None:
            request = self.call.request
            self._answer = Answer(request.n, request.n * request.max_tokens)
        return self._answer

    def begin_answer(self) -> None:
        """Discard what has come and expect an answer from its beginning."""
        self.held.num_bytes -= sum(len(data) + OVERHEAD_BYTES for _, _, data in self.reads)
        self.reads.clear()
        self._answer = None

    @property
    def has_left(self) -> bool:
        """True when it was sent or could not be; a request that was never launched leaves no record."""
        return bool(self.sent_ns) or (self.failure is not None and self.failure.kind != "cancelled")

    @property
    def has_ended(self) -> bool:
        return self.done_ns > 0

    @property
    def last_ns(self) -> int:
        return self.reads[-1][0] if self.reads else self.last_arrival_ns

    def keep(self, read_ns: int, data: bytes) -> None:
        """Store a read without a timestamp of the kernel."""
        self.reads.append((read_ns, b"", data))
        self.held.num_bytes += len(data) + OVERHEAD_BYTES

    @property
    def excess(self) -> RequestError | None:
        """The failure of an answer that must not be read any further, as far as it is decoded."""
        return None if self._answer is None else self._answer.excess

    @property
    def output_ns(self) -> int:
        """The last arrival of output that has been decoded; 0 before the first."""
        return 0 if self._answer is None else self._answer.reader.last_chunk_ns

    def is_over(self) -> bool:
        """Decode all reads; True when nothing that may still come can change the answer."""
        self.decode_all()
        return self.answer.is_over

    def decode_all(self) -> None:
        while self.reads:
            self.decode_some()

    def decode_some(self) -> None:
        """Decode some reads and drop them."""
        reads, feed, last_arrival_ns, unpack = self.reads, self.answer.feed, self.last_arrival_ns, TIMESPEC.unpack
        offset_ns = self.clock.steady_offset_ns(reads[-1][0]) if reads else None
        num_bytes = num_reads = 0
        for read_ns, stamp, data in reads:
            num_reads += 1
            num_bytes += len(data) + OVERHEAD_BYTES
            arrival_ns = read_ns + 1
            if stamp and offset_ns is not None:  # the usual case, without a call per read
                seconds, nanoseconds = unpack(stamp)
                arrival_ns = seconds * NS_PER_S + nanoseconds - offset_ns
            if arrival_ns > read_ns:
                arrival_ns = self._arrival_ns(read_ns, stamp, data)
            if arrival_ns > last_arrival_ns:  # noqa: PLR1730 - a call per token costs more
                last_arrival_ns = arrival_ns
            feed(last_arrival_ns, read_ns - last_arrival_ns, data)
            if num_bytes >= _SLICE_BYTES:
                break
        del reads[:num_reads]
        self.answer.charge(num_bytes)
        self.answer.reader.compact()
        self.last_arrival_ns = last_arrival_ns
        self.held.num_bytes -= num_bytes

    def _arrival_ns(self, read_ns: int, stamp: bytes, data: bytes) -> int:
        """Arrival of a read whose timestamp is missing or implausible: at the latest when it was read."""
        arrival_ns = self.clock.arrival_ns(stamp, read_ns)
        self.is_stamped = self.is_stamped and (arrival_ns is not None or not data)
        return read_ns if arrival_ns is None else arrival_ns

    def end(self, failure: RequestError | None) -> None:
        """Note the end and its failure, of which the first counts."""
        self.failure = self.failure or failure
        self.done_ns = self.last_ns if self.failure is None else time.monotonic_ns()

    async def record(self) -> RequestRecord:
        """The record of the request, after decoding in slices that leave the loop free for the other streams."""
        while self.reads:
            self.decode_some()
            if self.reads:
                await asyncio.sleep(0)
        self.answer.finish(self.done_ns)
        return self._record()

    def slot_free_ns(self) -> int | None:
        """Time at which its slot became free, with the last byte of the stream before; None if it did not wait for
        one.
        """
        if self.slot_freed is None:
            return None
        read_ns, stamp = self.slot_freed
        arrival_ns = self.clock.arrival_ns(stamp, read_ns)
        return read_ns if arrival_ns is None else arrival_ns

    def _record(self) -> RequestRecord:
        reader, request = self.answer.reader, self.call.request
        usage, is_stamped = reader.usage, self.is_stamped and bool(self.last_arrival_ns)
        is_too_large = reader.most_record_bytes > LINE_BYTES  # readers of files bound a line as well
        choices = () if is_too_large else reader.choices(is_stamped)
        error = self._error(request) or limit_passed(choices, self.timeouts, self.sent_ns)
        error = error or (_UNRECORDABLE if is_too_large else None)
        slot_free_ns = self.slot_free_ns()
        return RequestRecord(
            request_id=request.request_id,
            index=request.index,
            is_warmup=self.call.is_warmup,
            scheduled_ns=self.scheduled_ns or slot_free_ns or self.sent_ns,
            slot_free_ns=slot_free_ns,
            connected_ns=self.connected_ns or None,
            sent_ns=self.sent_ns or None,
            done_ns=self.done_ns,
            stamps="kernel" if is_stamped else "loop",
            route=self.route,
            num_redirects=self.num_redirects,
            is_resent=self.is_resent,
            status=self.answer.status,
            choices=choices,
            prompt_tokens=usage.prompt_tokens if usage else None,
            completion_tokens=usage.completion_tokens if usage else None,
            cached_tokens=usage.cached_tokens if usage else None,
            natural_tokens=request.natural_tokens,
            error=None if error is None else self._without_secrets(error),
        )

    def _without_secrets(self, error: RequestError) -> RequestError:
        """The error without secrets, such as those of our headers, in case the server repeats them."""
        call = self.call
        headers = {name: value for name, value in call.headers.items() if name.lower() == "authorization"}
        words = {name: value.rpartition(" ")[2] for name, value in headers.items()}
        message = redacted(error.message, {**words, **call.secrets})[:MESSAGE_CHARS]
        return error if message == error.message else msgspec.structs.replace(error, message=message)

    def _error(self, request: PreparedRequest) -> RequestError | None:
        """The error to record: the server's own error explains more than the way in which the stream then ended."""
        failure = self.failure
        if failure is not None and failure.kind in _OF_THE_CLIENT:
            return failure
        answer_error = error_of(self.answer, request)
        if failure is None or (answer_error is not None and answer_error.kind in _OF_THE_SERVER):
            return answer_error
        return failure
