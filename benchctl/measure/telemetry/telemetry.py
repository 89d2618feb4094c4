"""The samplers of a load, each a thread: of the server's processes, its devices and its counters."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Final, Self

import msgspec

from benchctl.measure.telemetry.gpu_reading import GpuReader
from benchctl.measure.telemetry.host import host_samples
from benchctl.measure.telemetry.prometheus import prometheus_samples
from benchctl.profile.sections import Telemetry
from benchctl.records.files import JsonlWriter
from benchctl.records.schema import ResultWarning

_FIRST_SAMPLE_S: Final = 5.0
"""Time that a load waits for the first sample before it starts without."""


class Sampler:
    """Inside the context, writes what ``samples`` yields to ``path``, one flushed line each.

    The context begins when the first sample is written, so that each load has a sample from before it. ``warnings``
    tells afterwards if sampling failed; the run continues without it.
    """

    def __init__(self, name: str, path: Path, samples: Callable[[Event], Iterator[msgspec.Struct]]) -> None:
        self.warnings: tuple[ResultWarning, ...] = ()
        self._name = name
        self._path = path
        self._samples = samples
        self._stopped = Event()
        self._begun = Event()
        self._thread = Thread(target=self._write, name=f"benchctl-{name}-sampler", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._begun.wait(_FIRST_SAMPLE_S)
        return self

    def __exit__(self, *_error: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _write(self) -> None:
        try:
            with JsonlWriter(self._path) as writer:
                for sample in self._samples(self._stopped):
                    writer.write(sample)
                    self._begun.set()
        except Exception as error:  # noqa: BLE001 - a load does not end for want of samples
            failed = f"the {self._name} sampler failed ({type(error).__name__}: {error})"
            message = f"{failed}: its samples do not cover the whole load"
            self.warnings = (ResultWarning(code=f"{self._name}-sampler-failed", message=message),)
        finally:
            self._begun.set()


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
    device_warnings: list[ResultWarning] = []
    if server.gpu is not None and rates.gpu_hz:
        gpu, hz = server.gpu, rates.gpu_hz
        samplers.append(
            Sampler(
                "gpu", directory / "gpu.jsonl", lambda stopped: gpu.samples(hz, stopped, device_warnings.append)
            )
        )
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
    sampler_warnings += [*device_warnings, *(warning for sampler in samplers for warning in sampler.warnings)]
