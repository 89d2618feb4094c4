"""FLOPs: the laws of both accounts and of the corrections between them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchctl.costs.flops import Convention, explain_difference, observed_flops, published_flops
from benchctl.costs.run_work import Lengths, RunLengths, RunTotals, StepLogCounts, TokenWork
from benchctl.costs.shapes import ModelShape, shape_for

BASE = shape_for("qwen2.5-7b")
VALUE = shape_for("qwen2.5-1.5b")
GUIDED_RUN = RunTotals(num_questions=50, num_sequences=800, prompt_tokens=5200, output_tokens=237_710)

totals_of_runs = st.builds(
    lambda questions, samples, prompt, output: RunTotals(
        num_questions=questions,
        num_sequences=questions * samples,
        prompt_tokens=questions * prompt,
        output_tokens=questions * samples * output,
    ),
    questions=st.integers(1, 40),
    samples=st.integers(1, 8),
    prompt=st.integers(1, 600),
    output=st.integers(1, 600),
)
value_models = st.sampled_from(["qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b"]).map(shape_for)
conventions = st.sampled_from(["published", "two-n", "lm-head-value-model"])
runs = st.lists(
    st.tuples(st.integers(1, 300), st.lists(st.integers(0, 400), min_size=1, max_size=4)), min_size=1, max_size=6
).map(
    lambda questions: RunLengths(
        question_prompts=tuple(prompt for prompt, _ in questions),
        sequences=tuple(Lengths(prompt, output) for prompt, outputs in questions for output in [*outputs, 1]),
    )
)
counts = st.integers(0, 100_000)
seen_counts = st.builds(
    StepLogCounts,
    base_prefill_tokens=counts,
    value_prefill_tokens=counts,
    value_extend_tokens=counts,
    candidates=counts,
)


@given(totals=totals_of_runs, value=value_models, top_k=st.integers(1, 50), convention=conventions)
def test_more_candidates_cost_more(
    totals: RunTotals, value: ModelShape, top_k: int, convention: Convention
) -> None:
    fewer = published_flops(totals, base=BASE, value_model=value, top_k=top_k, convention=convention)
    more = published_flops(totals, base=BASE, value_model=value, top_k=top_k + 1, convention=convention)
    assert more.total - fewer.total == fewer.of("value_extend").total
    assert more.of("base") == fewer.of("base")


@given(totals=totals_of_runs, value=value_models, top_k=st.integers(0, 50), convention=conventions)
def test_the_parts_of_an_account_add_up(
    totals: RunTotals, value: ModelShape, top_k: int, convention: Convention
) -> None:
    account = published_flops(totals, base=BASE, value_model=value, top_k=top_k, convention=convention)
    phases = (account.of("base_prefill"), account.of("base_decode"))
    value_phases = (account.of("value_prefill"), account.of("value_extend"), account.of("value_candidates"))
    assert sum(phase.total for phase in phases) == account.of("base").total
    assert sum(phase.total for phase in value_phases) == account.of("value").total
    assert (
        account.of("base").linear + account.of("base").attention + account.of("base").head
        == account.of("base").total
    )
    assert account.of("base").total + account.of("value").total == account.total


@given(totals=totals_of_runs, convention=conventions, top_k=st.integers(-1, 50))
def test_without_a_value_model_nothing_is_extra(totals: RunTotals, convention: Convention, top_k: int) -> None:
    account = published_flops(totals, base=BASE, top_k=top_k, convention=convention)
    assert account.of("value").total == 0
    assert account.ratio == 1.0


@given(totals=totals_of_runs, convention=conventions, factor=st.integers(2, 5))
def test_flops_are_linear_in_the_questions(totals: RunTotals, convention: Convention, factor: int) -> None:
    repeated = RunTotals(
        num_questions=totals.num_questions * factor,
        num_sequences=totals.num_sequences * factor,
        prompt_tokens=totals.prompt_tokens * factor,
        output_tokens=totals.output_tokens * factor,
    )
    one = published_flops(totals, base=BASE, value_model=VALUE, top_k=3, convention=convention)
    more = published_flops(repeated, base=BASE, value_model=VALUE, top_k=3, convention=convention)
    assert more.total == factor * one.total


@given(totals=totals_of_runs, top_k=st.integers(1, 20), cost=st.floats(0, 1))
def test_a_candidate_cost_scales_the_candidates_only(totals: RunTotals, top_k: int, cost: float) -> None:
    full = published_flops(totals, base=BASE, value_model=VALUE, top_k=top_k)
    part = published_flops(totals, base=BASE, value_model=VALUE, top_k=top_k, candidate_cost=cost)
    assert part.of("value_candidates").total == pytest.approx(
        cost * full.of("value_candidates").total, abs=4, rel=1e-12
    )
    assert part.of("value_extend") == full.of("value_extend")


@given(totals=totals_of_runs, value=value_models, top_k=st.integers(1, 20), seen_frac=st.floats(0, 1))
def test_the_published_candidates_bound_the_observed_ones(
    totals: RunTotals, value: ModelShape, top_k: int, seen_frac: float
) -> None:
    lengths = totals.evenly()
    counts = StepLogCounts(base_prefill_tokens=0, candidates=int(seen_frac * top_k * totals.output_tokens))
    observed = observed_flops(lengths.sequences, counts, base=BASE, value_model=value)
    published = published_flops(totals, base=BASE, value_model=value, top_k=top_k)
    assert observed.of("value_candidates").total <= published.of("value_candidates").total
    if seen_frac == 1:
        assert observed.of("value_candidates") == published.of("value_candidates")


@given(lengths=runs, counts=seen_counts, value=st.none() | value_models, top_k=st.integers(-1, 8))
def test_the_corrections_lead_exactly_from_the_published_account_to_the_observed_one(
    lengths: RunLengths, counts: StepLogCounts, value: ModelShape | None, top_k: int
) -> None:
    published = published_flops(lengths.totals(), base=BASE, value_model=value, top_k=top_k)
    observed = observed_flops(lengths.sequences, counts, base=BASE, value_model=value)
    corrections = explain_difference(
        published, lengths=lengths, counts=counts, base=BASE, value_model=value, top_k=top_k
    )
    assert published.total + sum(correction.flops for correction in corrections) == observed.total
    codes = [correction.code for correction in corrections]
    expected = ["lengths", "head", "first-token", "base-prefill"]
    assert codes == (expected if value is None else [*expected, "value-prefill", "value-extend", "candidates"])


@given(convention=conventions, cost=st.sampled_from([0.5, 1.0]))
def test_another_convention_is_a_correction_of_its_own(convention: Convention, cost: float) -> None:
    lengths = GUIDED_RUN.evenly()
    published = published_flops(
        GUIDED_RUN, base=BASE, value_model=VALUE, top_k=5, convention=convention, candidate_cost=cost
    )
    counts = StepLogCounts(base_prefill_tokens=5200, value_prefill_tokens=5200, value_extend_tokens=1, candidates=1)
    corrections = explain_difference(
        published, lengths=lengths, counts=counts, base=BASE, value_model=VALUE, top_k=5
    )
    has_own = corrections[0].code == "convention"
    assert has_own == (convention != "published" or cost != 1)
    observed = observed_flops(lengths.sequences, counts, base=BASE, value_model=VALUE)
    assert published.total + sum(correction.flops for correction in corrections) == observed.total


def test_each_correction_has_the_sign_of_what_it_corrects() -> None:
    lengths = GUIDED_RUN.evenly()
    published = published_flops(GUIDED_RUN, base=BASE, value_model=VALUE, top_k=5)
    counts = StepLogCounts(
        base_prefill_tokens=5200,
        value_prefill_tokens=16 * 5200,
        value_extend_tokens=237_710 - 800,
        candidates=2 * 237_710,
    )
    corrections = explain_difference(
        published, lengths=lengths, counts=counts, base=BASE, value_model=VALUE, top_k=5
    )
    prices = {correction.code: correction.flops for correction in corrections}
    assert prices["head"] < 0
    assert prices["first-token"] < 0
    assert prices["base-prefill"] == 0
    assert prices["value-prefill"] > 0
    assert prices["value-extend"] < 0
    # Two of five candidates seen: three fifths of their price comes back.
    assert prices["candidates"] == pytest.approx(-0.6 * published.of("value_candidates").total, rel=1e-3)


@given(totals=totals_of_runs)
def test_lengths_spread_evenly_keep_their_totals(totals: RunTotals) -> None:
    lengths = totals.evenly()
    assert lengths.totals() == totals
    outputs = [output for _, output in lengths.sequences]
    assert max(outputs) - min(outputs) <= 1


def test_resizing_nothing_sees_nothing() -> None:
    assert TokenWork().resized(10, heads=1) == TokenWork(tokens=10, heads=1)
