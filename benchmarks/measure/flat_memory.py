"""Memory of benchctl while it measures, sampled each second, and what the report of the results adds.

A load of 10,000 requests at 800 streams against the paced server, then a simulated experiment of 100 runs. Growth
is the peak of the processes of benchctl (servers left out) in the last four fifths of the measured time over that
of its first fifth, when every stream has been open once or the first runs are done. Shared memory is
divided among its users (PSS).

    python -m benchmarks.measure.flat_memory [--requests 10000] [--streams 800] [--runs 100] [--json FILE]

The last column holds both against 20 MB of growth while measuring and 200 MB in the report.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from benchctl.records.loaded import load_results
from benchmarks.common.harness import FailedError, Figures, compared, options, write
from benchmarks.common.measured_process import Family
from benchmarks.common.truth import paced_server

MOST_GROWTH_BYTES = 20_000_000
MOST_REPORT_BYTES = 200_000_000
SAMPLE_S = 1.0
BEGINNING = 0.2
"""The part of the measured time after which memory should be flat."""
GOOD_CODES = (0, 3, 4)
"""Also inconclusive, and suspect on a busy machine: neither matters here."""
PROFILE = """\
name: flat-memory
seed: 1
engine: {{kind: sim, options: {{time_scale: 20.0}}}}
model: qwen2.5-7b
hardware: h100-sxm
blocks: {blocks}
stop: forced
workload:
  dataset: generated
  num_prompts: 16
  output_len: 64
  arrival: {{kind: closed-loop, max_concurrency: 8}}
  num_warmups: 1
variants:
  baseline: {{}}
  narrow: {{server: {{max_num_seqs: 4}}}}
allowed_differences: [server.max_num_seqs]
"""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a family of processes at a monotonic time, in ns."""

    t_ns: int
    pss: int
    rss: int


def watched(argv: Sequence[str], work: Path, name: str) -> list[Memory]:
    """The memory of ``benchctl ARGV`` each second until its end. Raises FailedError when it fails."""
    samples, log = [], work / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchctl", *argv], cwd=work, stdout=output, stderr=subprocess.STDOUT
        )
        while process.poll() is None:
            samples.append(memory_of(process.pid))
            time.sleep(SAMPLE_S)
    if process.returncode not in GOOD_CODES:
        raise FailedError(f"{name} ended with {process.returncode}: {log.read_text()[-2000:]}")
    return samples


def memory_of(pid: int) -> Memory:
    pss = rss = 0
    t_ns = time.monotonic_ns()
    for process in Family(pid).members():
        with suppress(psutil.Error):  # it has just ended
            if "benchctl.sim" not in process.cmdline():
                size = process.memory_full_info()
                pss, rss = pss + size.pss, rss + size.rss
    return Memory(t_ns, pss, rss)


def measured(name: str, command: Sequence[str], work: Path, out: Path) -> Figures:
    """Measure, then report; the figures of both."""
    samples = watched(command, work, name)
    times = [run.record.times for run in load_results(out).runs]
    start_ns, end_ns = min(each.first_send_ns for each in times), max(each.last_token_ns for each in times)
    middle_ns = start_ns + round(BEGINNING * (end_ns - start_ns))
    first = [sample for sample in samples if start_ns <= sample.t_ns <= middle_ns]
    rest = [sample for sample in samples if middle_ns <= sample.t_ns <= end_ns]
    if not first or len(rest) < 5:
        raise FailedError(f"{name} was measured for {(end_ns - start_ns) / 1e9:.1f} s only, too short for samples")
    figures = {
        "s": (end_ns - start_ns) / 1e9,
        "start": first[0].pss / 1e6,
        "end": rest[-1].pss / 1e6,
        "peak of the first fifth": peak_mb(first),
        "of the rest": peak_mb(rest),
        "growth": peak_mb(rest) - peak_mb(first),
        "resident": max(sample.rss for sample in (*first, *rest)) / 1e6,
        "whole command": peak_mb(samples),
        "report": peak_mb(watched(["report", str(out)], work, f"report of {name}")),
    }
    is_flat = figures["growth"] * 1e6 <= MOST_GROWTH_BYTES and figures["report"] * 1e6 <= MOST_REPORT_BYTES
    return figures | {"at most 20 and 200": "ok" if is_flat else "FAIL"}


def peak_mb(samples: Sequence[Memory]) -> float:
    return max(sample.pss for sample in samples) / 1e6


def of_a_load(asked: argparse.Namespace, root: Path) -> Figures:
    out = root / "load"
    with paced_server(root / "server", ("--tick-ms", f"{asked.tick_ms:g}")) as server:
        sizes = ["--num-prompts", str(asked.requests), "--max-concurrency", str(asked.streams)]
        command = ["load", server.url, "--model", "paced", "--dialect", "openai", *sizes]
        return measured("load", [*command, "--output-len", str(asked.output_len), "-o", str(out)], root, out)


def of_runs(asked: argparse.Namespace, root: Path) -> Figures:
    out, profile = root / "runs", root / "profile.yaml"
    profile.write_text(PROFILE.format(blocks=asked.runs // 2))
    return measured("experiment", ["run", "-p", str(profile), "-o", str(out)], root, out)


def main() -> None:
    asked = options(__doc__, requests=10_000, streams=800, output_len=32, tick_ms=100.0, runs=100)
    with tempfile.TemporaryDirectory() as root:
        ways = {
            f"{asked.requests:,} requests, {asked.streams} streams": partial(of_a_load, asked, Path(root)),
            f"{asked.runs} simulated runs": partial(of_runs, asked, Path(root)),
        }
        write(asked.json, compared("memory in MB (PSS)", ways))


if __name__ == "__main__":
    main()
