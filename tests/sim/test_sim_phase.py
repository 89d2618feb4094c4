"""Announced phases: arrivals are exact in virtual time, whatever the order and time in which requests come in."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.servers.simulator import phase_of, request_of

from benchctl.records.files import encode
from benchctl.records.schema import StepRecord
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
    return [encode(step) for step in records(core)]


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
        log = []
        if is_late:
            chance.shuffle(coming)
        while coming:
            core.submit(coming.pop(0))
            log += log_of(core) if is_late else []
        return log + log_of(core)

    assert steps(is_late=True) == steps(is_late=False)


def submit(core: Core, max_tokens: int, *names: str) -> None:
    for name in names:
        core.submit(request_of(name, max_tokens=max_tokens))


def records(core: Core) -> list[StepRecord]:
    return [output.record for output in iter(core.next_step, None)]


def test_the_core_waits_for_a_request_that_is_due() -> None:
    core = core_with(phase_at(0, 20))
    submit(core, 10, "r0")
    assert len(records(core)) == 2  # two steps of 12.8 ms pass 20 ms
    assert core.missing() == "r1"
    submit(core, 10, "r1")
    assert core.missing() is None
    assert len(records(core)) == 10
    assert core.phase.is_over


def test_virtual_time_jumps_over_idle_time_within_a_phase_only() -> None:
    core = core_with(phase_at(0, 5000))
    submit(core, 1, "r0", "r1")
    assert len(records(core)) == 2
    end_ns = core.engine.now_ns
    assert end_ns == pytest.approx(5012.8 * MS, rel=0.001)
    core.announce(phase_at(0, prefix="s"))
    assert core.missing() == "s0"
    submit(core, 1, "s0")
    assert [step.start_ns for step in records(core)] == [end_ns]


def test_steps_of_a_warm_up_phase_say_so() -> None:
    core = core_with(phase_at(0, prefix="w", is_warmup=True))
    submit(core, 2, "w0")
    assert [step.is_warmup for step in records(core)] == [True, True]
    submit(core, 2, "unannounced")
    assert [step.is_warmup for step in records(core)] == [False, False]


def test_a_slot_frees_when_its_request_ends_with_all_choices_is_refused_or_goes() -> None:
    core = core_with(phase_at(0, 0, 0, max_concurrency=1))
    for name, tokens in (("r0", 3), ("r1", 2), ("r2", 1)):
        core.submit(request_of(name, max_tokens=tokens, n=2))
    assert [step.num_seqs for step in records(core)] == [2] * 6
    core = core_with(phase_at(0, 0, 1000, max_concurrency=1))
    for name in ("r0", "r2", "stranger"):
        core.refuse(name)
    submit(core, 1, "r1")
    assert len(records(core)) == 1
    assert core.phase.is_over
    core = core_with(phase_at(0, 0, 0, max_concurrency=1))
    submit(core, 4, "r0", "r1", "r2")
    assert core.next_step() is not None
    core.abort("r1")
    core.abort("r0")
    assert [name for output in iter(core.next_step, None) for name in output.finished_requests] == ["r2"]


def test_an_abandoned_or_replaced_phase_lets_in_what_has_come() -> None:
    core = core_with(phase_at(0, 0, 1000))
    submit(core, 1, "r1", "r2")
    assert core.next_step() is None
    assert core.missing() == "r0"
    core.abandon_phase()
    assert (core.num_abandoned_phases, len(records(core))) == (1, 1)
    submit(core, 1, "r0")
    assert len(records(core)) == 1
    core.announce(phase_at(0, 0, prefix="s"))
    submit(core, 3, "s1")
    core.announce(phase_at(0, prefix="t"))
    assert len(records(core)) == 3  # s1 runs alone, then the core waits for the new phase
    submit(core, 1, "stranger", "t0")
    assert [step.num_seqs for step in records(core)] == [2]
    assert core.num_abandoned_phases == 2
