"""The samplers of a load, each a thread: of the server's processes, its devices and its counters."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Final

import httpx
import msgspec
import psutil

from benchctl.analysis.metrics.server_counters import is_idle, token_counts
from benchctl.engines.metrics_page import series_of
from benchctl.load.control import control_client
from benchctl.measure.telemetry.reading import GpuReader
from benchctl.profile.sections import Telemetry, Timeouts
from benchctl.records.files import JsonlWriter
from benchctl.records.schema import HostSample, PrometheusSample, ResultWarning
from benchctl.units import s_from_ns
from benchctl.untrusted import METRICS_BYTES
from benchctl.untrusted.http import fetch


def host_samples(
    processes: Callable[[], list[psutil.Process]], hz: float, stopped: Event, scan_s: float = 5.0
) -> Iterator[HostSample]:
    """Samples at ``hz`` until ``stopped`` is set; the first has no rates.

    ``processes`` lists those of the server, every ``scan_s``: it reads the state of all processes of the machine.
    """
    client = psutil.Process()
    members = processes()
    scanned_at = time.monotonic()
    psutil.cpu_percent()  # its first value has no meaning
    before_ns, before = time.monotonic_ns(), _cpu_s([*members, client])
    yield _sample(before_ns, members)
    while not stopped.wait(1 / hz):
        if time.monotonic() - scanned_at >= scan_s:
            members, scanned_at = processes(), time.monotonic()
        now_ns, now = time.monotonic_ns(), _cpu_s([*members, client])
        elapsed_s = s_from_ns(now_ns - before_ns)
        used = {pid: now[pid] - before.get(pid, 0.0) for pid in now}
        client_s = used.pop(client.pid, 0.0)
        yield _sample(
            now_ns,
            members,
            server_cpu_cores=sum(used.values()) / elapsed_s,
            client_cpu_cores=client_s / elapsed_s,
            host_cpu_frac=psutil.cpu_percent() / 100,
        )
        before_ns, before = now_ns, now


def _sample(t_ns: int, members: list[psutil.Process], **rates: float) -> HostSample:
    sizes = []
    for member in members:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            sizes.append(member.memory_info().rss)
    return HostSample(
        t_ns=t_ns,
        server_rss_bytes=sum(sizes),
        server_processes=len(sizes),
        memory_available_bytes=psutil.virtual_memory().available,
        **rates,
    )


def _cpu_s(processes: list[psutil.Process]) -> dict[int, float]:
    """CPU seconds by process, for those that still live."""
    used: dict[int, float] = {}
    for process in processes:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            times = process.cpu_times()
            used[process.pid] = times.user + times.system
    return used


_TIMEOUT_S: Final = 5.0


def prometheus_samples(url: str, hz: float, stopped: Event, *, settles: bool = False) -> Iterator[PrometheusSample]:
    """Samples of ``url`` at ``hz`` until ``stopped`` is set, and one more then.

    With ``settles`` the first and the last sample wait, at most two seconds, for counters that are up to date: the
    server reports no running request, and its token counters were the same a tenth of a second before. Raises
    OSError when the page cannot be fetched, ValueError when it cannot be parsed.
    """
    with asyncio.Runner() as runner:  # of this thread
        client = control_client(url, Timeouts())

        def read() -> PrometheusSample:
            return runner.run(_reading(client, url))

        read_end = partial(_settled, read) if settles else read
        yield read_end()
        while not stopped.wait(1 / hz):
            yield read()
        yield read_end()


def _settled(read: Callable[[], PrometheusSample]) -> PrometheusSample:
    """The first sample that repeats the one before while the server is idle, or the last within the limit."""
    deadline = time.monotonic() + 2.0
    before = read()
    while True:
        time.sleep(0.1)
        now = read()
        has_caught_up = is_idle(now.values) and token_counts(now.values) == token_counts(before.values)
        if has_caught_up or time.monotonic() >= deadline:
            return now
        before = now


async def _reading(client: httpx.AsyncClient, url: str) -> PrometheusSample:
    try:
        response = await fetch(client, "GET", url, limit_s=_TIMEOUT_S, max_bytes=METRICS_BYTES)
    except httpx.HTTPError as error:
        raise OSError(f"GET {url}: {error}") from error
    if response.status_code != httpx.codes.OK:
        raise OSError(
            f"GET {url}: answered {response.status_code} {response.reason_phrase}; start the server with its "
            "counters switched on, or set telemetry.prometheus_hz to 0"
        )
    return PrometheusSample(t_ns=time.monotonic_ns(), values=series_of(response.text))


@contextmanager
def sampler(
    name: str,
    path: Path,
    samples: Callable[[Event], Iterator[msgspec.Struct]],
    warnings: list[ResultWarning],
) -> Iterator[None]:
    """Inside, write what ``samples`` yields to ``path``, one flushed line each, in a thread.

    The context begins when the first sample is written, so that each load has a sample from before it. A
    warning is added if sampling failed; the run continues without it.
    """
    stopped, begun = Event(), Event()

    def write() -> None:
        try:
            with JsonlWriter(path) as writer:
                for sample in samples(stopped):
                    writer.write(sample)
                    begun.set()
        except Exception as error:  # noqa: BLE001 - a load does not end for want of samples
            warnings.append(
                ResultWarning(
                    code=f"{name}-sampler-failed",
                    message=f"the {name} sampler failed ({type(error).__name__}: {error}): its samples do not "
                    "cover the whole load",
                )
            )
        finally:
            begun.set()

    thread = Thread(target=write, name=f"benchctl-{name}-sampler", daemon=True)
    thread.start()
    # Time that a load waits for the first sample before it starts without
    begun.wait(5.0)
    try:
        yield
    finally:
        stopped.set()
        thread.join()


@contextmanager
def sampling(
    log_of: Callable[[str], Path],
    rates: Telemetry,
    *,
    processes: Callable[[], list[psutil.Process]] | None = None,
    gpu: GpuReader | None = None,
    metrics_url: str | None = None,
    counts_late: bool = False,
) -> Iterator[list[ResultWarning]]:
    """Fill ``gpu``, ``host`` and ``prometheus.jsonl`` inside. The list holds the samplers' warnings afterwards.

    ``log_of`` names the file of each of them, whose names are those of its records.
    ``processes`` lists the living processes of the server. ``counts_late`` says that it updates its counters a
    moment after its answers, as real engines do.
    """
    warnings: list[ResultWarning] = []
    samples: dict[str, Callable[[Event], Iterator[msgspec.Struct]]] = {}
    if gpu is not None and rates.gpu_hz:
        samples["gpu"] = partial(gpu.samples, rates.gpu_hz, warn=warnings.append)
    if processes is not None and rates.host_hz:
        samples["host"] = partial(host_samples, processes, rates.host_hz)
    if metrics_url is not None and rates.prometheus_hz:
        samples["prometheus"] = partial(prometheus_samples, metrics_url, rates.prometheus_hz, settles=counts_late)
    with ExitStack() as stack:
        for name, of_name in samples.items():
            stack.enter_context(sampler(name, log_of(name), of_name, warnings))
        yield warnings
