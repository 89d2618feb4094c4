"""One load on one running server, without an experiment around it.

    directory ▸ effective configuration ▸ warm-up ▸ load ▸ verdict

It leaves a result directory like any other, with a single run. It starts nothing, samples no device and keeps
nothing in memory while it sends; afterwards the run is read back and judged like any other.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from benchctl.analysis.metrics.latency import is_completed, measured, total
from benchctl.analysis.validity.answers import check_client_tokens
from benchctl.engines.attach.engine import AttachEngine
from benchctl.engines.attach.options import AttachOptions
from benchctl.engines.engine import LaunchSite
from benchctl.errors import LoadError
from benchctl.load.client import StreamClient
from benchctl.load.demand import size_of
from benchctl.measure.machine import new_manifest, this_node
from benchctl.measure.measured_run import MeasuredRun
from benchctl.measure.result_directory import Origin, create_results, set_state
from benchctl.measure.sending import ServerUnderTest
from benchctl.measure.server.attached import NOT_FRESH
from benchctl.measure.warmup import warmup_requests
from benchctl.profile.model import Arrival, Profile, VariantSettings
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
    load = _SingleLoad(results, profile, on_progress, limits_ms or {})
    with sole_writer(results.path):
        try:
            load.measure()
        finally:
            with suppress(OSError, MemoryError):  # a full disk has been reported as what it did to the run
                set_state(results, load.record.state)
                record_run(results, load.record.run_id)
    return load.result()


class _SingleLoad:
    """One load in progress."""

    def __init__(
        self,
        results: ResultDirectory,
        profile: Profile,
        on_progress: Callable[[int], None],
        limits_ms: Mapping[str, float],
    ) -> None:
        (planned,) = results.plan().runs
        self._results = results
        self._profile = profile
        directory = results.run(planned.run_id)
        self._run = MeasuredRun(profile, planned, directory, AttachEngine(), on_progress, node=this_node())
        self._limits_ms = limits_ms

    @property
    def record(self) -> RunRecord:
        return self._run.journal.record

    def measure(self) -> None:
        with self._run.begun(can_resume=False):
            self._run.perform(self._send())

    def result(self) -> LoadResult:
        from benchctl.analysis.metrics.run import load_figures  # noqa: PLC0415 - numpy, after the load

        arrival, loaded = self._profile.workload.arrival, replace(self._loaded, record=self.record)
        return LoadResult(
            manifest=self._results.manifest(),
            record=self.record,
            figures=load_figures(loaded, arrival, self._limits_ms),
            arrival=arrival,
        )

    @cached_property
    def _loaded(self) -> LoadedRun:
        """The records of the whole load, to be read after its end."""
        return load_run(self._results.run(self.record.run_id))

    async def _send(self) -> None:
        run, profile = self._run, self._profile
        async with StreamClient(run.engine.base_url(run.settings, 0), profile.timeouts) as client:
            site = LaunchSite(port=0, directory=self._results.run(self.record.run_id).path)
            reported = await run.record_configuration(client.control, site)
            settings = _with_served_model(run.settings, reported.get("served_model"))
            target = ServerUnderTest(engine=run.engine, settings=settings, client=client)
            await self._warm_up(target)
            requests = self._results.prepared_requests()
            await run.send_load(target, requests, size_of(self._results.prepared_requests()))
        self._judge()

    async def _warm_up(self, target: ServerUnderTest) -> None:
        """Raises LoadError when none of the warm-up's requests completes: the load would fail the same way."""
        count = self._profile.workload.num_warmups
        requests = [
            msgspec.structs.replace(request, ignore_eos=self._profile.stop == "forced")
            for request in warmup_requests(tuple(islice(self._results.prepared_requests(), count)), count)
        ]
        if not requests:
            return
        self._run.begin_warmup()
        warmup = await self._run.send_bursts(target, [requests])
        if warmup.num_failed == warmup.num_sent:
            remedy = "correct the address, --model or --dialect, or ask the server's owner"
            message = f"the server generates nothing ({warmup.first_error}), so no load was sent; {remedy}"
            raise LoadError(message, cause="no-first-generation")
        self._run.judge_warmup(warmup)

    def _judge(self) -> None:
        """The verdict on a load that went to its end."""
        run, journal, loaded = self._run, self._run.journal, self._loaded
        completed = [request for request in measured(loaded.requests) if is_completed(request)]
        journal.warn(NOT_FRESH)
        if cached := total([request.cached_tokens for request in completed]):
            prompt = total([request.prompt_tokens for request in completed])
            message = (
                f"{cached}{'' if prompt is None else f' of {prompt}'} prompt tokens came from the server's prefix "
                "cache: ttft is that of a warm cache; another --seed asks other prompts"
            )
            journal.warn(ResultWarning(code="prefix-cache", message=message))
        run.judge_client(loaded)
        if (check := check_client_tokens(completed)).ok is False:
            journal.suspect("check-failed", f"usage and what arrived count different tokens: {check.detail}")
        run.judge_answers(self._results.prepared_requests(), loaded)
        run.judge_failures()
        run.conclude()


def _with_served_model(settings: VariantSettings, served_model: object) -> VariantSettings:
    """Name the model that the server offers first, where the command line names none."""
    options = settings.server
    if isinstance(options, AttachOptions) and options.served_model is None and isinstance(served_model, str):
        server = options.model_copy(update={"served_model": served_model})
        return settings.model_copy(update={"server": server})
    return settings
