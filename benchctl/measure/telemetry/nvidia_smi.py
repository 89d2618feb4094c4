"""GPU readings through the program ``nvidia-smi``, for machines on which the NVML binding finds no library."""

import os
import select
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from threading import Event
from time import monotonic_ns
from typing import Final

from benchctl.measure.telemetry.gpu_reading import throttle_reasons, visible_positions
from benchctl.records.manifest import GpuInfo
from benchctl.records.samples import GpuSample
from benchctl.units import HZ_PER_MHZ, MIB, MS_PER_S

_PROGRAM: Final = "nvidia-smi"
_CALL_LIMIT_S: Final = 20.0
_POLL_S: Final = 0.1
_INFO_FIELDS: Final = ("index", "uuid", "name", "memory.total", "driver_version")
_SAMPLE_FIELDS: Final = (
    "index",
    "uuid",
    "utilization.gpu",
    "memory.used",
    "power.draw",
    "clocks.sm",
    "clocks.mem",
    "temperature.gpu",
    "clocks_throttle_reasons.active",  # the older of its two names, which newer programs understand, too
)


class SmiReader:
    """Reads the visible devices; made by ``open_smi``."""

    def __init__(self, devices: tuple[GpuInfo, ...]) -> None:
        self._devices = devices
        self._selection = ("-i", ",".join(device.uuid or str(device.index) for device in devices))

    def inventory(self) -> tuple[GpuInfo, ...]:
        return self._devices

    def read(self) -> tuple[GpuSample, ...]:
        return tuple(_sample(line) for line in _query(_SAMPLE_FIELDS, self._selection))

    def compute_processes(self) -> dict[int, tuple[int, ...]]:
        argv = (_PROGRAM, "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader", *self._selection)
        users = [_fields(line, 2) for line in _answer(argv)]
        return {
            device.index: tuple(sorted(int(pid) for uuid, pid in users if uuid == device.uuid and pid.isdigit()))
            for device in self._devices
        }

    def samples(self, hz: float, stopped: Event) -> Iterator[GpuSample]:
        argv = (*_argv(_SAMPLE_FIELDS), *self._selection, "-lms", str(round(MS_PER_S / hz)))
        with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as program:
            try:
                for line in _lines(program, stopped):
                    yield _sample(line)
            finally:
                program.kill()


def open_smi(visible: str | None) -> SmiReader | None:
    """A reader, or None where the program is absent, fails, or sees no visible device."""
    devices: list[GpuInfo] = []
    for line in _query(_INFO_FIELDS, ()):
        index, uuid, name, memory_mib, driver = _fields(line, len(_INFO_FIELDS))
        memory = _number(memory_mib)
        memory_bytes = None if memory is None else round(memory * MIB)
        devices.append(GpuInfo(index=int(index), name=name, uuid=uuid, memory_bytes=memory_bytes, driver=driver))
    chosen = visible_positions(visible, [device.uuid for device in devices])
    return SmiReader(tuple(devices[position] for position in chosen)) if chosen else None


def _argv(fields: Sequence[str]) -> tuple[str, ...]:
    return (_PROGRAM, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")


def _query(fields: Sequence[str], selection: Sequence[str]) -> list[str]:
    return _answer((*_argv(fields), *selection))


def _answer(argv: Sequence[str]) -> list[str]:
    """The lines that the program prints; none if it is absent or fails."""
    try:
        output = subprocess.run(
            argv, capture_output=True, encoding="utf-8", errors="replace", check=True, timeout=_CALL_LIMIT_S
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line for line in output.stdout.splitlines() if line.strip()]


def _lines(program: subprocess.Popen[bytes], stopped: Event) -> Iterator[str]:
    """Complete lines of a program's output as they come, until ``stopped`` is set."""
    assert program.stdout is not None  # noqa: S101 - it is a pipe
    descriptor, rest = program.stdout.fileno(), b""
    while not stopped.is_set():
        if not select.select([descriptor], [], [], _POLL_S)[0]:
            continue
        data = os.read(descriptor, 65_536)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from (line.decode(errors="replace") for line in lines if line.strip())


def _fields(line: str, count: int) -> list[str]:
    """The fields of a line; missing ones are empty."""
    fields = [field.strip() for field in line.split(",")]
    return (fields + [""] * count)[:count]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _sample(line: str) -> GpuSample:
    index, uuid, *texts = _fields(line, len(_SAMPLE_FIELDS))
    utilization, memory, power, sm_clock, memory_clock, temperature = map(_number, texts[:-1])
    mask: int | None = None
    with suppress(ValueError):
        mask = int(texts[-1], 16)
    return GpuSample(
        t_ns=monotonic_ns(),
        index=int(index),
        uuid=uuid or None,
        source="nvidia-smi",
        utilization_frac=None if utilization is None else utilization / 100,
        memory_used_bytes=None if memory is None else round(memory * MIB),
        power_w=power,
        sm_clock_hz=None if sm_clock is None else round(sm_clock * HZ_PER_MHZ),
        memory_clock_hz=None if memory_clock is None else round(memory_clock * HZ_PER_MHZ),
        temperature_c=temperature,
        throttle_reasons=None if mask is None else throttle_reasons(mask),
    )
