"""Do NVML and nvidia-smi tell the same of a GPU under load? Both are benchctl's own ways to the numbers.

Reads through both at the same time while a command puts the GPU under load, matches each reading of nvidia-smi with
the nearest one of NVML, and prints the differences. Exits 1 where the medians differ by more than the limits below,
2 where there is no GPU or one of the two ways is not there.

    python -m benchmarks.measure.nvml_agreement [--hz 10] [--seconds 20] [-- COMMAND...]
"""

import argparse
import os
import statistics
import subprocess
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

import pynvml

from benchctl.measure.telemetry.gpus import open_nvml, open_smi
from benchctl.records.schema import GpuSample
from benchctl.units import HZ_PER_MHZ, MIB, ms_from_ns

NEAR_S = 0.5
"""Readings further apart are not compared."""
QUANTITIES: dict[str, tuple[str, float, float]] = {
    "memory_used_bytes": ("MiB", MIB, 64.0),
    "utilization_frac": ("%", 0.01, 10.0),
    "power_w": ("W", 1.0, 25.0),
    "sm_clock_hz": ("MHz", HZ_PER_MHZ, 30.0),
    "memory_clock_hz": ("MHz", HZ_PER_MHZ, 30.0),
    "temperature_c": ("C", 1.0, 2.0),
}
"""Field of a sample: its unit, the size of the unit, and the median difference that is tolerated."""


def paired(nvml: Sequence[GpuSample], smi: Sequence[GpuSample]) -> Iterator[tuple[GpuSample, GpuSample]]:
    """Each reading of nvidia-smi with the nearest one that NVML gave of the same device."""
    for later in smi:
        same = [sample for sample in nvml if sample.uuid == later.uuid]
        position = bisect_left(same, later.t_ns, key=lambda sample: sample.t_ns)
        near = min(same[max(position - 1, 0) : position + 1], key=lambda s: abs(s.t_ns - later.t_ns), default=None)
        if near is not None and ms_from_ns(abs(near.t_ns - later.t_ns)) <= NEAR_S * 1000:
            yield near, later


def differences(pairs: Sequence[tuple[GpuSample, GpuSample]], field: str) -> list[float]:
    """Absolute differences of one quantity, in its unit, where both know it."""
    size = QUANTITIES[field][1]
    values = [(getattr(first, field), getattr(second, field)) for first, second in pairs]
    return [abs(first - second) / size for first, second in values if first is not None and second is not None]


def report(pairs: Sequence[tuple[GpuSample, GpuSample]]) -> bool:
    """Print a line for each quantity; whether all agree."""
    agree = bool(pairs)
    print(f"{'quantity':20} {'unit':5} {'pairs':>6} {'median':>9} {'most':>9} {'limit':>7}")
    for field, (unit, _, limit) in QUANTITIES.items():
        found = differences(pairs, field)
        if not found:
            print(f"{field:20} {unit:5} {0:6}   not told by both")
            continue
        median = statistics.median(found)
        agree = agree and median <= limit
        print(f"{field:20} {unit:5} {len(found):6} {median:9.2f} {max(found):9.2f} {limit:7.1f}")
    return agree


def ignore(_warning: object) -> None:
    pass


def collect(
    samples: Callable[[threading.Event], Iterator[GpuSample]], stopped: threading.Event, into: list[GpuSample]
) -> threading.Thread:
    thread = threading.Thread(target=lambda: into.extend(samples(stopped)))
    thread.start()
    return thread


def read_both(hz: float, load: Callable[[], None]) -> tuple[list[GpuSample], list[GpuSample]]:
    """Readings of both ways while ``load`` runs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    with open_nvml(pynvml, visible) as opened:
        nvml, smi = opened.reader, open_smi(visible).reader
        if nvml is None or smi is None:
            absent = " and ".join(name for name, way in (("NVML", nvml), ("nvidia-smi", smi)) if way is None)
            print(f"no visible GPU through {absent}; run this where one is ('benchctl doctor --gpu' says more)")
            raise SystemExit(2)
        stopped, by_nvml, by_smi = threading.Event(), list[GpuSample](), list[GpuSample]()
        threads = [
            collect(lambda end: nvml.samples(hz, end, ignore), stopped, by_nvml),
            collect(lambda end: smi.samples(hz, end, ignore), stopped, by_smi),
        ]
        try:
            load()
        finally:
            stopped.set()
            for thread in threads:
                thread.join()
    return by_nvml, by_smi


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hz", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long to read where no command is given")
    parser.add_argument("command", nargs="*", help="what puts the GPU under load")
    arguments = parser.parse_args()

    def load() -> None:
        if not arguments.command:
            time.sleep(arguments.seconds)
        elif (code := subprocess.run(arguments.command, check=False).returncode) != 0:
            print(f"the load ended with exit code {code}")
            raise SystemExit(5)

    by_nvml, by_smi = read_both(arguments.hz, load)
    pairs = list(paired(by_nvml, by_smi))
    print(f"{len(by_nvml)} readings by NVML, {len(by_smi)} by nvidia-smi, {len(pairs)} pairs")
    agree = report(pairs)
    print("agree" if agree else "disagree")
    sys.exit(not agree)


if __name__ == "__main__":
    main()
