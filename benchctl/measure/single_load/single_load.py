"""One load on one running server, without an experiment around it.

    directory ▸ what the server says of itself ▸ warm-up ▸ load ▸ verdict

What it leaves is a result directory like any other, with a single run, so that whatever reads those reads this. It
starts nothing, samples no device and keeps neither requests nor records in memory: it is the smallest thing that
measures.
"""

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import msgspec

from benchctl.analysis.metrics.offered_load import ClientAccount, load_metrics, offered_load
from benchctl.analysis.metrics.timestamp_quality import client_metrics
from benchctl.analysis.summary.load_figures import FiguresInPassing, LoadFigures
from benchctl.analysis.validity.bunching import bunching_doubts
from benchctl.analysis.validity.client_guard import client_doubts, client_warnings
from benchctl.engines.attach.engine import AttachEngine
from benchctl.engines.attach.options import AttachOptions
from benchctl.engines.engine import LaunchSite
from benchctl.errors import LoadError, RunError
from benchctl.load.demand import size_of
from benchctl.load.driver import Load
from benchctl.load.interpreter import steady_interpreter
from benchctl.load.transport.client import StreamClient
from benchctl.load.workers.workers import load_for, prioritised
from benchctl.measure.calls import calls_of
from benchctl.measure.configuration import flat_configuration
from benchctl.measure.interrupt import run_interruptible
from benchctl.measure.journal import Journal, utc_now
from benchctl.measure.server.attached import NOT_FRESH
from benchctl.measure.single_load.evidence import LoadEvidence
from benchctl.measure.warmup import warmup_requests
from benchctl.profile.model import Arrival, Profile
from benchctl.profile.planning.plan import variant_settings
from benchctl.records.digests import record_run
from benchctl.records.directory import ResultDirectory, RunDirectory
from benchctl.records.run import (
    ClientSample,
    Manifest,
    RequestRecord,
    ResultWarning,
    RunFailure,
    RunRecord,
    RunState,
)
from benchctl.records.schema import SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What came of a load."""

    manifest: Manifest
    record: RunRecord
    figures: LoadFigures
    client: ClientAccount
    """How the load generator did."""
    arrival: Arrival


def load_server(results: ResultDirectory, profile: Profile, on_progress: Callable[[int], None]) -> Loaded:
    """Send the load that lies ready in ``results`` and judge it; ``on_progress`` hears how many requests ended.

    A load of which nothing completed is a record with state ``failed``. Raises KeyboardInterrupt on SIGINT or
    SIGTERM; the records then say so.
    """
    single = _SingleLoad(results, profile, on_progress)
    with _state_kept(results, single.journal):
        try:
            run_interruptible(single.go())
        except LoadError as error:
            single.fail(error.cause, str(error))
    return single.loaded()


@contextmanager
def _state_kept(results: ResultDirectory, journal: Journal) -> Iterator[None]:
    """However it ends, the records say how."""
    try:
        yield
    except OSError as error:
        with suppress(OSError):  # the disk may be full for this, too
            journal.close("failed", RunFailure(cause="disk", message=str(error)))
        raise RunError(f"{results.path}: {error}; free space or correct the permissions", cause="disk") from error
    except BaseException as error:
        is_interrupt = isinstance(error, KeyboardInterrupt)
        cause = "interrupted" if is_interrupt else type(error).__name__
        message = "the load was interrupted by a signal" if is_interrupt else str(error)
        journal.close("failed", RunFailure(cause=cause, message=message))
        raise
    finally:
        with suppress(OSError):
            results.write_manifest(msgspec.structs.replace(results.manifest(), state=journal.record.state))
            record_run(results, journal.record.run_id)


class _SingleLoad:
    """One load while it goes on."""

    def __init__(self, results: ResultDirectory, profile: Profile, on_progress: Callable[[int], None]) -> None:
        (planned,) = results.plan().runs
        self._profile, self._on_progress = profile, on_progress
        self._results = results
        self._directory: RunDirectory = results.run(planned.run_id)
        self._engine = AttachEngine()
        self._settings = variant_settings(profile, planned.variant, planned.cell)
        self._figures = FiguresInPassing()
        self._evidence = LoadEvidence()
        record = RunRecord(
            schema_version=SCHEMA_VERSION,
            **msgspec.structs.asdict(planned),
            state="running",
            attempt=1,
            engine=profile.engine.kind,
            host=platform.node(),
            started_at=utc_now(),
        )
        self.journal = Journal(self._directory, record)

    def loaded(self) -> Loaded:
        figures, arrival = self._came_to, self._profile.workload.arrival
        seen = self._evidence.as_run(self.journal.record)
        measured = client_metrics(seen.requests, seen.client) | load_metrics(seen.requests, arrival)
        return Loaded(
            manifest=self._results.manifest(),
            record=self.journal.record,
            figures=figures,
            client=ClientAccount(
                metrics=measured | figures.client_metrics(),
                offered=offered_load(seen.requests, arrival),
                bounds=self._evidence.bounds(),
            ),
            arrival=arrival,
        )

    @cached_property
    def _came_to(self) -> LoadFigures:
        """Once all is over: of a long load this takes its time."""
        return self._figures.figures()

    def fail(self, cause: str, message: str) -> None:
        self.journal.close("failed", RunFailure(cause=cause, message=message))

    async def go(self) -> None:
        base_url = self._engine.base_url(self._settings, 0)
        async with StreamClient(base_url, self._profile.timeouts) as client:
            await self._ask_configuration(client)
            with self._directory.append("requests") as records, self._directory.append("client") as samples:
                await self._warm_up(client, records.write)
                await self._measured(client, records.write, samples.write)

    async def _ask_configuration(self, client: StreamClient) -> None:
        """Record what the server says of itself; a model that nobody named is the one it offers first."""
        site = LaunchSite(port=0, directory=self._directory.path)
        told = await self._engine.effective_config(client.control, self._settings, site)
        served, options = told.get("served_model"), self._settings.server
        if isinstance(options, AttachOptions) and options.served_model is None and isinstance(served, str):
            server = options.model_copy(update={"served_model": served})
            self._settings = self._settings.model_copy(update={"server": server})
        version = told.get("version")
        self.journal.update(
            effective_config=flat_configuration(self._settings, told),
            engine_version=None if version is None else str(version),
        )

    async def _warm_up(self, client: StreamClient, write: Callable[[RequestRecord], None]) -> None:
        """Raises LoadError when none of the warm-up's requests completes: the load would fail the same way."""
        count = self._profile.workload.num_warmups
        requests = [
            msgspec.structs.replace(request, ignore_eos=self._profile.stop == "forced")
            for request in warmup_requests(tuple(islice(self._results.stored_requests(), count)), count)
        ]
        if not requests:
            return
        self.journal.time(warmup_start_ns=time.monotonic_ns())
        load = Load(client, Arrival(kind="burst"), write)
        await load.drive(calls_of(self._engine, self._settings, requests, is_warmup=True))
        ended = load.summary()
        if ended.num_failed == ended.num_sent:
            remedy = "correct the address, --model or --dialect, or ask the server's owner"
            message = f"the server generates nothing ({ended.first_error}), so that no load was sent; {remedy}"
            raise LoadError(message, cause="no-first-generation")
        if ended.num_failed:
            what = f"{ended.num_failed} of {ended.num_sent} warm-up requests failed ({ended.first_error})"
            self.journal.doubt("warmup-failed", f"{what}: the load may have met a cold server")

    async def _measured(
        self,
        client: StreamClient,
        write: Callable[[RequestRecord], None],
        write_sample: Callable[[ClientSample], None],
    ) -> None:
        num_ended = 0

        def keep(record: RequestRecord) -> None:
            nonlocal num_ended
            write(record)
            self._figures.take(record)
            self._evidence.take(record)
            num_ended += 1
            self._on_progress(num_ended)

        def watch(sample: ClientSample) -> None:
            write_sample(sample)
            self._evidence.take_sample(sample)

        priority, size = self._profile.load.priority, size_of(self._results.stored_requests())
        load = load_for(client, self._profile, size, keep, priority=priority, on_sample=watch)
        try:
            with steady_interpreter(), prioritised(load, priority, self._tell_priority):
                stored = self._results.stored_requests()
                await load.drive(calls_of(self._engine, self._settings, stored, is_warmup=False))
        finally:
            self.journal.count(load.summary())
        self._judge(load.summary().first_error)

    def _tell_priority(self, got: str) -> None:
        self.journal.update(client_priority=got)

    def _judge(self, first_error: str | None) -> None:
        """The verdict on a load that went to its end."""
        journal, figures = self.journal, self._came_to
        journal.warn(NOT_FRESH)
        if figures.cached_tokens:
            journal.warn(_cached(figures.cached_tokens, figures.prompt_tokens))
        seen, arrival = self._evidence.as_run(journal.record), self._profile.workload.arrival
        journal.warn(*client_warnings(seen, arrival, self._evidence.bounds()), *bunching_doubts(seen))
        for doubt in client_doubts(seen, arrival):
            journal.doubt(doubt.code, doubt.message)
        if figures.miscounted:
            journal.doubt("check-failed", _miscounted(figures.miscounted))
        if figures.num_failed:
            what = f"{figures.num_failed} of {figures.num_requests} requests failed ({first_error})"
            journal.doubt("failed-requests", f"{what}: see {self._directory.path / 'requests.jsonl'}")
            if not figures.num_completed:
                self.fail("no-request-completed", what)
                return
        state: RunState = "suspect" if journal.is_doubtful else "done"
        journal.close(state)


def _cached(cached_tokens: int, prompt_tokens: int | None) -> ResultWarning:
    of_all = "" if prompt_tokens is None else f" of {prompt_tokens}"
    message = (
        f"{cached_tokens}{of_all} prompt tokens came from the server's prefix cache: ttft is that of a warm cache; "
        "another --seed asks other prompts"
    )
    return ResultWarning(code="prefix-cache", message=message)


def _miscounted(request_ids: Sequence[str]) -> str:
    shown = ", ".join(request_ids[:3]) + (" and others" if len(request_ids) > 3 else "")
    return f"usage and what arrived count different tokens in {len(request_ids)} requests: {shown}"
