"""Loads that were not as planned: slots of a closed loop that stand empty, prompts of other lengths, and answers
that end early though theirs was forced; loads that were are left in peace.
"""

import random
from dataclasses import replace
from itertools import accumulate, pairwise
from statistics import median

import msgspec
import pytest
from hypothesis import given, strategies as st
from support.closed_loops import T0_NS, closed, closed_loop
from support.results.builders import change_requests, prepared, requests_of, run_ids, steps_of, write_results
from support.results.comparing import compare_arms
from test_client_guard import OPEN, run_of, sent

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.metrics.chunks import chunks_of as columns_of
from benchctl.analysis.metrics.client import client_metrics, offered_load, slot_occupancy
from benchctl.analysis.metrics.run import load_figures
from benchctl.analysis.validity.answers import answer_end_warnings, prompt_warnings
from benchctl.analysis.validity.client import client_suspect_warnings
from benchctl.profile.arrival import Arrival
from benchctl.records.record import ChoiceRecord, RequestError, RequestRecord
from benchctl.report.load_tables import totals_table
from benchctl.units import NS_PER_MS

OF_SLOTS = (
    "offered_load_frac",
    "slot_idle_frac",
    "p50_refill_gap_ms",
    "p99_refill_gap_ms",
    "p99_refill_connect_ms",
)


def occupancy(records, num_slots):
    return slot_occupancy(records, closed(num_slots))


LOADS = st.integers(1, 6).flatmap(
    lambda num_slots: st.tuples(
        st.just(num_slots),
        st.lists(st.integers(1, 400), min_size=num_slots + 1, max_size=30),
        st.lists(st.integers(0, 100), min_size=30, max_size=30),
    )
)


def test_a_planted_delay_is_measured_to_the_nanosecond_and_opening_a_connection_is_told_apart():
    full = occupancy(closed_loop([100.0] * 40, 4), 4)
    assert (full.idle_frac, full.mean_open, set(full.gaps_ns)) == (0.0, 4.0, {0})
    planted = occupancy(closed_loop([95.0] * 40, 4, 5.0, connecting_ms=4.0), 4)
    assert (planted.idle_ns, planted.slot_time_ns) == (36 * 5 * NS_PER_MS, 4 * 9 * 100 * NS_PER_MS)
    assert (planted.idle_frac, median(planted.gaps_ns)) == (pytest.approx(0.05), 5 * NS_PER_MS)
    assert planted.connecting_ns == (4 * NS_PER_MS,) * 36


ERROR = RequestError(kind="connect-refused", message="nobody there")


@pytest.mark.parametrize(
    ("records", "num_slots", "frac"),
    [
        pytest.param(
            closed_loop([90.0] * 40, 4, 10.0, read_late_ms=9.5), 4, 0.1, id="ends by the kernel, not by the reads"
        ),
        pytest.param(closed_loop([100.0] * 4 + [5000.0, 10.0], 4), 4, 0.0, id="the tail of a load"),
        pytest.param(closed_loop([100.0] * 8 + [2000.0], 8, 50.0), 8, 50 / 850, id="a tail behind a delay"),
        pytest.param(
            [
                msgspec.structs.replace(r, sent_ns=None, error=ERROR) if r.index % 5 == 0 else r
                for r in closed_loop([100.0] * 20, 4)
            ], 4, 0.0, id="failed requests hold their slots",
        ),
        pytest.param(
            [
                msgspec.structs.replace(r, scheduled_ns=r.scheduled_ns - 90 * NS_PER_MS) if r.index < 4 else r
                for r in closed_loop([100.0] * 40, 4)
            ], 4, 90 / 990, id="a load that began late",
        ),
    ],
)  # fmt: skip
def test_idle_time_is_what_no_request_fills_while_some_wait(records, num_slots, frac):
    assert occupancy(records, num_slots).idle_frac == pytest.approx(frac)


def test_slots_that_no_request_was_meant_for_are_idle_while_others_still_have_some():
    """One of two processes has sent all of its own: half of the slots stand empty for the second half."""
    both = occupancy([*closed_loop([50.0] * 20, 2), *closed_loop([100.0] * 20, 2)], 4)
    assert both.slot_time_ns == pytest.approx(4 * 900 * NS_PER_MS, rel=0.05)
    assert both.idle_frac == pytest.approx(2 * 400 / (4 * 900), rel=0.05)


@pytest.mark.parametrize(
    "arrival",
    [
        OPEN,
        Arrival(kind="burst"),
        Arrival(kind="closed-loop", max_concurrency=4, launch_rate_limit=50.0),
        Arrival(kind="constant", request_rate=9.0, max_concurrency=4),
    ],
)
def test_loads_without_slots_to_fill_have_no_occupancy(arrival):
    assert slot_occupancy(closed_loop([100.0] * 40, 4), arrival) is None


def test_of_records_that_do_not_say_when_slots_were_free_nothing_is_held():
    old = [msgspec.structs.replace(record, slot_free_ns=None) for record in closed_loop([100.0] * 40, 4, 50.0)]
    assert occupancy(old, 4) is occupancy([], 4) is None
    assert {client_metrics(columns_of(old), (), closed(4))[name] for name in OF_SLOTS} == {None}


@given(load=LOADS, shift_ns=st.integers(-T0_NS, 10**12), late_ms=st.integers(0, 100), more_ms=st.integers(1, 50))
def test_idle_time_is_a_part_of_slot_time_whatever_the_clock_s_zero_and_however_late_the_reads(
    load, shift_ns, late_ms, more_ms
):
    num_slots, lasts_ms, gaps_ms = load
    records, shifted, late = (
        closed_loop(lasts_ms, num_slots, gaps_ms.__getitem__, **changes)
        for changes in ({}, {"t0_ns": T0_NS + shift_ns}, {"read_late_ms": late_ms})
    )
    slots = occupancy(records, num_slots)
    end_ns = max(record.sent_ns for record in records)
    busy_ns = sum(min(record.done_ns, end_ns) - record.sent_ns for record in records)
    assert slots.idle_ns == sum(slots.gaps_ns) == slots.slot_time_ns - busy_ns
    assert 0 <= slots.idle_frac <= 1
    assert occupancy(shifted, num_slots) == slots
    assert occupancy(late, num_slots).idle_ns == slots.idle_ns
    # Equal lengths, so that the same slots are filled by the same requests.
    less, more = (
        occupancy(closed_loop(lasts_ms[:1] * len(lasts_ms), num_slots, gaps_ms[0] + ms), num_slots).idle_frac
        for ms in (0, more_ms)
    )
    assert less < more


def doubts(records, arrival):
    return {doubt.code: doubt.message for doubt in client_suspect_warnings(run_of(records), arrival)}


def test_slots_that_stand_empty_for_more_than_a_hundredth_make_a_run_suspect():
    message = doubts(closed_loop([97.0] * 400, 4, 3.0, connecting_ms=2.7), closed(4))["slots-idle"]
    assert message.startswith(
        "slots of the closed loop were empty for 3.00% of their time although requests waited (more than 1%): the "
        "server met 3.88 of 4 requests at once. From the last byte of an answer to the next request: 3 ms "
        "(p50), 3 ms (p99) and 3 ms (max); 396 of 396 had to open a connection, which took 90% of that time"
    )
    assert "The server closes connections" in message


CAPPED = Arrival(kind="constant", request_rate=100.0, max_concurrency=4)
LATE = closed_loop([20.0] * 400, 4, 20.0)
OLD = [msgspec.structs.replace(r, slot_free_ns=None, connected_ns=(r.slot_free_ns or T0_NS) + 1) for r in LATE]


def capped(lag_ms):
    """Requests due every 10 ms that have to wait for one of four slots, and leave so long after they have it."""
    return [
        msgspec.structs.replace(record, scheduled_ns=T0_NS + 10 * record.index * NS_PER_MS)
        for record in closed_loop([60.0] * 200, 4, lag_ms)[4:]
    ]


@pytest.mark.parametrize(
    ("records", "arrival", "codes"),
    [
        pytest.param(closed_loop([99.1] * 400, 4, 0.9), closed(4), [], id="empty for less"),
        pytest.param(
            closed_loop([100.0] * 40, 4, lambda i: 60.0 if i in {20, 21, 22, 23} else 0.0), closed(4),
            ["slots-idle"], id="one long delay",
        ),
        pytest.param(closed_loop([90.0] * 40, 5, 10.0), closed(5), [], id="a load of less than a second"),
        pytest.param(closed_loop([90.0] * 50, 5, 20.0), closed(5), ["slots-idle"], id="a longer one"),
        pytest.param(LATE, closed(4), ["slots-idle"], id="known slots"),
        pytest.param(OLD, closed(4), ["sends-delayed"], id="unknown slots"),
        pytest.param(capped(0.5), CAPPED, [], id="waiting for a slot under a cap"),
        pytest.param(capped(9.0), CAPPED, ["sends-delayed"], id="late when the slot is free"),
        pytest.param(
            [sent(i, 10 * i, 6.0, connect_ms=5.9, lasts_ms=1.0) for i in range(200)], CAPPED, ["sends-delayed"],
            id="a cap that was never met, and late connections",
        ),
    ],
)  # fmt: skip
def test_a_load_is_judged_by_its_slots_or_where_these_are_not_known_by_its_sends(records, arrival, codes):
    assert list(doubts(records, arrival)) == codes


def test_a_load_says_how_its_client_did_and_how_its_slots_were_filled():
    records = closed_loop([90.0] * 400, 4, 10.0, connecting_ms=8.0)
    figures = load_figures(run_of(records), closed(4))
    assert [figures.metrics[name] for name in OF_SLOTS] == [pytest.approx(0.9), pytest.approx(0.1), 10, 10, 8]
    for cores, lag_ms, words in (
        (None, None, "not sampled"),
        (None, 3.0, "its loop at most 3.000 ms late"),
        (0.1, None, "0.1000 cores"),
    ):
        sampled = figures.metrics | {"client_cpu_cores": cores, "max_loop_lag_ms": lag_ms}
        rows = dict(totals_table(replace(figures, metrics=sampled)).texts())
        assert rows["client"].startswith(words)
    assert rows["load"] == "3.600 of 4.000 requests at once"
    assert rows["slots"] == (
        "empty for 10.00% of their time; filled again after 10.00 ms (p50), 10.00 ms (p99); a connection "
        "took 8.000 ms of it (p99)"
    )
    slower = offered_load([sent(i, 10 * i, i) for i in range(300)], OPEN, None)
    assert (slower.planned, slower.met, slower.unit) == (pytest.approx(100), pytest.approx(1000 / 11), "requests/s")


MS = 1_000_000
ASKED = 128
WORDS = (" a", " the", " of", " measure", "ment", " is", ".", " tokens", " 17", "\n")


def record(index, chunks, *, finish="length", tail_ns=4 * MS, tokens=ASKED, n=1, **fields):
    """A request whose chunks are (gap before it in ns, text, tokens that the server counts or None)."""
    gaps_ns, texts, counts = zip(*chunks, strict=True)
    times = tuple(accumulate(gaps_ns))
    choices = tuple(
        ChoiceRecord(
            index=i,
            chunk_ns=times,
            chunk_tokens=None if None in counts else counts,
            chunk_chars=tuple(map(len, texts)),
            finish_reason=finish,
            text="".join(texts),
        )
        for i in range(n)
    )
    values = {"choices": choices, "completion_tokens": tokens, "done_ns": times[-1] + tail_ns} | fields
    return RequestRecord(request_id=f"r{index}", index=index, scheduled_ns=0, sent_ns=0, **values)


def chunks_of(rng, sizes, *, are_counted=False):
    """Chunks of so many words, 5 ms apart."""
    return [(5 * MS, "".join(rng.choices(WORDS, k=size)), size if are_counted else None) for size in sizes]


def split(rng, total, most):
    """Sizes of chunks with 1 to ``most`` tokens each, ``total`` together."""
    ends = [0, *accumulate(rng.randint(1, most) for _ in range(total))]
    return [min(end, total) - start for start, end in pairwise(ends) if start < total]


def answer_codes(records, *, is_forced=True, may_stop=False):
    return [warning.code for warning in answer_end_warnings(records, is_forced=is_forced, may_stop=may_stop)]


@pytest.mark.parametrize("seed", range(3))
def test_honest_answers_are_believed(seed):
    rng = random.Random(seed)
    others = [record(99, chunks_of(rng, [1] * ASKED)) for _ in range(5)]
    loads = {
        "a token per chunk": [record(i, chunks_of(rng, [1] * ASKED)) for i in range(20)],
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
            record(i, [(0, rng.choice(WORDS), 1) for _ in range(ASKED)], tail_ns=0) for i in range(20)
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
    assert {name: answer_codes(records) for name, records in loads.items()} == {name: [] for name in loads}


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
def test_answers_with_the_text_of_fewer_tokens_than_usage_counts_are_told(share):
    for seed in range(5):
        rng = random.Random(seed)
        early = [record(i, chunks_of(rng, [1] * round(share * ASKED))) for i in range(12)]
        assert answer_codes(early + [record(90 + i, chunks_of(rng, [1] * ASKED)) for i in range(4)]) == [
            "output-ended-early"
        ], seed


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("are_counted", [False, True])
def test_an_answer_that_ended_by_itself_before_its_tokens_had_come_is_told(n, are_counted):
    chunks = chunks_of(random.Random(1), [1] * 59 + [69 if are_counted else 1], are_counted=are_counted)
    records = [record(1, chunks, finish="stop", n=n, tokens=ASKED * n)]
    told = [answer_codes(records, **options) for options in ({}, {"is_forced": False}, {"may_stop": True})]
    assert told == [["output-ended-early"], [], []]


def test_tokens_that_a_count_adds_without_time_or_text_and_few_chunks_without_a_whole_answer_are_told():
    rng = random.Random(1)
    for gap_ns in (MS, 0):
        chunks = [*chunks_of(rng, [1] * 60, are_counted=True), (gap_ns, "", 68)]
        assert answer_codes([record(1, chunks)]) == ["output-ended-early"]
    assert answer_codes([record(i, chunks_of(rng, split(rng, ASKED, 4))) for i in range(9)]) == [
        "output-tokens-unseen"
    ]


def test_an_unknown_finish_reason_is_named_without_its_control_characters():
    finishes = ("\x1b[31msudden", "sudden\ndeath")
    records = [record(i, [(MS, "a", None)], finish=finish) for i, finish in enumerate(finishes)]
    (warning,) = answer_end_warnings(records, is_forced=False)
    assert (warning.code, {"\x1b", "\n"} & set(warning.message)) == ("finish-reason-unknown", set())


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
    first = [msgspec.structs.replace(each, prompt_tokens=n) for each, n in zip(records, counted, strict=False)]
    return [*first, *records[len(first) :]]


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
    comparison = compare_arms(results)
    text = "the servers count the same prompts differently: 20.0 tokens on average in baseline, 21.0 in guided"
    for told in (analyze_directory(results.path), comparison):
        assert any(warning.message.startswith(text) for warning in told.warnings)
    assert comparison.verdict == "invalid", "equal requests are not equal work"
