"""The failure of an answer that has ended, if it is not what was requested."""

from typing import Final

import msgspec

from benchctl.load.answer.answer import OK, Answer
from benchctl.load.answer.events import UNREADABLE
from benchctl.load.answer.stream import CompletionReader, excerpt
from benchctl.records.record import PreparedRequest, RequestError

_MOST_OVER_FRAC: Final = 1.25
_MOST_OVER_TOKENS: Final = 16
"""Some servers count the tokens of the text anew, and get a few more than were generated."""


def error_of(answer: Answer, request: PreparedRequest) -> RequestError | None:
    """The error of an answer that has ended; None only when everything that ``request`` asks for has come.

    The server's own error explains more than the way in which the answer then ended.
    """
    status, reader = answer.status, answer.reader
    if status is not None and status != OK:
        return RequestError(
            kind="http-status", message=answer.http_error or _stated(answer.body_head), status=status
        )
    if reader.error is not None:
        return reader.error
    if answer.http_error is not None:
        return RequestError(kind="malformed-http", message=answer.http_error)
    if (failed := reader.finish_error) is not None:
        return failed
    if not answer.is_complete:
        when = "before it answered" if status is None else "in mid-stream"
        return RequestError(kind="early-close", message=f"the server closed the connection {when}")
    return _incompleteness(answer, request) or _miscount(reader, request)


def _incompleteness(answer: Answer, request: PreparedRequest) -> RequestError | None:
    reader = answer.reader
    if reader.cut_event:
        message = f"the stream ended in the middle of an event: {excerpt(reader.cut_event)}"
        return RequestError(kind="early-close", message=message)
    if not reader.has_events and answer.body_head:
        message = f"the answer holds no events: {excerpt(answer.body_head)}"
        return RequestError(kind="malformed-stream", message=message)
    if reader.num_finished < request.n:
        finished = f"{reader.num_finished} of {request.n} choices finished"
        if reader.is_terminated:
            message = f"the server ended the stream by [DONE] with {finished}: the others have no finish_reason"
            return RequestError(kind="unfinished", message=message)
        return RequestError(kind="early-close", message=f"the stream ended with {finished}")
    return None


def _miscount(reader: CompletionReader, request: PreparedRequest) -> RequestError | None:
    output_tokens, forced_tokens = reader.output_tokens, request.max_tokens * request.n
    if output_tokens is None:
        message = "the stream states no usage and no ids of all its tokens: tokens cannot be counted"
        return RequestError(kind="malformed-stream", message=message)
    if output_tokens > _MOST_OVER_FRAC * forced_tokens + _MOST_OVER_TOKENS:
        message = f"usage counts {output_tokens} output tokens where at most {forced_tokens} were requested"
        return RequestError(kind="wrong-length", message=message)
    if request.ignore_eos and output_tokens != forced_tokens:
        message = f"{output_tokens} output tokens where ignore_eos demands {forced_tokens}"
        return RequestError(kind="wrong-length", message=message)
    return None


class _Refusal(msgspec.Struct):
    error: msgspec.Raw = msgspec.Raw()
    message: str | None = None


def _stated(body: bytes) -> str:
    """The message of a refusal: of ``{"error": {"message": …}}``, of ``{"message": …}``, or the body as it is."""
    nested = body
    while nested:
        try:
            refusal = msgspec.json.decode(nested, type=_Refusal)
        except UNREADABLE:
            break
        if refusal.message is not None:
            return excerpt(refusal.message.encode())
        body, nested = nested, bytes(refusal.error)
    return excerpt(nested or body) or "no message"
