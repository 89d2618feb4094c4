"""Speculation on a server with step times: goodput by batch, the batches at which drafts pay, latency by rate."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from benchctl.steptime.queueing import kv_capacity_tokens
from benchctl.steptime.serving_times import RequestSize, ServerLimits
from benchctl.steptime.speculation.batch_load import BatchLoad, Speculation
from benchctl.steptime.speculation.rate_load import RateLoad, load_with_drafts
from benchctl.steptime.speculation.server_steps import Backfill
from benchctl.steptime.work import Deployment

MOST_ROWS: Final = 4096
"""Batches are looked at up to here where memory sets no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedSpeculation:
    """Speculation on one server.

    ``paying`` has, for each number of draft tokens, the smallest and the largest batch at which it gains, among
    those up to ``most_rows``; None where there is none. ``memory_rows`` is how many sequences fit beside the
    weights of both models, None where the memory is unknown.
    """

    origin: str
    """Source of the step times, in words."""
    context: float
    backfill: Backfill
    most_rows: int
    memory_rows: int | None
    batches: tuple[BatchLoad, ...]
    paying: tuple[tuple[int, tuple[int, int] | None], ...]
    rates: tuple[RateLoad, ...] = ()

    @property
    def largest_paying(self) -> int:
        """The largest batch at which any of the draft lengths gains; 0 if none does."""
        return max((batches[1] for _, batches in self.paying if batches is not None), default=0)


def serve(
    speculation: Speculation,
    origin: str,
    batch_sizes: Sequence[int],
    *,
    memory_rows: int | None = None,
    rates: Sequence[float] = (),
    size: RequestSize | None = None,
    limits: ServerLimits | None = None,
) -> ServedSpeculation:
    """Every draft length at each batch size and, for requests of ``size``, at each rate."""
    most_rows = max(1, min(MOST_ROWS, MOST_ROWS if memory_rows is None else memory_rows))
    return ServedSpeculation(
        origin=origin,
        context=speculation.steps.context,
        backfill=speculation.steps.backfill,
        most_rows=most_rows,
        memory_rows=memory_rows,
        batches=tuple(speculation.at_batch(rows) for rows in batch_sizes),
        paying=tuple((num, speculation.batches_that_pay(num, most_rows)) for num in speculation.draft_tokens),
        rates=tuple(load_with_drafts(speculation, rate, size, limits or ServerLimits()) for rate in rates)
        if size is not None
        else (),
    )


def rows_that_fit(target: Deployment, draft: Deployment | None, context: float) -> int | None:
    """Sequences of ``context`` tokens that fit beside the weights of both models; None for unknown memory.

    ``kv_capacity_tokens`` over the context.
    """
    if target.hardware.memory_bytes is None:
        return None
    return int(kv_capacity_tokens(target, draft=draft) / max(context, 1.0))
