"""Leaping over stretches of decode steps changes nothing: an engine that runs them singly has the same steps."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.servers.simulator import (
    FILTERED,
    VALUE_MODEL,
    announced_log_of,
    prompt_of,
    request_of,
    run,
)

from benchctl.guided.params import GuidanceParams
from benchctl.records.columns import columns_from
from benchctl.records.files import encode
from benchctl.sim.config import SimConfig
from benchctl.sim.core import SimLoad, Simulation, simulate
from benchctl.sim.costs.cost_model import NoiseSource
from benchctl.sim.requests import SamplingParams
from benchctl.sim.steps import Course, Progress, StepLog, walk, walk_steps

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
    arrival_ns = tuple(at * 1_000_000 for *_, at in sizes)
    return SimLoad(requests=requests, arrival_ns=arrival_ns, max_concurrency=limit)


Walk = Callable[[Course, StepLog, NoiseSource | None], Progress]


def walk_singly(course: Course, log: StepLog, noise: NoiseSource | None) -> Progress:
    return walk(course._replace(num_steps=1), log, noise)


def walk_in_a_loop(course: Course, log: StepLog, _: NoiseSource | None) -> Progress:
    return walk_steps(course, log)


def simulated(config: SimConfig, load: SimLoad, walk: Walk = walk) -> Simulation:
    """A simulation whose stretches are run by ``walk``."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("benchctl.sim.engine.walk", walk)
        return simulate(config, [load])


def log_of(config: SimConfig, load: SimLoad, walk: Walk = walk) -> list[bytes]:
    return [encode(step) for step in simulated(config, load, walk).steps]


@settings(max_examples=60, deadline=None)
@given(sizes_strategy, config_strategy, st.none() | st.integers(1, 3), st.booleans())
def test_a_simulation_has_the_steps_of_a_server_that_is_told_the_same_load(
    sizes: list[tuple[int, int, int, int]], options: dict[str, Any], limit: int | None, is_guided: bool
) -> None:
    value_model = VALUE_MODEL if is_guided and options["cost_model"] != "llm-mock" else None
    config = SimConfig(**options, value_model=value_model)
    load = load_of(sizes, config, limit)
    steps = log_of(config, load)
    assert steps == announced_log_of(config, load)
    assert steps == log_of(config, load, walk_singly)


@settings(max_examples=30, deadline=None)
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
    config = SimConfig(
        cost_model=cost_model, block_size=block_size, num_kv_blocks=rows * (tokens + 100) // block_size
    )
    logs = [simulated(config, load, walk).log for walk in (walk, walk_in_a_loop)]
    assert logs[0].dur_ns == logs[1].dur_ns
    assert logs[0].kv_used == logs[1].kv_used


@settings(max_examples=40, deadline=None)
@given(sizes_strategy, config_strategy, st.booleans())
def test_the_columns_of_a_simulation_are_those_of_its_records(
    sizes: list[tuple[int, int, int, int]], options: dict[str, Any], is_guided: bool
) -> None:
    value_model = VALUE_MODEL if is_guided and options["cost_model"] != "llm-mock" else None
    config = SimConfig(**options, value_model=value_model)
    load = load_of(sizes, config)
    warmup = SimLoad(requests=(request_of("w", max_tokens=3),), is_warmup=True)
    simulation = simulate(config, [warmup, load])
    for is_warmup in (True, False):
        columns = simulation.step_columns(is_warmup=is_warmup)
        expected = columns_from(simulation.steps, is_warmup=is_warmup)
        assert columns.arrays.keys() == expected.arrays.keys()
        assert all(np.array_equal(values, expected.arrays[name]) for name, values in columns.arrays.items())


def test_a_closing_step_holds_room_for_the_last_token() -> None:
    """Its row computes every token, so a last token that begins a block needs the block."""
    steps = run([request_of("r", prompt_tokens=15, max_tokens=2)], cost_model="llm-mock").steps
    assert [(step.context_tokens, step.kv_used_blocks) for step in steps] == [(15, 1), (16, 1), (17, 2)]
