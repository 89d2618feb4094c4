"""The samplers of a load: of the server's processes, its devices and its counters."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchctl.measure.telemetry.gpu_reading import GpuReader
from benchctl.measure.telemetry.host import host_samples
from benchctl.measure.telemetry.prometheus import prometheus_samples
from benchctl.measure.telemetry.sampler import Sampler
from benchctl.profile.model import Telemetry
from benchctl.records.record import ResultWarning


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledServer:
    """The sources of samples: the server's processes, its devices and its metrics page, if there are any."""

    server_pid: int | None
    gpu: GpuReader | None
    metrics_url: str | None
    counts_late: bool = False
    """True when the server updates its counters a moment after its answers, as real engines do."""


@contextmanager
def sampling(directory: Path, rates: Telemetry, server: SampledServer) -> Iterator[list[ResultWarning]]:
    """Fill ``gpu``, ``host`` and ``prometheus.jsonl`` inside. The list holds the samplers' warnings afterwards."""
    samplers: list[Sampler] = []
    if server.gpu is not None and rates.gpu_hz:
        samplers.append(Sampler("gpu", directory / "gpu.jsonl", partial(server.gpu.samples, rates.gpu_hz)))
    if server.server_pid is not None and rates.host_hz:
        read = partial(host_samples, server.server_pid, rates.host_hz)
        samplers.append(Sampler("host", directory / "host.jsonl", read))
    if server.metrics_url is not None and rates.prometheus_hz:
        scrape = partial(prometheus_samples, server.metrics_url, rates.prometheus_hz, settles=server.counts_late)
        samplers.append(Sampler("prometheus", directory / "prometheus.jsonl", scrape))
    sampler_warnings: list[ResultWarning] = []
    with ExitStack() as stack:
        for sampler in samplers:
            stack.enter_context(sampler)
        yield sampler_warnings
    sampler_warnings += [warning for sampler in samplers for warning in sampler.warnings]
