"""The cost of a request: loads of many short requests, and of typical ones, beside the least that a client can do.

    python -m benchmarks.load.requests [--requests 1000 10000 50000] [--typical 2000] [--streams 256] [--rounds 3]

Requests of 4 tokens show what a request costs, whatever its tokens do; all their prompts and answers have one
length. *typical* requests have lengths of their own, log-normal around 200 tokens in the prompt and 100 in the
answer, and are those of ``benchctl run``; the limit sends as many of the mean lengths. Each load goes to a fresh
paced server, which has a core of its own. By tool, on either event loop the limit, and benchctl:

    wall s      of the whole command
    load s      from the first arrival at the server to its last send
    us/request  processor time of the command and its children over the requests, and *more*: less that of a load of
                one request, which is nearly all start-up
    peak MB     the most that the command had resident; *kB more*: over that of one request, by requests

Ratios are to the first tool. The limit keeps what it has read in memory, and neither decodes, writes nor judges it.
"""

import os
import sys
import tempfile
from functools import partial
from itertools import count
from pathlib import Path

from benchmarks.common.harness import FailedError, Figures, compared, options, write
from benchmarks.common.measured_process import Cost, run_measured
from benchmarks.common.truth import PacedRun, on_cores, paced_server, usable_cores
from benchmarks.load.peers.tools import OURS, TOOLS, Load

GOOD_CODES = (0, 3, 4)
"""Also inconclusive, and suspect: a server that is so fast keeps any client busy."""
PROMPT, ANSWER = 200, 100
PROFILE = """\
name: typical
seed: 1
engine:
  kind: attach
  options: {{url: "{url}", served_model: paced, dialect: openai, bypass_prefix_cache: false}}
model: paced
blocks: 1
stop: forced
workload:
  dataset: synthetic
  num_prompts: {num_prompts}
  input_len: {{mean: 200, cv: 0.5, min: 16, max: 1000}}
  output_len: {{mean: 100, cv: 0.5, min: 1, max: 500}}
  arrival: {{kind: closed-loop, max_concurrency: {concurrency}}}
  num_warmups: 0
  warmup_shapes: false
  allow_prefix_cache_hits: true
variants: {{one: {{}}}}
baseline: one
load: {{workers: 1}}
telemetry: {{gpu_hz: 0.0, host_hz: 0.0, prometheus_hz: 0.0}}
"""


class Bench:
    """Loads against fresh servers, each in a directory of its own; what one request costs is measured once."""

    def __init__(self, root: Path, streams: int, tick_ms: float) -> None:
        self.root, self.streams, self.tick_ms, self.numbers = root, streams, tick_ms, count()
        self.alone: dict[tuple[str, bool], Cost] = {}

    def figures(self, tool: str, num_requests: int, *, is_typical: bool) -> Figures:
        key = tool, is_typical
        if key not in self.alone:
            starts = [self.sent(tool, 1, is_typical=is_typical)[0] for _ in range(3)]  # the first compiles modules
            self.alone[key] = min(starts, key=lambda cost: cost.cpu_s)
        alone, (cost, load_s) = self.alone[key], self.sent(tool, num_requests, is_typical=is_typical)
        return {
            "wall s": cost.wall_s,
            "load s": load_s,
            "us/request": 1e6 * cost.cpu_s / num_requests,
            "more": 1e6 * (cost.cpu_s - alone.cpu_s) / num_requests,
            "peak MB": cost.peak_bytes / 1e6,
            "kB more": (cost.peak_bytes - alone.peak_bytes) / 1e3 / num_requests,
        }

    def sent(self, tool: str, num_requests: int, *, is_typical: bool) -> tuple[Cost, float]:
        """What a load cost, and the seconds in which the server answered it. Raises FailedError."""
        directory = self.root / str(next(self.numbers))
        with paced_server(directory, ("--tick-ms", str(self.tick_ms))) as server:
            if is_typical and tool == "benchctl":
                cost = self.run_of_profile(server, directory, num_requests)
            else:
                load = Load(
                    url=server.url,
                    directory=directory,
                    tokenizer=directory,
                    num_prompts=num_requests,
                    input_len=PROMPT if is_typical else 16,
                    output_len=ANSWER if is_typical else 4,
                    concurrency=self.streams,
                )
                cost = TOOLS[tool].run(load, usable_cores()[1], timeout_s=600, is_watched=False)
        truths = [truth for truth in server.requests() if truth.is_complete]
        if cost.failure or len(truths) < num_requests:
            raise FailedError(cost.failure or f"only {len(truths)} of {num_requests} requests were answered")
        first_ns, last_ns = min(truth.arrived_ns for truth in truths), max(truth.sends_ns[-1] for truth in truths)
        return cost, (last_ns - first_ns) / 1e9

    def run_of_profile(self, server: PacedRun, directory: Path, num_requests: int) -> Cost:
        profile = directory / "profile.yaml"
        profile.write_text(PROFILE.format(url=server.url, num_prompts=num_requests, concurrency=self.streams))
        argv = [sys.executable, "-m", "benchctl", "run", "-p", str(profile), "-o", str(directory / "out")]
        return run_measured(
            on_cores(argv, usable_cores()[1]),
            directory / "tool.log",
            timeout_s=600,
            environment=OURS,
            is_watched=False,
            good_codes=GOOD_CODES,
        )


def main() -> None:
    asked = options(
        __doc__,
        requests=[1000, 10_000, 50_000],
        typical=2000,
        tools=["limit", "limit-asyncio", "benchctl"],
        streams=256,
        tick_ms=1.0,
        rounds=3,
    )
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a command is measured as it runs the second time
    tables = {}
    with tempfile.TemporaryDirectory() as root:
        bench = Bench(Path(root), asked.streams, asked.tick_ms)
        sizes = {f"{number:,} requests of 4 tokens": (number, False) for number in asked.requests}
        sizes |= {f"{asked.typical:,} typical requests": (asked.typical, True)}
        for title, (number, is_typical) in sizes.items():
            ways = {tool: partial(bench.figures, tool, number, is_typical=is_typical) for tool in asked.tools}
            name = f"{title}, {asked.streams} streams"
            tables[name] = compared(name, ways, rounds=asked.rounds, ratios=("us/request", "more", "peak MB"))
    write(asked.json, tables)


if __name__ == "__main__":
    main()
