"""A process that computes in bursts of random length and rests as long on average: a neighbour on the machine.

python -m benchmarks.common.busy [--seed 0] [--mean-ms 200]
"""

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from benchmarks.common.harness import options


def busy_processes(count: int) -> AbstractContextManager[None]:
    """So many of them, each with a seed of its own, until the block ends."""
    argv = (sys.executable, "-m", "benchmarks.common.busy", "--seed")
    return running([*argv, str(seed)] for seed in range(count))


@contextmanager
def running(commands: Iterable[Sequence[str]]) -> Iterator[None]:
    """A process of each command, until the block ends."""
    processes = [subprocess.Popen(command) for command in commands]
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
