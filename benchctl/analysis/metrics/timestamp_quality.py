"""Quality of the client's timestamps: their source, the delay of reads, and the load of the client's processes."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Final

from benchctl.analysis.metrics.arrival_errors import by_worker
from benchctl.analysis.metrics.percentile import percentiles
from benchctl.analysis.metrics.request_timing import concatenated, num_zeros, pooled_itls_ns, send_lag_ns
from benchctl.analysis.metrics.unknown import known_values, ms_or_none, quotient
from benchctl.records.request import RequestRecord
from benchctl.records.samples import ClientSample
from benchctl.units import NS_PER_S, s_from_ns

_PERIOD_NS: Final = NS_PER_S // 10
"""Period of the samples of an event loop that does not stall."""
MIN_CPU_SPAN_NS: Final = NS_PER_S
"""Processor time over a shorter span says little."""


def client_metrics(requests: Sequence[RequestRecord], samples: Sequence[ClientSample]) -> dict[str, float | None]:
    """The metrics of the load generator itself, on its own clock."""
    lags = known_values([send_lag_ns(request) for request in requests])
    send = percentiles(lags, len(lags), (50, 99))
    late = concatenated([choice.chunk_late_ns or () for request in requests for choice in request.choices])
    chunks = [len(choice.chunk_ns) for request in requests for choice in request.choices]
    num_bounds = num_zeros(pooled_itls_ns(requests))
    cores = busy_cores(samples)
    return {
        "p50_send_lag_ms": ms_or_none(send[50]),
        "p99_send_lag_ms": ms_or_none(send[99]),
        "max_send_lag_ms": ms_or_none(max(lags, default=None)),
        "kernel_stamp_frac": quotient(len(late), sum(chunks)),
        "coalesced_chunk_frac": quotient(num_bounds, sum(chunks)),
        "p99_read_delay_ms": ms_or_none(percentiles(late, len(late), (99,))[99]),
        "max_loop_lag_ms": ms_or_none(max((sample.loop_lag_ns for sample in samples), default=None)),
        "client_cpu_cores": sum(cores.values()) if cores else None,
    }


def busy_cores(samples: Iterable[ClientSample]) -> Mapping[int, float]:
    """Cores that each process of the load generator kept busy, by its number; at least a second of each."""
    return {
        worker: (own[-1].cpu_ns - own[0].cpu_ns) / span_ns
        for worker, own in by_worker(samples).items()
        if (span_ns := own[-1].t_ns - own[0].t_ns) >= MIN_CPU_SPAN_NS
    }


def samples_span_ns(samples: Iterable[ClientSample]) -> int:
    """Time that the samples cover, in the process that was sampled longest."""
    return max((own[-1].t_ns - own[0].t_ns + _PERIOD_NS for own in by_worker(samples).values()), default=0)


def stalled_ns(samples: Iterable[ClientSample], limit_ns: float) -> int:
    """Time covered by samples whose lag exceeds the limit, in the process with the most of it.

    Time rather than a count, because a stalled loop takes fewer samples.
    """
    late = []
    for own in by_worker(samples).values():
        starts = [own[0].t_ns - _PERIOD_NS, *(sample.t_ns for sample in own[:-1])]
        late.append(sum(s.t_ns - start for s, start in zip(own, starts, strict=True) if s.loop_lag_ns > limit_ns))
    return max(late, default=0)


def clock_steps(samples: Iterable[ClientSample]) -> tuple[tuple[float, float], ...]:
    """Each time that the wall clock was set during the load: seconds since the first look at it, and by how many.

    They are those of the process that noticed most.
    """
    offsets = [
        [sample.offset for sample in own if sample.offset is not None] for own in by_worker(samples).values()
    ]
    most = max(offsets, key=len, default=[])
    return tuple(
        (
            s_from_ns(after.t_ns - most[0].t_ns),
            s_from_ns(after.realtime_less_monotonic_ns - before.realtime_less_monotonic_ns),
        )
        for before, after in pairwise(most)
    )
