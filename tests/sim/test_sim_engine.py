"""The virtual-time core: who is in which step, and phases whose arrivals are exact whenever requests come in."""

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings, strategies as st
from pydantic import ValidationError
from support.servers.simulator import (
    FILTERED,
    NEUTRAL,
    VALUE_MODEL,
    phase_of,
    prompt_of,
    request_of,
    run,
    sequences_of,
)

from benchctl.errors import UsageError
from benchctl.records.files import encode
from benchctl.records.schema import SECTION_PARENT, StepRecord
from benchctl.sim.config import SimConfig
from benchctl.sim.core import Core, Phase
from benchctl.sim.engine import SimulatedEngine
from benchctl.sim.requests import SamplingParams

MS = 1_000_000
requests_strategy = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 40), st.integers(1, 3), st.integers(0, 300)),
    min_size=1,
    max_size=8,
)
limits_strategy = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.integers(6, 64),
        "num_kv_blocks": st.integers(26, 80),
        "block_size": st.sampled_from([4, 8]),
        "enable_prefix_caching": st.booleans(),
        "async_scheduling": st.booleans(),
    }
)


@settings(max_examples=60)
@given(requests_strategy, limits_strategy, st.booleans())
def test_every_load_ends_with_all_tokens_and_all_blocks_back(
    sizes: list[tuple[int, int, int, int]], limits: dict[str, int], is_guided: bool
) -> None:
    config = SimConfig(**limits, value_model=VALUE_MODEL if is_guided else None)
    engine = SimulatedEngine(config)
    core = Core(engine)
    requests = [
        request_of(
            f"r{i}",
            prompt=prompt_of(prompt, "shared" if i % 2 else f"r{i}-", config.block_size),
            max_tokens=output,
            n=n,
            seed=i,
            sampling=FILTERED,
            guidance=NEUTRAL if is_guided else None,
        )
        for i, (prompt, output, n, _) in enumerate(sizes)
    ]
    names_ns = {r.request_id: size[3] * 1_000_000 for r, size in zip(requests, sizes, strict=True)}
    core.announce(phase_of(names_ns, max_concurrency=3))
    for request in requests:
        core.submit(request)
    steps, finished = [], []
    while (output := core.next_step()) is not None:
        scheduler, blocks = engine.scheduler, engine.block_manager
        running = [*scheduler.decoding, *scheduler.prefilling]
        assert scheduler.decode_context == sum(seq.num_tokens for seq in scheduler.decoding)
        assert scheduler.num_sampled_decodes == sum(not seq.is_greedy for seq in scheduler.decoding)
        assert sum(scheduler.block_needs) == len(scheduler.decoding)
        lengths = [seq.num_tokens - seq.is_decoding for seq in running]
        shared = [key for seq in running for key in seq.block_keys if key is not None]
        assert Counter(shared) == blocks._num_holders
        num_held = sum(map(blocks.blocks_for, lengths))
        assert blocks.num_used == num_held - len(shared) + len(set(shared))
        assert blocks.num_used + sum(blocks._free.values()) + blocks._num_fresh == config.num_kv_blocks or (
            not config.enable_prefix_caching
        )
        assert len(running) <= config.max_num_seqs
        record = output.record
        assert (record.num_prefill_tokens or 0) + (record.num_decode_tokens or 0) <= config.max_num_batched_tokens
        steps.append(record)
        finished += output.finished
    assert engine.block_manager.num_used == 0
    assert Counter(seq.request.request_id for seq in finished) == {r.request_id: r.n for r in requests}
    assert sum(step.output_tokens or 0 for step in steps) == sum(r.n * r.max_tokens for r in requests)
    assert [step.step for step in steps] == list(range(1, len(steps) + 1))
    for before, after in itertools.pairwise(steps):
        assert after.start_ns >= before.start_ns + before.dur_ns
    for step in steps:
        inside = Counter[str | None]()
        for name, time_ns in step.sections_ns.items():
            inside[SECTION_PARENT[name]] += time_ns
        assert inside.pop(None) == step.dur_ns
        assert all(inside[parent] <= step.sections_ns[parent] for parent in inside)


def test_requests_begin_in_the_order_of_their_arrival() -> None:
    requests = [request_of(f"r{i}", prompt_tokens=5 + 7 * i % 40, max_tokens=4) for i in range(12)]
    simulation = run(requests, arrival_ns=[i * 1_000_000 for i in range(12)], max_num_seqs=2)
    firsts = sorted(sequences_of(simulation), key=lambda seq: (seq.first_token_ns, seq.seq_id))
    assert [seq.request.request_id for seq in firsts] == [f"r{i}" for i in range(12)]


def test_a_long_prompt_is_prefilled_in_chunks_beside_decoding_rows() -> None:
    requests = [request_of("short", prompt_tokens=4, max_tokens=20), request_of("long", prompt_tokens=100)]
    steps = run(requests, arrival_ns=[0, 1], max_num_batched_tokens=32, max_num_seqs=4).steps
    assert [step.phase for step in steps[:6]] == ["prefill", "mixed", "mixed", "mixed", "mixed", "decode"]
    assert [step.num_prefill_tokens for step in steps[:6]] == [4, 31, 31, 31, 7, 0]
    assert [step.output_tokens for step in steps[:6]] == [1, 1, 1, 1, 2, 2]
    first = run([request_of("alone", prompt_tokens=100)], max_num_batched_tokens=32, max_num_seqs=4).steps[0]
    assert (first.output_tokens, first.is_greedy) == (0, None)
    assert "sampler_total" not in first.sections_ns


def test_the_last_to_arrive_is_preempted_and_computes_everything_again() -> None:
    requests = [request_of(f"r{i}", prompt_tokens=16, max_tokens=30) for i in range(3)]
    simulation = run(requests, num_kv_blocks=7, block_size=8, max_num_seqs=4)
    assert sum(step.preempted or 0 for step in simulation.steps) > 0
    assert [seq.request.request_id for seq in sequences_of(simulation)] == ["r0", "r1", "r2"]
    assert sum(step.output_tokens or 0 for step in simulation.steps) == 90
    # 48 prompt tokens, and what the preempted had computed before
    assert sum(step.num_prefill_tokens or 0 for step in simulation.steps) > 48


def test_samples_share_the_blocks_of_their_prompt_and_requests_a_prefix_only_with_prefix_caching() -> None:
    simulation = run([request_of("r", prompt_tokens=50, n=4)])
    assert simulation.steps[0].num_prefill_tokens == 50 + 3 * 2
    assert simulation.steps[0].kv_used_blocks == 4 + 3
    # All four blocks are known, but the last token's logits are needed: its block is computed again.
    for is_cached, num_tokens in ((False, 128), (True, 64 + 16)):
        requests = [request_of(name, prompt=prompt_of(64, "same")) for name in ("a", "b")]
        simulation = run(requests, arrival_ns=[0, 10**9], enable_prefix_caching=is_cached)
        assert sum(step.num_prefill_tokens or 0 for step in simulation.steps) == num_tokens
    # What is cached is given up when its blocks are needed.
    requests = [
        request_of(name, prompt=prompt_of(size, name[0]), max_tokens=1)
        for name, size in (("a", 64), ("flood", 150), ("again", 64))
    ]
    simulation = run(requests, arrival_ns=[0, 10**9, 2 * 10**9], enable_prefix_caching=True, num_kv_blocks=10)
    assert [step.num_prefill_tokens for step in simulation.steps] == [64, 150, 64]


@pytest.mark.parametrize("is_ahead", [False, True])
def test_an_aborted_request_leaves_its_blocks_and_the_others_alone(is_ahead: bool) -> None:
    engine = SimulatedEngine(SimConfig(max_num_seqs=2, async_scheduling=is_ahead))
    for name in ("a", "b", "c"):
        engine.add_request(request_of(name, n=1, max_tokens=50))
    for _ in range(3):
        engine.step()
    engine.add_request(request_of("late"))
    for name in ("a", "c", "never-seen", "late"):
        engine.abort(name)
    finished: list[str] = []
    while engine.has_work:
        finished += engine.step().finished_requests
    assert finished == ["b"]
    assert (engine.block_manager.num_used, engine.scheduler.num_waiting) == (0, 0)


def test_a_batch_is_greedy_only_when_all_its_rows_are() -> None:
    greedy = request_of("greedy", sampling=SamplingParams(temperature=0.0), max_tokens=10)
    sampled = request_of("sampled", max_tokens=4)
    steps = run([greedy, sampled]).steps
    assert [step.is_greedy for step in steps] == [False] * 4 + [True] * 6
    assert set(steps[-1].sections_ns) == {"schedule", "model_forward", "sampler_total"}


def test_what_can_never_fit_or_work_is_refused() -> None:
    for prompt_tokens, max_tokens, config, message in (
        (100, 40_000, {}, "exceed the context of 32768 tokens; shorten either"),
        (100, 100, {"num_kv_blocks": 10}, "need 13 blocks of key-value memory, the server has 10"),
    ):
        engine = SimulatedEngine(SimConfig(**config))
        with pytest.raises(UsageError, match=message):
            engine.check_servable(request_of("r", prompt_tokens=prompt_tokens, max_tokens=max_tokens))
    for options, message in (
        ({"max_num_seqs": 0}, "max_num_seqs\n.*greater than or equal to 1"),
        ({"max_num_batched_tokens": 512}, "max_num_batched_tokens is 512, below max_num_seqs 1024"),
        ({"time_scale": 0.0}, "time_scale\n.*greater than or equal to 0.000001"),
        ({"start_delay_s": -1.0}, "start_delay_s\n.*greater than or equal to 0"),
        ({"cost_model": "llm-mock", "value_model": "qwen2.5-0.5b"}, "llm-mock cannot price a value model"),
    ):
        with pytest.raises(ValidationError, match=message):
            SimConfig(**options)


def test_a_step_that_was_planned_ahead_runs_without_the_request_that_came_meanwhile() -> None:
    requests = [
        request_of("early", prompt_tokens=4, max_tokens=9),
        request_of("late", prompt_tokens=4, max_tokens=2),
    ]
    for is_ahead, phases in ((False, ["prefill", "mixed", "decode"]), (True, ["prefill", "decode", "mixed"])):
        steps = run(requests, arrival_ns=[0, 1], async_scheduling=is_ahead).steps
        assert [step.phase for step in steps][:3] == phases
    # Those that come to an idle server join at once and together.
    requests = [request_of(f"r{i}", prompt_tokens=4, max_tokens=3) for i in range(4)]
    steps = run(requests, arrival_ns=[0, 0, 10**12, 10**12], async_scheduling=True).steps
    assert [step.num_seqs for step in steps] == [2, 2, 2] * 2


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


def submit(core: Core, max_tokens: int, *names: str) -> None:
    for name in names:
        core.submit(request_of(name, max_tokens=max_tokens))


def records(core: Core) -> list[StepRecord]:
    return [output.record for output in iter(core.next_step, None)]


@settings(max_examples=40)
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
        for request in coming:
            core.submit(request)
            log += records(core) if is_late else []
        return [encode(step) for step in log + records(core)]

    assert steps(is_late=True) == steps(is_late=False)


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
