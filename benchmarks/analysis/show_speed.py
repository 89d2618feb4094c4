"""How long `benchctl show` takes for a directory of many runs, and how much memory.

    python -m benchmarks.analysis.show_speed [--blocks N] [--requests N] [--tokens N] [--repeats N] [--json FILE]

The directory is made up: blocks of a baseline and a guided run, each with so many requests of two answers that are
so many tokens long. Whoever reads long requests first leaves a copy of their numbers: that is "first reading",
once; it also compiles the modules, which an installation has done. The best of all repeats counts, and the largest
resident size; the start of the interpreter is part of both.
"""

import argparse
import random
import sys
import tempfile
from pathlib import Path

import msgspec

from benchctl.records.integrity import begin_digests, digests_of_run, record_run
from benchmarks.common.measured_process import best_of
from benchmarks.common.table import show, write

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support.results import builders


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
        show_it = [sys.executable, "-m", "benchctl", "show", str(path)]
        rows = [
            best_of("first reading", show_it, path.parent, 1),
            best_of("benchctl show", show_it, path.parent, options.repeats),
        ]
    num_runs, num_tokens = 2 * options.blocks, 4 * options.blocks * options.requests * options.tokens
    show(rows, f"a directory of {num_runs} runs and {num_tokens:,} tokens")
    write(options.json, {"rows": rows, "runs": num_runs, "tokens": num_tokens})


if __name__ == "__main__":
    main()
