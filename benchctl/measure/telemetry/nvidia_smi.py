"""GPU readings through the program ``nvidia-smi``, for machines on which the NVML binding finds no library.

What a device cannot tell stands in brackets (``[N/A]``) and is unknown. A driver refuses a whole query for one
field that it does not know; such a field is left out.
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
_UNKNOWN_FIELD: Final = re.compile(r'[Ff]ield "([^"]*)" is not a valid field to query')
_REASONS: Final = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""The same, of drivers since and before 535."""
_FIELDS: Final = (
    "index", "uuid", "memory.total", "driver_version", "utilization.gpu", "memory.used", "power.draw", "clocks.sm",
    "clocks.mem", "temperature.gpu", *_REASONS, "name",
)  # fmt: skip
"""The name of the device is the last: it may contain a comma."""


class SmiReader(GpuReader):
    """Reads devices; made by ``open_smi``."""

    source = _PROGRAM

    def __init__(self, fields: Sequence[str], gpus: Sequence[NodeGpu]) -> None:
        self._fields, self._gpus = fields, gpus
        self._selection = ("-i", ",".join(gpu.uuid or str(gpu.index) for gpu in gpus))

    def described(self) -> tuple[NodeGpu, ...]:
        return tuple(self._gpus)

    def readings(self) -> Iterator[Reading]:
        lines, _ = _ask(_query(self._fields), *self._selection)
        return map(_reading, _rows(self._fields, lines))

    def stream(self, hz: float, stopped: Event) -> Iterator[Reading]:
        """Raises OSError where the program ends by itself."""
        argv = _argv(_query(self._fields), *self._selection, "-lms", str(round(MS_PER_S / hz)))
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
    fields: tuple[str, ...] = _FIELDS
    refused = {""}
    while refused and fields:
        lines, problem = _ask(_query(fields))
        refused = set(_UNKNOWN_FIELD.findall("\n".join((*lines, problem)))).intersection(fields)
        fields = tuple(field for field in fields if field not in refused)
    gpus = {int(row["index"]): _described(row) for row in _rows(fields, lines)}
    if not gpus:
        return OpenedGpus(problem=problem or "it lists no device", has_driver=False)
    indices = range(max(gpus) + 1)
    uuids = [gpus[index].uuid if index in gpus else None for index in indices]
    reason = problem or f"it is missing in the list of {_PROGRAM}"
    missing = {index: reason for index in indices if index not in gpus}
    return opened_gpus(visible, uuids, missing, lambda chosen: SmiReader(fields, [gpus[index] for index in chosen]))


def _kill_when(stopped: Event, program: subprocess.Popen[str]) -> None:
    stopped.wait()
    program.kill()


def _query(fields: Sequence[str]) -> str:
    return f"--query-gpu={','.join(fields)}"


def _argv(*options: str) -> tuple[str, ...]:
    return (_PROGRAM, *options, "--format=csv,noheader,nounits")


def _ask(*options: str) -> tuple[list[str], str]:
    """The lines that the program prints, and the reason of a failure in its words or the system's."""
    try:
        done = subprocess.run(
            _argv(*options), capture_output=True, text=True, errors="replace", check=False, timeout=_LIMIT_S
        )
    except FileNotFoundError:
        return [], f"no program {_PROGRAM} is on the PATH"
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], visible_line(str(error), 200)
    complaint = done.stderr.strip() or done.stdout.strip() if done.returncode else ""
    return done.stdout.splitlines(), visible_line(complaint, 200)


def _rows(fields: Sequence[str], lines: Sequence[str]) -> list[dict[str, str]]:
    """The values of each line by their fields; none for anything but a whole row, such as an error."""
    split = [line.strip().split(", ", len(fields) - 1) for line in lines] if "index" in fields else []
    return [dict(zip(fields, row, strict=True)) for row in split if len(row) == len(fields) and row[0].isdecimal()]


def _described(row: Mapping[str, str]) -> NodeGpu:
    return NodeGpu(
        index=int(row["index"]),
        name=_text(row, "name") or "unknown GPU",
        uuid=_text(row, "uuid"),
        memory_bytes=_amount(row, "memory.total", MIB),
        driver=_text(row, "driver_version"),
    )


def _reading(row: Mapping[str, str]) -> Reading:
    mask, percent = next((row[name] for name in _REASONS if name in row), ""), _number(row, "utilization.gpu")
    reasons = throttle_reasons(int(mask, 16)) if re.fullmatch(r"0[xX][0-9a-fA-F]{1,16}", mask) else None
    sample = GpuSample(
        t_ns=monotonic_ns(),
        index=int(row["index"]),
        uuid=_text(row, "uuid"),
        source="nvidia-smi",
        utilization_frac=None if percent is None else percent / 100,
        memory_used_bytes=_amount(row, "memory.used", MIB),
        power_w=_number(row, "power.draw"),
        sm_clock_hz=_amount(row, "clocks.sm", HZ_PER_MHZ),
        memory_clock_hz=_amount(row, "clocks.mem", HZ_PER_MHZ),
        temperature_c=_number(row, "temperature.gpu"),
        throttle_reasons=reasons,
    )
    return sample, next((visible_line(value.strip("[]"), 200) for value in row.values() if value[:1] == "["), "")


def _text(row: Mapping[str, str], field: str) -> str | None:
    """A text that the device told; None for ``[Unknown Error]`` and its like."""
    value = row.get(field, "")
    return None if not value or value[0] == "[" or value == "ERR!" else value


def _number(row: Mapping[str, str], field: str) -> float | None:
    """A quantity, which is never negative; None for every other text."""
    try:
        value = float(row.get(field, ""))
    except ValueError:
        return None
    return value if 0 <= value <= _MOST else None


def _amount(row: Mapping[str, str], field: str, unit: int) -> int | None:
    number = _number(row, field)
    return None if number is None else round(number * unit)
