"""FLOPs of a measured run: published and observed accounts from a result directory with a known truth."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.results.builders import prepared, write_results
from support.steps import records_of, with_steps

from benchctl.analysis.attribution.flops import RunFlops, count_run_flops
from benchctl.costs.flops import observed_flops, published_flops
from benchctl.costs.hardware import hardware_for
from benchctl.costs.run_work import Lengths, RunTotals, StepLogCounts
from benchctl.costs.shapes import shape_for
from benchctl.records.loaded import LoadedRun, load_results
from benchctl.records.record import PreparedRequest, RequestError, RequestRecord
from benchctl.records.schema import StepRecord

BASE = shape_for("qwen2.5-7b")
VALUE = shape_for("qwen2.5-1.5b")
H100 = hardware_for("h100-sxm")

# write_results: 4 requests with 2 choices of 8 tokens and prompts of 20, prefilled sample by sample.
TOTALS = RunTotals(num_questions=4, num_sequences=8, prompt_tokens=80, output_tokens=64)
SEQUENCES = (Lengths(20, 8),) * 8


@pytest.fixture
def runs(tmp_path: Path) -> dict[str, LoadedRun]:
    loaded = load_results(write_results(tmp_path / "results").path)
    return {run.record.variant: run for run in loaded.runs[:2]}


def account(run: LoadedRun, **changes: Any) -> RunFlops:
    options: dict[str, Any] = {
        "base": BASE,
        "value_model": VALUE if run.record.variant == "guided" else None,
        "top_k": 5,
        "prepared": prepared(4, 8, 2),
    } | changes
    return count_run_flops(run, **options)


def with_changed_steps(run: LoadedRun, change: Callable[[StepRecord], StepRecord]) -> LoadedRun:
    return with_steps(run, map(change, records_of(run)))


def with_requests(run: LoadedRun, change: Callable[[RequestRecord], RequestRecord]) -> LoadedRun:
    return _replaced(run, requests=tuple(change(request) for request in run.requests))


def _replaced(run: LoadedRun, **changes: Any) -> LoadedRun:
    return replace(run, **changes)


def codes(found: RunFlops) -> list[str]:
    return [warning.code for warning in found.warnings]


def test_the_baseline_is_accounted_from_usage_and_steps(runs: dict[str, LoadedRun]) -> None:
    found = account(runs["baseline"])
    assert found.published == published_flops(TOTALS, base=BASE)
    assert found.observed == observed_flops(SEQUENCES, StepLogCounts(base_prefill_tokens=160), base=BASE)
    assert found.warnings == ()


def test_a_guided_run_is_accounted_from_its_step_log(runs: dict[str, LoadedRun]) -> None:
    found = account(runs["guided"])
    assert found.published == published_flops(TOTALS, base=BASE, value_model=VALUE, top_k=5)
    seen = StepLogCounts(
        base_prefill_tokens=160, value_prefill_tokens=160, value_extend_tokens=7 * 8, candidates=8 * 3 * 8
    )
    assert found.observed == observed_flops(SEQUENCES, seen, base=BASE, value_model=VALUE)
    assert found.warnings == ()


@pytest.mark.parametrize("variant", ["baseline", "guided"])
def test_the_corrections_add_up_to_the_difference(runs: dict[str, LoadedRun], variant: str) -> None:
    found = account(runs[variant])
    assert found.published is not None
    assert found.observed is not None
    total = sum(correction.flops for correction in found.corrections)
    assert found.published.total + total == found.observed.total


def test_a_greedy_run_is_charged_by_the_published_rule_only(runs: dict[str, LoadedRun]) -> None:
    def greedy(step: StepRecord) -> StepRecord:
        return msgspec.structs.replace(
            step,
            is_greedy=True,
            guided_rows=None,
            candidates=None,
            value_prefill_tokens=None,
            value_extend_tokens=None,
        )

    found = account(with_changed_steps(runs["guided"], greedy), top_k=1)
    assert found.published is not None
    assert found.observed is not None
    assert found.published.of("value").total > 0
    assert found.observed.of("value").total == 0
    assert found.warnings == ()


def test_a_run_that_was_never_guided_is_charged_by_the_published_rule_only(runs: dict[str, LoadedRun]) -> None:
    found = account(runs["baseline"], value_model=VALUE)
    assert found.published is not None
    assert found.observed is not None
    assert found.published.of("value").total > 0
    assert found.observed.of("value").total == 0
    assert found.warnings == ()


def test_unknown_candidates_leave_no_observed_account(runs: dict[str, LoadedRun]) -> None:
    silent = with_changed_steps(runs["guided"], lambda step: msgspec.structs.replace(step, candidates=None))
    found = account(silent)
    assert found.published is not None
    assert found.observed is None
    assert found.corrections == ()
    assert codes(found) == ["candidates-unknown"]
    assert found.warnings[0].where == silent.record.run_id
    assert account(with_steps(runs["guided"], ())).observed is None


def test_unknown_prefixes_of_the_value_model_are_assumed_and_said(runs: dict[str, LoadedRun]) -> None:
    silent = with_changed_steps(
        runs["guided"],
        lambda step: msgspec.structs.replace(step, value_prefill_tokens=None, value_extend_tokens=None),
    )
    found = account(silent)
    assert codes(found) == ["value-prefixes-assumed"]
    # The same as logged: a prompt and all but the last token of each sequence.
    assert found.observed == account(runs["guided"]).observed


def test_a_log_without_prefill_counts_assumes_one_prompt_for_each_question(runs: dict[str, LoadedRun]) -> None:
    silent = with_changed_steps(
        runs["baseline"], lambda step: msgspec.structs.replace(step, num_prefill_tokens=None)
    )
    found = account(silent)
    assert codes(found) == ["base-prefill-assumed"]
    assert found.observed == observed_flops(SEQUENCES, StepLogCounts(base_prefill_tokens=80), base=BASE)


def test_warm_up_counts_for_nothing(runs: dict[str, LoadedRun]) -> None:
    run = runs["guided"]
    warm_request = msgspec.structs.replace(run.requests[0], request_id="warm", is_warmup=True)
    warm_step = msgspec.structs.replace(records_of(run)[0], is_warmup=True, candidates=10**9)
    warmed = _replaced(with_steps(run, (warm_step, *records_of(run))), requests=(warm_request, *run.requests))
    assert account(warmed) == account(run)


def test_failed_requests_are_left_out_and_named(runs: dict[str, LoadedRun]) -> None:
    def fail_first(request: RequestRecord) -> RequestRecord:
        if request.index:
            return request
        return msgspec.structs.replace(request, error=RequestError(kind="timeout", message="no answer"))

    found = account(with_requests(runs["baseline"], fail_first))
    assert found.published is not None
    assert found.published.output_tokens == 48
    assert codes(found) == ["failed-requests-in-step-log"]
    assert "1 of 4 requests did not complete" in found.warnings[0].message


def test_tokens_are_counted_once_for_each_request_from_usage(runs: dict[str, LoadedRun]) -> None:
    def without_lengths(request: RequestRecord) -> RequestRecord:
        choices = tuple(
            msgspec.structs.replace(choice, output_tokens=None, chunk_tokens=None) for choice in request.choices
        )
        return msgspec.structs.replace(request, choices=choices, completion_tokens=15)

    found = account(with_requests(runs["baseline"], without_lengths))
    assert found.published is not None
    assert found.published.output_tokens == 60
    assert codes(found) == ["choice-lengths-assumed"]
    expected = observed_flops(
        (Lengths(20, 8), Lengths(20, 7)) * 4, StepLogCounts(base_prefill_tokens=160), base=BASE
    )
    assert found.observed == expected


def test_choices_are_counted_by_themselves_where_usage_is_missing(runs: dict[str, LoadedRun]) -> None:
    silent = with_requests(
        runs["baseline"], lambda request: msgspec.structs.replace(request, completion_tokens=None)
    )
    assert account(silent).observed == account(runs["baseline"]).observed


def test_prompt_tokens_of_the_workload_stand_in_for_missing_usage(runs: dict[str, LoadedRun]) -> None:
    silent = with_requests(runs["baseline"], lambda request: msgspec.structs.replace(request, prompt_tokens=None))
    found = account(silent)
    assert found.published == account(runs["baseline"]).published
    assert codes(found) == ["prompt-tokens-estimated"]
    unknown = account(silent, prepared=())
    assert unknown.published is None
    assert codes(unknown) == ["tokens-unknown"]
    assert "r00000" in unknown.warnings[0].message


def test_usage_alone_counts_as_one_choice(runs: dict[str, LoadedRun]) -> None:
    bare = with_requests(runs["baseline"], lambda request: msgspec.structs.replace(request, choices=()))
    found = account(bare)
    assert found.warnings == ()
    expected = observed_flops((Lengths(20, 16),) * 4, StepLogCounts(base_prefill_tokens=160), base=BASE)
    assert found.observed == expected


def test_unknown_output_tokens_leave_no_account(runs: dict[str, LoadedRun]) -> None:
    silent = with_requests(
        runs["baseline"], lambda request: msgspec.structs.replace(request, completion_tokens=None, choices=())
    )
    found = account(silent)
    assert found.published is found.observed is None
    assert codes(found) == ["tokens-unknown"]


def test_a_run_without_completed_requests_has_no_account(runs: dict[str, LoadedRun]) -> None:
    found = account(_replaced(runs["baseline"], requests=()))
    assert found.published is found.observed is None
    assert codes(found) == ["no-completed-requests"]


def test_draft_tokens_are_said_to_be_left_out(runs: dict[str, LoadedRun]) -> None:
    drafting = with_changed_steps(runs["baseline"], lambda step: msgspec.structs.replace(step, draft_tokens=3))
    assert codes(account(drafting)) == ["drafts-not-charged"]


def _as_requests(sources: list[str], samples: list[int]) -> tuple[PreparedRequest, ...]:
    return tuple(
        msgspec.structs.replace(request, source=source, sample=sample)
        for request, source, sample in zip(prepared(4, 8, 2), sources, samples, strict=True)
    )


@pytest.mark.parametrize(
    ("sources", "samples", "num_questions"),
    [
        (["a", "a", "b", "b"], [0, 1, 0, 1], 2),
        (["a", "b", "a", "b"], [0, 0, 1, 1], 2),
        (["a", "a", "a", "a"], [0, 1, 2, 3], 1),
        (["a", "a", "a", "a"], [0, 1, 0, 1], 2),
        (["a", "a", "a", "a"], [0, 0, 0, 0], 4),
    ],
)
def test_samples_sent_as_requests_share_the_prompt_of_their_question(
    runs: dict[str, LoadedRun], sources: list[str], samples: list[int], num_questions: int
) -> None:
    found = account(runs["baseline"], prepared=_as_requests(sources, samples))
    totals = RunTotals(
        num_questions=num_questions, num_sequences=8, prompt_tokens=20 * num_questions, output_tokens=64
    )
    assert found.published == published_flops(totals, base=BASE)
    assert found.observed == account(runs["baseline"]).observed
