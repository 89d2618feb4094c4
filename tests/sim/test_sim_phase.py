"""Announced phases: arrivals are exact in virtual time, whatever the order and time in which requests come in."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.servers.simulator import phase_of, request_of

from benchctl.records.files import encode
from benchctl.sim.config import SimConfig
from benchctl.sim.core import Core, Phase
from benchctl.sim.engine import SimulatedEngine

MS = 1_000_000


def core_with(*phases: Phase) -> Core:
    core = Core(SimulatedEngine(SimConfig()))
    for phase in phases:
        core.announce(phase)
    return core


def phase_at(
    *arrival_ms: int, prefix: str = "r", max_concurrency: int | None = None, is_warmup: bool = False
) -> Phase:
    names_ns = {f"{prefix}{i}": at * MS for i, at in enumerate(arrival_ms)}
    return phase_of(names_ns, max_concurrency=max_concurrency, is_warmup=is_warmup)


def log_of(core: Core) -> list[bytes]:
    return [encode(output.record) for output in iter(core.next_step, None)]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 400), st.integers(1, 12)), min_size=1, max_size=8),
    st.none() | st.integers(1, 3),
    st.randoms(use_true_random=False),
)
def test_steps_do_not_depend_on_when_requests_come_in(
    requests: list[tuple[int, int]], limit: int | None, chance: random.Random
) -> None:
    def steps(*, is_late: bool) -> list[bytes]:
        core = core_with(phase_at(*(at for at, _ in requests), max_concurrency=limit))
        coming = [request_of(f"r{i}", max_tokens=tokens) for i, (_, tokens) in enumerate(requests)]
        if is_late:
            chance.shuffle(coming)
        else:
            while coming:
                core.submit(coming.pop(0))
        log: list[bytes] = []
        while True:
            log += log_of(core)
            if not coming:
                return log
            core.submit(coming.pop())

    assert steps(is_late=True) == steps(is_late=False)


def test_the_core_waits_for_a_request_that_is_due() -> None:
    core = core_with(phase_at(0, 20))
    core.submit(request_of("r0", max_tokens=10))
    assert len(log_of(core)) == 2  # two steps of 12.8 ms pass 20 ms
    assert core.missing() == "r1"
    core.submit(request_of("r1", max_tokens=10))
    assert core.missing() is None
    assert len(log_of(core)) == 10
    assert core.phase.is_over


def test_virtual_time_jumps_over_idle_time_within_a_phase_only() -> None:
    core = core_with(phase_at(0, 5000))
    core.submit(request_of("r0", max_tokens=1))
    core.submit(request_of("r1", max_tokens=1))
    assert len(log_of(core)) == 2
    end_ns = core.engine.now_ns
    assert end_ns == pytest.approx(5012.8 * MS, rel=0.001)
    core.announce(phase_at(0, prefix="s"))
    assert core.missing() == "s0"
    core.submit(request_of("s0", max_tokens=1))
    output = core.next_step()
    assert output.record.start_ns == end_ns


def test_steps_of_a_warm_up_phase_say_so() -> None:
    core = core_with(phase_at(0, prefix="w", is_warmup=True))
    core.submit(request_of("w0", max_tokens=2))
    warm = [output.record.is_warmup for output in iter(core.next_step, None)]
    core.submit(request_of("unannounced", max_tokens=2))
    cold = [output.record.is_warmup for output in iter(core.next_step, None)]
    assert (warm, cold) == ([True, True], [False, False])


def test_a_slot_frees_when_its_request_ends_with_all_choices_is_refused_or_goes() -> None:
    core = core_with(phase_at(0, 0, 0, max_concurrency=1))
    for name, tokens in (("r0", 3), ("r1", 2), ("r2", 1)):
        core.submit(request_of(name, max_tokens=tokens, n=2))
    assert [output.record.num_seqs for output in iter(core.next_step, None)] == [2] * 6
    core = core_with(phase_at(0, 0, 1000, max_concurrency=1))
    for name in ("r0", "r2", "stranger"):
        core.refuse(name)
    core.submit(request_of("r1", max_tokens=1))
    assert len(log_of(core)) == 1
    assert core.phase.is_over
    core = core_with(phase_at(0, 0, 0, max_concurrency=1))
    for name in ("r0", "r1", "r2"):
        core.submit(request_of(name, max_tokens=4))
    assert core.next_step() is not None
    core.abort("r1")
    core.abort("r0")
    assert [name for output in iter(core.next_step, None) for name in output.finished_requests] == ["r2"]


def test_an_abandoned_or_replaced_phase_lets_in_what_has_come() -> None:
    core = core_with(phase_at(0, 0, 1000))
    for name in ("r1", "r2"):
        core.submit(request_of(name, max_tokens=1))
    assert core.next_step() is None
    assert core.missing() == "r0"
    core.abandon_phase()
    assert (core.num_abandoned_phases, len(log_of(core))) == (1, 1)
    core.submit(request_of("r0", max_tokens=1))
    assert len(log_of(core)) == 1
    core.announce(phase_at(0, 0, prefix="s"))
    core.submit(request_of("s1", max_tokens=3))
    core.announce(phase_at(0, prefix="t"))
    assert len(log_of(core)) == 3  # s1 runs alone, then the core waits for the new phase
    core.submit(request_of("stranger", max_tokens=1))
    core.submit(request_of("t0", max_tokens=1))
    assert [output.record.num_seqs for output in iter(core.next_step, None)] == [2]
    assert core.num_abandoned_phases == 2
