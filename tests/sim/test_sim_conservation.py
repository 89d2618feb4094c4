"""What goes into a simulation comes out of it: tokens, blocks and requests, whatever the load and the limits."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.servers.simulator import prompt_of, request_of

from benchctl.errors import UsageError
from benchctl.sim.config import SimConfig
from benchctl.sim.core import SimLoad, Simulation, simulate
from benchctl.sim.requests import CountedRequests

MS = 1_000_000
loads_strategy = st.lists(
    st.tuples(st.integers(1, 120), st.integers(1, 200), st.integers(0, 2000)), min_size=1, max_size=25
)
config_strategy = st.fixed_dictionaries(
    {
        "cost_model": st.sampled_from(["lenvm-h100", "roofline"]),
        "max_num_seqs": st.integers(1, 30),
        "max_num_batched_tokens": st.integers(30, 300),
        "num_kv_blocks": st.integers(25, 120),
        "enable_prefix_caching": st.booleans(),
        "noise": st.sampled_from(["none", "published"]),
    }
)


def load_of(sizes: list[tuple[int, int, int]], limit: int | None = None) -> SimLoad:
    requests = tuple(
        request_of(f"r{i}", prompt=prompt_of(prompt, f"p{i % 4}-"), max_tokens=output)
        for i, (prompt, output, _) in enumerate(sizes)
    )
    return SimLoad(requests=requests, arrival_ns=tuple(at * MS for *_, at in sizes), max_concurrency=limit)


def optional(simulation: Simulation, name: str) -> np.ndarray:
    return simulation.step_columns().optional(name).astype(int)


@settings(max_examples=60, deadline=None)
@given(loads_strategy, config_strategy, st.none() | st.integers(1, 5))
def test_tokens_requests_and_time_are_conserved(
    sizes: list[tuple[int, int, int]], options: dict[str, Any], limit: int | None
) -> None:
    simulation = simulate(SimConfig(**options), [load_of(sizes, limit)])
    steps, requests = simulation.step_columns(), simulation.requests
    assert sorted(requests.index) == list(range(len(sizes)))
    assert list(requests.output_tokens[np.argsort(requests.index)]) == [output for _, output, _ in sizes]
    assert optional(simulation, "output_tokens").sum() == sum(output for _, output, _ in sizes)
    assert requests.preemptions.sum() == simulation.num_preemptions == optional(simulation, "preempted").sum()
    ends_ns = steps.start_ns + steps.dur_ns
    assert (steps.start_ns[1:] >= ends_ns[:-1]).all()
    assert (requests.arrival_ns <= requests.first_token_ns).all()
    assert (requests.first_token_ns <= requests.last_token_ns).all()
    assert (np.diff(requests.last_token_ns) >= 0).all()
    assert np.isin(requests.last_token_ns, ends_ns).all()
    computed = optional(simulation, "num_prefill_tokens").sum()
    if not simulation.num_preemptions:
        assert computed + requests.cached_tokens.sum() == sum(prompt for prompt, _, _ in sizes)
    used = optional(simulation, "kv_used_blocks")
    assert used.min() >= 1
    assert used.max() <= options["num_kv_blocks"]
    assert steps.num_seqs.max() <= options["max_num_seqs"]


@settings(max_examples=60, deadline=None)
@given(loads_strategy, config_strategy)
def test_little_s_law_holds(sizes: list[tuple[int, int, int]], options: dict[str, Any]) -> None:
    """Rows in a batch, summed over time, are the times that requests spend in batches, summed over requests."""
    config = SimConfig(**{**options, "num_kv_blocks": 1000, "max_num_seqs": 30, "max_num_batched_tokens": 5000})
    simulation = simulate(config, [load_of(sizes)])
    steps, requests = simulation.step_columns(), simulation.requests
    # With room for all, a request is in a batch from the first step that begins after its arrival.
    begin_ns = steps.start_ns[np.searchsorted(steps.start_ns, requests.arrival_ns)]
    assert (steps.num_seqs * steps.dur_ns).sum() <= (requests.last_token_ns - begin_ns).sum()
    idle_ns = [
        (steps.start_ns[1:] - steps.start_ns[:-1] - steps.dur_ns[:-1])[
            (steps.start_ns[1:] > begin) & (steps.start_ns[1:] <= end)
        ].sum()
        for begin, end in zip(begin_ns, requests.last_token_ns, strict=True)
    ]
    assert (steps.num_seqs * steps.dur_ns).sum() == (requests.last_token_ns - begin_ns).sum() - sum(idle_ns)


@settings(max_examples=30, deadline=None)
@given(loads_strategy, st.integers(1, 40))
def test_blocks_in_use_are_those_of_the_contexts(sizes: list[tuple[int, int, int]], block_size: int) -> None:
    """Without shared prefixes each row of a step holds whole blocks for its context and no others."""
    load = SimLoad(requests=CountedRequests([p for p, *_ in sizes], [o for _, o, _ in sizes]))
    for step in simulate(SimConfig(block_size=block_size, num_kv_blocks=10_000), [load]).steps:
        room = step.kv_used_blocks * block_size
        assert room - step.num_seqs * block_size < step.context_tokens <= room


def test_lengths_come_in_pairs_and_each_request_has_an_arrival() -> None:
    with pytest.raises(UsageError, match="2 prompt lengths for 1 output lengths"):
        CountedRequests([1, 2], [3])
    with pytest.raises(UsageError, match="arrival_ns has 1 entries for 2 requests; give one for each"):
        SimLoad(requests=CountedRequests([1, 2], [3, 4]), arrival_ns=(0,))
