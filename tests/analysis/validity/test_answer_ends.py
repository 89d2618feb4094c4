"""Answers that end early although their length was forced, told from honest ones that look alike."""

import random

import pytest

from benchctl.analysis.validity.answers import answer_end_warnings
from benchctl.records.record import ChoiceRecord, RequestError, RequestRecord

MS = 1_000_000
ASKED = 128
WORDS = (" a", " the", " of", " measure", "ment", " is", ".", " tokens", " 17", "\n")


def record(
    index: int,
    chunks: list[tuple[int, str, int | None]],
    *,
    finish: str = "length",
    tail_ns: int = 4 * MS,
    tokens: int = ASKED,
    n: int = 1,
) -> RequestRecord:
    """A request whose chunks are (gap before it in ns, text, tokens that the server counts or None)."""
    times, now = [], 0
    for gap_ns, _, _ in chunks:
        now += gap_ns
        times.append(now)
    counts = tuple(count for _, _, count in chunks if count is not None)
    choices = tuple(
        ChoiceRecord(
            index=i,
            chunk_ns=tuple(times),
            chunk_tokens=counts if len(counts) == len(chunks) else None,
            chunk_chars=tuple(len(text) for _, text, _ in chunks),
            finish_reason=finish,
            text="".join(text for _, text, _ in chunks),
        )
        for i in range(n)
    )
    return RequestRecord(
        request_id=f"r{index}",
        index=index,
        scheduled_ns=0,
        sent_ns=0,
        done_ns=now + tail_ns,
        choices=choices,
        completion_tokens=tokens,
    )


def words(rng: random.Random, count: int) -> str:
    return "".join(rng.choice(WORDS) for _ in range(count))


def chunks_of(rng: random.Random, sizes: list[int], *, gap_ns: int = 5 * MS, are_counted: bool = False):
    return [(gap_ns, words(rng, size), size if are_counted else None) for size in sizes]


def split(rng: random.Random, total: int, most: int) -> list[int]:
    """Sizes of chunks with 1 to ``most`` tokens each, ``total`` together."""
    sizes: list[int] = []
    while sum(sizes) < total:
        sizes.append(min(rng.randint(1, most), total - sum(sizes)))
    return sizes


def codes(records: list[RequestRecord], *, is_forced: bool = True, may_stop: bool = False) -> list[str]:
    warnings = answer_end_warnings(records, is_forced=is_forced, may_stop=may_stop)
    return [warning.code for warning in warnings]


def whole(rng: random.Random, index: int) -> RequestRecord:
    return record(index, chunks_of(rng, [1] * ASKED))


@pytest.mark.parametrize("seed", range(10))
def test_honest_answers_are_believed(seed: int) -> None:
    rng = random.Random(seed)
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
        + [whole(rng, 99) for _ in range(5)],
        "an end of sequence repeated, which a count shows": [
            record(i, [*chunks_of(rng, [1] * 60, are_counted=True), (5 * MS * 68, "", 68)]) for i in range(20)
        ],
        "pauses without text within the answer": [
            record(i, [*chunks_of(rng, [1] * 30), (5 * MS * 69, "x", None), *chunks_of(rng, [1] * 29)])
            for i in range(20)
        ]
        + [whole(rng, 99) for _ in range(5)],
        "one token asked for": [record(i, chunks_of(rng, [1]), tokens=1) for i in range(20)],
        "calls of tools": [record(i, [(MS, "", None)] * 20, finish="tool_calls") for i in range(20)],
        "ended by itself with all its tokens": [
            record(i, chunks_of(rng, [1] * ASKED), finish="stop") for i in range(20)
        ],
    }
    told = {name: codes(records) for name, records in loads.items()}
    assert told == {name: [] for name in loads}


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
def test_answers_with_the_text_of_fewer_tokens_than_usage_counts_are_found(seed: int, share: float) -> None:
    rng = random.Random(seed)
    count = round(share * ASKED)
    records = [record(i, chunks_of(rng, [1] * count)) for i in range(12)] + [whole(rng, 90 + i) for i in range(4)]
    assert codes(records) == ["output-ended-early"]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("are_counted", [False, True])
def test_an_answer_that_ended_by_itself_before_its_tokens_had_come_is_found(n: int, are_counted: bool) -> None:
    rng = random.Random(1)
    sizes = [1] * 59 + ([69] if are_counted else [1])
    records = [record(1, chunks_of(rng, sizes, are_counted=are_counted), finish="stop", n=n, tokens=ASKED * n)]
    assert codes(records) == ["output-ended-early"]
    assert codes(records, is_forced=False) == []
    assert codes(records, may_stop=True) == []


def test_tokens_that_a_count_adds_without_time_or_text_are_found() -> None:
    rng = random.Random(1)
    chunks = [*chunks_of(rng, [1] * 60, are_counted=True), (MS, "", 68)]
    assert codes([record(1, chunks)]) == ["output-ended-early"]
    at_once = [*chunks_of(rng, [1] * 60, are_counted=True), (0, "", 68)]
    assert codes([record(1, at_once)]) == ["output-ended-early"]


def test_few_chunks_without_any_answer_to_hold_them_against_are_noted() -> None:
    rng = random.Random(1)
    assert codes([record(i, chunks_of(rng, split(rng, ASKED, 4))) for i in range(9)]) == ["output-tokens-unseen"]


def test_an_unknown_finish_reason_is_named_without_its_control_characters() -> None:
    finishes = ("\x1b[31msudden", "sudden\ndeath")
    records = [record(i, [(MS, "a", None)], finish=finish) for i, finish in enumerate(finishes)]
    (warning,) = answer_end_warnings(records, is_forced=False)
    assert warning.code == "finish-reason-unknown"
    assert "\x1b" not in warning.message
    assert "\n" not in warning.message
    assert "sudden" in warning.message


def test_failed_and_warm_up_requests_say_nothing() -> None:
    rng = random.Random(1)
    early = record(1, chunks_of(rng, [1] * 60), finish="stop")
    failed = RequestRecord(
        request_id="f",
        index=2,
        scheduled_ns=0,
        choices=early.choices,
        completion_tokens=ASKED,
        done_ns=1,
        error=RequestError(kind="reset", message="x"),
    )
    assert codes([failed]) == []
