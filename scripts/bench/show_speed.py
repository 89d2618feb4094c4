"""How long `benchctl show` takes for a directory of many runs, and how much memory.

    python scripts/bench/show_speed.py [--blocks N] [--requests N] [--tokens N] [--repeats N] [--json FILE]

The directory is made up: blocks of a baseline and a guided run, each with so many requests of two answers that are
so many tokens long. Whoever reads long requests first leaves a copy of their numbers: that is "first reading",
once; it also compiles the modules, which an installation has done. The best of all repeats counts, and the largest
resident size; the start of the interpreter is part of both.
"""

import argparse
import os
import random
import sys
import tempfile
from pathlib import Path

import msgspec
from measured_process import run_measured
from table import show, write

from benchctl.records.digests import begin_digests, digests_of_run, record_run

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import builders


def make_directory(path, options):
    scatter = random.Random(1)
    blocks = [
        {"baseline": 1 + 0.02 * scatter.random(), "guided": 1.05 + 0.02 * scatter.random()}
        for _ in range(options.blocks)
    ]
    results = builders.write_results(
        path, block_factors=blocks, num_requests=options.requests, output_tokens=options.tokens, n=2
    )
    begin_digests(results)
    for run in results.runs():
        run.write(msgspec.structs.replace(run.read(), files=digests_of_run(run)))
        record_run(results, run.path.name)


def measured(name, path, repeats):
    log = path.parent / "show.log"
    argv = [sys.executable, "-m", "benchctl", "show", str(path)]
    bytecode = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(path.parent / "bytecode")}
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), **bytecode}
    costs = [
        run_measured(argv, log, timeout_s=600, environment=environment, is_watched=False) for _ in range(repeats)
    ]
    for cost in costs:
        if cost.failure:
            raise SystemExit(f"{name} {cost.failure}")
    best = min(costs, key=lambda cost: cost.wall_s)
    peak_mib = max(cost.peak_bytes for cost in costs) / 2**20
    return {"what": name, "wall s": best.wall_s, "cpu s": best.cpu_s, "peak MiB": peak_mib}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=240, help="of two runs each")
    parser.add_argument("--requests", type=int, default=64, help="of each run, with two answers")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "results"
        make_directory(path, options)
        rows = [measured("first reading", path, 1), measured("benchctl show", path, options.repeats)]
    num_runs, num_tokens = 2 * options.blocks, 4 * options.blocks * options.requests * options.tokens
    show(rows, f"a directory of {num_runs} runs and {num_tokens:,} tokens")
    write(options.json, {"rows": rows, "runs": num_runs, "tokens": num_tokens})


if __name__ == "__main__":
    main()
