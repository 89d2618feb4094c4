"""Laws of a simulation: what goes in comes out, and leaping over stretches of decode steps changes nothing."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.servers.simulator import FILTERED, VALUE_MODEL, announced_log_of, prompt_of, request_of

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
    }
)


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


@settings(max_examples=60)
@given(sizes_strategy, config_strategy, st.none() | st.integers(1, 3), st.booleans())
def test_a_simulation_has_the_steps_of_a_server_that_is_told_the_same_load_and_the_columns_of_its_records(
    sizes: list[tuple[int, int, int, int]], options: dict[str, Any], limit: int | None, is_guided: bool
) -> None:
    value_model = VALUE_MODEL if is_guided and options["cost_model"] != "llm-mock" else None
    config = SimConfig(**options, value_model=value_model)
    load = load_of(sizes, config, limit)
    steps = [encode(step) for step in simulate(config, [load]).steps]
    assert steps == announced_log_of(config, load)
    singly = simulated(config, load, lambda course, *rest: walk(course._replace(num_steps=1), *rest))
    assert steps == [encode(step) for step in singly.steps]
    warmup = SimLoad(requests=(request_of("w", max_tokens=3),), is_warmup=True)
    simulation = simulate(config, [warmup, load])
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


plain_sizes = st.lists(
    st.tuples(st.integers(1, 120), st.integers(1, 200), st.just(1), st.integers(0, 2000)), min_size=1, max_size=25
)
plain_config = st.fixed_dictionaries(
    {
        "cost_model": st.sampled_from(["lenvm-h100", "roofline"]),
        "max_num_seqs": st.integers(1, 30),
        "max_num_batched_tokens": st.integers(30, 300),
        "num_kv_blocks": st.integers(25, 120),
        "enable_prefix_caching": st.booleans(),
        "noise": st.sampled_from(["none", "published"]),
    }
)


def plain_load(sizes: list[tuple[int, int, int, int]], limit: int | None = None) -> SimLoad:
    requests = tuple(
        request_of(f"r{i}", prompt=prompt_of(prompt, f"p{i % 4}-"), max_tokens=output)
        for i, (prompt, output, *_) in enumerate(sizes)
    )
    return SimLoad(requests=requests, arrival_ns=tuple(at * MS for *_, at in sizes), max_concurrency=limit)


@settings(max_examples=60)
@given(plain_sizes, plain_config, st.none() | st.integers(1, 5))
def test_tokens_requests_and_time_are_conserved(
    sizes: list[tuple[int, int, int, int]], options: dict[str, Any], limit: int | None
) -> None:
    simulation = simulate(SimConfig(**options), [plain_load(sizes, limit)])
    steps, requests = simulation.step_columns(), simulation.requests
    outputs = [output for _, output, *_ in sizes]
    assert sorted(requests.index) == list(range(len(sizes)))
    assert list(requests.output_tokens[np.argsort(requests.index)]) == outputs
    assert steps.total("output_tokens") == sum(outputs)
    assert requests.preemptions.sum() == simulation.num_preemptions == steps.total("preempted")
    ends_ns = steps.start_ns + steps.dur_ns
    assert (steps.start_ns[1:] >= ends_ns[:-1]).all()
    assert (requests.arrival_ns <= requests.first_token_ns).all()
    assert (requests.first_token_ns <= requests.last_token_ns).all()
    assert (np.diff(requests.last_token_ns) >= 0).all()
    assert np.isin(requests.last_token_ns, ends_ns).all()
    if not simulation.num_preemptions:
        computed = steps.total("num_prefill_tokens") + requests.cached_tokens.sum()
        assert computed == sum(prompt for prompt, *_ in sizes)
    used = steps.optional("kv_used_blocks")
    assert 1 <= used.min() <= used.max() <= options["num_kv_blocks"]
    assert steps.num_seqs.max() <= options["max_num_seqs"]


@settings(max_examples=60)
@given(plain_sizes, plain_config)
def test_little_s_law_holds(sizes: list[tuple[int, int, int, int]], options: dict[str, Any]) -> None:
    """Rows in a batch, summed over time, are the times that requests spend in batches, summed over requests."""
    room = {"num_kv_blocks": 1000, "max_num_seqs": 30, "max_num_batched_tokens": 5000}
    simulation = simulate(SimConfig(**{**options, **room}), [plain_load(sizes)])
    steps, requests = simulation.step_columns(), simulation.requests
    # With room for all, a request is in a batch from the first step that begins after its arrival.
    begin_ns = steps.start_ns[np.searchsorted(steps.start_ns, requests.arrival_ns)]
    gaps_ns = steps.start_ns[1:] - steps.start_ns[:-1] - steps.dur_ns[:-1]
    idle_ns = [
        gaps_ns[(steps.start_ns[1:] > begin) & (steps.start_ns[1:] <= end)].sum()
        for begin, end in zip(begin_ns, requests.last_token_ns, strict=True)
    ]
    assert (steps.num_seqs * steps.dur_ns).sum() == (requests.last_token_ns - begin_ns).sum() - sum(idle_ns)


@settings(max_examples=30)
@given(plain_sizes, st.integers(1, 40))
def test_blocks_in_use_are_those_of_the_contexts(sizes: list[tuple[int, int, int, int]], block_size: int) -> None:
    """Without shared prefixes each row of a step holds whole blocks for its context and no others."""
    load = SimLoad(requests=CountedRequests([p for p, *_ in sizes], [o for _, o, *_ in sizes]))
    for step in simulate(SimConfig(block_size=block_size, num_kv_blocks=10_000), [load]).steps:
        room = step.kv_used_blocks * block_size
        assert room - step.num_seqs * block_size < step.context_tokens <= room
