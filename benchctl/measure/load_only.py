"""One load on one running server, without an experiment around it.

    directory ▸ effective configuration ▸ warm-up ▸ load ▸ verdict

It leaves a result directory like any other, with a single run. It starts nothing, samples no device and keeps
nothing in memory while it sends; afterwards the run is read back and judged like any other.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from benchctl.analysis.metrics.latency import is_completed, measured, total
from benchctl.analysis.validity.answers import check_client_tokens
from benchctl.engines.attach import AttachEngine, AttachOptions
from benchctl.engines.engine import LaunchSite
from benchctl.errors import LoadError
from benchctl.load.client import StreamClient
from benchctl.load.demand import size_of
from benchctl.measure.directory import Origin, create_results, set_state
from benchctl.measure.machine import new_manifest, this_node
from benchctl.measure.measured_run import MeasuredRun
from benchctl.measure.sending import ServerUnderTest
from benchctl.measure.server.server import NOT_FRESH
from benchctl.measure.warmup import warmup_requests
from benchctl.profile.arrival import Arrival
from benchctl.profile.model import Profile, VariantSettings
from benchctl.records.directory import ResultDirectory
from benchctl.records.integrity import record_run
from benchctl.records.loaded import LoadedRun, load_run
from benchctl.records.record import Manifest, RunRecord
from benchctl.records.schema import ResultWarning
from benchctl.records.writers import sole_writer
from benchctl.workload.prepare import PreparedSet

if TYPE_CHECKING:
    from benchctl.analysis.metrics.run import LoadFigures


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """The records of a load and what they come to."""

    manifest: Manifest
    record: RunRecord
    figures: "LoadFigures"
    arrival: Arrival


def create_load_directory(profile: Profile, prepared: PreparedSet, origin: Origin) -> ResultDirectory:
    """Write everything that is known before the load. Raises UsageError where no directory can be created."""
    manifest = msgspec.structs.replace(
        new_manifest(profile, prepared, origin.argv), state="running", label=origin.label
    )
    return create_results(profile, prepared, origin, manifest)


def load_server(
    results: ResultDirectory,
    profile: Profile,
    on_progress: Callable[[int], None],
    limits_ms: Mapping[str, float] | None = None,
) -> LoadResult:
    """Send the load that is prepared in ``results`` and judge it; goodput counts the requests within ``limits_ms``.

    ``on_progress`` is called with the number of requests that have ended. A load of which nothing completed is a
    record with state ``failed``. Raises KeyboardInterrupt on SIGINT or SIGTERM; the records then say so.
    """
    (planned,) = results.plan().runs
    run = MeasuredRun(profile, planned, results.run(planned.run_id), engine=AttachEngine(), node=this_node())
    with sole_writer(results.path):
        try:
            with run.begun(can_resume=False):
                error = run.perform(_send(run, results, on_progress))
                loaded = load_run(run.directory)
                if error is None:
                    _judge(run, results, loaded)
        finally:
            with suppress(OSError, MemoryError):  # a full disk has been reported as what it did to the run
                set_state(results, run.record.state)
                record_run(results, run.record.run_id)
    from benchctl.analysis.metrics.run import load_figures  # noqa: PLC0415 - numpy, after the load

    arrival = profile.workload.arrival
    return LoadResult(
        manifest=results.manifest(),
        record=run.record,
        figures=load_figures(replace(loaded, record=run.record), arrival, limits_ms or {}),
        arrival=arrival,
    )


async def _send(run: MeasuredRun, results: ResultDirectory, on_progress: Callable[[int], None]) -> None:
    """Ask the server for its configuration, warm it up and send the load.

    Raises LoadError when none of the warm-up's requests completes: the load would fail the same way.
    """
    profile, count = run.profile, run.profile.workload.num_warmups
    async with StreamClient(run.engine.base_url(run.settings, 0), profile.timeouts) as client:
        target = ServerUnderTest(run, client, on_progress=on_progress)
        reported = await target.record_configuration(LaunchSite(port=0, directory=run.directory.path))
        target.settings = _with_served_model(run.settings, reported.get("served_model"))
        first = tuple(islice(results.prepared_requests(), count))
        if first:
            is_forced = profile.stop == "forced"
            again = [
                msgspec.structs.replace(request, ignore_eos=is_forced) for request in warmup_requests(first, count)
            ]
            run.time(warmup_start_ns=time.monotonic_ns())
            warmup = await target.send_bursts([again])
            if warmup.num_failed == warmup.num_sent:
                remedy = "correct the address, --model or --dialect, or ask the server's owner"
                message = f"the server generates nothing ({warmup.first_error}), so no load was sent; {remedy}"
                raise LoadError(message, cause="no-first-generation")
            run.judge_warmup(warmup)
        await target.send_load(results.prepared_requests(), size_of(results.prepared_requests()))


def _judge(run: MeasuredRun, results: ResultDirectory, loaded: LoadedRun) -> None:
    """The verdict on a load that went to its end; its requests are read from the file, not kept in memory."""
    completed = [request for request in measured(loaded.requests) if is_completed(request)]
    run.warn(NOT_FRESH)
    if cached := total([request.cached_tokens for request in completed]):
        prompt = total([request.prompt_tokens for request in completed])
        message = (
            f"{cached}{'' if prompt is None else f' of {prompt}'} prompt tokens came from the server's prefix "
            "cache: ttft is that of a warm cache; another --seed asks other prompts"
        )
        run.warn(ResultWarning(code="prefix-cache", message=message))
    run.judge_client(loaded)
    if (check := check_client_tokens(completed)).ok is False:
        run.suspect("check-failed", f"usage and what arrived count different tokens: {check.detail}")
    run.judge_answers(results.prepared_requests(), loaded)
    run.judge_failures()
    run.conclude()


def _with_served_model(settings: VariantSettings, served_model: object) -> VariantSettings:
    """Name the model that the server offers first, where the command line names none."""
    options = settings.server
    if isinstance(options, AttachOptions) and options.served_model is None and isinstance(served_model, str):
        server = options.model_copy(update={"served_model": served_model})
        return settings.model_copy(update={"server": server})
    return settings
