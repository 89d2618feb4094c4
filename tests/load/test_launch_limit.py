"""The limit of launches per second: kept in every window of time, and reached."""

import asyncio
import itertools
import time

import pytest
from asyncio_throttle.throttler import Throttler

from benchctl.load.schedule import MADE_UP_S, LaunchLimit

CLOCK_S = 0.0005
"""Between the moment that a launch is counted for and the one that is noted here."""


def launches(rate_per_s: float, num: int, *, pauses_s: dict[int, float] | None = None) -> list[float]:
    """Times of launches that wait for nothing but the limit; the loop is busy for ``pauses_s`` before some."""

    async def go() -> list[float]:
        times = []
        with LaunchLimit(rate_per_s) as limit:
            for number in range(num):
                time.sleep((pauses_s or {}).get(number, 0.0))  # noqa: ASYNC251 - the loop is to be late
                await limit.acquire()
                times.append(time.monotonic())
        return times

    return asyncio.run(go())


def most_ahead(times: list[float], rate_per_s: float) -> float:
    """The launches by which any window of time has more than its length allows, beside the one that opens it."""
    ahead = highest = 0.0
    for before, after in itertools.pairwise(times):
        ahead = max(0.0, ahead + 1 - (after - before) * rate_per_s)
        highest = max(highest, ahead)
    return highest


def test_no_window_has_more_launches_than_the_limit_and_none_waits_longer_than_it_must() -> None:
    for rate_per_s, num in ((10, 4), (50, 10), (200, 40), (1000, 200), (2000, 400)):
        reached = []
        for _ in range(3):  # what a busy machine takes from one of them is no fault of the limit
            times = launches(rate_per_s, num)
            assert most_ahead(times, rate_per_s) <= (MADE_UP_S + CLOCK_S) * rate_per_s
            reached.append((num - 1) / (times[-1] - times[0]) / rate_per_s)
            if reached[-1] > 0.8:
                break
        assert max(reached) > 0.8, f"{reached} of the limit of {rate_per_s}"


def test_a_delay_is_made_up_in_part_and_never_by_a_burst() -> None:
    times = launches(1000, 200, pauses_s={100: 0.05})
    assert times[100] - times[99] > 0.05
    in_next_10_ms = sum(0 <= each - times[100] < 0.01 for each in times)
    assert in_next_10_ms <= 1 + (0.01 + MADE_UP_S + CLOCK_S) * 1000


def test_the_first_launches_are_no_burst() -> None:
    times = launches(100, 5)
    assert all(after - before > 0.01 - MADE_UP_S for before, after in itertools.pairwise(times))
    assert times[-1] - times[0] > 0.04 - MADE_UP_S


def test_it_is_the_throttle_of_asyncio_throttle_that_admits_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    admitted = []

    async def acquire(throttler: Throttler) -> None:
        admitted.append(throttler.period)

    monkeypatch.setattr(Throttler, "acquire", acquire)
    assert len(launches(500, 3)) == len(admitted) == 3
