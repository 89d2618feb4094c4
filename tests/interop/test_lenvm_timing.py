"""Step logs of the LenVM fork by revision: what a line holds, where it may break, what averages still tell."""

from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.results.lenvm_results import as_lines, own_steps, sampled_steps

from benchctl.engines.engine import raw_step_log
from benchctl.errors import RecordError
from benchctl.interop.lenvm_log import (
    busy_starts,
    last_lives,
    load_ms,
    num_start_up,
    read_averages,
    read_lenvm_steps,
    read_timing,
    record_from,
    revisions_of,
    spans,
    step_records,
    windows_of,
)
from benchctl.records.files import encode
from benchctl.records.record import RequestRecord

REVISIONS = ["V1", "V3", "V4"]
WHOLE = as_lines([*own_steps(), *sampled_steps([3, 3, 2, 1], revision="V4", is_guided=True, loads=True)])


def lives_of(content: bytes):
    return read_timing(content.splitlines(keepends=True))[0]


def records_of(lives):
    return tuple(record for life in lives for record in life)


def revision_lines(revision: str, *, is_guided: bool) -> bytes:
    return as_lines([*own_steps(), *sampled_steps([3, 2, 1], revision=revision, is_guided=is_guided)])


@pytest.mark.parametrize("revision", REVISIONS)
def test_every_revision_s_lines_are_read_with_all_they_tell(revision):
    record = records_of(lives_of(revision_lines(revision, is_guided=True)))[8]
    assert (record.step, record.batch_size, record.is_greedy, record.is_active) == (9, 3, False, True)
    assert record.sections_ms["lvm_forward"] == 36.0
    assert record.count("lvm_n_reqs_with_guidance") == 3
    if revision == "V4":
        assert record.sections_ms["lvm_build_topk_filter"] == 1.0
        assert record.other["lvm_has_topk_all_path"] is False


@pytest.mark.parametrize(
    ("revision", "is_guided", "fits"),
    [
        ("V1", True, ("V1", "V3")),
        ("V1", False, ("V1", "V3", "V4")),
        ("V3", True, ("V3",)),
        ("V4", True, ("V4",)),
    ],
)
def test_a_log_tells_which_revisions_could_have_written_it(revision, is_guided, fits):
    assert revisions_of(records_of(lives_of(revision_lines(revision, is_guided=is_guided)))) == fits


def test_without_lines_the_server_s_own_log_tells_the_revision():
    assert revisions_of([], ["[sampler_timing] calls=200 guided=0 sampler_forward=0.700ms"]) == ("V2",)
    assert revisions_of([], ["WARNING LENVM_STRIDE=5"]) == ("V3",)
    assert revisions_of([], ["fired up"]) == ("V0", "V2")


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"[1, 2]",
        b'{"step": 1, "batch_size": 1, "is_greedy": true}',
        b'{"step": "1", "t_sampler_total_ms": 1.0, "batch_size": 1, "is_greedy": true}',
        b'{"step": 1, "t_sampler_total_ms": -1.0, "batch_size": 1, "is_greedy": true}',
        b'{"step": 1, "t_sampler_total_ms": 1.0, "batch_size": true, "is_greedy": true}',
        b'{"step": 1, "t_sampler_total_ms": 1.0, "batch_size": 1, "is_greedy": 1}',
        b'{"step": 1, "t_sampler_total_ms": 1.0, "batch_size": 1, "is_greedy": true, "t_sample_ms": "x"}',
        b"\xff\xfe",
    ],
)
def test_a_line_that_holds_no_record_holds_none(line):
    assert record_from(line) is None


def test_keys_that_nobody_knows_are_kept():
    record = record_from(
        b'{"step": 1, "t_sampler_total_ms": 1, "t_new_ms": 2, "lvm_new": [1], "batch_size": 1, "is_greedy": false}'
    )
    assert record.sections_ms == {"sampler_total": 1.0, "new": 2.0}
    assert record.other == {"lvm_new": [1]}


@given(length=st.integers(0, len(WHOLE)))
def test_a_log_cut_anywhere_holds_every_whole_line_before_the_cut(length):
    content = WHOLE[:length]
    lives, damage = read_timing(content.splitlines(keepends=True))
    whole = records_of(lives_of(WHOLE))
    is_whole_without_end = length > 0 and WHOLE[length : length + 1] == b"\n"
    assert records_of(lives) == whole[: content.count(b"\n") + is_whole_without_end]
    assert damage.is_cut is (length > 0 and not content.endswith(b"\n") and not is_whole_without_end)
    assert damage.num_lines == 0


@given(cut=st.integers(1, 60), lengths=st.lists(st.integers(1, 5), min_size=2, max_size=4))
def test_servers_that_wrote_one_after_another_are_told_apart_whatever_the_first_left(cut, lengths):
    texts = [as_lines(own_steps(length)) for length in lengths]
    lives = lives_of(texts[0][:-cut] + b"".join(texts[1:]))
    assert [len(life) for life in lives][-(len(lengths) - 1) :] == lengths[1:]
    assert len(lives[0] if len(lives) == len(lengths) else ()) <= lengths[0]


def test_the_lives_that_it_took_to_make_the_tokens_count():
    lives = lives_of(b"".join(as_lines(sampled_steps([4] * length, first=1)) for length in (9, 3, 5)))
    assert [len(life) for life in last_lives(lives, 20)] == [5]
    assert [len(life) for life in last_lives(lives, 21)] == [3, 5]
    assert [len(life) for life in last_lives(lives, 10_000)] == [9, 3, 5]
    assert [len(life) for life in last_lives(lives, None)] == [9, 3, 5]


def test_the_server_s_own_first_request_is_set_apart_also_in_a_greedy_run():
    (sampled,) = lives_of(as_lines([*own_steps(), *sampled_steps([2])]))
    assert num_start_up(sampled, is_greedy_run=False) == 8
    (greedy,) = lives_of(as_lines(own_steps(30)))
    assert num_start_up(greedy, is_greedy_run=True) == 8
    (none,) = lives_of(as_lines(sampled_steps([2], first=1)))
    assert num_start_up(none, is_greedy_run=False) == 0


def test_loading_is_what_no_section_names_of_the_first_guided_call():
    (life,) = lives_of(as_lines([*own_steps(), *sampled_steps([2, 2], is_guided=True, loads=True)]))
    assert load_ms(life) == (8, 2500.0)
    steps = list(step_records(life, [(0, 1)] * len(life)))
    assert ["value_model_load" in step.sections_ns for step in steps] == [False] * 8 + [True, False]
    (without,) = lives_of(as_lines([*own_steps(), *sampled_steps([2, 2], is_guided=True)]))
    assert load_ms(without) is None


def test_steps_never_claim_more_than_their_line_tells():
    (life,) = lives_of(as_lines(sampled_steps([2], is_guided=True)))
    (step,) = step_records(life, [(5, 60_000_000)])
    assert (step.clock, step.candidates, step.output_tokens, step.num_prefill_tokens, step.fused) == (
        "host", None, None, None, None,
    )  # fmt: skip
    (idle,) = step_records(lives_of(as_lines(sampled_steps([2])))[0], [(5, 60_000_000)])
    assert (idle.guided_rows, idle.candidates) == (0, 0)


def test_windows_between_averages_follow_by_differences_with_the_error_that_rounding_makes():
    lines = read_averages(
        [
            "INFO [sampler_timing] calls=200 guided=10 sampler_forward=0.700ms softmax=0.100ms/14.3%",
            "nothing",
            "INFO [sampler_timing] calls=400 guided=210 sampler_forward=6.700ms softmax=0.100ms/1.5%",
            "INFO [lvm_timing] calls=200 skipped=0 apply_total=12.850ms",
            "INFO [sampler_timing] cal",
        ]
    )
    assert [line.calls for line in lines] == [200, 400, 200]
    assert lines[1].means_ms == {"sampler_forward": 6.7, "softmax": 0.1}
    first, second, lvm = windows_of(lines)
    assert (first.first_call, first.last_call, first.mean_ms) == (1, 200, pytest.approx(0.7))
    assert (second.first_call, second.last_call) == (201, 400)
    assert second.mean_ms == pytest.approx(12.7)
    assert second.rounding_ms == pytest.approx(0.0005 * 600 / 200)
    assert (lvm.source, lvm.mean_ms) == ("lvm_timing", pytest.approx(12.85))


@given(means=st.lists(st.floats(0.01, 100), min_size=1, max_size=8), every=st.integers(1, 500))
def test_windows_hold_the_true_mean_within_their_rounding(means, every):
    lines, total = [], 0.0
    for i, mean in enumerate(means, start=1):
        total += mean * every
        lines.append(f"[sampler_timing] calls={i * every} guided=0 sampler_forward={total / (i * every):.3f}ms")
    windows = list(windows_of(read_averages(lines)))
    assert len(windows) == len(means)
    for window, mean in zip(windows, means, strict=True):
        assert abs(window.mean_ms - mean) <= window.rounding_ms * (1 + 1e-6) + 1e-9


def test_a_server_that_started_again_begins_new_windows():
    lines = ["[lvm_timing] calls=400 apply_total=5.000ms", "[lvm_timing] calls=200 apply_total=9.000ms"]
    assert [(w.first_call, w.last_call, w.mean_ms) for w in windows_of(read_averages(lines))] == [
        (1, 400, pytest.approx(5.0)), (1, 200, pytest.approx(9.0)),
    ]  # fmt: skip


def request(sent_ms: int, done_ms: int) -> RequestRecord:
    return RequestRecord(
        request_id="r", index=0, scheduled_ns=0, sent_ns=sent_ms * 1_000_000, done_ns=done_ms * 1_000_000
    )


def test_busy_times_begin_where_nothing_was_in_flight_before():
    requests = [request(10, 30), request(20, 50), request(50, 60), request(80, 90), request(85, 86)]
    assert busy_starts(requests) == [10_000_000, 80_000_000]


def stamped(*ends_ms: int):
    (life,) = lives_of(as_lines(sampled_steps([1] * len(ends_ms))))
    return [(end * 1_000_000, record) for end, record in zip(ends_ms, life, strict=True)]


def test_a_step_starts_where_the_one_before_ended_or_when_the_first_request_was_sent():
    steps_ns = list(spans(stamped(5, 20, 30, 100, 110), [10_000_000, 80_000_000]))
    assert [(start / 1e6, duration / 1e6) for start, duration in steps_ns] == [
        (4.75, 0.25), (10, 10), (20, 10), (80, 20), (100, 10),
    ]  # fmt: skip


@given(gaps=st.lists(st.integers(0, 10_000_000), min_size=1, max_size=30), starts=st.lists(st.integers(0, 10**8)))
def test_steps_never_overlap_and_hold_their_sampler(gaps, starts):
    ends, now = [], 1_000_000
    for gap in gaps:
        now += gap + 250_000
        ends.append(now)
    (life,) = lives_of(as_lines(sampled_steps([1] * len(ends))))
    steps_ns = list(spans(list(zip(ends, life, strict=True)), sorted(starts)))
    assert all(duration >= 250_000 for _, duration in steps_ns)
    assert all(start + duration <= later for (start, duration), (later, _) in pairwise(steps_ns))
    assert [start + duration for start, duration in steps_ns] == ends


@given(lates=st.lists(st.integers(0, 3_000_000), min_size=1, max_size=30))
def test_a_line_that_comes_late_takes_nothing_from_the_next_step(lates):
    true_ends = [1_000_000 * (i + 1) for i in range(len(lates))]
    seen_ends = list(accumulate((end + late for end, late in zip(true_ends, lates, strict=True)), max))
    (life,) = lives_of(as_lines(sampled_steps([1] * len(seen_ends))))
    steps_ns = list(spans(list(zip(seen_ends, life, strict=True)), [0]))
    assert all(duration >= 250_000 for _, duration in steps_ns)
    assert all(start + duration <= later for (start, duration), (later, _) in pairwise(steps_ns))
    ends = [start + duration for start, duration in steps_ns]
    assert all(true - 1 <= end <= late for true, end, late in zip(true_ends, ends, seen_ends, strict=True))


def test_a_stamped_log_is_read_up_to_its_first_damage(tmp_path: Path):
    lines = as_lines(sampled_steps([2, 2, 1])).splitlines()
    stamps = b"".join(
        encode({"t_ns": 10**9 * (i + 1), "line": line.decode()}) + b"\n" for i, line in enumerate(lines)
    )
    raw_step_log(tmp_path).write_bytes(stamps + b'{"t_ns": 4000000000, "line": "nothing"}\n')
    steps = []
    with pytest.raises(RecordError, match=r"steps\.raw\.jsonl:4: this line is not a step: 'nothing'"):
        steps.extend(read_lenvm_steps(raw_step_log(tmp_path), tmp_path / "requests.jsonl"))
    raw_step_log(tmp_path).write_bytes(stamps)
    steps = list(read_lenvm_steps(raw_step_log(tmp_path), tmp_path / "requests.jsonl"))
    assert [(step.start_ns, step.dur_ns) for step in steps] == [
        (999_750_000, 250_000), (10**9, 10**9), (2 * 10**9, 10**9),
    ]  # fmt: skip
    assert [step.num_seqs for step in steps] == [2, 2, 1]
