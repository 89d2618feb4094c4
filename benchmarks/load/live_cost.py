"""Processor time of the numbers that a terminal shows while a load is sent, over that of the client.

    python -m benchmarks.load.live_cost [--seconds 12]

Each load goes to a fresh paced server, and its line is drawn on a terminal that another process reads. Around
making the numbers of a second and drawing them stands the clock of the thread; freeing the requests of that second
counts as theirs. Taking an ended request, and a sample after which nothing is made, is shorter than a reading of
that clock: their time is that of as many in a loop, afterwards. The time of the client is that between its first
and last sample; it includes all of this.

    us/answer   taking one ended request, a sample of which are looked at
    ms/s        making and drawing the numbers, per second of the load
    share       of the client's processor time, per cent
    of a core   per cent of one core

Ends with exit code 1 where a share is 1 % or more of a client that needs 5 % of a core and more.
"""

import os
import pty
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from benchctl.cli.screen import live_line
from benchctl.load.exchange import LoadSummary
from benchctl.measure import sending
from benchctl.measure.directory import Origin
from benchctl.measure.live import LiveNumbers
from benchctl.measure.tokens import planning_tokenizer, prepare_counted
from benchctl.profile.load import parse_profile
from benchctl.records.loaded import LoadedRun, load_results
from benchctl.units import NS_PER_S
from benchmarks.common.harness import options, show
from benchmarks.common.truth import paced_server, usable_cores

PROFILE: Final = """\
name: live-cost
seed: 1
engine:
  kind: attach
  options: {{url: "{url}", served_model: paced, dialect: openai, bypass_prefix_cache: false}}
model: paced
blocks: 1
slo: {{ttft_ms: 40, tpot_ms: 25, e2el_ms: 5000}}
workload:
  dataset: synthetic
  num_prompts: {num_prompts}
  input_len: 20
  output_len: {output_len}
  arrival: {{kind: closed-loop, max_concurrency: {streams}}}
  num_warmups: 0
  warmup_shapes: false
  allow_prefix_cache_hits: true
variants: {{one: {{}}}}
baseline: one
load: {{workers: 1}}
telemetry: {{gpu_hz: 0.0, host_hz: 0.0, prometheus_hz: 0.0}}
"""
CASES: Final = {
    "64 streams x 20 ms": (64, 20.0, 150),
    "256 streams x 10 ms": (256, 10.0, 200),
    "64 streams, answers of 4 tokens": (64, 2.0, 4),
    "4 streams x 20 ms": (4, 20.0, 100),
}
"""Streams, time between tokens in ms, and tokens of an answer."""
LEAST_CORES: Final = 0.05
MOST_REQUESTS: Final = 10_000


class Timed:
    """Processor time of the functions that it wraps."""

    def __init__(self) -> None:
        self.spent_ns = {"parts": 0, "show": 0}
        self.calls = dict.fromkeys(self.spent_ns, 0)

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            begin_ns = time.thread_time_ns()
            value = call(*args)
            if name == "show" or value is not None:
                self.spent_ns[name] += time.thread_time_ns() - begin_ns
                self.calls[name] += 1
            return value

        return timed

    def numbers(self, *args: Any) -> LiveNumbers:
        """Live numbers whose functions are timed."""
        live = LiveNumbers(*args)
        live.parts = self.around("parts", live.parts)  # type: ignore[method-assign]
        return live


def looped_ns(run: LoadedRun) -> tuple[float, float]:
    """Time of taking one request, and of a sample after which nothing is made."""
    counts = LoadSummary()
    live, begin_ns = LiveNumbers(counts, {}, 1.0), time.thread_time_ns()
    for record in run.requests:
        counts.num_sent += 1
        live.take(record)
    taken_ns = time.thread_time_ns()
    live.parts(run.client[0])
    made_ns = time.thread_time_ns()
    for _ in range(1_000):
        live.parts(run.client[0])
    return (taken_ns - begin_ns) / len(run.requests), (time.thread_time_ns() - made_ns) / 1_000


def figures(case: str, seconds: float, root: Path) -> dict[str, Any]:
    """One load with its line, and what both took."""
    streams, tick_ms, output_len = CASES[case]
    waves = max(2, min(round(seconds * 1000 / (tick_ms * output_len)), MOST_REQUESTS // streams))
    timed = Timed()
    with paced_server(root / case.replace(" ", "-"), ("--tick-ms", str(tick_ms))) as server:
        text = PROFILE.format(url=server.url, num_prompts=streams * waves, output_len=output_len, streams=streams)
        profile = parse_profile(text, "live-cost")
        prepared = prepare_counted(profile, planning_tokenizer(profile))
        directory = root / f"{case.replace(' ', '-')}-results"
        origin = Origin(output_root=root, directory=directory, label=None, argv=("live-cost",))
        results = sending.create_load_directory(profile, prepared, origin)
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, usable_cores()[1])
        with patch.object(sending, "LiveNumbers", timed.numbers), live_line(position=0) as show_live:
            sending.load_server(results, profile, lambda _: None, timed.around("show", show_live))
        os.sched_setaffinity(0, cores)
    (run,) = load_results(directory).runs
    cpu_ns, span_ns = (getattr(run.client[-1], name) - getattr(run.client[0], name) for name in ("cpu_ns", "t_ns"))
    take_ns, idle_ns = looped_ns(run)
    second_ns = sum(timed.spent_ns.values()) + idle_ns * len(run.client)
    live_ns = second_ns + take_ns * len(run.requests)
    return {
        "load": case,
        "answers/s": len(run.requests) / span_ns * NS_PER_S,
        "lines": timed.calls["show"],
        "client, % of a core": 100 * cpu_ns / span_ns,
        "us/answer": take_ns / 1e3,
        "ms/s": second_ns / span_ns * 1e3,
        "share %": 100 * live_ns / cpu_ns,
        "of a core %": 100 * live_ns / span_ns,
    }


def main() -> int:
    chosen = options(__doc__, seconds=12.0)
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (30, 120))
    with tempfile.TemporaryDirectory() as root, os.fdopen(theirs, "w") as terminal:
        reader = subprocess.Popen(["cat"], stdin=ours, stdout=subprocess.DEVNULL)
        before, sys.stderr = sys.stderr, terminal
        os.environ.pop("CI", None)
        try:
            rows = [figures(case, chosen.seconds, Path(root)) for case in CASES]
        finally:
            sys.stderr = before
            reader.terminate()
            reader.wait()
    show(rows)
    return int(any(row["share %"] >= 1 and row["client, % of a core"] >= 100 * LEAST_CORES for row in rows))


if __name__ == "__main__":
    sys.exit(main())
