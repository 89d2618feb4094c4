"""One request on its way: its bytes, its times, its limits, its answer, and the record that these make; counts of
records, and the signs of life of a load.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set as AbstractSet
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from operator import gt, sub
from typing import Final, Literal

import msgspec

from benchctl.errors import OWN_LIMITS
from benchctl.load.answer import Answer, error_of
from benchctl.load.clocks import TIMESPEC, KernelClock
from benchctl.load.sockets import OVERHEAD_BYTES, Connection, Read, Receiver
from benchctl.profile.sections import Timeouts
from benchctl.records.finish_reasons import FINISH_ERROR_KINDS
from benchctl.records.record import Call, ChoiceRecord, PreparedRequest, RequestError, RequestRecord
from benchctl.units import NS_PER_S
from benchctl.untrusted import LINE_BYTES, MESSAGE_CHARS
from benchctl.untrusted.secrets import redacted

CANCELLED: Final = RequestError(kind="cancelled", message="the load ended before this request did")
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
_LIMITS: Final = {
    "connect_s": ("connect-timeout", "no connection"),
    "first_token_s": ("first-token-timeout", "no token"),
    "between_tokens_s": ("between-tokens-timeout", "no further token"),
    "request_s": ("total-timeout", "no end"),
}
"""By the key of the limit in a profile: the kind of failure, and what did not come."""
_CHECKS_PER_LIMIT: Final = 20
_HELD_BYTES: Final = 4 << 20
"""Bytes of undecoded reads beyond which streams are decoded while they are open."""


@dataclass(slots=True, kw_only=True, eq=False)
class Exchange:
    """The request of one call and its answer. Times are monotonic ns, 0 before they are known."""

    call: Call
    wire: bytes
    """The request as HTTP/1.1 puts it on the wire."""
    timeouts: Timeouts
    clock: KernelClock
    receiver: Receiver
    on_end: "Callable[[Exchange], None]"
    """Called once, when it has ended and before any of it is decoded."""
    scheduled_ns: int = 0
    connected_ns: int = 0
    sent_ns: int = 0
    done_ns: int = 0
    connecting_ns: int = 0
    """Time at which the opening of a connection of its own began."""
    later: tuple[Call, ...] = ()
    """The turns behind it in its conversation, which are sent one after the other."""
    earlier_answers: tuple[str, ...] = ()
    """The answers to the turns before it."""
    slot_freed: tuple[int, bytes] | None = None
    """The read that freed its slot, if it waited for one: its time and the kernel's timestamp."""
    last_arrival_ns: int = 0
    """The last arrival that has been decoded."""
    reads: list[Read] = field(default_factory=list)
    """Reads that are not yet decoded."""
    failure: RequestError | None = None
    """An error of the transport, or a limit that was reached; errors of the server are in the answer."""
    route: Literal["stream", "httpx"] = "stream"
    """``stream`` for our own transport, ``httpx`` for servers that speak TLS."""
    is_stamped: bool = True
    """True while every read has a timestamp of the kernel."""
    is_launched: bool = False
    """True when it is to be sent as soon as its connection is open."""
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

    @property
    def output_ns(self) -> int:
        """The last arrival of output that has been decoded; 0 before the first."""
        return 0 if self._answer is None else self._answer.reader.last_chunk_ns

    def keep(self, read_ns: int, data: bytes) -> None:
        """Store a read without a timestamp of the kernel."""
        self.reads.append((read_ns, b"", data))
        self.receiver.num_held_bytes += len(data) + OVERHEAD_BYTES

    def begin_anew(self) -> None:
        """Discard what has come, and the connection: the request needs another one."""
        self.receiver.num_held_bytes -= sum(len(data) + OVERHEAD_BYTES for _, _, data in self.reads)
        self.reads.clear()
        self._answer = self.connection = None
        self.connected_ns = 0

    def is_over(self) -> bool:
        """Decode all reads; True when nothing that may still come can change the answer."""
        self.decode_all()
        return self.answer.is_over

    def decode_all(self) -> None:
        while self.reads:
            self.decode_some()

    def decode_some(self) -> None:
        """Decode some reads and drop them."""
        num_bytes = num_reads = 0
        for _, _, data in self.reads:
            num_reads += 1
            num_bytes += len(data) + OVERHEAD_BYTES
            # Decoded at once, in a quarter of a millisecond; then other streams are read
            if num_bytes >= 32_768:
                break
        reads_ns, stamps, pieces = zip(*self.reads[:num_reads], strict=True)
        arrivals_ns = self._arrivals_ns(reads_ns, stamps, pieces)
        del self.reads[:num_reads]
        self.answer.feed_all(arrivals_ns, list(map(sub, reads_ns, arrivals_ns)), list(pieces))
        self.answer.charge(num_bytes)
        self.last_arrival_ns = arrivals_ns[-1]
        self.receiver.num_held_bytes -= num_bytes

    def _arrivals_ns(self, reads_ns: Sequence[int], stamps: Sequence[bytes], pieces: Sequence[bytes]) -> list[int]:
        """Arrivals of reads in a row, none before the one before it."""
        offset_ns = self.clock.steady_offset_ns(self.reads[-1][0])
        arrivals_ns: Sequence[int] = ()
        are_stamped = {*map(len, stamps)} == {TIMESPEC.size}
        if are_stamped and offset_ns is not None:  # the usual case, without a call per read
            seconds = TIMESPEC.iter_unpack(b"".join(stamps))
            arrivals_ns = [whole * NS_PER_S + nanoseconds - offset_ns for whole, nanoseconds in seconds]
        if not arrivals_ns or any(map(gt, arrivals_ns, reads_ns)):
            arrivals_ns = list(map(self._arrival_ns, reads_ns, stamps, pieces))
        return list(accumulate(arrivals_ns, max, initial=self.last_arrival_ns))[1:]

    def _arrival_ns(self, read_ns: int, stamp: bytes, data: bytes) -> int:
        """Arrival of a read whose timestamp is missing or implausible: at the latest when it was read."""
        arrival_ns = self.clock.arrival_ns(stamp, read_ns)
        self.is_stamped = self.is_stamped and (arrival_ns is not None or not data)
        return read_ns if arrival_ns is None else arrival_ns

    def end(self) -> None:
        """Note the end. Limits are checked now and then: an answer that ended too late in between was too late."""
        if self.failure is None and self.sent_ns:
            self.failure = _reached("request_s", self.timeouts, self.sent_ns, self.last_ns)
        self.done_ns = self.last_ns if self.failure is None else time.monotonic_ns()

    async def record(self) -> RequestRecord:
        """The record of the request, after decoding in slices that leave the loop free for the other streams."""
        while self.reads:
            self.decode_some()
            if self.reads:
                await asyncio.sleep(0)
        self.answer.finish(self.done_ns)
        return self._record()

    def _record(self) -> RequestRecord:
        reader, request = self.answer.reader, self.call.request
        usage, is_stamped = reader.usage, self.is_stamped and bool(self.last_arrival_ns)
        is_too_large = reader.most_record_bytes > LINE_BYTES  # readers of files bound a line as well
        choices = () if is_too_large else reader.choices(is_stamped)
        error = self._error(request) or _late_output(choices, self.timeouts, self.sent_ns)
        error = error or (_UNRECORDABLE if is_too_large else None)
        slot_free_ns = None
        if self.slot_freed is not None:
            read_ns, stamp = self.slot_freed
            slot_free_ns = self.clock.arrival_ns(stamp, read_ns) or read_ns
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
            is_resent=self.is_resent,
            status=self.answer.status,
            choices=choices,
            prompt_tokens=usage.prompt_tokens if usage else None,
            completion_tokens=usage.completion_tokens if usage else None,
            cached_tokens=usage.cached_tokens if usage else None,
            natural_tokens=request.natural_tokens,
            turn=request.turn,
            error=None if error is None else self._without_secrets(error),
        )

    def _error(self, request: PreparedRequest) -> RequestError | None:
        """The error to record: the server's own error explains more than the way in which the stream then ended."""
        failure = self.failure
        if failure is not None and failure.kind in _OF_THE_CLIENT:
            return failure
        answer_error = error_of(self.answer, request)
        if failure is None or (answer_error is not None and answer_error.kind in _OF_THE_SERVER):
            return answer_error
        return failure

    def _without_secrets(self, error: RequestError) -> RequestError:
        """The error without secrets, such as those of our headers, in case the server repeats them."""
        call = self.call
        headers = {name: value for name, value in call.headers.items() if name.lower() == "authorization"}
        words = {name: value.rpartition(" ")[2] for name, value in headers.items()}
        message = redacted(error.message, {**words, **call.secrets})[:MESSAGE_CHARS]
        return error if message == error.message else msgspec.structs.replace(error, message=message)


def _reached(limit: str, timeouts: Timeouts, since_ns: int, now_ns: int) -> RequestError | None:
    """The failure by the limit of that key, if it was reached between ``since_ns`` and ``now_ns``."""
    limit_s: float | None = getattr(timeouts, limit)
    if limit_s is None or now_ns - since_ns <= limit_s * NS_PER_S:
        return None
    kind, missing = _LIMITS[limit]
    return RequestError(kind=kind, message=f"{missing} within {limit_s:g} s (timeouts.{limit})")


def limit_reached(exchange: Exchange, timeouts: Timeouts, now_ns: int) -> RequestError | None:
    """The limit that ``exchange`` has reached at ``now_ns``; None while there is none.

    Only output counts as a token: no comment that keeps the connection alive, and no event that names the role.
    Arrived bytes are therefore decoded first, and only when the limit may have been reached.
    """
    if exchange.failure is not None:
        return None
    if not exchange.sent_ns:
        is_waiting = exchange.connecting_ns and not exchange.connected_ns
        return _reached("connect_s", timeouts, exchange.connecting_ns, now_ns) if is_waiting else None
    return _reached("request_s", timeouts, exchange.sent_ns, now_ns) or _late_token(exchange, timeouts, now_ns)


def _late_token(exchange: Exchange, timeouts: Timeouts, now_ns: int) -> RequestError | None:
    since_ns = exchange.output_ns or exchange.sent_ns
    if not any(_reached(limit, timeouts, since_ns, now_ns) for limit in ("first_token_s", "between_tokens_s")):
        return None
    exchange.decode_all()
    if exchange.output_ns:
        return _reached("between_tokens_s", timeouts, exchange.output_ns, now_ns)
    return _reached("first_token_s", timeouts, exchange.sent_ns, now_ns)


def _late_output(choices: Sequence[ChoiceRecord], timeouts: Timeouts, sent_ns: int) -> RequestError | None:
    """The first limit that output came too late for: a check in time sees a short excess only by chance."""
    if timeouts.first_token_s is None and timeouts.between_tokens_s is None:
        return None
    times_ns = sorted(t_ns for choice in choices for t_ns in choice.chunk_ns)
    first = [_reached("first_token_s", timeouts, sent_ns, t_ns) for t_ns in times_ns[:1]]
    others = (_reached("between_tokens_s", timeouts, before_ns, t_ns) for before_ns, t_ns in pairwise(times_ns))
    return next(filter(None, chain(first, others)), None)


class Watch:
    """Supervises ``open_exchanges``, a set that others change: time limits, and the memory that reads take.

    ``stop`` ends an exchange that is overdue.
    """

    def __init__(
        self,
        open_exchanges: AbstractSet[Exchange],
        timeouts: Timeouts,
        receiver: Receiver,
        stop: Callable[[Exchange, RequestError], None],
    ) -> None:
        self._open = open_exchanges
        self._timeouts = timeouts
        self._receiver = receiver
        self._stop = stop

    async def run(self) -> None:
        """Stop requests that have reached a limit, and bound the memory of undecoded reads; never returns."""
        limits_s = [limit_s for key in _LIMITS if (limit_s := getattr(self._timeouts, key)) is not None]
        interval_s = min(max(min(limits_s) / _CHECKS_PER_LIMIT, 0.05), 1.0)
        next_check_s = 0.0
        while True:
            await asyncio.sleep(min(interval_s, 0.1))
            if (now_s := time.monotonic()) >= next_check_s:
                next_check_s = now_s + interval_s
                await self._stop_overdue(time.monotonic_ns())
            if self._receiver.num_held_bytes > _HELD_BYTES:
                for _ in self._decoding():
                    await asyncio.sleep(0)

    async def _stop_overdue(self, now_ns: int) -> None:
        self._receiver.read_ready()  # a client that was held up has not seen yet what came in time
        for exchange in tuple(self._open):
            num_reads = len(exchange.reads)
            reached = limit_reached(exchange, self._timeouts, now_ns) if exchange in self._open else None
            if reached is not None:
                self._stop(exchange, reached)
            if len(exchange.reads) < num_reads:
                await asyncio.sleep(0)  # decoding took a while: let others run

    def decode_now(self) -> None:
        """Decode reads of open streams until little of them is left, whatever waits meanwhile.

        A server that sends faster than anybody generates is not measured, only survived.
        """
        for _ in self._decoding():
            pass

    def _decoding(self) -> Iterator[None]:
        """Decode a piece at a time, longest streams first; end those of which no more must be read."""
        for exchange in sorted(self._open, key=lambda exchange: len(exchange.reads), reverse=True):
            while exchange.reads and exchange in self._open:
                exchange.decode_some()
                if exchange.answer.is_broken_off and exchange.answer.reader.error is not None:
                    self._stop(exchange, exchange.answer.reader.error)
                yield
            if self._receiver.num_held_bytes <= _HELD_BYTES // 2:
                return


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
    opening: "LoadSummary | None" = None
    """The counts of its warm-up requests, apart from its own; None where all requests are its own."""
    primed_ns: int | None = None
    """The first send of the requests that brought its prefixes into the cache, if there were any."""

    @property
    def begin_ns(self) -> int | None:
        """The first send, also of its opening."""
        return self.first_send_ns if self.opening is None else self.opening.first_send_ns

    def count(self, record: RequestRecord) -> None:
        if record.is_warmup and self.opening is not None:
            self.opening.count(record)
            return
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
