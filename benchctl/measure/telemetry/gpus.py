"""The GPUs of this machine: a reader of those that a server sees, their users, and memory that comes back."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from typing import Any, Final

import psutil
import pynvml

from benchctl.measure.limits import Shortfall
from benchctl.measure.telemetry.nvidia_smi import open_smi
from benchctl.measure.telemetry.nvml import open_nvml
from benchctl.measure.telemetry.reading import VARIABLE, GpuReader, OpenedGpus, Warn, hides_all
from benchctl.profile.engine_options import LaunchedOptions
from benchctl.profile.engine_table import ENGINES
from benchctl.profile.model import Profile
from benchctl.profile.planning import arms, variant_settings
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


@contextmanager
def opened(visible: str | None, nvml: Any = pynvml) -> Iterator[OpenedGpus]:
    """The devices that ``visible`` (the value of CUDA_VISIBLE_DEVICES) names, through NVML or else nvidia-smi.

    The problem is that of NVML, and of both without a reader.
    """
    with open_nvml(nvml, visible) as by_nvml:
        if by_nvml.reader is not None:
            yield by_nvml
            return
        by_smi = open_smi(visible)
        yield OpenedGpus(
            reader=by_smi.reader,
            problem=by_nvml.problem if by_smi.reader else f"NVML: {by_nvml.problem}; nvidia-smi: {by_smi.problem}",
            has_driver=by_nvml.has_driver or by_smi.has_driver,
            warnings=by_smi.warnings or by_nvml.warnings,
        )


@contextmanager
def open_gpu(
    visible: str | None, nvml: Any = pynvml, warn: Warn = lambda _warning: None
) -> Iterator[GpuReader | None]:
    """A reader of the devices that ``visible`` names, or None.

    ``warn`` is told of devices that cannot be read beside others, of names that mean none, and of the reason why
    there is no reader.
    """
    with opened(visible, nvml) as gpus:
        for warning in gpus.warnings:
            warn(warning)
        if gpus.reader is None:
            warn(ResultWarning(code="gpu-sampler-missing", message=f"{_MISSING} ({gpus.problem})"))
        yield gpus.reader


def absent_gpu(visible: str | None, nvml: Any = pynvml, system: Path = Path("/dev")) -> tuple[str, bool] | None:
    """The reason why no device that ``visible`` names is there, and whether that is certain; None where one is.

    It is not where the system has files of devices, in the directory ``system``, that neither way can read.
    """
    with opened(visible, nvml) as gpus:
        if gpus.reader is not None:
            return None
    may_be_there = any(True for pattern in _DEVICE_FILES for _ in system.glob(pattern))
    names = "" if visible is None else f"{VARIABLE} is {visible_value(visible)}; "
    return f"{names}{gpus.problem}", gpus.has_driver or hides_all(visible) or not may_be_there


def gpu_inventory(visible: str | None = None) -> tuple[GpuInfo, ...]:
    """The devices that ``visible`` names, by default those that CUDA_VISIBLE_DEVICES names."""
    with open_gpu(os.environ.get(VARIABLE) if visible is None else visible) as reader:
        gpus = reader.described() if reader is not None else ()
    return tuple(GpuInfo(**{name: getattr(gpu, name) for name in GpuInfo.__struct_fields__}) for gpu in gpus)


def memory_used_bytes(reader: GpuReader) -> dict[int, int]:
    """The memory in use of each device, by its index."""
    readings = reader.read()
    return {sample.index: sample.memory_used_bytes for sample in readings if sample.memory_used_bytes is not None}


def wait_memory_returned(
    reader: GpuReader, before_bytes: Mapping[int, int], limit_s: float = _RETURN_LIMIT_S
) -> tuple[ResultWarning, ...]:
    """Wait until no device holds more than before the run, so that the next one finds the same machine.

    Each device is checked by itself: memory that one frees must not hide memory that another still holds.
    """
    deadline = time.monotonic() + limit_s
    while True:
        more = {i: used - before_bytes.get(i, used) for i, used in memory_used_bytes(reader).items()}
        held = {index: num_bytes for index, num_bytes in more.items() if num_bytes > _SLACK_BYTES}
        if not held:
            return ()
        if time.monotonic() >= deadline:
            text = ", ".join(f"{num_bytes // MIB} MiB of GPU {index}" for index, num_bytes in sorted(held.items()))
            message = f"{text} are still held {limit_s:g} s after the server was stopped"
            return (ResultWarning(code="gpu-memory-held", message=message),)
        time.sleep(_POLL_S)


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


def process_text(pid: int) -> str:
    """A process by its id, and its name if it is visible from here."""
    with suppress(psutil.Error, ValueError):
        return f"{pid} ({psutil.Process(pid).name()})"
    return f"{pid}"


def gpu_shortfalls(profile: Profile, nvml: Any = pynvml) -> Iterator[Shortfall]:
    """One entry where an arm of ``profile`` needs a GPU and its server would see none."""
    servers = (variant_settings(profile, variant, cell).server for variant, cell in arms(profile))
    given: list[dict[str, str]] = [getattr(server, "env", {}) for server in servers if server.uses_gpu]
    for visible in dict.fromkeys(env.get(VARIABLE, os.environ.get(VARIABLE)) for env in given):
        if (absence := absent_gpu(visible, nvml)) is not None:
            reason, is_certain = absence
            kind = profile.engine.kind
            need = f"engine {kind!r} needs one in this profile; {_remedy(kind)}"
            message = f"no GPU is seen here ({reason}), and {need}"
            yield Shortfall(message=message, is_certain=is_certain)
            return


def _remedy(kind: str) -> str:
    preset = ENGINES[kind].preset_without_gpu
    instead = "" if preset is None else f"measure small models without one: --engine {preset}; or "
    return (
        f"{instead}make a GPU visible ('benchctl doctor --gpu' says what is missing), or, where the engine is "
        "built for another device, --set engine.options.needs_gpu=false"
    )


def gpus_of_block(profile: Profile, *, has_gpus: bool | None = None) -> int | None:
    """GPUs that one block takes: those its profile states, else as many as the largest server is spread over.

    The servers of a block run one after the other. Simulated and attached servers take none. An engine that can do
    with or without a GPU, and whose options do not say which, takes what there is: ``has_gpus`` tells of the host
    that measures; None where that is another one gives None.
    """
    if profile.cluster.gpus_per_block is not None:
        return profile.cluster.gpus_per_block
    servers = [variant_settings(profile, variant, cell).server for variant, cell in arms(profile)]
    launched = [server for server in servers if isinstance(server, LaunchedOptions)]
    if has_gpus is None and any(server.uses_gpu is None for server in launched):
        return None
    users = [server for server in launched if (has_gpus if server.uses_gpu is None else server.uses_gpu)]
    spread = ("tensor_parallel_size", "data_parallel_size")
    return max((prod(getattr(each, name, 1) for name in spread) for each in users), default=0)
