"""GPU telemetry: choose a reader, list devices and their users, wait until memory is free again."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pynvml

from benchctl.measure.telemetry.gpu_reading import GpuReader, OpenedGpus, Warn, process_text, unheard
from benchctl.measure.telemetry.nvidia_smi import open_smi
from benchctl.measure.telemetry.nvml import open_nvml
from benchctl.measure.telemetry.visible_devices import VARIABLE, hides_all
from benchctl.records.schema import FOREIGN_GPU_PROCESS, GpuInfo, ResultWarning
from benchctl.units import MIB
from benchctl.untrusted.text import visible_value

_SLACK_BYTES: Final = 256 * MIB
"""Memory that a driver may keep without a warning: contexts of other programs come and go."""
_RETURN_LIMIT_S: Final = 30.0
_POLL_S: Final = 0.2
FORGOTTEN_LIMIT_S: Final = 5.0
"""Time in which the driver forgets a program that has ended."""
_DEVICE_FILES: Final = ("nvidia[0-9]*", "dxg", "kfd")
"""Files of devices that a server may use although neither way of reading sees them: NVIDIA's, WSL's, AMD's."""
_MISSING: Final = "neither NVML nor nvidia-smi shows a visible GPU: use, power, clocks and throttling are unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class AbsentGpu:
    """The absence of a visible GPU."""

    reason: str
    """The words of both ways of reading."""
    is_certain: bool
    """False where the system has files of a device that neither way can read."""


@contextmanager
def open_gpu(visible: str | None, nvml: Any = pynvml, warn: Warn = unheard) -> Iterator[GpuReader | None]:
    """A reader of the devices that ``visible`` (the value of CUDA_VISIBLE_DEVICES) names, or None.

    ``warn`` is told of devices that cannot be read beside others, of names that mean none, and of the reason why
    there is no reader.
    """
    with _opened(visible, nvml) as opened:
        for warning in opened.warnings:
            warn(warning)
        if opened.reader is None:
            warn(ResultWarning(code="gpu-sampler-missing", message=f"{_MISSING} ({opened.problem})"))
        yield opened.reader


def absent_gpu(visible: str | None, nvml: Any = pynvml, system: Path = Path("/dev")) -> AbsentGpu | None:
    """The absence of devices that ``visible`` names; None where there is one.

    ``system`` is the directory of the system's devices.
    """
    with _opened(visible, nvml) as opened:
        if opened.reader is not None:
            return None
        names = "" if visible is None else f"{VARIABLE} is {visible_value(visible)}; "
        may_be_there = any(True for pattern in _DEVICE_FILES for _ in system.glob(pattern))
        return AbsentGpu(
            reason=f"{names}{opened.problem}",
            is_certain=opened.has_driver or hides_all(visible) or not may_be_there,
        )


@contextmanager
def _opened(visible: str | None, nvml: Any) -> Iterator[OpenedGpus]:
    """The devices through NVML or else through nvidia-smi; the problem is that of both."""
    with open_nvml(nvml, visible) as by_nvml:
        if by_nvml.reader is not None:
            yield by_nvml
            return
        by_smi = open_smi(visible)
        yield OpenedGpus(
            reader=by_smi.reader,
            problem=f"NVML: {by_nvml.problem}; nvidia-smi: {by_smi.problem}",
            has_driver=by_nvml.has_driver or by_smi.has_driver,
            warnings=by_smi.warnings or by_nvml.warnings,
        )


def gpu_inventory(visible: str | None = None) -> tuple[GpuInfo, ...]:
    """The devices that ``visible`` names, by default those that CUDA_VISIBLE_DEVICES names."""
    with open_gpu(os.environ.get(VARIABLE) if visible is None else visible) as reader:
        return reader.inventory() if reader else ()


def memory_used_bytes(reader: GpuReader) -> dict[int, int]:
    readings = reader.read()
    return {sample.index: sample.memory_used_bytes for sample in readings if sample.memory_used_bytes is not None}


def wait_memory_returned(
    reader: GpuReader, before_bytes: Mapping[int, int], limit_s: float = _RETURN_LIMIT_S
) -> tuple[ResultWarning, ...]:
    """Wait until no device holds more than before the run, so that the next one finds the same machine.

    Each device is checked by itself: memory that one frees must not hide memory that another still holds.
    """
    deadline = time.monotonic() + limit_s
    while held := _held_bytes(memory_used_bytes(reader), before_bytes):
        if time.monotonic() >= deadline:
            held_text = ", ".join(
                f"{num_bytes // MIB} MiB of GPU {index}" for index, num_bytes in sorted(held.items())
            )
            message = f"{held_text} are still held {limit_s:g} s after the server was stopped"
            return (ResultWarning(code="gpu-memory-held", message=message),)
        time.sleep(_POLL_S)
    return ()


def foreign_processes(reader: GpuReader, when: str, limit_s: float = 0.0) -> tuple[ResultWarning, ...]:
    """Warn of programs that compute on the devices while no server of ours runs, waiting until ended ones are
    forgotten.

    ``when`` continues the message after "computed on GPU 0". Only the time tells them from ours: in a container the
    process ids of the driver differ from those inside.
    """
    deadline = time.monotonic() + limit_s
    users = reader.compute_processes()
    while any(users.values()) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        users = reader.compute_processes()
    return tuple(
        ResultWarning(
            code=FOREIGN_GPU_PROCESS,
            message=f"process {', '.join(map(process_text, pids))} computed on GPU {index} {when}",
        )
        for index, pids in users.items()
        if pids
    )


def _held_bytes(now: Mapping[int, int], before: Mapping[int, int]) -> dict[int, int]:
    """The memory that each device holds beyond that before, if it exceeds what other programs may explain."""
    more = {index: used - before.get(index, used) for index, used in now.items()}
    return {index: num_bytes for index, num_bytes in more.items() if num_bytes > _SLACK_BYTES}
