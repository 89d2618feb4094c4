"""The kernel's stamps on the measuring clock, also when somebody sets the wall clock; the limit of launches."""

import asyncio
import itertools
import struct
import time

import pytest
from asyncio_throttle.throttler import Throttler
from support.servers.paced_engine import PacedEngine, call, request, running, send

from benchctl.load import clocks
from benchctl.load.client import StreamClient
from benchctl.load.clocks import (
    Alarm,
    KernelClock,
)
from benchctl.load.schedule import MADE_UP_S, LaunchLimit
from benchctl.units import NS_PER_MS, NS_PER_S

HOUR_NS = 3600 * NS_PER_S


class Wall:
    """A wall clock that a test sets, and the monotonic clock beside it."""

    now_ns = 1_000 * NS_PER_S
    offset_ns = HOUR_NS
    width_ns = 100

    def stamp(self, at_ns: int) -> bytes:
        return struct.pack("@qq", *divmod(at_ns + self.offset_ns, NS_PER_S))


@pytest.fixture
def wall(monkeypatch):
    wall = Wall()
    monkeypatch.setattr(clocks, "realtime_less_monotonic", lambda: (wall.width_ns, wall.now_ns, wall.offset_ns))
    return wall


def test_a_stamp_is_the_time_of_arrival_and_never_later_than_the_read(wall):
    clock = KernelClock()
    read_ns = wall.now_ns + 50 * NS_PER_MS
    assert clock.arrival_ns(wall.stamp(read_ns - 7_000), read_ns) == read_ns - 7_000
    assert clock.arrival_ns(wall.stamp(read_ns + 3_000), read_ns) == read_ns  # two clocks are never read at once
    assert clock.arrival_ns(wall.stamp(read_ns + 1 * NS_PER_MS), read_ns) is None
    assert clock.arrival_ns(b"", read_ns) is None


@pytest.mark.parametrize("step_ns", [NS_PER_S, -NS_PER_S, 40_000, -HOUR_NS], ids=str)
def test_no_read_since_the_last_look_before_a_clock_was_set_has_a_time_of_the_kernel(wall, step_ns):
    clock = KernelClock()
    before_ns, early = wall.now_ns + 10 * NS_PER_MS, wall.stamp(wall.now_ns + 9 * NS_PER_MS)
    wall.now_ns += 20 * NS_PER_MS
    clock.sample()
    between_ns, unsure = wall.now_ns + 5 * NS_PER_MS, wall.stamp(wall.now_ns + 4 * NS_PER_MS)
    wall.now_ns += 100 * NS_PER_MS
    wall.offset_ns += step_ns
    clock.sample()
    after_ns, late = wall.now_ns + 10 * NS_PER_MS, wall.stamp(wall.now_ns + 9 * NS_PER_MS)
    assert [offset.realtime_less_monotonic_ns for offset in clock.offsets] == [HOUR_NS, HOUR_NS + step_ns]
    assert clock.arrival_ns(early, before_ns) == before_ns - NS_PER_MS
    assert clock.arrival_ns(unsure, between_ns) is None
    assert clock.arrival_ns(late, after_ns) is None
    wall.now_ns += 200 * NS_PER_MS
    clock.sample()
    assert clock.arrival_ns(wall.stamp(wall.now_ns), wall.now_ns) is None, "for the rest of the load"


def test_a_look_that_was_interrupted_teaches_nothing(wall):
    clock = KernelClock()
    wall.width_ns, wall.offset_ns = 5 * NS_PER_MS, HOUR_NS + 2 * NS_PER_MS
    clock.sample()
    assert len(clock.offsets) == 1


def test_times_of_streams_hold_though_the_loop_stands_still_again_and_again(tmp_path):
    async def go(how):
        async with StreamClient(how.base_url, how.timeouts) as client:
            asking = asyncio.create_task(send(client, call(request(0, max_tokens=30, gap_ms=20)), 0))
            while not asking.done():
                await asyncio.sleep(0.001)
                time.sleep(0.015)  # noqa: ASYNC251 - the loop is to stand still
            return await (await asking).record()

    with running(tmp_path) as how:
        record = asyncio.run(go(how))
    assert record.error is None
    if record.stamps != "kernel":
        pytest.skip("this kernel does not stamp what arrives (SO_TIMESTAMPNS)")
    truth = PacedEngine(truth=tmp_path / "truth.jsonl").truths()["r0"]
    (choice,) = record.choices
    errors_ns = sorted(seen - sent for seen, sent in zip(choice.chunk_ns, truth["sent_ns"], strict=True))
    late_ns = sorted(choice.chunk_late_ns)
    assert late_ns[len(late_ns) // 2] > 3 * NS_PER_MS
    # The server may be held up between its note and its send, but not in half of them.
    assert 0 <= errors_ns[len(errors_ns) // 2] < 1 * NS_PER_MS


def test_an_alarm_never_rings_early_and_lets_others_have_their_turn_when_its_time_is_past():
    async def go():
        turns = []
        with Alarm() as alarm:
            for wait_ns in (300_000, 3 * NS_PER_MS, 1, 20 * NS_PER_MS):
                due_ns = time.monotonic_ns() + wait_ns
                await alarm.sleep_until(due_ns)
                assert time.monotonic_ns() >= due_ns
            other = asyncio.create_task(asyncio.sleep(0, turns.append(1)))
            await alarm.sleep_until(0)
            assert other.done() or turns
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await alarm.sleep_until(time.monotonic_ns() + NS_PER_S)
            await alarm.sleep_until(time.monotonic_ns() + NS_PER_MS)  # another moment, before the first

    asyncio.run(go())


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
