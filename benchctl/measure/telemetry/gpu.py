"""GPU telemetry: choose a reader, list devices and their users, wait until memory is free again."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import pynvml

from benchctl.measure.telemetry.gpu_reading import GpuReader, Warn, process_text, unheard
from benchctl.measure.telemetry.nvidia_smi import open_smi
from benchctl.measure.telemetry.nvml import open_nvml
from benchctl.measure.telemetry.visible_devices import VARIABLE
from benchctl.records.manifest import GpuInfo
from benchctl.records.record import FOREIGN_GPU_PROCESS, ResultWarning
from benchctl.units import MIB

_SLACK_BYTES: Final = 256 * MIB
"""Memory that a driver may keep without a warning: contexts of other programs come and go."""
_RETURN_LIMIT_S: Final = 30.0
_POLL_S: Final = 0.2
FORGOTTEN_LIMIT_S: Final = 5.0
"""Time in which the driver forgets a program that has ended."""


@contextmanager
def open_gpu(visible: str | None, nvml: Any = pynvml, warn: Warn = unheard) -> Iterator[GpuReader | None]:
    """A reader of the devices that ``visible`` (the value of CUDA_VISIBLE_DEVICES) names, or None.

    ``warn`` is told of devices that cannot be read beside others, of names that mean none, and of the reason why
    there is no reader.
    """
    with open_nvml(nvml, visible) as by_nvml:
        opened = by_nvml if by_nvml.reader else open_smi(visible)
        for warning in opened.warnings or by_nvml.warnings:
            warn(warning)
        if opened.reader is None:
            warn(_sampler_missing(by_nvml.problem, opened.problem))
        yield opened.reader


def _sampler_missing(nvml_problem: str, smi_problem: str) -> ResultWarning:
    message = (
        "neither NVML nor nvidia-smi shows a visible GPU: use, power, clocks and throttling are unknown "
        f"(NVML: {nvml_problem}; nvidia-smi: {smi_problem})"
    )
    return ResultWarning(code="gpu-sampler-missing", message=message)


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
