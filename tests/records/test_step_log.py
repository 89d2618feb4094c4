"""A step log: its columns are those of its records, whatever stands in it, and damage is told with its line."""

import os
import sys
from contextlib import suppress
from functools import partial
from operator import attrgetter

import msgspec
import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from support.results.builders import write_results
from support.waiting import wait_until

from benchctl import second_process as two
from benchctl.records import columns as columns_module, files
from benchctl.records.columns import OPTIONAL, PHASES, columns_from, read_steps
from benchctl.records.directory import RunDirectory
from benchctl.records.files import encode, read_jsonl
from benchctl.records.loaded import DAMAGED_LINE, load_results, load_run
from benchctl.records.schema import SECTION_PARENT, StepRecord

moments = st.integers(-(2**62), 2**62)
durations = st.integers(0, 86_400 * 10**9)
counts = st.integers(0, 2**40)
words = st.text(max_size=12) | st.sampled_from(
    ["a", "b:c", 'quo"te', "brace}", "dur_ns", "logprob", *SECTION_PARENT]
)


def fields(*, optional=counts):
    flags = {name: st.booleans() for name in ("is_greedy", "fused", "value_replayed")}
    return {
        "step": counts,
        "start_ns": moments,
        "dur_ns": durations,
        "num_seqs": counts,
        "clock": st.sampled_from(["host", "device", "virtual"]),
        "phase": st.sampled_from(PHASES),
        "is_warmup": st.booleans(),
        "sections_ns": st.dictionaries(words, durations, max_size=4),
        "accepted_by_position": st.none() | st.lists(counts, max_size=4).map(tuple),
        **{name: st.none() | flags.get(name, optional) for name in OPTIONAL},
    }


records = st.lists(st.builds(StepRecord, **fields()), max_size=12)


def step(number=0, **changed):
    record = StepRecord(
        step=number, start_ns=10 * number, dur_ns=7, clock="host", phase="decode", num_seqs=3, output_tokens=3
    )
    return msgspec.structs.replace(record, **changed)


def expected_of(records, *, is_warmup=False):
    """Columns as their definition says, value by value."""
    steps = [record for record in records if record.is_warmup == is_warmup]
    sections = sorted({name for step in steps for name in step.sections_ns})
    optionals = [name for name in OPTIONAL if any(getattr(step, name) is not None for step in steps)]
    drafts = [step.accepted_by_position for step in steps]
    num_positions = max((len(counts or ()) for counts in drafts), default=0)
    unknown = [np.nan] * num_positions
    accepted = [[*counts, *[0] * (num_positions - len(counts))] if counts else unknown for counts in drafts]

    def of_steps(value_of, dtype=np.int64):
        return np.array([value_of(step) for step in steps], dtype=dtype)

    return {
        **{name: of_steps(attrgetter(name)) for name in ("start_ns", "dur_ns", "num_seqs")},
        "clocks": tuple(sorted({step.clock for step in steps})),
        **{phase: of_steps(lambda s, phase=phase: s.phase == phase, bool) for phase in PHASES},
        **{name: of_steps(attrgetter(name), np.float64) if name in optionals else None for name in OPTIONAL},
        "section_ns": {name: of_steps(lambda s, name=name: s.sections_ns.get(name, 0)) for name in sections},
        "has_section": {name: of_steps(lambda s, name=name: name in s.sections_ns, bool) for name in sections},
        "accepted_by_position": np.array(accepted, dtype=np.float64) if num_positions else None,
    }


def read_log(path):
    """The columns of the load and of the warm-up, and the damage, of a log read in blocks of a few lines."""
    return read_steps(path, within=path.parent)


@pytest.fixture(name="short_blocks", autouse=True)
def _short_blocks(monkeypatch):
    monkeypatch.setattr(files, "_BLOCK_BYTES", 600)


def written(path, steps):
    path.write_bytes(b"".join(encode(record) + b"\n" for record in steps))
    return path


def require_same(columns, expected):
    named = {phase: columns.in_phase(phase) for phase in PHASES}
    named |= {name: columns.optional(name) for name in OPTIONAL}
    mine = {name: named[name] if name in named else getattr(columns, name) for name in expected}
    np.testing.assert_equal(mine, expected)
    types = [
        [values.dtype for values in columns.values() if isinstance(values, np.ndarray)]
        for columns in (mine, expected)
    ]
    assert types[0] == types[1]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=80)
@given(steps=records, repeats=st.sampled_from([1, 1, 2, 9]))
def test_the_columns_of_a_log_are_those_of_its_records(tmp_path, steps, repeats):
    *columns, damage = read_log(written(tmp_path / "steps.jsonl", steps * repeats))
    assert damage is None
    for is_warmup in (False, True):
        expected = expected_of(steps * repeats, is_warmup=is_warmup)
        require_same(columns[is_warmup], expected)
        require_same(columns_from(steps * repeats, is_warmup=is_warmup), expected)


def test_a_log_whose_every_block_is_read_at_once_has_the_columns_of_its_records(tmp_path, monkeypatch):
    steps = [
        step(
            i,
            is_greedy=i % 3 == 0,
            candidates=None if i % 4 else i,
            sections_ns={"sample": i, "own": 2**40} if i else {},
            accepted_by_position=tuple(range(i % 12)) if i % 5 else None,
        )
        for i in range(100)
    ]
    monkeypatch.setattr(files, "_read_singly", None)
    require_same(read_log(written(tmp_path / "steps.jsonl", steps))[0], expected_of(steps))


def test_lines_that_differ_in_their_digits_alone_are_not_read_as_records(tmp_path, monkeypatch):
    monkeypatch.setattr(columns_module, "records_in", None)
    steps = [step(i, is_warmup=i < 9, sections_ns={"a b": i}, accepted_by_position=(i, 1)) for i in range(99)]
    require_same(read_log(written(tmp_path / "steps.jsonl", steps))[0], expected_of(steps))


GOOD = encode(step())
TAIL = b'"dur_ns":7'
ODD_LINES = [
    GOOD.replace(TAIL, b'"dur_ns":8,"unheard_of":{"dur_ns":[1,{"x":2}]}'),
    GOOD.replace(TAIL, b'"dur_ns":7,"dur_ns":9'),
    GOOD.replace(TAIL, b'"dur_ns":7,"guided_rows":null'),
    GOOD.replace(TAIL, b'"dur_ns":7,"sections_ns":{}'),
    GOOD.replace(TAIL, b'"dur_ns":7,"accepted_by_position":[]'),
    GOOD.replace(TAIL, b'"dur_ns":7,"accepted_by_position":null'),
    GOOD.replace(TAIL, b'"dur_ns":7,"accepted_by_position":[1],"accepted_by_position":[2,3]'),
    GOOD.replace(TAIL, b'"dur_ns":7,"sections_ns":{"a":1,"a":2}'),
    GOOD.replace(TAIL, b'"dur_ns":7,"sections_ns":{"\\u0061":1,"a:b":2}'),
    GOOD.replace(b'"dur_ns"', b'"dur\\u005fns"'),
    GOOD.replace(b'"dur_ns"', b'"dur_3ns"'),
    GOOD.replace(TAIL, b'"dur_ns":7,"sections_ns":{"a1":1,"a2":2}'),
    b"  " + GOOD.replace(b":", b" :  ") + b" \r",
    b"",
    b"   ",
]
FIELDS = (
    "dur_ns", "sections_ns", "guided_rows", "clock", "is_greedy", "is_warmup", "num_seqs", "accepted_by_position",
)  # fmt: skip
VALUES = (
    b"null", b"1.0", b'"1"', b"true", b"1", b"[1]", b"[1,null]", b"[1.0]",
    b'{"a":null}', b"9223372036854775808", b"1099511627777", b"-1", b"1 2", b"1e3", b"", b"NaN",
)  # fmt: skip


def test_a_line_that_nobody_here_wrote_means_to_columns_what_it_means_to_records_or_is_damage_to_both(tmp_path):
    path, decode = tmp_path / "steps.jsonl", msgspec.json.Decoder(StepRecord).decode
    before = [encode(step(i)) for i in range(20)]
    plain = msgspec.to_builtins(step(sections_ns={"a": 1}))
    wrong = [encode(plain | {field: msgspec.Raw(value)}) for field in FIELDS for value in VALUES]
    for line in (*ODD_LINES, *wrong):
        path.write_bytes(b"\n".join([*before, line, GOOD]))
        columns, warmup_columns, damage = read_log(path)
        own, fault = [], None
        try:
            own = [decode(line)] if line.strip() else []
        except msgspec.DecodeError as error:
            fault = str(error)
        if fault is None:
            assert damage is None, line
            require_same(columns, expected_of([*map(decode, before), *own, decode(GOOD)]))
        else:
            assert str(damage).startswith(f"{path}:21: "), line
            assert f"{fault}; it begins" in str(damage), line
            assert (len(columns), len(warmup_columns)) == (20, 0), line


def test_a_damaged_line_of_a_long_log_is_named_and_what_came_before_is_kept(tmp_path):
    run = RunDirectory(write_results(tmp_path / "r").runs()[0].path)
    whole = list(read_jsonl(run.step_log, StepRecord))
    run.step_log.write_bytes(run.step_log.read_bytes() + encode(step(9, is_warmup=True)) + b"\n" + GOOD[:-9])
    loaded = load_run(run)
    assert loaded.is_damaged
    (warning,) = [warning for warning in loaded.warnings if warning.code == DAMAGED_LINE]
    assert warning.message.startswith(f"{run.step_log}:{len(whole) + 2}: the line is cut off")
    require_same(loaded.columns, expected_of(whole))
    require_same(loaded.warmup_columns, expected_of([step(9, is_warmup=True)], is_warmup=True))


def test_columns_of_few_steps_are_complete_and_a_column_that_no_step_could_have_is_refused_by_name(tmp_path):
    columns, _, damage = read_log(written(tmp_path / "steps.jsonl", ()))
    require_same(columns, expected_of(()))
    assert (damage, len(columns)) == (None, 0)
    with pytest.raises(
        ValueError, match="'outputs' is not an optional field of a step; those are num_prefill_tokens"
    ):
        columns.optional("outputs")
    steps = [step(0, accepted_by_position=(3, 1)), step(1), step(2, accepted_by_position=(2,))]
    expected = [[3, 1], [np.nan, np.nan], [2, 0]]  # no draft is counted beyond the end of a short one
    np.testing.assert_array_equal(columns_from(steps).accepted_by_position, expected)
    assert columns_from(steps[1:2]).accepted_by_position is None
    columns = columns_from([step(i, phase=phase) for i, phase in enumerate([*PHASES, "decode"])])
    assert columns.in_phase("decode").tolist() == [False, True, False, True]


def content(columns, warmup_columns, damage=None):
    """All that a reading of a log holds, to the last bit."""
    parts = [columns.arrays, warmup_columns.arrays]
    return [{name: (each.dtype, each.tolist()) for name, each in part.items()} for part in parts], str(damage)


@pytest.fixture(name="logs")
def _logs(tmp_path, monkeypatch):
    """Seven logs: one of them is damaged, one is missing, one is a link."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})
    logs = [tmp_path / f"{number}.jsonl" for number in range(7)]
    for number, log in enumerate(logs):
        written(log, [step(i, is_warmup=i < number, sections_ns={"sample": i}) for i in range(30)])
    logs[1].unlink()
    logs[4].write_bytes(logs[4].read_bytes()[:-9])
    logs[5].unlink()
    logs[5].symlink_to(logs[0])
    return logs


def children():
    """Second processes of this one, which other tests may have given children of another kind."""
    return [child for child in psutil.Process().children() if two._SECOND_PROCESS in child.cmdline()]


def reading_by_two(logs, num_bytes=two.LONG_BYTES):
    return two.two_readers(partial(read_steps, within=logs[0].parent), logs, num_bytes)


def require_same_readings(read, logs):
    for log in logs:
        assert content(*read(log)) == content(*read_log(log)), log


@pytest.mark.parametrize("waits", [False, True])
def test_a_second_process_reads_what_this_one_would_and_ends(logs, waits):
    with reading_by_two(logs) as read:
        wait_until("its children", children, 120)  # until it is more than a copy of this one
        if waits:  # until the other one has read nearly all
            require_same_readings(read, [logs.pop()])
        require_same_readings(read, logs)
    assert not children()


def test_one_core_or_short_logs_have_one_process(logs, monkeypatch):
    for cores, num_bytes in (({0}, two.LONG_BYTES), ({0, 1}, two.LONG_BYTES - 1)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _pid, cores=cores: cores)
        with reading_by_two(logs, num_bytes) as read:
            assert read.func is read_steps
            assert not children()


def test_what_a_second_process_does_not_read_this_one_reads(logs, monkeypatch):
    for module, name, value in (
        (two, "_SECOND_PROCESS", "raise SystemExit(3)"),
        (two, "_SECOND_PROCESS", "import os; os.kill(os.getpid(), 9)"),
        (two, "_SECOND_PROCESS", "print('hello')"),
        (sys, "executable", "/no/such/python"),
    ):
        monkeypatch.setattr(module, name, value)
        with reading_by_two(logs) as read:
            require_same_readings(read, logs)


def test_no_process_is_left_where_reading_ends_early(logs):
    with suppress(KeyboardInterrupt), reading_by_two(logs) as read:
        read(logs[0])
        raise KeyboardInterrupt
    assert not children()


def test_two_processes_load_the_runs_and_the_damage_that_one_does(tmp_path, monkeypatch):
    results = write_results(tmp_path / "r")
    damaged = results.runs()[-1].step_log
    damaged.write_bytes(damaged.read_bytes() + GOOD[:-9])
    messages, messages_of_two = [], []
    loaded = load_results(results.path, messages)
    monkeypatch.setattr(two, "LONG_BYTES", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})
    of_two = load_results(results.path, messages_of_two)
    assert messages
    assert messages_of_two == messages
    for mine, theirs in zip(of_two.runs, loaded.runs, strict=True):
        assert mine.warnings == theirs.warnings
        assert content(mine.columns, mine.warmup_columns) == content(theirs.columns, theirs.warmup_columns)
