"""Requests: as prepared before the load, and as the client saw them."""

from typing import Final, Literal

from benchctl.records.record import Count, MomentNs, Record, Size

ESTIMATE: Final = "estimate"
"""Source of a number of prompt tokens that no tokenizer counted."""
SERVER: Final = "server"
"""Source of a number of prompt tokens that a server counted before the load."""


class Message(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One chat message."""

    role: str
    """``system``, ``user`` or ``assistant``."""
    content: str
    """Text of the message."""


class PreparedRequest(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One prepared request: prompt, limits and arrival.

    The same for every variant and cell; byte-identical for the same profile and seed. Exactly one of
    ``messages`` (chat) and ``prompt`` (completion) is set.
    """

    request_id: str
    """Identity, the same in every run."""
    index: Count
    """Position in the request set, from 0."""
    arrival_ns: Size
    """Offset from the start of the load. 0 for all requests of a closed loop, which sends when a slot is free."""
    messages: tuple[Message, ...] | None = None
    """Prompt as a chat."""
    prompt: str | None = None
    """Prompt as plain text."""
    prompt_tokens: Count
    """Length of the prompt as counted or estimated before the load; the engine's own count is in ``usage``."""
    prompt_tokens_from: str = ESTIMATE
    """Source of ``prompt_tokens``: ``tokenizer <sha256>`` of a file, ``server``, or ``estimate``."""
    max_tokens: Count
    """Limit in tokens of each choice; with ``ignore_eos`` their exact length."""
    ignore_eos: bool = False
    """Whether each choice has exactly ``max_tokens``, wherever the model would end it."""
    n: Count = 1
    """Choices asked for in this one request."""
    seed: int
    """Seed of the sampler, different for each request."""
    source: str
    """Dataset and row of the prompt, for example ``gsm8k/test:17``."""
    sample: Count = 0
    """Number of this sample of its prompt, when ``n`` samples are sent as ``n`` requests."""
    answer: str | None = None
    """Gold answer, if the dataset has one."""
    session: str | None = None
    """Conversation of which the prompt is a turn, if the dataset names it; sending does not depend on it."""
    natural_tokens: Count | None = None
    """Length at which the baseline's model ended its answer, if that was measured beforehand."""


class ChoiceRecord(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One choice of one request, chunk by chunk.

    Chunks are not tokens: count from usage. Chunks that came out of one read share its time, which is that of its
    newest bytes: for all but the last of them it is an upper bound.
    """

    index: Count
    """Number of the choice, from 0."""
    chunk_ns: tuple[int, ...] = ()
    """Arrival of each event that carried output of this choice."""
    chunk_late_ns: tuple[int, ...] | None = None
    """Time from ``chunk_ns`` until the client read the chunk, if the kernel stamped the arrivals."""
    chunk_tokens: tuple[int, ...] | None = None
    """Tokens in each chunk, if the engine reports them."""
    chunk_chars: tuple[int, ...] | None = None
    """Characters (code points) of ``text`` in each chunk; their sum is its length. None in older records."""
    output_tokens: Count | None = None
    """Tokens of this choice, if the engine reports them."""
    finish_reason: str | None = None
    """``stop``, ``length`` or another word, as the server says it; at most 64 characters."""
    text: str = ""
    """The answer."""


class RequestError(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The failure of a request.

    ``kind`` is a class of its own for each way: ``connect-refused``, ``connect-timeout``, ``connect-failed``
    (anything else before there was a connection), ``too-many-open-files`` and ``out-of-memory`` (of the client),
    ``first-token-timeout``, ``between-tokens-timeout``, ``total-timeout``, ``reset`` and ``early-close`` (the
    connection broke, or ended before the answer did), ``http-status``, ``malformed-http``, ``malformed-stream``,
    ``server-error`` (an error event in the stream), ``unfinished`` (the stream said that it was over before each
    choice had a finish reason), ``finish-error``, ``finish-abort``, ``finish-cancelled``,
    ``finish-content-filter`` and ``finish-timeout`` (the finish reason says that the answer is none),
    ``wrong-length`` (not as many tokens as ``ignore_eos`` demands), ``unrequested-choice``, ``oversized-head``,
    ``oversized-line`` and ``oversized-answer`` (more than any answer to the request holds: it was not read to its
    end), ``cancelled``.
    """

    kind: str
    """Class of the failure."""
    message: str
    """Text of the failure."""
    status: Count | None = None
    """HTTP status, if the server sent one; of an error event, the code in it."""


class RequestRecord(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One request as the client saw it.

    Failed requests are lines like any other and stay in every denominator. Nothing is sent twice, but for a request
    that met an idle connection in the moment in which the server closed it (``is_resent``).
    """

    request_id: str
    """Identity of the prepared request."""
    index: Count
    """Position in the request set, from 0."""
    is_warmup: bool = False
    """Whether it belongs to the warm-up, which no metric counts."""
    scheduled_ns: MomentNs
    """Planned time of sending; for a request without one, the time at which it had a slot."""
    slot_free_ns: MomentNs | None = None
    """Time at which its slot became free: with the last byte of the stream that had it before. None for one that
    waited for no slot, and in older records."""
    connected_ns: MomentNs | None = None
    """Time at which its connection was open: before ``sent_ns``, as connections are made ahead or used again."""
    sent_ns: MomentNs | None = None
    """Time at which its first byte was handed to the kernel; ``sent_ns - scheduled_ns`` is the send lag."""
    done_ns: MomentNs | None = None
    """Time of the last byte of the answer, or of the failure."""
    stamps: Literal["kernel", "loop", "whole"] = "loop"
    """Source of the chunks' times: the kernel as their bytes reached this host, or the client as it read them.
    ``whole``: the answer came in one piece, of which only ``done_ns`` is known."""
    route: Literal["stream", "httpx"] = "stream"
    """The transport made for streams, or one of httpx's own, which costs more and stamps later."""
    num_redirects: Count = 0
    """Redirects that the server sent."""
    is_resent: bool = False
    """Whether it was sent again: the server closed an idle connection before a byte of the answer had come back."""
    status: Count | None = None
    """HTTP status."""
    choices: tuple[ChoiceRecord, ...] = ()
    """Answers, one for each of ``n``."""
    prompt_tokens: Count | None = None
    """From ``usage``: tokens of the prompt."""
    completion_tokens: Count | None = None
    """From ``usage``: summed over the choices of this request, once per request."""
    cached_tokens: Count | None = None
    """From ``usage``: prompt tokens that the server found in its prefix cache."""
    natural_tokens: Count | None = None
    """Copy from the request set, so that the records of a run can be read by themselves."""
    error: RequestError | None = None
    """The failure; None for a request that succeeded."""
