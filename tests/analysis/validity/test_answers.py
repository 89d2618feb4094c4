"""Planned against counted tokens: prompts of other lengths, and answers that end early though theirs was forced."""

import json
import random
from itertools import accumulate

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.results.builders import change_requests, prepared, requests_of, run_ids, steps_of, write_results
from support.results.comparing import compare_arms

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.validity.answers import answer_end_warnings, prompt_warnings
from benchctl.records.record import ChoiceRecord, RequestError, RequestRecord

MS = 1_000_000
ASKED = 128
WORDS = (" a", " the", " of", " measure", "ment", " is", ".", " tokens", " 17", "\n")


def record(index, chunks, *, finish="length", tail_ns=4 * MS, tokens=ASKED, n=1, **fields):
    """A request whose chunks are (gap before it in ns, text, tokens that the server counts or None)."""
    times = tuple(accumulate(gap_ns for gap_ns, _, _ in chunks))
    counts = tuple(count for _, _, count in chunks if count is not None)
    choices = tuple(
        ChoiceRecord(
            index=i,
            chunk_ns=times,
            chunk_tokens=counts if len(counts) == len(chunks) else None,
            chunk_chars=tuple(len(text) for _, text, _ in chunks),
            finish_reason=finish,
            text="".join(text for _, text, _ in chunks),
        )
        for i in range(n)
    )
    values = {"choices": choices, "completion_tokens": tokens, "done_ns": times[-1] + tail_ns} | fields
    return RequestRecord(request_id=f"r{index}", index=index, scheduled_ns=0, sent_ns=0, **values)


def words(rng, count):
    return "".join(rng.choice(WORDS) for _ in range(count))


def chunks_of(rng, sizes, *, are_counted=False):
    return [(5 * MS, words(rng, size), size if are_counted else None) for size in sizes]


def split(rng, total, most):
    """Sizes of chunks with 1 to ``most`` tokens each, ``total`` together."""
    sizes = []
    while sum(sizes) < total:
        sizes.append(min(rng.randint(1, most), total - sum(sizes)))
    return sizes


def codes(records, *, is_forced=True, may_stop=False):
    return [warning.code for warning in answer_end_warnings(records, is_forced=is_forced, may_stop=may_stop)]


def whole(rng, index):
    return record(index, chunks_of(rng, [1] * ASKED))


@pytest.mark.parametrize("seed", range(3))
def test_honest_answers_are_believed(seed):
    rng = random.Random(seed)
    others = [whole(rng, 99) for _ in range(5)]
    loads = {
        "a token per chunk": [whole(rng, i) for i in range(20)],
        "some coalesced": [
            record(i, chunks_of(rng, [1] * ASKED if i % 2 else split(rng, ASKED, 4))) for i in range(20)
        ],
        "a few coalesced": [record(i, chunks_of(rng, [1] * ASKED if i > 3 else [2] * 64)) for i in range(40)],
        "speculation that is counted": [
            record(i, chunks_of(rng, split(rng, ASKED, 6), are_counted=True)) for i in range(20)
        ],
        "four tokens in every chunk, counted": [
            record(i, chunks_of(rng, [4] * 32, are_counted=True)) for i in range(20)
        ],
        "characters held back": [record(i, chunks_of(rng, [1] * 110 + [3] * 6)) for i in range(20)],
        "all at once, counted": [
            record(i, [(0, words(rng, 1), 1) for _ in range(ASKED)], tail_ns=0) for i in range(20)
        ],
        "an end of sequence repeated, which nobody sees": [
            record(i, chunks_of(rng, [1] * (40 + i % 5 * 20)), tail_ns=5 * MS * (88 - i % 5 * 20))
            for i in range(20)
        ]
        + others,
        "an end of sequence repeated, which a count shows": [
            record(i, [*chunks_of(rng, [1] * 60, are_counted=True), (5 * MS * 68, "", 68)]) for i in range(20)
        ],
        "pauses without text within the answer": [
            record(i, [*chunks_of(rng, [1] * 30), (5 * MS * 69, "x", None), *chunks_of(rng, [1] * 29)])
            for i in range(20)
        ]
        + others,
        "one token asked for": [record(i, chunks_of(rng, [1]), tokens=1) for i in range(20)],
        "calls of tools": [record(i, [(MS, "", None)] * 20, finish="tool_calls") for i in range(20)],
        "ended by itself with all its tokens": [
            record(i, chunks_of(rng, [1] * ASKED), finish="stop") for i in range(20)
        ],
        "a request that failed": [
            record(
                1, chunks_of(rng, [1] * 60), finish="stop", done_ns=1, error=RequestError(kind="reset", message="x")
            )
        ],
    }
    assert {name: codes(records) for name, records in loads.items()} == {name: [] for name in loads}


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
def test_answers_with_the_text_of_fewer_tokens_than_usage_counts_are_told(share):
    for seed in range(5):
        rng = random.Random(seed)
        early = [record(i, chunks_of(rng, [1] * round(share * ASKED))) for i in range(12)]
        assert codes(early + [whole(rng, 90 + i) for i in range(4)]) == ["output-ended-early"], seed


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("are_counted", [False, True])
def test_an_answer_that_ended_by_itself_before_its_tokens_had_come_is_told(n, are_counted):
    chunks = chunks_of(random.Random(1), [1] * 59 + [69 if are_counted else 1], are_counted=are_counted)
    records = [record(1, chunks, finish="stop", n=n, tokens=ASKED * n)]
    assert codes(records) == ["output-ended-early"]
    assert codes(records, is_forced=False) == codes(records, may_stop=True) == []


def test_tokens_that_a_count_adds_without_time_or_text_and_few_chunks_without_a_whole_answer_are_told():
    rng = random.Random(1)
    for gap_ns in (MS, 0):
        chunks = [*chunks_of(rng, [1] * 60, are_counted=True), (gap_ns, "", 68)]
        assert codes([record(1, chunks)]) == ["output-ended-early"]
    assert codes([record(i, chunks_of(rng, split(rng, ASKED, 4))) for i in range(9)]) == ["output-tokens-unseen"]


def test_an_unknown_finish_reason_is_named_without_its_control_characters():
    finishes = ("\x1b[31msudden", "sudden\ndeath")
    records = [record(i, [(MS, "a", None)], finish=finish) for i, finish in enumerate(finishes)]
    (warning,) = answer_end_warnings(records, is_forced=False)
    assert warning.code == "finish-reason-unknown"
    assert "sudden" in warning.message
    assert not {"\x1b", "\n"} & set(warning.message)


SYNTHETIC = {"source": "synthetic:0"}
TRACE = {"source": "azure-trace/conv-2023:3"}
COUNTED = {"prompt_tokens_from": "tokenizer 0123456789abcdef"}
SERVER = {"prompt_tokens_from": "server"}
MEANS = "the server counted 120.0 tokens in a prompt on average, and 100.0 were planned (by "
BEYOND = "ratio 1.200): 4 of 10 requests differ by more than 4 tokens and 2%"
NO_USAGE = "no usage, so no check of the prompt, in "


def planned(num=10, tokens=100, n=1, **fields):
    return tuple(msgspec.structs.replace(r, prompt_tokens=tokens, **fields) for r in prepared(num, 8, n))


def answered(requests, *counted):
    """The records of ``requests``, the first of which have these prompt tokens in their usage."""
    records = requests_of(requests, steps_of(len(requests), 8, 1.0, guided=False))
    return [
        msgspec.structs.replace(record, prompt_tokens=counted[i]) if i < len(counted) else record
        for i, record in enumerate(records)
    ]


@pytest.mark.parametrize(
    ("requests", "counted", "code", "words"),
    [
        *((planned(**SYNTHETIC), [few] * 10, None, ()) for few in (96, 100, 104)),
        (planned(tokens=1000, **SYNTHETIC), [1020] * 10, None, ()),
        (planned(n=8, **SYNTHETIC), [], None, ()),
        *(
            (planned(**fields), [150] * 4, "prompt-tokens-differ", (MEANS, BEYOND))
            for fields in (SYNTHETIC, TRACE, COUNTED, SERVER)
        ),
        (planned(), [150] * 10, "prompt-tokens-unconfirmed", ("(by an estimate; ratio 1.500): 10 of 10 requests",)),
        (planned(**SYNTHETIC), [None, None], "prompt-tokens-unconfirmed", (f"{NO_USAGE}2 requests",)),
        (
            planned(**SYNTHETIC), [None, 200], "prompt-tokens-differ",
            ("1 of 9 requests differ", f"; {NO_USAGE}1 request"),
        ),
    ],
)  # fmt: skip
def test_prompts_of_other_lengths_than_asked_or_counted_are_told_with_both_numbers(requests, counted, code, words):
    records = answered(requests, *counted)
    warnings = prompt_warnings(requests, records)
    assert [warning.code for warning in warnings] == ([code] if code else [])
    assert all(part in warning.message for warning in warnings for part in words)
    for ignored in ({"is_warmup": True}, {"choices": (), "done_ns": None}):
        assert prompt_warnings(requests, [msgspec.structs.replace(each, **ignored) for each in records]) == ()


@given(
    tokens=st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 5000)), min_size=1, max_size=8),
    widened=st.integers(0, 7),
)
def test_equal_counts_never_warn_and_a_wider_gap_never_silences(tokens, widened):
    requests = tuple(
        msgspec.structs.replace(request, prompt_tokens=of_plan, **SYNTHETIC)
        for request, (of_plan, _) in zip(prepared(len(tokens), 8), tokens, strict=True)
    )
    assert prompt_warnings(requests, answered(requests, *(of_plan for of_plan, _ in tokens))) == ()
    counted = [of_server for _, of_server in tokens]
    before = prompt_warnings(requests, answered(requests, *counted))
    i = widened % len(tokens)
    counted[i] += 1000 if counted[i] >= tokens[i][0] else -counted[i]
    assert bool(prompt_warnings(requests, answered(requests, *counted))) >= bool(before)


def test_two_servers_that_count_the_same_prompts_differently_are_named_with_both_numbers(tmp_path):
    results = write_results(tmp_path)
    for run_id in run_ids(results):
        change_requests(results, run_id, prompt_tokens=21)
    text = "the servers count the same prompts differently: 20.0 tokens on average in baseline, 21.0 in guided"
    comparison = compare_arms(results)
    for told in (analyze_directory(results.path), comparison):
        assert any(warning.message.startswith(text) for warning in told.warnings)
    assert comparison.verdict == "invalid", "equal requests are not equal work"
    assert json.dumps(comparison.cells[0].errors).count("prompt_tokens must be equal and is 80 against 84") == 1
