"""A process that computes in bursts of random length and rests as long on average: a neighbour on the machine.

python -m benchmarks.common.busy [--seed 0] [--mean-ms 200]
"""

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.common.harness import options


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """So many of them, each with a seed of its own, until the block ends."""
    argv = (sys.executable, "-m", "benchmarks.common.busy", "--seed")
    processes = [subprocess.Popen([*argv, str(seed)]) for seed in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    chosen = options(__doc__, seed=0, mean_ms=200.0)
    stream, parent = random.Random(chosen.seed), os.getppid()
    while os.getppid() == parent:  # who started it may be killed
        end = time.perf_counter() + stream.expovariate(1e3 / chosen.mean_ms)
        while time.perf_counter() < end:
            sum(range(1000))
        time.sleep(stream.expovariate(1e3 / chosen.mean_ms))


if __name__ == "__main__":
    main()
