"""Laws of a simulation: what goes in comes out, and leaping over stretches of decode steps changes nothing."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.servers.simulator import FILTERED, VALUE_MODEL, announced_log_of, prompt_of, request_of, sequences_of

from benchctl.guided.params import GuidanceParams
from benchctl.records.columns import columns_from
from benchctl.records.files import encode
from benchctl.sim.config import SimConfig
from benchctl.sim.core import SimLoad, Simulation, simulate
from benchctl.sim.requests import CountedRequests, SamplingParams
from benchctl.sim.steps import walk, walk_steps

MS = 1_000_000
TILTED = GuidanceParams(mode="centered_exp", value_scale=-10.0)
sizes_strategy = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 90), st.sampled_from([1, 1, 1, 3]), st.integers(0, 3000)),
    min_size=1,
    max_size=10,
)
config_strategy = st.fixed_dictionaries(
    {
        "cost_model": st.sampled_from(["lenvm-h100", "roofline", "llm-mock"]),
        "max_num_seqs": st.integers(1, 8),
        "max_num_batched_tokens": st.integers(8, 80),
        "num_kv_blocks": st.integers(40, 90),
        "block_size": st.sampled_from([1, 4, 16]),
        "enable_prefix_caching": st.booleans(),
        "guided_rows": st.sampled_from(["exact", "aggregate"]),
        "revision": st.sampled_from(["V1", "V2", "V4"]),
        "async_scheduling": st.booleans(),
        "noise": st.sampled_from(["none", "none", "published"]),
        "max_model_len": st.sampled_from([152, 32768]),
    }
)
drafting_strategy = st.fixed_dictionaries(
    {
        "num_speculative_tokens": st.integers(1, 6),
        "acceptance": st.sampled_from([(0.0,), (0.7,), (1.0,), (0.9, 0.8, 0.5, 0.5, 0.2, 0.1)]),
        "acceptance_spread": st.sampled_from([0.0, 1.0]),
        "draft_cost": st.sampled_from([0.0, 0.1]),
        "bonus_token": st.booleans(),
        "backfill": st.sampled_from(["none", "expansion", "prefill"]),
    }
)
PARTS = {"schedule", "draft", "backfill", "model_forward", "sampler_total"}


def load_of(sizes: list[tuple[int, int, int, int]], config: SimConfig, limit: int | None = None) -> SimLoad:
    requests = tuple(
        request_of(
            f"r{i}",
            prompt=prompt_of(min(prompt, 20 if config.block_size == 1 else 60), f"p{i % 3}-", config.block_size),
            max_tokens=min(output, 20 if config.block_size == 1 else 90),
            n=n,
            seed=i,
            sampling=FILTERED if i % 4 else SamplingParams(temperature=0.0),
            guidance=TILTED if i % 2 and config.value_model else None,
        )
        for i, (prompt, output, n, _) in enumerate(sizes)
    )
    return SimLoad(requests=requests, arrival_ns=tuple(at * MS for *_, at in sizes), max_concurrency=limit)


def simulated(config: SimConfig, load: SimLoad, walk: object) -> Simulation:
    """A simulation whose stretches are run by ``walk``."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("benchctl.sim.engine.walk", walk)
        return simulate(config, [load])


@settings(max_examples=100)
@given(
    sizes_strategy,
    config_strategy,
    st.none() | st.integers(1, 3),
    st.just({}) | st.just({"value_model": VALUE_MODEL}) | drafting_strategy,
)
def test_tokens_and_time_are_conserved_and_steps_are_those_of_a_server_that_is_told_the_same_load(
    sizes: list[tuple[int, int, int, int]], options: dict[str, Any], limit: int | None, more: dict[str, Any]
) -> None:
    is_mock = options["cost_model"] == "llm-mock"
    config = SimConfig(**options, **({} if is_mock else more))
    load = load_of(sizes, config, limit)
    simulation = simulate(config, [load])
    records, steps, requests = list(simulation.steps), simulation.step_columns(), simulation.requests
    assert [encode(step) for step in records] == announced_log_of(config, load)
    singly = simulated(config, load, lambda course, *rest: walk(course._replace(num_steps=1), *rest))
    assert list(singly.steps) == records
    require_columns_of_records(simulation)
    require_columns_of_records(simulate(config, [SimLoad(requests=load.requests[:2], is_warmup=True), load]))
    ended = {(seq.request.request_id, seq.choice): seq.num_output for seq in sequences_of(simulation)}
    expected = {
        (request.request_id, choice): request.max_tokens for request in load.requests for choice in range(request.n)
    }
    assert ended.keys() == expected.keys()
    assert is_mock or ended == expected
    assert steps.total("output_tokens") == sum(ended.values())
    assert requests.preemptions.sum() == simulation.num_preemptions == steps.total("preempted")
    ends_ns = steps.start_ns + steps.dur_ns
    assert (steps.start_ns[1:] >= ends_ns[:-1]).all()
    assert (requests.arrival_ns <= requests.first_token_ns).all()
    assert (requests.first_token_ns <= requests.last_token_ns).all()
    assert (np.diff(requests.last_token_ns) >= 0).all()
    assert is_mock or np.isin(requests.last_token_ns, ends_ns).all()
    used = steps.optional("kv_used_blocks")
    assert used.min() >= 1
    assert is_mock or used.max() <= config.num_kv_blocks
    assert steps.num_seqs.max() <= config.max_num_seqs
    for step in records if config.num_speculative_tokens else ():
        accepted = step.accepted_by_position
        assert len(accepted) == config.num_speculative_tokens
        assert list(accepted) == sorted(accepted, reverse=True)
        assert sum(accepted) == step.accepted_tokens <= step.draft_tokens
        assert max(accepted) <= step.drafts <= step.draft_tokens <= step.drafts * config.num_speculative_tokens
        assert step.num_prefill_tokens + step.num_decode_tokens <= config.max_num_batched_tokens
        assert step.output_tokens <= step.num_decode_tokens + step.num_seqs
        assert sum(time_ns for name, time_ns in step.sections_ns.items() if name in PARTS) == step.dur_ns
        assert ("backfill" in step.sections_ns) == (config.bonus_token and config.backfill != "none")


def require_columns_of_records(simulation: Simulation) -> None:
    for is_warmup in (True, False):
        columns = simulation.step_columns(is_warmup=is_warmup)
        expected = columns_from(simulation.steps, is_warmup=is_warmup)
        assert columns.arrays.keys() == expected.arrays.keys()
        assert all(np.array_equal(values, expected.arrays[name]) for name, values in columns.arrays.items())


@settings(max_examples=30)
@given(
    st.integers(1, 40),
    st.integers(100, 4000),
    st.integers(0, 3 * 10**10),
    st.sampled_from(["lenvm-h100", "roofline", "llm-mock"]),
    st.integers(1, 16),
)
def test_arrays_and_the_loop_walk_the_same_steps(
    rows: int, tokens: int, late_ns: int, cost_model: str, block_size: int
) -> None:
    requests = [request_of(f"r{i}", prompt_tokens=5 + i, max_tokens=tokens + i) for i in range(rows)]
    load = SimLoad(requests=(*requests, request_of("late")), arrival_ns=(*([0] * rows), late_ns))
    num_blocks = rows * (tokens + 100) // block_size
    config = SimConfig(cost_model=cost_model, block_size=block_size, num_kv_blocks=num_blocks)
    logs = [simulated(config, load, each).log for each in (walk, lambda course, log, _: walk_steps(course, log))]
    assert (logs[0].dur_ns, logs[0].kv_used) == (logs[1].dur_ns, logs[1].kv_used)


single_sizes = st.lists(
    st.tuples(st.integers(1, 120), st.integers(1, 200), st.just(1), st.integers(0, 2000)), min_size=1, max_size=25
)


@settings(max_examples=60)
@given(single_sizes, config_strategy)
def test_little_s_law_holds_and_prompts_are_computed_or_cached(
    sizes: list[tuple[int, int, int, int]], options: dict[str, Any]
) -> None:
    """Rows in a batch, summed over time, are the times that requests spend in batches, summed over requests."""
    room = {"num_kv_blocks": 4000, "max_num_seqs": 30, "max_num_batched_tokens": 5000, "cost_model": "roofline"}
    config = SimConfig(**{**options, **room, "async_scheduling": False})
    load = load_of(sizes, config)
    simulation = simulate(config, [load])
    steps, requests = simulation.step_columns(), simulation.requests
    computed = steps.total("num_prefill_tokens") + requests.cached_tokens.sum()
    assert computed == sum(request.prompt.num_tokens for request in load.requests)
    # With room for all, a request is in a batch from the first step that begins after its arrival.
    begin_ns = steps.start_ns[np.searchsorted(steps.start_ns, requests.arrival_ns)]
    gaps_ns = steps.start_ns[1:] - steps.start_ns[:-1] - steps.dur_ns[:-1]
    idle_ns = [
        gaps_ns[(steps.start_ns[1:] > begin) & (steps.start_ns[1:] <= end)].sum()
        for begin, end in zip(begin_ns, requests.last_token_ns, strict=True)
    ]
    assert (steps.num_seqs * steps.dur_ns).sum() == (requests.last_token_ns - begin_ns).sum() - sum(idle_ns)


@settings(max_examples=30)
@given(single_sizes, st.integers(1, 40))
def test_blocks_in_use_are_those_of_the_contexts(sizes: list[tuple[int, int, int, int]], block_size: int) -> None:
    """Without shared prefixes each row of a step holds whole blocks for its context and no others."""
    load = SimLoad(requests=CountedRequests([p for p, *_ in sizes], [o for _, o, *_ in sizes]))
    for step in simulate(SimConfig(block_size=block_size, num_kv_blocks=10_000), [load]).steps:
        room = step.kv_used_blocks * block_size
        assert room - step.num_seqs * block_size < step.context_tokens <= room
