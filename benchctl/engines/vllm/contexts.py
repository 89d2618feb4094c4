"""The context of each step of a vLLM server, which its scheduler does not report: counted from what it does report.

    context after a step = context before it + tokens computed + tokens from the prefix cache - rejected drafts
    context before the next = context after it - tokens of the requests that ended

A request of P prompt and O output tokens ends with P + O - 1 tokens in the cache, and the drafts that were accepted
beyond its end. When the server is idle nothing is left, which proves the count of the steps since it was idle last.
A preemption drops an unknown part, and an aborted request ends without a report: the contexts of such a stretch are
unknown from the first preemption, or as a whole. So are those of several replicas, whose lines alternate.
"""

from collections.abc import Iterable, Iterator

from benchctl.engines.vllm.raw_step import RawStep
from benchctl.errors import RecordError


def with_contexts(raws: Iterable[RawStep]) -> Iterator[tuple[RawStep, int | None]]:
    """Each line with the sum of contexts after its step; None where the lines do not determine it.

    Raises RecordError at the first damaged line, after the lines before it.
    """
    stretch: list[tuple[RawStep, int | None]] = []
    held: int | None = 0
    try:
        for raw in raws:
            after = _context_after(raw, held)
            after = None if after is not None and after < 0 else after
            stretch.append((raw, after))
            held = None if after is None else after - raw.finished_tokens
            if raw.scheduler is not None and not raw.leaves_work:
                yield from stretch if not held else _unknown(stretch)
                stretch, held = [], 0
    except RecordError:
        yield from stretch
        raise
    yield from stretch


def _context_after(raw: RawStep, held: int | None) -> int | None:
    """The context after a step that began with ``held`` tokens; None from where it is unknown."""
    outputs, details = raw.outputs, raw.details
    if held is None or raw.engine or (outputs is not None and outputs.finished_tokens is None):
        return None
    if outputs is not None and (outputs.num_preempted_reqs or details is None):
        return None
    if details is None:
        return held
    from_cache = 0 if raw.prefix_cache is None else raw.prefix_cache.hits
    spec = raw.spec_decoding
    rejected = 0 if spec is None else (spec.num_draft_tokens or 0) - (spec.num_accepted_tokens or 0)
    return held + details.num_ctx_tokens + details.num_generation_tokens + from_cache - rejected


def _unknown(stretch: Iterable[tuple[RawStep, int | None]]) -> Iterator[tuple[RawStep, int | None]]:
    return ((raw, None) for raw, _ in stretch)
