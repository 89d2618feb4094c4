"""One run in progress: the part that a run of an experiment and a single load have in common.

    attempt ▸ effective configuration ▸ warm-up ▸ load ▸ verdict

``run.json`` is replaced at each transition. A run that fails keeps what it has.
"""

import itertools
import os
import platform
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import httpx
import msgspec

from benchctl.analysis.metrics.arrivals import bunching_warnings
from benchctl.analysis.validity.answers import answer_end_warnings, prompt_warnings
from benchctl.analysis.validity.client import client_suspect_warnings, client_warnings
from benchctl.engines.engine import Engine, LaunchSite
from benchctl.errors import OWN_LIMITS, RequestRefusedError, RunError
from benchctl.load.demand import LoadSize
from benchctl.load.process import steady_interpreter
from benchctl.load.schedule import Load
from benchctl.load.tally import LoadSummary
from benchctl.load.workers import AnyLoad, load_for, prioritized
from benchctl.measure.described_fields import undescribed_fields
from benchctl.measure.interrupt import await_signal, run_interruptible
from benchctl.measure.journal import Journal, utc_now
from benchctl.measure.sending import ServerUnderTest, send_requests
from benchctl.profile.model import Arrival, Profile
from benchctl.profile.planning import variant_settings
from benchctl.profile.sections import PriorityOption
from benchctl.records.directory import RunDirectory
from benchctl.records.loaded import LoadedRun
from benchctl.records.record import PlannedRun, PreparedRequest, RequestRecord, RunFailure, RunRecord
from benchctl.records.schema import SCHEMA_VERSION, NodeInfo, ResultWarning, RunState
from benchctl.untrusted.http import recordable
from benchctl.untrusted.secrets import environment_redactor


def ignore(*_values: object) -> None:
    """Stand in for a callback that is not needed."""


class MeasuredRun:
    """The record of one run, and the requests that are sent for it. The caller brings the server and the verdict.

    ``on_progress`` is called with the number of requests of the load that have ended. ``node`` is None where no
    machine is measured: a simulation in virtual time.
    """

    def __init__(
        self,
        profile: Profile,
        planned: PlannedRun,
        directory: RunDirectory,
        engine: Engine,
        on_progress: Callable[[int], None] = ignore,
        *,
        node: NodeInfo | None,
    ) -> None:
        self.profile = profile
        self.engine = engine
        self.settings = variant_settings(profile, planned.variant, planned.cell)
        variables = self.settings.request.variables | self.settings.server.secret_variables
        self.secrets = {name: os.environ[name] for name in sorted(variables) if name in os.environ}
        """Values in its requests that no file may hold, by the variable that holds each."""
        self.redactor = environment_redactor(self.secrets)
        self._directory = directory
        self._on_progress = on_progress
        self._load: AnyLoad | None = None
        self.simulated = LoadSummary()
        """Counts of a load that no server was sent."""
        record = RunRecord(
            schema_version=SCHEMA_VERSION,
            **msgspec.structs.asdict(planned),
            state="running",
            engine=profile.engine.kind,
            host=platform.node(),
            node=node,
            started_at=utc_now(),
            clock=engine.clock,
            time_scale=engine.time_scale(self.settings),
        )
        self.journal = Journal(directory, record, self.redactor)

    @property
    def has_sent_load(self) -> bool:
        return self._load is not None

    @property
    def load_summary(self) -> LoadSummary:
        return self._load.summary() if self._load is not None else self.simulated

    @property
    def has_no_answer(self) -> bool:
        """True when requests were sent and all of them failed."""
        return 0 < self.load_summary.num_sent == self.load_summary.num_failed

    def begun(self, *, can_resume: bool = True) -> AbstractContextManager[None]:
        """See ``Journal.begun``; what ends the run is recorded with the counts of its load."""
        return self.journal.begun(self.fail, can_resume=can_resume)

    def perform(self, main: Coroutine[Any, Any, None]) -> RunError | None:
        """Run ``main`` to its end; record and return the RunError with which it failed, if it did."""
        try:
            run_interruptible(main)
        except RunError as error:
            await_signal()  # a job system signals the server, too, and its end may be noticed first
            self.fail(error.cause, str(error), error.log_tail)
            return error
        return None

    async def record_configuration(
        self, control: httpx.AsyncClient, site: LaunchSite, extra: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Record what the server reports of itself beside what it will be sent; returns what it reports."""
        stated = await self.engine.effective_config(control, self.settings, site)
        reported = {name: recordable(value) for name, value in stated.items()}
        self.note_configuration(reported, extra)
        if unknown := await undescribed_fields(control, self.settings.request.extra_body):
            fields = ", ".join(f"request.extra_body.{name}" for name in unknown)
            message = (
                f"the server's description of its requests does not have {fields}: it may ignore them silently"
            )
            self.journal.warn(ResultWarning(code="request-field-unknown", message=message))
        return reported

    def note_configuration(self, reported: Mapping[str, Any], extra: Mapping[str, str] | None = None) -> None:
        """Record the settings of a server beside what it will be sent."""
        config: dict[str, Any] = {"model": self.settings.model}
        config |= {f"server.{key}": value for key, value in reported.items()}
        config |= self.settings.stated()
        if (guidance := self.settings.guidance) is not None:
            config |= {f"guidance.{key}": value for key, value in guidance.model_dump(mode="json").items()}
        version = reported.get("version")
        self.journal.update(
            effective_config=config | dict(extra or {}),
            engine_version=None if version is None else str(version),
        )
        if self.journal.record.clock == "virtual" and (keys := self._asked_keys()):
            message = f"the simulator takes {', '.join(keys)} and neither charges for them nor changes its answers"
            self.journal.warn(ResultWarning(code="request-field-simulated", message=message))

    async def send_bursts(
        self, target: ServerUnderTest, bursts: Iterable[Sequence[PreparedRequest]]
    ) -> LoadSummary:
        """Send requests of the warm-up, each burst when the one before has ended.

        Raises RequestRefusedError when the server refuses all of them for what the profile puts into them.
        """
        with self._directory.append("requests") as writer:
            load = Load(target.client, Arrival(kind="burst"), writer.write)
            for requests in bursts:
                await send_requests(target, load, requests, is_warmup=True)
        self._check_accepted(load.summary())
        return load.summary()

    def _asked_keys(self) -> list[str]:
        """Keys of the profile that put something of their own into requests."""
        keys = [f"request.{key}" for key in self.settings.request.stated()]
        return keys + [f"sampling.{name}" for name in self.settings.sampling.penalties]

    def begin_warmup(self, now_ns: int | None = None) -> None:
        """Note when the warm-up begins: now, unless another clock says when."""
        self.journal.time(warmup_start_ns=time.monotonic_ns() if now_ns is None else now_ns)

    def judge_warmup(self, warmup: LoadSummary) -> None:
        """Warn where the load may have met a cold server."""
        if warmup.num_failed:
            failed = f"{warmup.num_failed} of {warmup.num_sent} warm-up requests failed ({warmup.first_error})"
            self.journal.suspect("warmup-failed", f"{failed}: the load may have met a cold server")

    async def send_load(
        self,
        target: ServerUnderTest,
        requests: Iterable[PreparedRequest],
        size: LoadSize,
    ) -> None:
        """Send the load; every record and sample is on disk as it comes.

        Raises RequestRefusedError when the server refuses all of it for what the profile puts into requests.
        """
        num_ended = itertools.count(1)
        with self._directory.append("requests") as writer, self._directory.append("client") as samples:

            def keep(record: RequestRecord) -> None:
                writer.write(record)
                self._on_progress(next(num_ended))

            # A simulator steps in its own time, which no delay of ours changes.
            is_virtual = self.journal.record.clock == "virtual"
            priority: PriorityOption = "none" if is_virtual else self.profile.load.priority
            load = self._load = load_for(
                target.client,
                self.profile,
                size,
                keep,
                priority=priority,
                time_scale=self.journal.record.time_scale,
                on_sample=samples.write,
            )
            arrival = self.profile.workload.arrival
            with (
                steady_interpreter(),
                prioritized(load, priority, lambda granted: self.journal.update(client_priority=granted)),
            ):
                await send_requests(target, load, requests, arrival=arrival, is_warmup=False)
        self._check_accepted(load.summary())

    def _check_accepted(self, load: LoadSummary) -> None:
        keys = self._asked_keys()
        if keys and 0 < load.num_refused == load.num_sent:
            raise RequestRefusedError(
                f"variant {self.settings.variant!r}: the server refuses every request ({load.first_refusal}); "
                f"correct what the profile puts into them: {', '.join(keys)}"
            )

    def judge_records(self, loaded: LoadedRun, requests: Sequence[PreparedRequest]) -> None:
        """Check the records of the run against each other, as they are on disk now."""
        from benchctl.analysis.validity.checks import (  # noqa: PLC0415 - numpy, after the load
            failed_checks,
            reconcile,
            value_model_warnings,
        )

        checks = reconcile(loaded, self.profile, self.settings, requests, self.profile.stop)
        self.journal.warn(*failed_checks(loaded, checks), *value_model_warnings(loaded))
        self.judge_answers(requests, loaded)

    def judge_answers(self, requests: Iterable[PreparedRequest], loaded: LoadedRun) -> None:
        """Warn of prompts of other lengths than planned, and of answers that ended early or for unknown reasons."""
        self.journal.warn(*prompt_warnings(requests, loaded.requests))
        if self.journal.record.is_simulated:
            return
        options = self.settings.request
        has_form = options.response_format is not None or options.structured_outputs is not None
        has_stops = any(name.startswith("stop") for name in options.extra_body)
        is_forced, may_stop = self.profile.stop != "natural", has_form or has_stops
        self.journal.warn(*answer_end_warnings(loaded.requests, is_forced=is_forced, may_stop=may_stop))

    def judge_client(self, loaded: LoadedRun) -> None:
        """Warn of what the client itself did to the times that it took."""
        arrival = self.profile.workload.arrival
        self.journal.warn(
            *client_suspect_warnings(loaded, arrival),
            *client_warnings(loaded, arrival),
            *bunching_warnings(loaded),
        )

    def judge_failures(self) -> None:
        """Warn of requests that failed."""
        if self.load_summary.num_failed:
            self.journal.suspect("failed-requests", f"{self._failures()}: see requests.jsonl")

    def _failures(self) -> str:
        load = self.load_summary
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(load.failures.items()))
        of_several = f": {kinds}" if len(load.failures) > 1 else ""
        return f"{load.num_failed} of {load.num_sent} requests failed{of_several} ({load.first_error})"

    def conclude(self) -> RunRecord:
        """The verdict on a run that went to its end: failed without any answer, else suspect or done."""
        if self.has_no_answer:
            limits = sorted(OWN_LIMITS.intersection(self.load_summary.failures))
            return self.fail(limits[0] if limits else "no-request-completed", self._failures())
        return self.close("suspect" if self.journal.is_suspect else "done")

    def fail(self, cause: str, message: str, log_tail: str = "") -> RunRecord:
        return self.close("failed", RunFailure(cause=cause, message=message, log_tail=log_tail))

    def close(self, state: RunState, failure: RunFailure | None = None) -> RunRecord:
        self.journal.count(self.load_summary)
        return self.journal.close(state, failure)
