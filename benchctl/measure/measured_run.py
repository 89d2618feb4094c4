"""One run in progress: its record, of which every change is on disk at once, and the verdict.

    attempt ▸ effective configuration ▸ warm-up ▸ load ▸ verdict

The caller brings the server and sends the requests. A run that fails keeps what it has.
"""

import datetime as dt
import os
import platform
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from benchctl.analysis.validity.answers import answer_end_warnings, prompt_warnings
from benchctl.engines.engine import Engine, engine_for
from benchctl.errors import KEPT, OWN_LIMITS, BenchctlError, RunError, as_run_error, is_of_the_system
from benchctl.load.exchange import LoadSummary
from benchctl.measure.directory import begin_attempt
from benchctl.measure.interrupt import await_signal, interruptible, run_interruptible
from benchctl.measure.redaction import redacted_tree
from benchctl.profile.model import Profile, VariantSettings
from benchctl.profile.planning import variant_settings
from benchctl.records.directory import RequestSets, RunDirectory
from benchctl.records.integrity import digests_of_run
from benchctl.records.loaded import LoadedRun, read_load
from benchctl.records.loads import concluded
from benchctl.records.record import INTERRUPTED, LoadRecord, PlannedRun, PreparedRequest, RunFailure, RunRecord
from benchctl.records.schema import SCHEMA_VERSION, NodeInfo, ResultWarning, RunState
from benchctl.records.warning_codes import SUSPECT_CODES, by_severity
from benchctl.untrusted.secrets import environment_redactor


def ignore(*_values: object) -> None:
    """Stand in for a callback that is not needed."""


def utc_now() -> str:
    """The time of day, UTC, ISO 8601, to milliseconds."""
    return dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _cause_and_message(error: BaseException) -> tuple[str, str]:
    """The cause and the message by which a record tells of the error that ended a run."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "the run was interrupted by a signal"
    if isinstance(error, BenchctlError):
        return getattr(error, "cause", type(error).__name__), str(error)
    return "internal-error", f"{type(error).__name__}: {error}"


class MeasuredRun:
    """A run of one arm of a profile. Nothing comes into its files with a secret.

    ``engine`` stands for the one that the profile names. ``node`` is None where no machine is measured, as by a
    simulation in virtual time.
    """

    def __init__(
        self,
        profile: Profile,
        planned: PlannedRun,
        directory: RunDirectory,
        *,
        engine: Engine | None = None,
        node: NodeInfo | None = None,
        num_loads: int = 1,
    ) -> None:
        self.profile, self.directory = profile, directory
        """The profile under the load that its server gets or is warmed up for; the directory for its records."""
        self.engine = engine or engine_for(profile.engine.kind)
        self.settings = variant_settings(profile, planned.variant, planned.cell)
        variables = self.settings.request.variables | self.settings.server.secret_variables
        self.secrets = {name: os.environ[name] for name in sorted(variables) if name in os.environ}
        """Values in its requests that no file may hold, by the variable that holds each."""
        self.redactor = environment_redactor(self.secrets)
        self.load = LoadSummary()
        """The counts of its load, or of the newest of several, which grow while it is sent."""
        self.num_steps = 0
        """Steps that were written."""
        self.sent: list[LoadSummary] = []
        """Those of each of several loads that was begun, in order."""
        points = planned.ladder or (({},) * num_loads if num_loads > 1 else ())
        self.record = RunRecord(
            schema_version=SCHEMA_VERSION,
            **msgspec.structs.asdict(planned),
            state="running",
            engine=profile.engine.kind,
            host=platform.node(),
            node=node,
            started_at=utc_now(),
            clock=self.engine.clock,
            time_scale=self.engine.time_scale(self.settings),
            loads=tuple(LoadRecord(number=i, cell=cell) for i, cell in enumerate(points, start=1)),
        )

    @contextmanager
    def begun(self, *, can_resume: bool = True) -> Iterator[None]:
        """Begin an attempt. Inside, signals interrupt it, and what ends it before its verdict is recorded.

        Raises RunError when the system refuses files, memory or processes, KeyboardInterrupt after SIGINT or
        SIGTERM, and any other error as it is: a mistake of ours has the cause ``internal-error``. A RunError, after
        which the next run may succeed, is the caller's to catch inside.
        """
        with interruptible():
            try:
                self.update(attempt=begin_attempt(self.directory))
                yield
            except BaseException as error:
                ended = error
                if not isinstance(error, BenchctlError | KeyboardInterrupt) and is_of_the_system(error):
                    next_step = f", then continue with --resume; {KEPT}" if can_resume else f"; {KEPT}"
                    ended = as_run_error(error, self.directory.path, next_step=next_step)
                if self.record.state == "running":
                    with suppress(Exception):  # such as a full disk, which must not hide why the run failed
                        self.fail(*_cause_and_message(ended))
                if ended is error:
                    raise
                raise ended from error

    def perform(self, main: Coroutine[Any, Any, None]) -> RunError | None:
        """Run ``main`` to its end; record and return the RunError with which it failed, if it did."""
        try:
            run_interruptible(main)
        except RunError as error:
            await_signal()  # a job system signals the server, too, and its end may be noticed first
            self.fail(error.cause, str(error), error.log_tail)
            return error
        return None

    def update(self, **changes: Any) -> None:
        """Change fields of the record, on disk at once with what was noted before."""
        self.note(**changes)
        self.directory.write(self.record)

    def note(self, **changes: Any) -> None:
        """Change fields of the record, on disk with its next update: to write it takes milliseconds."""
        self.record = msgspec.structs.replace(self.record, **redacted_tree(changes, self.redactor))

    def time(self, **times: int | None) -> None:
        """Note when phases began."""
        self.note(times=msgspec.structs.replace(self.record.times, **times))

    def warn(self, *warnings: ResultWarning) -> None:
        """Attach warnings; those that name no place are about this run."""
        if warnings:
            placed = [w if w.where else msgspec.structs.replace(w, where=self.record.run_id) for w in warnings]
            self.note(warnings=(*self.record.warnings, *placed))

    @property
    def is_suspect(self) -> bool:
        """True if a warning keeps the run, or the load that is being sent, from counting as done."""
        return any(warning.code in SUSPECT_CODES for warning in self.record.warnings)

    def suspect(self, code: str, message: str) -> None:
        """Attach a warning that keeps the run from counting as done."""
        self.warn(ResultWarning(code=code, message=message))

    def count_redactions(self, counts: Mapping[str, int]) -> None:
        """Add to the number of secrets that were replaced, by what they are."""
        if counts:
            self.note(redactions=dict((Counter(self.record.redactions) + Counter(counts)).most_common()))

    def note_configuration(self, reported: Mapping[str, Any], extra: Mapping[str, str] | None = None) -> None:
        """Note what a server reports of itself beside what it will be sent."""
        config: dict[str, Any] = {"model": self.settings.model}
        config |= {f"server.{key}": value for key, value in reported.items()}
        config |= self.settings.stated()
        if (guidance := self.settings.guidance) is not None:
            config |= {f"guidance.{key}": value for key, value in guidance.model_dump(mode="json").items()}
        version = reported.get("version")
        self.note(
            effective_config=config | dict(extra or {}), engine_version=None if version is None else str(version)
        )
        if self.record.is_virtual and (keys := self.keys_in_requests()):
            message = f"the simulator takes {', '.join(keys)} and neither charges for them nor changes its answers"
            self.warn(ResultWarning(code="request-field-simulated", message=message))

    def keys_in_requests(self) -> list[str]:
        """Keys of the profile that put something of their own into requests."""
        keys = [f"request.{key}" for key in self.settings.request.stated()]
        return keys + [f"sampling.{name}" for name in self.settings.sampling.penalties]

    def settings_of_load(self) -> VariantSettings:
        """The settings of the next load: with a new salt where it may find prompts in the cache, but none of a load
        before it.
        """
        workload = self.profile.workload
        has_own_part = workload.plans_hits or (workload.allow_prefix_cache_hits and self.record.loads)
        return self.engine.salted(self.settings) if has_own_part else self.settings

    def judge_warmup(self, warmup: LoadSummary) -> None:
        """Warn where the load may have met a cold server."""
        if warmup.num_failed:
            self.suspect(
                "warmup-failed",
                f"{warmup.num_failed} of {warmup.num_sent} warm-up requests failed ({warmup.first_error}): the "
                "load may have met a cold server",
            )

    @contextmanager
    def each_load(self, number: int, profile: Profile) -> Iterator[None]:
        """Inside, counts and records are those of this load, and of several each has warnings of its own.

        ``profile`` is that of the load.
        """
        self.profile = profile
        if not self.record.loads:
            yield
            return
        self.directory, self.load = self.directory.of_load(number), LoadSummary()
        self.sent.append(self.load)
        warnings, loads = self.record.warnings, list(self.record.loads)
        self.note(warnings=())
        ended = loads[number - 1]
        try:
            yield
            failure = self._no_answer() if self.has_no_answer else None
            state: RunState = "failed" if failure is not None else "suspect" if self.is_suspect else "done"
            ended = msgspec.structs.replace(ended, state=state, failure=failure)
        finally:
            self.count()
            counts = {name: getattr(self.record, name) for name in ("num_sent", "num_completed", "num_failed")}
            loads[number - 1] = msgspec.structs.replace(
                ended,
                opening_ns=self.record.times.opening_ns,
                first_send_ns=self.load.first_send_ns,
                last_token_ns=self.load.last_token_ns,
                warnings=by_severity(self.record.warnings),
                **counts,
            )
            self.note(loads=tuple(loads), warnings=warnings)
        self.update()

    def judge(self, requests: RequestSets, *, has_client: bool = True) -> RunRecord:
        """The verdict on a run that went to its end, from its files; ``has_client`` where one took the times.

        Each of several loads was judged at its own end.
        """
        if not self.record.loads:
            self.judge_load(requests.of(self.record.cell), has_client=has_client)
        return self.conclude()

    def judge_load(self, requests: Sequence[PreparedRequest], *, has_client: bool = True) -> None:
        """Warn of what the files of a load show."""
        from benchctl.analysis.validity.checks import (  # noqa: PLC0415 - numpy, after the load
            failed_checks,
            reconcile,
            underfilled_batch_warnings,
            value_model_warnings,
        )
        from benchctl.analysis.validity.usable import clock_warnings  # noqa: PLC0415 - as above

        self.judge_failures()
        if self.load.opening is not None:
            self.judge_warmup(self.load.opening)
        if self.has_no_answer:
            return
        self.count()
        loaded = read_load(self.directory, self.record)
        self.warn(
            *failed_checks(loaded, reconcile(loaded, self.profile, self.settings, requests, self.profile.stop)),
            *value_model_warnings(loaded),
        )
        self.judge_answers(requests, loaded)
        if has_client:
            self.judge_client(loaded)
            self.warn(*underfilled_batch_warnings(loaded), *clock_warnings(loaded))

    @property
    def has_no_answer(self) -> bool:
        """True when requests were sent and all of them failed."""
        return 0 < self.load.num_sent == self.load.num_failed

    def judge_failures(self) -> None:
        """Warn of requests that failed."""
        if self.load.num_failed:
            self.suspect("failed-requests", f"{self._failures()}: see requests.jsonl")

    def judge_answers(self, requests: Iterable[PreparedRequest], loaded: LoadedRun) -> None:
        """Warn of prompts of other lengths than planned, and of answers that ended early or for unknown reasons."""
        self.warn(*prompt_warnings(requests, loaded.requests))
        if self.record.is_simulated:
            return
        options = self.settings.request
        has_form = options.response_format is not None or options.structured_outputs is not None
        has_stops = any(name.startswith("stop") for name in options.extra_body)
        is_forced, may_stop = self.profile.stop != "natural", has_form or has_stops
        self.warn(*answer_end_warnings(loaded.requests, is_forced=is_forced, may_stop=may_stop))

    def judge_client(self, loaded: LoadedRun) -> None:
        """Warn of what the client itself did to the times that it took."""
        from benchctl.analysis.metrics.arrivals import bunching_warnings  # noqa: PLC0415 - numpy, after the load
        from benchctl.analysis.validity.client import (  # noqa: PLC0415 - as above
            client_suspect_warnings,
            client_warnings,
        )

        arrival = self.profile.workload.arrival
        self.warn(
            *client_suspect_warnings(loaded, arrival),
            *client_warnings(loaded, arrival),
            *bunching_warnings(loaded),
        )

    def conclude(self) -> RunRecord:
        """The verdict on a run that went to its end: failed without any answer, else suspect or done."""
        self.count()
        if self.has_no_answer and not self.record.loads:
            return self.close("failed", self._no_answer())
        return self.close("suspect" if self.is_suspect else "done")

    def _no_answer(self) -> RunFailure:
        limits = sorted(OWN_LIMITS.intersection(self.load.failures))
        return RunFailure(cause=limits[0] if limits else "no-request-completed", message=self._failures())

    def _failures(self) -> str:
        load = self.load
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(load.failures.items()))
        of_several = f": {kinds}" if len(load.failures) > 1 else ""
        return f"{load.num_failed} of {load.num_sent} requests failed{of_several} ({load.first_error})"

    def count(self) -> None:
        """Note the counts of the load."""
        load = self.load
        times = msgspec.structs.replace(
            self.record.times,
            opening_ns=None if load.opening is None else load.begin_ns,
            first_send_ns=load.first_send_ns,
            last_token_ns=load.last_token_ns,
        )
        self.note(
            times=times,
            num_sent=load.num_sent,
            num_completed=load.num_sent - load.num_failed,
            num_failed=load.num_failed,
        )

    def fail(self, cause: str, message: str, log_tail: str = "") -> RunRecord:
        """Write the verdict that the run failed, with the counts of its load; returns the final record."""
        self.count()
        return self.close("failed", RunFailure(cause=cause, message=message, log_tail=log_tail))

    def close(self, state: RunState, failure: RunFailure | None = None) -> RunRecord:
        """Write the verdict, with the warnings that led to it first, and what the files of the run hold now;
        returns the final record.

        With several loads it is the one that they make, also where ``failure`` came in the middle of them.
        """
        self.note(state=state, failure=failure)
        if self.record.loads:
            self.record = concluded(self.record, failure)
        self.update(
            warnings=by_severity(self.record.warnings),
            files=digests_of_run(self.directory),
        )
        return self.record
