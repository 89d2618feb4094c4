"""Planned against counted prompt tokens, of runs and between arms."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.results.builders import (
    edit_requests,
    prepared,
    requests_of,
    steps_of,
    write_results,
)

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.compare.compare import CompareOptions, compare_sides
from benchctl.analysis.experiment.pairing import parse_side
from benchctl.analysis.validity.answers import prompt_warnings
from benchctl.records.record import PreparedRequest, RequestRecord

SYNTHETIC = {"source": "synthetic:0"}
TRACE = {"source": "azure-trace/conv-2023:3"}
COUNTED = {"prompt_tokens_from": "tokenizer 0123456789abcdef"}


def planned(num: int = 10, tokens: int = 100, n: int = 1, **fields: str) -> tuple[PreparedRequest, ...]:
    return tuple(msgspec.structs.replace(r, prompt_tokens=tokens, **fields) for r in prepared(num, 8, n))


def answered(requests: tuple[PreparedRequest, ...], *counted: int | None) -> list[RequestRecord]:
    """The records of ``requests``, the first of which have these prompt tokens in their usage."""
    records = requests_of(requests, steps_of(len(requests), 8, 1.0, guided=False))
    return [
        msgspec.structs.replace(record, prompt_tokens=counted[i]) if i < len(counted) else record
        for i, record in enumerate(records)
    ]


def told(requests: tuple[PreparedRequest, ...], *counted: int | None) -> list[tuple[str, str]]:
    found = prompt_warnings(requests, answered(requests, *counted))
    return [(warning.code, warning.message) for warning in found]


@pytest.mark.parametrize("counted", [100, 96, 104])
def test_a_few_tokens_more_or_less_are_no_difference(counted):
    assert told(planned(**SYNTHETIC), *[counted] * 10) == []
    assert told(planned(tokens=1000, **SYNTHETIC), *[1020] * 10) == []


@pytest.mark.parametrize("fields", [SYNTHETIC, TRACE, COUNTED, {"prompt_tokens_from": "server"}])
def test_prompts_of_other_lengths_than_asked_or_counted_make_a_run_suspect_with_both_numbers(fields):
    ((code, message),) = told(planned(**fields), *[150] * 4)
    assert code == "prompt-tokens-differ"
    assert message.startswith("the server counted 120.0 tokens in a prompt on average, and 100.0 were planned (by ")
    assert message.endswith("ratio 1.200): 4 of 10 requests differ by more than 4 tokens and 2%")


def test_a_wrong_estimate_of_text_that_somebody_wrote_is_a_note():
    ((code, message),) = told(planned(), *[150] * 10)
    assert code == "prompt-tokens-unconfirmed"
    assert "(by an estimate; ratio 1.500): 10 of 10 requests" in message


def test_requests_without_usage_are_not_checked_and_that_is_said_once():
    assert told(planned(**SYNTHETIC), None, None) == [
        ("prompt-tokens-unconfirmed", "no usage, so no check of the prompt, in 2 requests")
    ]
    ((code, message),) = told(planned(**SYNTHETIC), None, 200)
    assert code == "prompt-tokens-differ"
    assert "1 of 9 requests differ" in message
    assert message.endswith("; no usage, so no check of the prompt, in 1 request")


def test_several_answers_to_a_request_have_one_prompt():
    assert told(planned(n=8, **SYNTHETIC)) == []


def test_warm_up_and_failed_requests_are_not_checked():
    requests = planned(**SYNTHETIC)
    records = answered(requests, *[500] * 10)
    warmup = [msgspec.structs.replace(record, is_warmup=True) for record in records]
    assert prompt_warnings(requests, warmup) == ()
    failed = [msgspec.structs.replace(record, choices=(), done_ns=None) for record in records]
    assert prompt_warnings(requests, failed) == ()


@given(
    tokens=st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 5000)), min_size=1, max_size=8),
    widened=st.integers(0, 7),
)
def test_equal_counts_never_warn_and_a_wider_gap_never_silences(tokens, widened):
    requests = tuple(
        msgspec.structs.replace(request, prompt_tokens=of_plan, **SYNTHETIC)
        for request, (of_plan, _) in zip(prepared(len(tokens), 8), tokens, strict=True)
    )
    assert told(requests, *(of_plan for of_plan, _ in tokens)) == []
    counted = [of_server for _, of_server in tokens]
    before = told(requests, *counted)
    i = widened % len(tokens)
    counted[i] += 1000 if counted[i] >= tokens[i][0] else -counted[i]
    assert bool(told(requests, *counted)) >= bool(before)


def test_two_servers_that_count_the_same_prompts_differently_are_named_with_both_numbers(tmp_path):
    results = write_results(tmp_path)
    for run in results.plan().runs:
        if run.variant == "guided":
            edit_requests(results, run.run_id, lambda record: msgspec.structs.replace(record, prompt_tokens=21))
    text = "the servers count the same prompts differently: 20.0 tokens on average in baseline, 21.0 in guided"
    assert any(warning.message.startswith(text) for warning in analyze_directory(results.path).warnings)
    sides = [parse_side(f"{results.path}:{variant}") for variant in ("baseline", "guided")]
    comparison = compare_sides(*sides, CompareOptions())
    assert any(warning.message.startswith(text) for warning in comparison.warnings)
    assert comparison.verdict == "invalid", "equal requests are not equal work"
    assert json.dumps(comparison.cells[0].errors).count("prompt_tokens must be equal and is 80 against 84") == 1
