"""How wrong each load generator's times are, held against what the server did.

The paced server writes down the kernel's stamp of each request's arrival and the moment of each send. What a tool
says less that is its error: of TTFT, of every gap between events (ITL), of TPOT; tokens have to be exact. Transport
over loopback takes some ten microseconds, which count as error here. Scenarios:

    plain        64 streams, one token every 20 ms
    busy-core    the same, while a process that never sleeps shares the tool's only core
    burst        256 requests at once
    multi-token  64 streams, four tokens in each event, as speculative decoding gives them
    coalesced    64 streams, four events in each send, as a proxy or a busy server gives them

    python -m benchmarks.load.client_accuracy [--scenarios plain busy-core ...] [--tools limit-stamps benchctl ...]

The error of TTFT is all that passes between the moment from which a tool counts and the request's arrival, and
between the first send and the moment at which the tool says to have it: connections that are made meanwhile, work
for other requests, parsing. benchctl appears twice where the kernel stamps arrivals: by these stamps, and by when
its event loop read. *bound* is the share of events of which it says itself that their time is only an upper bound.
Errors are shown without their sign; the JSON has the medians with it. A dash: the tool does not tell this.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.measured_process import Cost
from benchmarks.common.table import print_rows, write
from benchmarks.common.truth import Errors, PacedRun, errors, on_cores, paced_server, usable_cores
from benchmarks.load.peers.tools import TOOLS, Asked, Tool, ToolError, add_arguments, make_tokenizer

BUSY = "while True: pass"


@dataclass(frozen=True, slots=True)
class Scenario:
    """What the server does, and where the tool runs."""

    title: str
    streams: int = 64
    flags: tuple[str, ...] = ()
    is_core_busy: bool = False


SCENARIOS = {
    "plain": Scenario("64 streams"),
    "busy-core": Scenario("64 streams, the tool's only core busy with another process", is_core_busy=True),
    "burst": Scenario("256 streams started at once", streams=256),
    "multi-token": Scenario("64 streams, 4 tokens in each event", flags=("--tokens-per-chunk", "4")),
    "coalesced": Scenario("64 streams, 4 events in each send", flags=("--coalesce", "4")),
}


@contextmanager
def company(cores: Sequence[int], *, is_busy: bool) -> Iterator[None]:
    """A process that takes all it gets of the first of these cores, where one is asked for."""
    if not is_busy:
        yield
        return
    process = subprocess.Popen(on_cores([sys.executable, "-c", BUSY], cores[:1]))
    try:
        yield
    finally:
        process.kill()
        process.wait()


def run_tool(tool: Tool, asked: Asked, scenario: Scenario, timeout_s: float) -> Cost:
    cores = usable_cores()[1][: 1 if scenario.is_core_busy else None]
    with company(cores, is_busy=scenario.is_core_busy):
        return tool.run(asked, cores, timeout_s=timeout_s, is_watched=False)


def measure(name: str, scenario: Scenario, options: argparse.Namespace, directory: Path) -> list[dict[str, Any]]:
    """A row for each way in which the tool tells its times."""
    tool = TOOLS[name]
    if not tool.is_installed:
        return [{"tool": tool.name, "failed": "not installed"}]
    streams = round(scenario.streams * options.scale) or 1
    with paced_server(directory, ("--tick-ms", str(options.tick_ms), *scenario.flags)) as server:
        asked = Asked(
            url=server.url,
            directory=directory,
            tokenizer=options.tokenizer,
            num_prompts=streams,
            concurrency=streams,
            output_len=options.output_len,
            workers=options.workers,
        )
        cost = run_tool(tool, asked, scenario, options.timeout_s)
    if cost.failure:
        return [{"tool": tool.name, "failed": cost.failure}]
    try:
        return [{**told, **tool.doubt(cost)} for told in told_rows(tool, asked, server)]
    except ToolError as error:
        return [{"tool": tool.name, "failed": str(error)}]


def told_rows(tool: Tool, asked: Asked, server: PacedRun) -> list[dict[str, Any]]:
    truths = server.requests()
    rows = []
    for told, seen in tool.told(asked.directory).items():
        found = errors(seen, truths)
        rows.append({"tool": told, **row(found, asked.num_prompts), "server": server.stats})
    return rows


def row(found: Errors, num_asked: int) -> dict[str, Any]:
    """Counts are of requests: those known to both, with another number of tokens, whose gaps are not told."""
    return {
        "matched": f"{found.num_matched}/{num_asked}",
        "wrong tokens": found.num_wrong_tokens,
        **figures_ms("ttft", found.ttft_ns),
        **figures_ms("itl", found.itl_ns),
        **figures_ms("tpot", found.tpot_ns),
        "no gaps": found.num_itl_missing,
        "bound": found.bound_share,
        "bias_ms": {
            name: float(np.median(values)) / 1e6 if values else None
            for name, values in asdict(found).items()
            if name.endswith("_ns")
        },
    }


def figures_ms(name: str, values_ns: Sequence[float]) -> dict[str, float | None]:
    """Median, 99th percentile and maximum of the absolute error, in ms."""
    sizes = np.abs(values_ns) / 1e6
    shares = {"p50": 50, "p99": 99, "max": 100}
    return {
        f"{name} {label}": float(np.percentile(sizes, share)) if len(sizes) else None
        for label, share in shares.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, ["limit-stamps", "benchctl", "vllm", "guidellm", "aiperf"])
    parser.add_argument("--scenarios", nargs="+", choices=sorted(SCENARIOS), default=list(SCENARIOS))
    parser.add_argument("--tick-ms", type=float, default=20.0)
    parser.add_argument("--output-len", type=int, default=200)
    parser.add_argument("--scale", type=float, default=1.0, help="times the streams of each scenario")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        options.tokenizer = make_tokenizer(Path(root) / "tokenizer")
        found = {}
        for label in options.scenarios:
            scenario = SCENARIOS[label]
            directories = ((name, Path(root) / f"{label}-{name}") for name in options.tools)
            rows = [made for name, place in directories for made in measure(name, scenario, options, place)]
            print_rows(f"{scenario.title}: errors in ms", rows, hidden=("bias_ms", "server"))
            found[label] = rows
        write(options.json, found)


if __name__ == "__main__":
    main()
