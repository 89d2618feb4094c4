"""Memory of benchctl while it measures, sampled each second, and what the report of the results adds.

A load of 10,000 requests at 800 streams against the paced server, then a simulated experiment of 100 runs. Growth
is the peak of the processes of benchctl (servers left out) in the last four fifths of the measured time over that
of its first fifth, when every stream has been open once or the first runs are done. Shared memory is
divided among its users (PSS).

    python -m benchmarks.measure.flat_memory [--requests 10000] [--streams 800] [--runs 100] [--json FILE]

The last lines are verdicts against 20 MB of growth while measuring and 200 MB in the report.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchctl.records.loaded import load_results
from benchmarks.common.harness import show, write
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


@dataclass(slots=True)
class Watched:
    """A command that has ended, with its memory each second."""

    wall_s: float
    samples: list[Memory] = field(default_factory=list)

    def between(self, start_ns: int, end_ns: int) -> list[Memory]:
        return [sample for sample in self.samples if start_ns <= sample.t_ns <= end_ns]


def watched(argv: Sequence[str], work: Path, name: str) -> Watched:
    """Run ``benchctl ARGV`` to its end. Raises SystemExit when it fails."""
    began_s, samples, log = time.monotonic(), [], work / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchctl", *argv], cwd=work, stdout=output, stderr=subprocess.STDOUT
        )
        while process.poll() is None:
            samples.append(memory_of(process.pid))
            time.sleep(SAMPLE_S)
    if process.returncode not in GOOD_CODES:
        raise SystemExit(f"{name} ended with {process.returncode}: {log.read_text()[-2000:]}")
    return Watched(time.monotonic() - began_s, samples)


def memory_of(pid: int) -> Memory:
    pss = rss = 0
    t_ns = time.monotonic_ns()
    for process in Family(pid).members():
        try:
            if "benchctl.sim" not in process.cmdline():
                size = process.memory_full_info()
                pss, rss = pss + size.pss, rss + size.rss
        except psutil.Error:  # it has just ended
            continue
    return Memory(t_ns, pss, rss)


def measured(name: str, command: Sequence[str], work: Path, out: Path) -> dict[str, object]:
    """Measure, then report; the row of both."""
    measuring = watched(command, work, name)
    times = [run.record.times for run in load_results(out).runs]
    start_ns = min(each.first_send_ns for each in times)
    end_ns = max(each.last_token_ns for each in times)
    samples = measuring.between(start_ns, end_ns)
    middle_ns = start_ns + round(BEGINNING * (end_ns - start_ns))
    first, rest = measuring.between(start_ns, middle_ns), measuring.between(middle_ns, end_ns)
    if not first or len(rest) < 5:
        raise SystemExit(f"{name} was measured for {(end_ns - start_ns) / 1e9:.1f} s only, too short for samples")
    reporting = watched(["report", str(out)], work, f"report of {name}")
    return {
        "of": name,
        "s": (end_ns - start_ns) / 1e9,
        "start": samples[0].pss / 1e6,
        "end": samples[-1].pss / 1e6,
        "peak of the first fifth": peak_mb(first),
        "of the rest": peak_mb(rest),
        "growth": peak_mb(rest) - peak_mb(first),
        "resident": max(sample.rss for sample in samples) / 1e6,
        "whole command": peak_mb(measuring.samples),
        "report": peak_mb(reporting.samples),
    }


def peak_mb(samples: Sequence[Memory]) -> float:
    return max(sample.pss for sample in samples) / 1e6


def of_a_load(options: argparse.Namespace, root: Path) -> dict[str, object]:
    out = root / "load"
    with paced_server(root / "server", ("--tick-ms", f"{options.tick_ms:g}")) as server:
        sizes = ["--num-prompts", str(options.requests), "--max-concurrency", str(options.streams)]
        command = ["load", server.url, "--model", "paced", "--dialect", "openai", *sizes]
        command += ["--output-len", str(options.output_len), "-o", str(out)]
        return measured(f"{options.requests:,} requests, {options.streams} streams", command, root, out)


def of_runs(options: argparse.Namespace, root: Path) -> dict[str, object]:
    out, profile = root / "runs", root / "profile.yaml"
    profile.write_text(PROFILE.format(blocks=options.runs // 2))
    return measured(f"{options.runs} simulated runs", ["run", "-p", str(profile), "-o", str(out)], root, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--streams", type=int, default=800)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--tick-ms", type=float, default=100.0, help="time between two tokens of a stream")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        rows = [measure(options, root) for measure in (of_a_load, of_runs)]
    show(rows, "memory in MB (PSS)")
    for row in rows:
        is_flat = row["growth"] * 1e6 <= MOST_GROWTH_BYTES
        is_small = row["report"] * 1e6 <= MOST_REPORT_BYTES
        print(f"{row['of']}: growth {row['growth']:.1f} MB {'ok' if is_flat else 'FAIL'} (at most 20), ", end="")
        print(f"report {row['report']:.0f} MB {'ok' if is_small else 'FAIL'} (at most 200)")
    write(options.json, rows)


if __name__ == "__main__":
    main()
