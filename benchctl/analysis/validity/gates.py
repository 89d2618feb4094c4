"""Machine-state gates: conditions that a run must meet to be compared.

They are declared in the profile before anything is measured, so that no run is excluded for its result. Throttling
is a device that slowed itself for heat or on demand of the hardware; idle clocks and the driver's power limit do
not count, because busy devices always run at that limit. Failed requests are a gate only if the profile says so:
otherwise they make a comparison incomplete, because excluding the runs in which a variant breaks would flatter it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from benchctl.analysis.metrics.request_timing import measured
from benchctl.analysis.metrics.run_metrics import load_window_ns
from benchctl.profile.model import Gate
from benchctl.records.loaded import LoadedRun
from benchctl.records.record import FOREIGN_GPU_PROCESS, ResultWarning

THROTTLING: Final = frozenset({"hw-slowdown", "hw-thermal", "hw-power-brake", "sw-thermal"})
"""Clock reasons of a device that was slowed down, as named in ``GpuSample.throttle_reasons``."""
_POWER_CAP: Final = "sw-power-cap"


@dataclass(frozen=True, slots=True)
class Violation:
    """A gate that a run did not pass, with the observation."""

    gate: Gate
    detail: str

    def __str__(self) -> str:
        return f"gate {self.gate}: {self.detail}"


def violated_gates(run: LoadedRun, gates: Sequence[Gate]) -> tuple[Violation, ...]:
    """The ``gates`` that the run did not pass, in order. Missing records violate no gate."""
    return tuple(Violation(gate, detail) for gate in gates if (detail := _OBSERVATIONS[gate](run)) is not None)


def clock_warnings(run: LoadedRun) -> tuple[ResultWarning, ...]:
    """Warnings about lowered device clocks during the load, whatever the gates."""
    warnings = []
    if (throttled := _throttled(run)) is not None:
        warnings.append(ResultWarning(code="gpu-throttled", message=throttled))
    if _POWER_CAP in _reasons(run):
        message = "the power limit held the clocks of a GPU down during the load, as is normal on busy devices"
        warnings.append(ResultWarning(code="gpu-power-capped", message=message))
    return tuple(warnings)


def _reasons(run: LoadedRun) -> frozenset[str]:
    """Clock reasons of all devices during the load."""
    window = load_window_ns(run)
    during = (sample for sample in run.gpu if window is not None and window[0] <= sample.t_ns <= window[1])
    return frozenset(reason for sample in during for reason in sample.throttle_reasons or ())


def _throttled(run: LoadedRun) -> str | None:
    slowing = sorted(THROTTLING & _reasons(run))
    return f"a GPU slowed itself down during the load ({', '.join(slowing)})" if slowing else None


def _shared(run: LoadedRun) -> str | None:
    messages = [warning.message for warning in run.record.warnings if warning.code == FOREIGN_GPU_PROCESS]
    return "; ".join(messages) or None


def _failing(run: LoadedRun) -> str | None:
    requests = measured(run.requests)
    num_failed = sum(request.error is not None for request in requests)
    return f"{num_failed} of {len(requests)} requests failed" if num_failed else None


_OBSERVATIONS: Final[Mapping[Gate, Callable[[LoadedRun], str | None]]] = {
    "throttling": _throttled,
    "foreign-gpu-process": _shared,
    "failed-requests": _failing,
}
