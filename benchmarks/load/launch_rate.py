"""How close launches come to `launch_rate_limit`, and whether any window of time has more than its share.

    python -m benchmarks.load.launch_rate [--seconds 1.5] [--rates 10,50,100,200,500,1000,2000]

Nothing but the limit holds the launches back. Polled is asyncio-throttle alone, looking every millisecond.
"""

import argparse
import asyncio
import time
from contextlib import nullcontext
from itertools import pairwise

import uvloop
from asyncio_throttle.throttler import Throttler

from benchctl.load.schedule import LaunchLimit
from benchmarks.common.table import show


async def launches(limit, num):
    times = []
    with limit if hasattr(limit, "__enter__") else nullcontext():
        for _ in range(num):
            await limit.acquire()
            times.append(time.monotonic())
            await asyncio.sleep(0)
    return times


def reached(times):
    return (len(times) - 1) / (times[-1] - times[0])


def most_ahead(times, rate_per_s):
    ahead = highest = 0.0
    for before, after in pairwise(times):
        ahead = max(0.0, ahead + 1 - (after - before) * rate_per_s)
        highest = max(highest, ahead)
    return highest


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.5, help="at each rate; at least ten launches")
    parser.add_argument("--rates", default="10,50,100,200,500,1000,2000")
    options = parser.parse_args()
    rows = []
    for rate in map(float, options.rates.split(",")):
        num = max(round(rate * options.seconds), 10)
        polled = uvloop.run(launches(Throttler(1, 1 / rate, 0.001), num))
        times = uvloop.run(launches(LaunchLimit(rate), num))
        rows.append(
            {
                "limit 1/s": rate,
                "polled 1/s": reached(polled),
                "reached 1/s": reached(times),
                "of limit": reached(times) / rate,
                "ahead": most_ahead(times, rate),
            }
        )
    show(rows, "launches that wait for nothing but their limit")


if __name__ == "__main__":
    main()
