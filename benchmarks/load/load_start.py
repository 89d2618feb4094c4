"""How long the smallest load takes and how much memory a large one needs, each as a user would call it.

The smallest is 4 requests of 4 tokens, one at a time, 5 ms a token: the load itself takes 110 ms of it. The large
one keeps 256 streams open for 2,560 requests of 128 tokens, 10 ms a token. Wall time is worth something only where
nothing else runs. The modules that took longest to import say where to look.

    python -m benchmarks.load.load_start [--rounds 10] [--large-rounds 3]
"""

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.measured_process import Cost, run_measured
from benchmarks.common.table import show, write
from benchmarks.common.truth import on_cores, paced_server, usable_cores

SMALLEST = ["--num-prompts", "4", "--output-len", "4", "--max-concurrency", "1"]
LARGE = ["--num-prompts", "2560", "--output-len", "128", "--max-concurrency", "256"]
SUSPECT = 4
IMPORTED = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)")
MOST_SHOWN = 12


def command(url: str, arguments: Sequence[str], directory: Path) -> list[str]:
    argv = ["-m", "benchctl", "load", url, "--model", "paced", "--dialect", "openai", *arguments]
    return [*argv, "--output", str(directory / "result")]


def measured(tick_ms: float, arguments: Sequence[str], root: Path, rounds: int, *, is_large: bool) -> list[Cost]:
    """One run after the other against one server, each into a directory of its own."""
    costs = []
    with paced_server(root / "server", ("--tick-ms", f"{tick_ms:g}")) as server:
        for number in range(rounds):
            directory = root / str(number)
            directory.mkdir()
            argv = [sys.executable, *command(server.url, arguments, directory)]
            costs.append(
                run_measured(
                    on_cores(argv, usable_cores()[1]),
                    directory / "log",
                    timeout_s=120.0,
                    environment={},
                    is_watched=is_large,
                    knows_shares=is_large,
                    good_codes=(0, SUSPECT),
                )
            )
            if failure := costs[-1].failure:
                raise SystemExit(failure)
    return costs


def slow_imports(root: Path, rounds: int) -> list[dict[str, object]]:
    """Modules by the time that each takes itself, the shortest of several runs, which no other work was in."""
    times_us: dict[str, list[int]] = {}
    with paced_server(root / "server", ("--tick-ms", "5")) as server:
        for number in range(rounds):
            argv = [sys.executable, "-X", "importtime", *command(server.url, SMALLEST, root / f"i{number}")]
            done = subprocess.run(argv, cwd=root, capture_output=True, text=True, check=False)
            for found in IMPORTED.finditer(done.stderr):
                times_us.setdefault(found[2], []).append(int(found[1]))
    shortest = {name: min(found) / 1e3 for name, found in times_us.items()}
    print(f"\n{len(shortest)} modules, {sum(shortest.values()):.0f} ms to import")
    ordered = sorted(shortest.items(), key=lambda item: item[1], reverse=True)
    return [{"module": name, "ms": ms} for name, ms in ordered[:MOST_SHOWN]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--large-rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        small = measured(5.0, SMALLEST, root / "small", options.rounds, is_large=False)
        seconds = {"wall s": [cost.wall_s for cost in small], "CPU s": [cost.cpu_s for cost in small]}
        rows = [
            {"of the smallest load": name, "least": min(found), "median": statistics.median(found)}
            for name, found in seconds.items()
        ]
        show(rows, f"smallest load: 4 requests of 4 tokens, {options.rounds} times")
        large = measured(10.0, LARGE, root / "large", options.large_rounds, is_large=True)
        sizes = {
            "peak MB, shared memory divided (PSS)": [cost.peak_pss_bytes / 1e6 for cost in large],
            "peak MB, resident": [cost.peak_bytes / 1e6 for cost in large],
            "CPU s": [cost.cpu_s for cost in large],
        }
        rows = [{"of a large load": name, "least": min(found), "most": max(found)} for name, found in sizes.items()]
        show(rows, f"256 streams: 2,560 requests of 128 tokens, 10 ms a token, {options.large_rounds} times")
        imports = slow_imports(root / "imports", options.rounds)
        show(imports)
    write(options.json, {**seconds, **sizes, "imports": imports})


if __name__ == "__main__":
    main()
