"""Speculative decoding in the simulator: what it yields, what it costs, and what it conserves."""

from collections import Counter
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from scipy import stats
from support.servers.simulator import decode_batch, request_of, run

from benchctl.errors import UsageError
from benchctl.records.files import encode
from benchctl.records.schema import StepRecord
from benchctl.sim.config import SimConfig
from benchctl.sim.core import Core, SimLoad, simulate
from benchctl.sim.costs.cost_model import cost_model_for
from benchctl.sim.costs.fitted import work_of
from benchctl.sim.drafts import DraftedRows, verified
from benchctl.sim.engine import SimulatedEngine
from benchctl.sim.requests import CountedRequests, SamplingParams
from benchctl.steptime.speculation_law import DraftCost, speed_up, tokens_per_step

GREEDY = SamplingParams(temperature=0.0)
DRAFTING: dict[str, Any] = {"num_speculative_tokens": 3, "acceptance": (0.8,), "draft_cost": 0.05}


def test_a_rerun_repeats_every_draft_and_another_server_life_does_not() -> None:
    load = SimLoad(requests=CountedRequests([20] * 4, [300] * 4))
    logs = [
        [encode(step) for step in simulate(SimConfig(**DRAFTING, noise_seed=seed), [load]).steps]
        for seed in (1, 1, 2)
    ]
    assert logs[0] == logs[1] != logs[2]


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams()])
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
