"""One run of a micro-benchmark: the replays of one point in one mode, in the worker of its block.

    begin ▸ configuration ▸ warm-up and replays ∥ samplers ▸ steps ▸ floor ▸ verdict

A run below its floor is a failed one, whatever else is asked for: it measured something else than its pass.
"""

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from benchctl.costs.shapes import shape_for
from benchctl.engines.engine import own_options
from benchctl.engines.environment import build_versions
from benchctl.engines.micro.options import MicroOptions
from benchctl.errors import RunError
from benchctl.measure.journal import Journal, utc_now
from benchctl.measure.machine import this_node
from benchctl.measure.measured_run import ignore
from benchctl.measure.telemetry.gpus import open_gpu
from benchctl.measure.telemetry.samplers import SampledServer, sampling
from benchctl.micro.floor import Peaks
from benchctl.micro.forward_times import ForwardTimes
from benchctl.micro.worker import WorkerInfo
from benchctl.micro.workers_of_blocks import WorkersOfBlocks, visible_devices
from benchctl.profile.choices import ForwardPoint
from benchctl.profile.model import Profile
from benchctl.profile.planning import variant_settings
from benchctl.records.directory import RunDirectory
from benchctl.records.record import PlannedRun, RunFailure, RunRecord
from benchctl.records.schema import SCHEMA_VERSION, ResultWarning, StepRecord
from benchctl.units import us_from_ns

BELOW_FLOOR: Final = "below-floor"
"""Cause of the failure of a run that is faster than its device."""
_NOT_OF_THE_POINT: Final = {"python", "replays", "warmups"}
_OF_THE_MOMENT: Final = {"python", "free_bytes", "device_uuid"}
"""Values of a worker's description that do not change what it computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPasses:
    """Measures the runs of one experiment, with its workers and the peaks of its device, if they are known."""

    workers: WorkersOfBlocks
    peaks: Peaks | None

    def measure(self, profile: Profile, planned: PlannedRun, directory: RunDirectory) -> RunRecord:
        """Measure one run; returns its final record, which is also on disk.

        A failed run is a record with state ``failed``. Raises UsageError where no such run can succeed here, and
        KeyboardInterrupt; in both cases the record says so.
        """
        run = _Run(self, profile, planned, directory)
        return run.measure()


class _Run:
    """A run on its way."""

    def __init__(
        self, shared: MeasuredPasses, profile: Profile, planned: PlannedRun, directory: RunDirectory
    ) -> None:
        self._shared = shared
        self._profile = profile
        self._planned = planned
        self._directory = directory
        self._settings = variant_settings(profile, planned.variant, planned.cell)
        self._options = own_options(self._settings, MicroOptions)
        self._point, self._mode = self._options.forward_pass
        record = RunRecord(
            schema_version=SCHEMA_VERSION,
            **msgspec.structs.asdict(planned),
            state="running",
            engine=profile.engine.kind,
            host=platform.node(),
            node=this_node(),
            started_at=utc_now(),
        )
        self._journal = Journal(directory, record)

    def measure(self) -> RunRecord:
        with self._journal.begun(self._fail):
            try:
                times = self._replays()
                self._write_steps(times)
                return self._conclude(times)
            except RunError as error:  # after which the next run may succeed, with a worker of its own
                self._shared.workers.end()
                return self._fail(error.cause, str(error), error.log_tail)

    def _fail(self, cause: str, message: str, log_tail: str = "") -> RunRecord:
        return self._journal.close("failed", RunFailure(cause=cause, message=message, log_tail=log_tail))

    def _replays(self) -> ForwardTimes:
        worker = self._shared.workers.of(self._planned.block)
        self._note_configuration(worker.info)
        samples_gpu = self._options.device != "cpu" and self._profile.telemetry.gpu_hz
        warn = self._journal.warn if samples_gpu else ignore
        with open_gpu(visible_devices(self._options.device), warn=warn) as gpu:
            gpus = () if gpu is None else gpu.described()
            self._journal.update(node=this_node(gpus, build_versions(Path(worker.info.python))))
            sampled = SampledServer(processes=worker.processes, gpu=gpu, metrics_url=None)
            with sampling(self._directory.path, self._profile.telemetry, sampled) as sampler_warnings:
                times = worker.measure(
                    self._point, self._mode, warmups=self._options.warmups, replays=self._options.replays
                )
        self._journal.warn(*sampler_warnings)
        self._note_replays(times)
        return times

    def _note_configuration(self, info: WorkerInfo) -> None:
        """Record what is computed, and what the worker says of where it computes."""
        options = self._options.model_dump(mode="json", exclude=_NOT_OF_THE_POINT)
        reported = msgspec.structs.asdict(info)
        where = {key: value for key, value in reported.items() if key not in _OF_THE_MOMENT and value is not None}
        config = {f"server.{key}": value for key, value in {**where, **options}.items()}
        self._journal.update(
            effective_config={"model": self._settings.model, **config},
            engine_version=info.torch_version,
            floor_ns=self._floor_ns(),
        )

    def _note_replays(self, times: ForwardTimes) -> None:
        """Record the operators of a pass, and memory that should not have been asked for while it was timed."""
        if times.num_operators is not None:
            config = self._journal.record.effective_config
            self._journal.update(effective_config={**config, "server.operators": times.num_operators})
        if times.num_allocations:
            message = (
                f"the device handed out {times.num_allocations} pieces of memory during "
                f"{len(times.duration_ns)} replays, which wait for it"
            )
            self._journal.warn(ResultWarning(code="replays-allocate", message=message))

    def _floor_ns(self) -> int | None:
        peaks, shape = self._shared.peaks, shape_for(self._settings.model)
        return None if peaks is None else peaks.floor_ns(shape, self._point, self._options.dtype)

    def _write_steps(self, times: ForwardTimes) -> None:
        with self._directory.append("steps") as writer:
            for step in steps_of(self._point, times):
                writer.write(step)
        self._journal.update(clock=times.clock)
        self._journal.time(first_send_ns=times.start_ns[0], last_token_ns=times.start_ns[0] + times.wall_ns)

    def _conclude(self, times: ForwardTimes) -> RunRecord:
        problem = self._problem(times)
        if problem is None:
            return self._journal.close("done")
        self._journal.suspect("below-floor", problem)
        return self._journal.close("failed", RunFailure(cause=BELOW_FLOOR, message=problem))

    def _problem(self, times: ForwardTimes) -> str | None:
        """The sentence on a median below the floor of the pass; None where it is above, or no floor is known."""
        floor_ns, median_ns = self._journal.record.floor_ns, float(np.median(times.duration_ns))
        if floor_ns is None or self._shared.peaks is None or median_ns >= floor_ns:
            return None
        return (
            f"the median of {len(times.duration_ns)} replays is {us_from_ns(median_ns):.1f} µs, and no such pass "
            f"takes less than {us_from_ns(floor_ns):.1f} µs by its FLOPs and bytes on "
            f"{self._shared.peaks.hardware.title}: something else was timed, and the run counts nowhere"
        )


def steps_of(point: ForwardPoint, times: ForwardTimes) -> Iterator[StepRecord]:
    """One step for each replay."""
    new, is_decode = point.total_new_tokens, point.phase == "decode"
    for number, (start_ns, dur_ns) in enumerate(zip(times.start_ns, times.duration_ns, strict=True)):
        yield StepRecord(
            step=number,
            start_ns=start_ns,
            dur_ns=dur_ns,
            clock=times.clock,
            phase=point.phase,
            num_seqs=point.batch_size,
            num_prefill_tokens=0 if is_decode else new,
            num_decode_tokens=new if is_decode else 0,
            context_tokens=point.batch_size * (point.context_tokens + point.new_tokens),
        )
