"""What ``nvidia-smi`` says of one GPU: its answers to single questions, and a record of a stretch of time.

Standard library only.
"""

import statistics
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAM = "nvidia-smi"
PERIOD_MS = 500
_CALL_LIMIT_S = 20.0
_WATCHED = (
    "clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "utilization.gpu", "memory.used",
    "clocks_throttle_reasons.active",
)  # fmt: skip
_UNITS = ("MHz", "MHz", "W", "°C", "%", "MiB")
IDLE_REASON = 0x1
"""The bit of the throttle reasons that says nothing but that the GPU is idle."""


def said(*arguments: str) -> str | None:
    """What the program prints; None where it is absent or fails."""
    try:
        done = subprocess.run(
            (PROGRAM, *arguments),
            capture_output=True,
            text=True,
            errors="replace",
            check=True,
            timeout=_CALL_LIMIT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def number(text: str) -> float | None:
    """The number of an answer; a mask is written in hexadecimal digits."""
    try:
        return float(int(text, 16)) if text.startswith("0x") else float(text)
    except ValueError:
        return None


@contextmanager
def watched(file: Path, gpu: str) -> Iterator[None]:
    """Write clocks, power and throttle reasons to a file while something runs; without the program, nothing."""
    argv = (
        PROGRAM, "-i", gpu, f"--query-gpu={','.join(_WATCHED)}", "--format=csv,noheader,nounits",
        "-lms", str(PERIOD_MS),
    )  # fmt: skip
    with file.open("wb") as sink:
        try:
            program = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.DEVNULL)
        except OSError:
            yield
            return
        try:
            yield
        finally:
            program.kill()
            program.wait()


def summary(file: Path) -> str:
    """Lowest, median and highest of what was written, as one line."""
    samples = [line.split(",") for line in file.read_text(errors="replace").splitlines()]
    samples = [[part.strip() for part in sample] for sample in samples if len(sample) == len(_WATCHED)]
    if not samples:
        return "Clocks and power: not known, nvidia-smi gave no readings."
    parts = []
    for position, unit in enumerate(_UNITS):
        values = [value for sample in samples if (value := number(sample[position])) is not None]
        if values:
            lowest, highest = min(values), max(values)
            parts.append(
                f"{_WATCHED[position]} {lowest:.0f} / {statistics.median(values):.0f} / {highest:.0f} {unit}"
            )
    masks = {int(mask) for sample in samples if (mask := number(sample[-1])) is not None}
    reasons = sorted(mask & ~IDLE_REASON for mask in masks if mask & ~IDLE_REASON)
    limited = ", ".join(f"{mask:#x}" for mask in reasons) or "none but idleness"
    return f"{len(samples)} readings, lowest / median / highest: {'; '.join(parts)}. Throttle reasons: {limited}."
