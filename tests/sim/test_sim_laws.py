"""Laws of a simulation: what goes in comes out, leaps change nothing, and drafts yield what their law says."""

from collections import Counter
from dataclasses import fields
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from pydantic import ValidationError
from scipy import stats
from support.servers.simulator import (
    FILTERED,
    VALUE_MODEL,
    announced_log_of,
    decode_batch,
    prompt_of,
    request_of,
    run,
    sequences_of,
)

from benchctl.errors import UsageError
from benchctl.guided.params import GuidanceParams
from benchctl.records.columns import columns_from
from benchctl.records.files import encode
from benchctl.records.schema import StepRecord
from benchctl.sim.config import SimConfig
from benchctl.sim.core import Core, SimLoad
from benchctl.sim.costs.cost_model import cost_model_for
from benchctl.sim.costs.fitted import work_of
from benchctl.sim.drafts import DraftedRows, verified
from benchctl.sim.engine import SimulatedEngine
from benchctl.sim.requests import CountedRequests, SamplingParams
from benchctl.sim.simulation import Simulation, simulate
from benchctl.sim.steps import walk, walk_steps
from benchctl.steptime.speculation_law import DraftCost, speed_up, tokens_per_step

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


@settings(max_examples=50)
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


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60), st.integers(0, 300)), min_size=1, max_size=30),
    st.none() | st.integers(1, 6),
    st.booleans(),
    st.sampled_from(["lenvm-h100", "roofline"]),
    st.sampled_from([30, 500]),
    st.integers(1, 8),
    st.sampled_from([None, "V1", "V2", "V4"]),
)
def test_counted_requests_run_as_the_engine_runs_requests_of_their_lengths(
    sizes: list[tuple[int, int, int]],
    limit: int | None,
    is_sampled: bool,
    cost_model: str,
    num_blocks: int,
    max_num_seqs: int,
    revision: str | None,
) -> None:
    options = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": 40, "num_kv_blocks": num_blocks}
    if revision is not None:
        options |= {"value_model": VALUE_MODEL, "guided_rows": "aggregate", "revision": revision}
    config = SimConfig(cost_model=cost_model, block_size=4, **options)
    sampling = SamplingParams(temperature=float(is_sampled), top_k=5, min_p=0.01)
    template = request_of("t", sampling=sampling, guidance=None if revision is None else TILTED)
    prompts, outputs, arrivals_ms = zip(*sizes, strict=True)
    counted = CountedRequests(prompts, outputs, template=template)
    arrival_ns = [at * MS for at in arrivals_ms]
    few = CountedRequests(prompts[:5], outputs[:5], template=template)
    logs = []
    for kind in (lambda requests: requests, tuple):
        load = SimLoad(requests=kind(counted), arrival_ns=arrival_ns, max_concurrency=limit)
        simulation = simulate(config, [SimLoad(requests=kind(few), is_warmup=True), load])
        columns = [getattr(simulation.requests, field.name).tolist() for field in fields(simulation.requests)]
        logs.append(([encode(step) for step in simulation.steps], columns, simulation.num_preemptions))
    assert logs[0] == logs[1]


DRAFTING: dict[str, Any] = {"num_speculative_tokens": 3, "acceptance": (0.8,), "draft_cost": 0.05}


def test_a_rerun_repeats_every_draft_and_another_server_life_does_not() -> None:
    load = SimLoad(requests=CountedRequests([20] * 4, [300] * 4))
    logs = [
        [encode(step) for step in simulate(SimConfig(**DRAFTING, noise_seed=seed), [load]).steps]
        for seed in (1, 1, 2)
    ]
    assert logs[0] == logs[1] != logs[2]


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0), SamplingParams()])
def test_the_drafts_of_a_request_do_not_depend_on_the_rows_beside_it(sampling: SamplingParams) -> None:
    own = request_of("own", prompt_tokens=30, max_tokens=200, seed=7, sampling=sampling)
    others = [request_of(f"r{i}", prompt_tokens=9 * i + 1, max_tokens=80, seed=i) for i in range(20)]
    num_steps = []
    for requests in ([own], [own, *others], [*others, own]):
        core = Core(SimulatedEngine(SimConfig(**DRAFTING)))
        for request in requests:
            core.submit(request)
        outputs = iter(core.next_step, None)
        num_steps.append(sum(any(seq.request is own for seq in output.emitted) for output in outputs))
    assert num_steps[0] == num_steps[1] == num_steps[2]


def full_batch_steps(rows: int, num_tokens: int, **options: Any) -> list[StepRecord]:
    """Decode steps of a batch of so many rows before the first of them ends."""
    load = SimLoad(requests=CountedRequests([32] * rows, [num_tokens] * rows))
    steps = [step for step in simulate(SimConfig(**options), [load]).steps if step.phase == "decode"]
    first_end = next((i for i, step in enumerate(steps) if step.num_seqs < rows), len(steps))
    return steps[: first_end - 1]


def plain_ns(step: StepRecord, config: SimConfig) -> int:
    """The time of a step without drafts at the contexts that a step began with."""
    rows, context = step.num_seqs, step.context_tokens - step.draft_tokens
    batch = decode_batch(rows, context, is_greedy=step.is_greedy)
    return cost_model_for(config).price(batch).total_ns()


@pytest.mark.parametrize("num_drafts", [1, 3, 7])
@pytest.mark.parametrize(
    ("bonus", "backfill"), [(True, "none"), (True, "expansion"), (True, "prefill"), (False, "none")]
)
@pytest.mark.parametrize("rows", [1, 8])
def test_the_speed_up_is_that_of_the_closed_form(num_drafts: int, bonus: bool, backfill: str, rows: int) -> None:
    """Verifying takes as long as decoding here: weights bound a step of lenvm-h100 up to hundreds of tokens."""
    acceptance, draft_cost = 0.8, 0.05
    options = {**DRAFTING, "num_speculative_tokens": num_drafts, "bonus_token": bonus, "backfill": backfill}
    steps = full_batch_steps(rows, 8000 // rows, **options)
    tokens = np.array([step.output_tokens / rows for step in steps])
    margin = stats.t.ppf(0.9995, len(steps) - 1) * tokens.std(ddof=1) / len(steps) ** 0.5
    expected = tokens_per_step([acceptance] * num_drafts, bonus=bonus)
    assert tokens.mean() == pytest.approx(expected, abs=max(margin, 1e-12))

    step_ns = fmean(step.dur_ns for step in steps)
    decode_ns = fmean(plain_ns(step, SimConfig()) for step in steps)
    backfill_share = fmean(step.sections_ns.get("backfill", 0) for step in steps) / decode_ns
    cost = DraftCost(draft=draft_cost, backfill=backfill_share)
    measured = tokens.mean() * decode_ns / step_ns
    law = speed_up(expected, num_drafts, cost, bonus=bonus)
    assert measured == pytest.approx(law, abs=margin * measured / expected + 1e-3 * law)
    if num_drafts == 1 and not bonus:
        assert measured < 1
        assert measured == pytest.approx(1 / (1 + draft_cost), rel=1e-3)


@pytest.mark.parametrize("backfill", ["expansion", "prefill"])
def test_the_backfill_is_paid_in_the_steps_after_a_bonus_token(backfill: str) -> None:
    steps = full_batch_steps(1, 2000, **{**DRAFTING, "backfill": backfill})
    whole = [step.accepted_tokens == 3 for step in steps]
    pays = [step.sections_ns["backfill"] > 0 for step in steps[1:]]
    assert pays == whole[:-1]
    decode_ns = plain_ns(steps[0], SimConfig())
    costs = {step.sections_ns["backfill"] / decode_ns for step in steps[1:] if step.sections_ns["backfill"]}
    if backfill == "prefill":  # a pass of its own, nearly as long as any other
        assert all(0.045 < cost <= 0.05 for cost in costs)
    else:
        assert all(cost < 0.001 for cost in costs)


def test_acceptance_by_position_is_that_of_the_option() -> None:
    acceptance = (0.9, 0.6, 0.3)
    steps = full_batch_steps(8, 3000, **{**DRAFTING, "acceptance": acceptance})
    accepted = np.sum([step.accepted_by_position or () for step in steps], axis=0)
    judged = [sum(step.drafts for step in steps), *accepted[:-1]]
    for probability, kept, number in zip(acceptance, accepted, judged, strict=True):
        assert stats.binomtest(int(kept), int(number), probability).pvalue > 1e-4


def test_requests_differ_by_the_spread_of_acceptance_and_keep_its_mean() -> None:
    def accepted_shares(spread: float) -> np.ndarray:
        options = {**DRAFTING, "num_speculative_tokens": 1, "acceptance": (0.7,), "acceptance_spread": spread}
        core = Core(SimulatedEngine(SimConfig(**options)))
        for i in range(400):
            core.submit(request_of(f"r{i}", max_tokens=101, seed=i))
        outputs = iter(core.next_step, None)
        num_steps = Counter(seq.request.request_id for output in outputs for seq in output.emitted)
        return np.array([100 / (steps - 1) - 1 for steps in num_steps.values()])

    same, spread = accepted_shares(0.0), accepted_shares(1.0)
    assert spread.std() > 2.5 * same.std()
    # Evenly from 0.4 to 1: standard deviation 0.6 / sqrt(12).
    assert spread.std() == pytest.approx(0.173, abs=0.03)
    assert spread.mean() == pytest.approx(0.7, abs=4 * spread.std() / 20)


def test_an_answer_ends_in_the_middle_of_an_accepted_run_and_drafts_where_the_budget_of_tokens_does() -> None:
    whole = {**DRAFTING, "acceptance": (1.0,)}
    steps = run([request_of("r", max_tokens=7)], **whole).steps
    counts = [(step.output_tokens, step.accepted_tokens, step.num_decode_tokens) for step in steps]
    assert counts == [(1, 0, 0), (4, 3, 4), (2, 3, 4)]
    requests = [request_of(f"r{i}", prompt_tokens=2, max_tokens=40, seed=i) for i in range(4)]
    steps = run(requests, **whole, max_num_seqs=4, max_num_batched_tokens=9).steps
    full = [step for step in steps if step.num_seqs == 4 and step.phase == "decode"]
    assert {(step.drafts, step.draft_tokens, step.accepted_tokens) for step in full} == {(2, 5, 5)}


def test_a_verification_sees_every_draft_behind_its_row() -> None:
    """Three rows of 10, 20 and 30 tokens with 2, 0 and 3 drafts, counted one by one."""
    base = decode_batch(3, 60)
    batch = verified(base, DraftedRows([1, 0, 1, 1], [20, 0, 10, 30]))
    assert (batch.num_decodes, batch.num_decode_tokens, batch.num_sampling) == (3, 8, 8)
    assert batch.context_tokens == 12 + 20 + 33
    assert batch.attended_positions == batch.decode_positions == (10 + 11 + 12) + 20 + (30 + 31 + 32 + 33)
    assert not batch.is_plain_decode
    work = work_of(batch)
    lengths = ((9, 3), (19, 1), (29, 4))  # tokens in the cache before the step, and new ones
    assert (work.num_decodes, work.decode_tokens) == (3, 8)
    assert work.decode_context == sum(cached for cached, _ in lengths)
    assert work.decode_positions == sum(new * (cached + new / 2) for cached, new in lengths)
    assert work.prefill_positions == work.prefill_context == 0


def test_a_draft_model_costs_what_its_own_steps_take() -> None:
    options = {**DRAFTING, "cost_model": "roofline", "draft_cost": None, "draft_model": "qwen2.5-0.5b"}
    (step, *_) = full_batch_steps(4, 200, **options)
    draft = SimConfig(cost_model="roofline", model="qwen2.5-0.5b")
    expected = sum(
        plain_ns(
            StepRecord(
                step=1, start_ns=0, dur_ns=0, clock="virtual", phase="decode", num_seqs=4, draft_tokens=0,
                is_greedy=False, context_tokens=step.context_tokens - 12 + 4 * i,
            ),
            draft,
        )
        for i in range(3)
    )  # fmt: skip
    assert step.sections_ns["draft"] == pytest.approx(expected, abs=2)
    assert step.sections_ns["draft"] < 0.5 * step.sections_ns["model_forward"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"value_model": "qwen2.5-1.5b"}, "value_model is qwen2.5-1.5b: a value model guides one token at a time"),
        ({"cost_model": "llm-mock"}, "llm-mock cannot price the verification of drafts"),
        ({"acceptance": None}, "state with acceptance how many drafts are accepted"),
        ({"acceptance": (0.8, 0.7)}, "has 2 positions for 3 draft tokens"),
        ({"acceptance": (1.2,)}, "acceptance.*0\n.*less than or equal to 1"),
        ({"acceptance_spread": 2.0}, "acceptance_spread\n.*less than or equal to 1"),
        ({"draft_cost": -1.0}, "draft_cost\n.*greater than or equal to 0"),
        ({"draft_cost": None}, "name either draft_model"),
        ({"draft_model": "qwen2.5-0.5b"}, "name either draft_model"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens\n.*greater than or equal to 0"),
        (
            {"draft_cost": None, "draft_model": "x", "cost_model": "layer-profile", "layer_profile": "x"},
            "layer-profile has the times of one model",
        ),
    ],
)
def test_options_that_exclude_each_other_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SimConfig(**{**DRAFTING, **options})


def test_a_request_whose_last_drafts_never_fit_is_refused() -> None:
    engine = SimulatedEngine(SimConfig(**DRAFTING, num_kv_blocks=2, block_size=16))
    engine.check_servable(request_of("fits", prompt_tokens=20, max_tokens=10))
    with pytest.raises(UsageError, match="need 3 blocks of key-value memory with 3 draft tokens"):
        engine.check_servable(request_of("does-not", prompt_tokens=20, max_tokens=12))
