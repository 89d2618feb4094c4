"""Checks of the ways in which GPUs are sampled: the one in use, what each does not tell, and whether they agree."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from benchctl.measure.doctor.check import Check
from benchctl.measure.telemetry.gpu_reading import READ_QUANTITIES, GpuReader, OpenedGpus
from benchctl.measure.telemetry.nvml import NvmlStates
from benchctl.records.schema import GpuSample, ResultWarning
from benchctl.records.warning_codes import WARNING_CODES
from benchctl.units import count_of

_check = partial(Check, topic="gpu")
_TO_READ_BY_NVML: Final = "put libnvidia-ml.so.1, which comes with the driver, on the path of the loader"


def reader_checks(by_nvml: NvmlStates, by_smi: OpenedGpus) -> Iterator[Check]:
    """One check of the samples of a run, and one of nvidia-smi beside NVML; there is at least one reader."""
    smi = by_smi.reader
    if by_nvml.states:
        yield _sampling("NVML", by_nvml.samples, None)
        yield _no_second_reader(by_smi.problem) if smi is None else _agreement(by_nvml, smi)
    elif smi is not None:
        yield _sampling("nvidia-smi", smi.read(), by_nvml.problem)


def reading_warnings(warnings: Sequence[ResultWarning]) -> Iterator[Check]:
    """A check for each warning that a run on these devices would carry."""
    for warning in warnings:
        code = WARNING_CODES[warning.code]
        remedy = None if code.severity == "note" else code.remedy
        yield _check(name=warning.code, finding=warning.message, remedy=remedy)


def unknown_quantities(samples: Sequence[GpuSample]) -> dict[int, tuple[str, ...]]:
    """The quantities that each device does not tell, by its index; none for a device that tells all."""
    unknown = {
        sample.index: tuple(name for name in READ_QUANTITIES if getattr(sample, name) is None) for sample in samples
    }
    return {index: names for index, names in unknown.items() if names}


def _sampling(source: str, samples: Sequence[GpuSample], nvml_problem: str | None) -> Check:
    """The check of the way in use; ``nvml_problem`` is the reason why it is not NVML."""
    instead = "" if nvml_problem is None else f", because NVML cannot be used: {nvml_problem}"
    unknown = unknown_quantities(samples)
    return _check(
        name="sampling",
        finding=f"through {source}{instead}; {_in_words(unknown)}",
        remedy=None if nvml_problem is None else _TO_READ_BY_NVML,
        facts={"source": source, "unknown": _as_fact(unknown), "nvml_problem": nvml_problem},
    )


def _no_second_reader(problem: str) -> Check:
    finding = f"cannot be asked ({problem}); NVML is enough"
    return _check(name="nvidia-smi", finding=finding, facts={"problem": problem, "agrees": None})


def _agreement(by_nvml: NvmlStates, smi: GpuReader) -> Check:
    """The check that both ways see the same devices."""
    ours = {state.index: state.name for state in by_nvml.states}
    theirs = {device.index: device.name for device in smi.inventory()}
    unknown, agrees = unknown_quantities(smi.read()), ours == theirs
    view = f"sees the same {count_of(len(ours), 'device')}"
    if not agrees:
        view = f"sees {_devices(theirs)}, and NVML {_devices(ours)}"
    return _check(
        name="nvidia-smi",
        finding=f"{view}; {_in_words(unknown)}",
        remedy=None
        if agrees
        else "use the nvidia-smi and the libnvidia-ml of one driver; 'nvidia-smi -L' lists both",
        facts={"agrees": agrees, "unknown": _as_fact(unknown), "problem": None},
    )


def _devices(names: dict[int, str]) -> str:
    return ", ".join(f"{index} {name}" for index, name in names.items())


def _in_words(unknown: dict[int, tuple[str, ...]]) -> str:
    if not unknown:
        return "every quantity is told"
    return "; ".join(f"GPU {index} does not tell {', '.join(names)}" for index, names in unknown.items())


def _as_fact(unknown: dict[int, tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(f"{index} {name}" for index, names in unknown.items() for name in names)
