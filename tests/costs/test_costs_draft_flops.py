"""FLOPs of speculation: verification by the base model, and the passes of the draft model."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchctl.costs.flops import explain_difference, observed_flops, published_flops
from benchctl.costs.run_work import Lengths, RunLengths, StepLogCounts
from benchctl.costs.shapes import shape_for

BASE, DRAFT = shape_for("llama-160m"), shape_for("llama-68m")
BASE_LINEAR, BASE_POSITION = 2 * 12 * (4 * 768 * 768 + 3 * 768 * 3072), 12 * 4 * 768
DRAFT_LINEAR, DRAFT_POSITION = 2 * 2 * (4 * 768 * 768 + 3 * 768 * 3072), 2 * 4 * 768
LOGITS = 2 * 768 * 32000

ONE = (Lengths(10, 9),)
POSITIONS = 8 * 10 + 8 * 9 // 2
"""Of the 8 tokens that a sequence of a prompt of 10 and 9 output tokens decodes after its first."""


def of_steps(num_steps, num_drafts, backfill=0):
    """Counts of one sequence in steps of so many draft tokens each."""
    return StepLogCounts(
        base_prefill_tokens=10,
        verification_tokens=num_steps * (num_drafts + 1),
        draft_prefill_tokens=10,
        draft_tokens=num_steps * num_drafts,
        backfill_tokens=backfill,
    )


PLAIN = StepLogCounts(base_prefill_tokens=10)


def corrections_of(published, lengths, counts, draft_model, top_k=0):
    models = {"base": BASE, "value_model": None, "draft_model": draft_model}
    corrections = explain_difference(published, lengths=lengths, counts=counts, top_k=top_k, **models)
    return {correction.code: correction.flops for correction in corrections}


def test_drafts_that_are_all_accepted_cost_the_base_model_what_decoding_does():
    drafted = observed_flops(ONE, of_steps(num_steps=2, num_drafts=3), base=BASE, draft_model=DRAFT)
    assert drafted.of("base") == observed_flops(ONE, PLAIN, base=BASE).of("base")
    assert drafted.of("base_decode").total == 8 * (BASE_LINEAR + LOGITS) + POSITIONS * BASE_POSITION


def test_rejected_drafts_are_verified_at_the_price_of_accepted_ones_also_without_a_model():
    account = observed_flops(ONE, of_steps(num_steps=8, num_drafts=3), base=BASE)
    decode = account.of("base_decode")
    assert (decode.linear, decode.head) == (32 * BASE_LINEAR, 32 * LOGITS)
    assert decode.attention == 4 * POSITIONS * BASE_POSITION
    assert account.of("draft").total == 0


def test_a_draft_costs_a_token_of_its_model_for_each_proposal_and_for_each_that_it_has_backfill_on():
    drafted = observed_flops(ONE, of_steps(num_steps=2, num_drafts=3, backfill=2), base=BASE, draft_model=DRAFT)
    assert drafted.of("draft_prefill").total == 10 * DRAFT_LINEAR + 55 * DRAFT_POSITION
    assert drafted.of("draft_decode").total == 8 * DRAFT_LINEAR + POSITIONS * DRAFT_POSITION + 6 * LOGITS
    assert drafted.total == drafted.of("base").total + drafted.of("draft").total
    per_token = drafted.of("base_decode").total + drafted.of("draft_decode").total
    assert drafted.flops_per_output_token == per_token / 9


sequences = st.lists(st.builds(Lengths, st.integers(1, 200), st.integers(2, 200)), min_size=1, max_size=6)


@settings(max_examples=50)
@given(
    sequences=sequences, rejected=st.integers(0, 5000), proposed=st.integers(0, 5000), backfill=st.integers(0, 99)
)
def test_an_output_token_never_costs_less_with_speculation_than_without(sequences, rejected, proposed, backfill):
    prompts = sum(prompt for prompt, _ in sequences)
    counts = StepLogCounts(
        base_prefill_tokens=prompts,
        verification_tokens=sum(output - 1 for _, output in sequences) + rejected,
        draft_prefill_tokens=prompts,
        draft_tokens=proposed,
        backfill_tokens=backfill,
    )
    drafted = observed_flops(sequences, counts, base=BASE, draft_model=DRAFT).flops_per_output_token
    plain = observed_flops(sequences, StepLogCounts(base_prefill_tokens=prompts), base=BASE).flops_per_output_token
    assert drafted > plain if rejected or proposed or backfill else drafted == plain


@settings(max_examples=50)
@given(sequences=sequences, num_steps=st.integers(1, 500), num_drafts=st.integers(1, 8), top_k=st.integers(0, 5))
def test_the_corrections_lead_from_published_flops_to_those_of_drafts(sequences, num_steps, num_drafts, top_k):
    counts = of_steps(num_steps, num_drafts, backfill=num_steps // 2)
    lengths = RunLengths(question_prompts=tuple(p for p, _ in sequences), sequences=tuple(sequences))
    published = published_flops(lengths.totals(), base=BASE, top_k=top_k)
    observed = observed_flops(sequences, counts, base=BASE, draft_model=DRAFT)
    by_code = corrections_of(published, lengths, counts, DRAFT, top_k)
    assert published.total + sum(by_code.values()) == observed.total
    assert by_code["drafts"] == observed.of("draft").total


@pytest.mark.parametrize(
    ("counts", "draft", "codes"),
    [
        (PLAIN, None, set()),
        (of_steps(3, 2), None, {"verification"}),
        (of_steps(3, 2), DRAFT, {"verification", "drafts"}),
    ],
)
def test_corrections_of_drafts_are_there_where_drafts_were(counts, draft, codes):
    lengths = RunLengths(question_prompts=(10,), sequences=ONE)
    corrections = corrections_of(published_flops(lengths.totals(), base=BASE), lengths, counts, draft)
    assert corrections.keys() & {"verification", "drafts"} == codes
