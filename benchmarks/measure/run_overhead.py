"""What benchctl itself adds to one run: everything but the server's own start and the load.

Measures a few runs on the simulator and prints where their wall time went; the last line is the verdict against the
limit of one second.

    python -m benchmarks.measure.run_overhead [--runs 5]
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchctl.measure.run import RunContext, measure_run
from benchctl.profile.load import parse_profile
from benchctl.records.directory import RunDirectory
from benchctl.records.record import PlannedRun, RunTimes
from benchctl.units import s_from_ns
from benchctl.workload.prepare import prepare_requests
from benchmarks.common.harness import options

LIMIT_S = 1.0
PROFILE = """\
name: overhead
seed: 1
engine: {kind: sim, options: {time_scale: 100.0}}
model: qwen2.5-7b
hardware: h100-sxm
workload:
  dataset: generated
  num_prompts: 16
  samples_per_prompt: 4
  output_len: 256
  arrival: {kind: closed-loop, max_concurrency: 16}
  num_warmups: 1
variants:
  baseline: {}
"""


def between(first_ns: int | None, second_ns: int | None) -> float:
    if first_ns is None or second_ns is None:
        raise SystemExit("a run failed; see its run.json")
    return s_from_ns(second_ns - first_ns)


def parts(wall_s: float, times: RunTimes, began_ns: int) -> dict[str, float]:
    """Wall time of a run by phase."""
    shown = {
        "before launch": between(began_ns, times.launch_ns),
        "server start": between(times.launch_ns, times.ready_ns),
        "warm-up": between(times.ready_ns, times.first_send_ns),
        "load": between(times.first_send_ns, times.last_token_ns),
        "after load": between(times.last_token_ns, times.stop_ns),
    }
    return shown | {"stop and record": wall_s - sum(shown.values())}


def main() -> None:
    asked = options(__doc__, runs=5)
    profile = parse_profile(PROFILE, "run_overhead.py")
    context = RunContext(profile=profile, requests=prepare_requests(profile).requests)
    overheads = []
    with tempfile.TemporaryDirectory() as root:
        for index in range(asked.runs):
            planned = PlannedRun(index=index, run_id=f"{index:03d}", block=index, position=0, variant="baseline")
            began, began_ns = time.perf_counter(), time.monotonic_ns()
            record = measure_run(context, planned, RunDirectory(Path(root) / planned.run_id))
            shown = parts(time.perf_counter() - began, record.times, began_ns)
            overheads.append(sum(shown.values()) - shown["server start"] - shown["load"])
            print("   ".join(f"{name} {seconds:.3f} s" for name, seconds in shown.items()))
    median_s = statistics.median(overheads)
    print(f"overhead of one run: median {median_s:.3f} s, most {max(overheads):.3f} s; limit {LIMIT_S:g} s")
    sys.exit(median_s > LIMIT_S)


if __name__ == "__main__":
    main()
