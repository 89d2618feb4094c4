"""Step logs of the LenVM fork by revision: what a line holds, where it may break, what averages still tell."""

from itertools import accumulate, pairwise
from statistics import fmean

import pytest
from hypothesis import given, settings, strategies as st
from support.results.lenvm_results import as_lines, own_steps, sampled_steps

from benchctl.engines.engine import raw_step_log
from benchctl.errors import RecordError
from benchctl.interop.lenvm_log import (
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

WHOLE = as_lines([*own_steps(), *sampled_steps([3, 3, 2, 1], revision="V4", is_guided=True, loads=True)])
MS = 1_000_000


def lives_of(content):
    return read_timing(content.splitlines(keepends=True))[0]


def records_of(lives):
    return tuple(record for life in lives for record in life)


def life_of(*steps):
    (life,) = lives_of(as_lines(steps))
    return life


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
    steps = sampled_steps([3, 2, 1], revision=revision, is_guided=is_guided)
    assert revisions_of(life_of(*own_steps(), *steps)) == fits


@pytest.mark.parametrize(
    ("line", "fits"),
    [
        ("[sampler_timing] calls=200 guided=0 sampler_forward=0.700ms", ("V2",)),
        ("WARNING LENVM_STRIDE=5", ("V3",)),
        ("fired up", ("V0", "V2")),
    ],
)
def test_without_lines_the_server_s_own_log_tells_the_revision(line, fits):
    assert revisions_of([], [line]) == fits


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


@settings(max_examples=50)
@given(length=st.integers(0, len(WHOLE)))
def test_a_log_cut_anywhere_holds_every_whole_line_before_the_cut(length):
    content = WHOLE[:length]
    lives, damage = read_timing(content.splitlines(keepends=True))
    is_whole_without_end = length > 0 and WHOLE[length : length + 1] == b"\n"
    num_lines = content.count(b"\n") + is_whole_without_end
    assert records_of(lives) == records_of(lives_of(WHOLE))[:num_lines]
    assert damage.is_cut is (length > 0 and not content.endswith(b"\n") and not is_whole_without_end)
    assert damage.num_lines == 0


@settings(max_examples=50)
@given(cut=st.integers(1, 60), lengths=st.lists(st.integers(1, 5), min_size=2, max_size=4))
def test_servers_that_wrote_one_after_another_are_told_apart_whatever_the_first_left(cut, lengths):
    texts = [as_lines(own_steps(length)) for length in lengths]
    lives = lives_of(texts[0][:-cut] + b"".join(texts[1:]))
    assert [len(life) for life in lives][-(len(lengths) - 1) :] == lengths[1:]
    assert len(lives[0] if len(lives) == len(lengths) else ()) <= lengths[0]


@pytest.mark.parametrize(
    ("num_tokens", "lengths"), [(20, [5]), (21, [3, 5]), (10_000, [9, 3, 5]), (None, [9, 3, 5])]
)
def test_the_lives_that_it_took_to_make_the_tokens_count(num_tokens, lengths):
    lives = lives_of(b"".join(as_lines(sampled_steps([4] * length, first=1)) for length in (9, 3, 5)))
    assert [len(life) for life in last_lives(lives, num_tokens)] == lengths


def test_the_server_s_own_first_request_is_set_apart_also_in_a_greedy_run():
    assert num_start_up(life_of(*own_steps(), *sampled_steps([2])), is_greedy_run=False) == 8
    assert num_start_up(life_of(*own_steps(30)), is_greedy_run=True) == 8
    assert num_start_up(life_of(*sampled_steps([2], first=1)), is_greedy_run=False) == 0


def test_loading_is_what_no_section_names_of_the_first_guided_call():
    life = life_of(*own_steps(), *sampled_steps([2, 2], is_guided=True, loads=True))
    assert load_ms(life) == (8, 2500.0)
    steps = step_records(life, [(0, 1)] * len(life))
    assert ["value_model_load" in step.sections_ns for step in steps] == [False] * 8 + [True, False]
    assert load_ms(life_of(*own_steps(), *sampled_steps([2, 2], is_guided=True))) is None


def test_windows_between_averages_follow_by_differences_and_a_server_that_started_again_begins_new_ones():
    lines = read_averages(
        [
            "INFO [sampler_timing] calls=200 guided=10 sampler_forward=0.700ms softmax=0.100ms/14.3%",
            "nothing",
            "INFO [sampler_timing] calls=400 guided=210 sampler_forward=6.700ms softmax=0.100ms/1.5%",
            "INFO [lvm_timing] calls=400 skipped=0 apply_total=5.000ms",
            "INFO [lvm_timing] calls=200 skipped=0 apply_total=12.850ms",
            "INFO [sampler_timing] cal",
        ]
    )
    assert [line.calls for line in lines] == [200, 400, 400, 200]
    assert lines[1].means_ms == {"sampler_forward": 6.7, "softmax": 0.1}
    windows = list(windows_of(lines))
    assert [(window.first_call, window.last_call) for window in windows] == [
        (1, 200),
        (201, 400),
        (1, 400),
        (1, 200),
    ]
    assert [window.mean_ms for window in windows] == pytest.approx([0.7, 12.7, 5.0, 12.85])
    assert windows[1].rounding_ms == pytest.approx(0.0005 * 600 / 200)
    assert windows[2].source == "lvm_timing"


@settings(max_examples=50)
@given(means=st.lists(st.floats(0.01, 100), min_size=1, max_size=8), every=st.integers(1, 500))
def test_windows_hold_the_true_mean_within_their_rounding(means, every):
    averages = [fmean(means[: i + 1]) for i in range(len(means))]
    text = "[sampler_timing] calls={} guided=0 sampler_forward={:.3f}ms"
    lines = [text.format((i + 1) * every, average) for i, average in enumerate(averages)]
    for window, mean in zip(windows_of(read_averages(lines)), means, strict=True):
        assert abs(window.mean_ms - mean) <= window.rounding_ms * (1 + 1e-6) + 1e-9


def spans_of(ends_ns, starts_ns):
    """Starts and durations of steps of one row."""
    life = life_of(*sampled_steps([1] * len(ends_ns)))
    return list(spans(list(zip(ends_ns, life, strict=True)), starts_ns))


def assert_apart(steps_ns):
    """No step overlaps the next, and each holds its sampler."""
    assert all(duration >= 250_000 for _, duration in steps_ns)
    assert all(start + duration <= later for (start, duration), (later, _) in pairwise(steps_ns))


def test_a_step_starts_where_the_one_before_ended_or_when_the_first_request_was_sent():
    steps_ns = spans_of([end * MS for end in (5, 20, 30, 100, 110)], [10 * MS, 80 * MS])
    steps_ms = [(start / MS, duration / MS) for start, duration in steps_ns]
    assert steps_ms == [(4.75, 0.25), (10, 10), (20, 10), (80, 20), (100, 10)]


@settings(max_examples=50)
@given(gaps=st.lists(st.integers(0, 10 * MS), min_size=1, max_size=30), starts=st.lists(st.integers(0, 10**8)))
def test_steps_never_overlap_and_hold_their_sampler(gaps, starts):
    ends = [MS + each for each in accumulate(gap + 250_000 for gap in gaps)]
    steps_ns = spans_of(ends, sorted(starts))
    assert_apart(steps_ns)
    assert [start + duration for start, duration in steps_ns] == ends


@settings(max_examples=50)
@given(lates=st.lists(st.integers(0, 3 * MS), min_size=1, max_size=30))
def test_a_line_that_comes_late_takes_nothing_from_the_next_step(lates):
    true_ends = [MS * (i + 1) for i in range(len(lates))]
    seen_ends = list(accumulate((end + late for end, late in zip(true_ends, lates, strict=True)), max))
    steps_ns = spans_of(seen_ends, [0])
    assert_apart(steps_ns)
    ends = [start + duration for start, duration in steps_ns]
    assert all(true - 1 <= end <= late for true, end, late in zip(true_ends, ends, seen_ends, strict=True))


def test_a_stamped_log_is_read_up_to_its_first_damage(tmp_path):
    log, requests = raw_step_log(tmp_path), tmp_path / "requests.jsonl"
    lines = as_lines(sampled_steps([2, 2, 1])).splitlines()
    stamps = [encode({"t_ns": 10**9 * (i + 1), "line": line.decode()}) for i, line in enumerate(lines)]
    log.write_bytes(b"\n".join([*stamps, b'{"t_ns": 4000000000, "line": "nothing"}\n']))
    with pytest.raises(RecordError, match=r"steps\.raw\.jsonl:4: this line is not a step: 'nothing'"):
        list(read_lenvm_steps(log, requests))
    log.write_bytes(b"\n".join([*stamps, b""]))
    steps = [(step.start_ns, step.dur_ns, step.num_seqs) for step in read_lenvm_steps(log, requests)]
    assert steps == [(999_750_000, 250_000, 2), (10**9, 10**9, 2), (2 * 10**9, 10**9, 1)]
