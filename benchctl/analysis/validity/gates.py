"""Machine-state gates: what must have held during a run for it to be compared.

They are declared in the profile, before anything is measured, so that nobody leaves out what does not please.
Throttling is a device that slowed itself for heat or at the demand of the hardware. Not meant are idle clocks, and
the power limit that the driver holds: busy devices run at it all the time, so it belongs to what is measured, and a
change that draws more power pays for it there. Failed requests are a gate only where somebody asks: else they
make a comparison incomplete, because leaving out the runs in which a variant breaks would flatter it.
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
"""Reasons of a device's clocks that say it was slowed down; named as ``GpuSample.throttle_reasons`` are."""
_POWER_CAP: Final = "sw-power-cap"


@dataclass(frozen=True, slots=True)
class Violation:
    """A gate that a run did not pass, and what was seen."""

    gate: Gate
    detail: str

    def __str__(self) -> str:
        return f"gate {self.gate}: {self.detail}"


def violated_gates(run: LoadedRun, gates: Sequence[Gate]) -> tuple[Violation, ...]:
    """Which of ``gates`` the run did not pass, in their order. What nobody recorded violates nothing."""
    seen = ((gate, _LOOKS[gate](run)) for gate in gates)
    return tuple(Violation(gate, detail) for gate, detail in seen if detail is not None)


def clock_warnings(run: LoadedRun) -> tuple[ResultWarning, ...]:
    """What held down the clocks of the devices during the load, told whatever the gates."""
    found = []
    if (throttled := _throttled(run)) is not None:
        found.append(ResultWarning(code="gpu-throttled", message=throttled))
    if _POWER_CAP in _reasons(run):
        message = "the power limit held the clocks of a GPU down during the load, as it does on busy devices"
        found.append(ResultWarning(code="gpu-power-capped", message=message))
    return tuple(found)


def _reasons(run: LoadedRun) -> frozenset[str]:
    """Reasons of the clocks of all devices during the load; those before and after it touch nothing measured."""
    window = load_window_ns(run)
    if window is None:
        return frozenset()
    during = (sample for sample in run.gpu if window[0] <= sample.t_ns <= window[1])
    return frozenset(reason for sample in during for reason in sample.throttle_reasons or ())


def _throttled(run: LoadedRun) -> str | None:
    slowing = sorted(THROTTLING & _reasons(run))
    return f"a GPU slowed itself down during the load ({', '.join(slowing)})" if slowing else None


def _shared(run: LoadedRun) -> str | None:
    told = [warning.message for warning in run.record.warnings if warning.code == FOREIGN_GPU_PROCESS]
    return "; ".join(told) or None


def _failing(run: LoadedRun) -> str | None:
    requests = measured(run.requests)
    num_failed = sum(request.error is not None for request in requests)
    return f"{num_failed} of {len(requests)} requests failed" if num_failed else None


_LOOKS: Final[Mapping[Gate, Callable[[LoadedRun], str | None]]] = {
    "throttling": _throttled,
    "foreign-gpu-process": _shared,
    "failed-requests": _failing,
}
