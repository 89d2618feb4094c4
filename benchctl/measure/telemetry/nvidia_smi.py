"""GPU readings through the program ``nvidia-smi``, for machines on which the NVML binding finds no library.

What a device cannot tell stands in brackets (``[N/A]``) and is unknown. A driver refuses a whole query for one
field that it does not know; such a field is asked for under its other name, and then left out.
"""

import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from threading import Event, Thread
from time import monotonic_ns
from typing import Final

from benchctl.measure.telemetry.reading import GpuReader, OpenedGpus, Reading, opened_gpus, throttle_reasons
from benchctl.records.schema import GpuSample, NodeGpu
from benchctl.units import HZ_PER_MHZ, MIB, MS_PER_S
from benchctl.untrusted.text import visible_line

_PROGRAM: Final = "nvidia-smi"
_LIMIT_S: Final = 20.0
_MOST: Final = 1e12
"""Most of any quantity in the units of the program, far above watts, MiB and MHz of devices; NaN is not below."""
_FORMAT: Final = "--format=csv,noheader,nounits"
_UNKNOWN_FIELD: Final = re.compile(r'[Ff]ield "([^"]*)" is not a valid field to query')
_NAMES: Final[Mapping[str, Sequence[str]]] = {
    "index": ("index",),
    "uuid": ("uuid", "gpu_uuid"),
    "memory_mib": ("memory.total",),
    "driver": ("driver_version",),
    "utilization": ("utilization.gpu",),
    "used_mib": ("memory.used",),
    "power_w": ("power.draw",),
    "sm_mhz": ("clocks.sm", "clocks.current.sm"),
    "memory_mhz": ("clocks.mem", "clocks.current.memory"),
    "temperature_c": ("temperature.gpu",),
    "reasons": ("clocks_event_reasons.active", "clocks_throttle_reasons.active"),
    "name": ("name", "gpu_name"),
}
"""Names of what is asked for, in the order of trial. The name of the device is the last: it may contain a comma."""


class SmiReader(GpuReader):
    """Reads devices; made by ``open_smi``."""

    source = _PROGRAM

    def __init__(self, fields: Mapping[str, str], gpus: Sequence[NodeGpu]) -> None:
        self._fields, self._gpus = fields, gpus
        self._selection = ("-i", ",".join(gpu.uuid or str(gpu.index) for gpu in gpus))

    def described(self) -> tuple[NodeGpu, ...]:
        return tuple(self._gpus)

    def readings(self) -> Iterator[Reading]:
        lines, _ = _ask(_query(self._fields), *self._selection)
        return (_reading(row) for row in _rows(self._fields, lines))

    def stream(self, hz: float, stopped: Event) -> Iterator[Reading]:
        """Raises OSError where the program ends by itself."""
        argv = (_PROGRAM, _query(self._fields), _FORMAT, *self._selection, "-lms", str(round(MS_PER_S / hz)))
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as program:
            Thread(target=_kill_when, args=(stopped, program), daemon=True).start()
            last = ""
            try:
                for line in program.stdout or ():
                    rows = _rows(self._fields, [line] if line.endswith("\n") else [])
                    last = last if rows else line
                    yield from map(_reading, rows)
                code = program.wait()
            finally:
                program.kill()
        if not stopped.is_set():
            raise OSError(f"{_PROGRAM} ended by itself with exit code {code}: {visible_line(last.strip(), 200)}")

    def compute_processes(self) -> dict[int, tuple[int, ...]]:
        lines, _ = _ask("--query-compute-apps=gpu_uuid,pid", *self._selection)
        users = [line.strip().split(", ") for line in lines]
        pids = [(user[0], int(user[1])) for user in users if len(user) == 2 and user[1].isdecimal()]
        return {gpu.index: tuple(sorted(pid for uuid, pid in pids if uuid == gpu.uuid)) for gpu in self._gpus}


def open_smi(visible: str | None) -> OpenedGpus:
    """A reader of the devices that ``visible`` names; none where the program is absent, fails, or sees none."""
    left = {key: list(names) for key, names in _NAMES.items()}
    while True:
        fields = {key: names[0] for key, names in left.items() if names}
        lines, problem = _ask(_query(fields))
        refused = set(_UNKNOWN_FIELD.findall("\n".join((*lines, problem))))
        if not refused.intersection(fields.values()):
            break
        left = {key: [name for name in names if name not in refused] for key, names in left.items()}
    rows = _rows(fields, lines) if "index" in fields else []
    gpus = {gpu.index: gpu for gpu in map(_described, rows)}
    if not gpus:
        return OpenedGpus(problem=problem or "it lists no device", has_driver=False)
    indices = range(max(gpus) + 1)
    uuids = [gpus[index].uuid if index in gpus else None for index in indices]
    missing = {
        index: problem or f"it is missing in the list of {_PROGRAM}" for index in indices if index not in gpus
    }
    return opened_gpus(visible, uuids, missing, lambda chosen: SmiReader(fields, [gpus[index] for index in chosen]))


def _kill_when(stopped: Event, program: subprocess.Popen[str]) -> None:
    stopped.wait()
    program.kill()


def _query(fields: Mapping[str, str]) -> str:
    return f"--query-gpu={','.join(fields.values())}"


def _ask(*options: str) -> tuple[list[str], str]:
    """The lines that the program prints, and the reason of a failure in its words or the system's."""
    argv = (_PROGRAM, *options, _FORMAT)
    try:
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", check=False, timeout=_LIMIT_S)
    except FileNotFoundError:
        return [], f"no program {_PROGRAM} is on the PATH"
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], visible_line(str(error), 200)
    complaint = done.stderr.strip() or done.stdout.strip() if done.returncode else ""
    return done.stdout.splitlines(), visible_line(complaint, 200)


def _rows(fields: Mapping[str, str], lines: Sequence[str]) -> list[dict[str, str]]:
    """The values of each line by what was asked for; none for anything but a whole row, such as an error."""
    split = [line.strip().split(", ", len(fields) - 1) for line in lines]
    return [dict(zip(fields, row, strict=True)) for row in split if len(row) == len(fields) and row[0].isdecimal()]


def _described(row: Mapping[str, str]) -> NodeGpu:
    return NodeGpu(
        index=int(row["index"]),
        name=_text(row, "name") or "unknown GPU",
        uuid=_text(row, "uuid"),
        memory_bytes=_amount(row, "memory_mib", MIB),
        driver=_text(row, "driver"),
    )


def _reading(row: Mapping[str, str]) -> Reading:
    mask, percent = row.get("reasons", ""), _number(row, "utilization")
    reasons = throttle_reasons(int(mask, 16)) if re.fullmatch(r"0[xX][0-9a-fA-F]{1,16}", mask) else None
    sample = GpuSample(
        t_ns=monotonic_ns(),
        index=int(row["index"]),
        uuid=_text(row, "uuid"),
        source="nvidia-smi",
        utilization_frac=None if percent is None else percent / 100,
        memory_used_bytes=_amount(row, "used_mib", MIB),
        power_w=_number(row, "power_w"),
        sm_clock_hz=_amount(row, "sm_mhz", HZ_PER_MHZ),
        memory_clock_hz=_amount(row, "memory_mhz", HZ_PER_MHZ),
        temperature_c=_number(row, "temperature_c"),
        throttle_reasons=reasons,
    )
    return sample, next((visible_line(value.strip("[]"), 200) for value in row.values() if value[:1] == "["), "")


def _text(row: Mapping[str, str], key: str) -> str | None:
    """A text that the device told; None for ``[Unknown Error]`` and its like."""
    value = row.get(key, "")
    return None if not value or value[0] == "[" or value == "ERR!" else value


def _number(row: Mapping[str, str], key: str) -> float | None:
    """A quantity, which is never negative; None for every other text."""
    try:
        value = float(row.get(key, ""))
    except ValueError:
        return None
    return value if 0 <= value <= _MOST else None


def _amount(row: Mapping[str, str], key: str, unit: int) -> int | None:
    number = _number(row, key)
    return None if number is None else round(number * unit)
