"""The warm-up: what the server loads or compiles lazily is loaded before the load begins."""

from collections.abc import Sequence
from typing import Final

import msgspec

from benchctl.records.run import PreparedRequest

_MAX_TOKENS: Final = 16
"""Enough steps to reach a token at which a value model has candidates to choose from."""


def warmup_requests(requests: Sequence[PreparedRequest], count: int) -> tuple[PreparedRequest, ...]:
    """The first ``count`` requests again (from the start, where there are fewer), short and in other words.

    Other words, because a prompt that the server has seen would be found in its prefix cache. Their sampling is
    that of the run, so that whatever the server loads lazily for it is loaded now.
    """
    return tuple(_reworded(requests[i % len(requests)], i) for i in range(count if requests else 0))


def _reworded(request: PreparedRequest, i: int) -> PreparedRequest:
    prefix = f"(warm-up {i}) "
    messages, prompt = request.messages, request.prompt
    if messages is not None:
        messages = tuple(msgspec.structs.replace(message, content=prefix + message.content) for message in messages)
    return msgspec.structs.replace(
        request,
        request_id=f"warmup-{i}",
        index=i,
        arrival_ns=0,
        messages=messages,
        prompt=None if prompt is None else prefix + prompt,
        max_tokens=min(request.max_tokens, _MAX_TOKENS),
        ignore_eos=True,
    )
