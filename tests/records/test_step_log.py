"""A long step log: its columns are those of its records, whatever stands in it, and damage is told as ever."""

import hashlib
import itertools
import os
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.results.builders import edit_run, write_results

from benchctl.records.columns import step_log
from benchctl.records.columns.columns import OPTIONAL, PHASES, StepColumns, copy_path
from benchctl.records.columns.columns import columns_from as columns_by_table
from benchctl.records.columns.step_log import read_step_log
from benchctl.records.directory import RunDirectory
from benchctl.records.files import encode
from benchctl.records.integrity.digests import digest_of
from benchctl.records.loaded import DAMAGED_LINE, ReadLimits, load_run
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


def columns_from(records, *, is_warmup=False):
    """Columns as their definition says, value by value."""
    steps = [record for record in records if record.is_warmup == is_warmup]
    sections = sorted({name for step in steps for name in step.sections_ns})
    optionals = [name for name in OPTIONAL if any(getattr(step, name) is not None for step in steps)]
    drafts = [step.accepted_by_position for step in steps]
    num_positions = max((len(counts or ()) for counts in drafts), default=0)
    accepted = np.array(
        [
            [*counts, *[0] * (num_positions - len(counts))] if counts else [np.nan] * num_positions
            for counts in drafts
        ],
        dtype=np.float64,
    )
    return StepColumns(
        start_ns=np.array([step.start_ns for step in steps], dtype=np.int64),
        dur_ns=np.array([step.dur_ns for step in steps], dtype=np.int64),
        num_seqs=np.array([step.num_seqs for step in steps], dtype=np.int64),
        phase=np.array([PHASES.index(step.phase) for step in steps], dtype=np.uint8),
        clocks=tuple(sorted({step.clock for step in steps})),
        optionals={name: np.array([getattr(s, name) for s in steps], dtype=np.float64) for name in optionals},
        section_ns={n: np.array([s.sections_ns.get(n, 0) for s in steps], dtype=np.int64) for n in sections},
        has_section={n: np.array([n in s.sections_ns for s in steps], dtype=bool) for n in sections},
        accepted_by_position=accepted if num_positions else None,
    )


def read_log(path):
    """Read a log in blocks of a few lines."""
    return read_step_log(path, block_bytes=600)


def written(path, steps):
    path.write_bytes(b"".join(encode(record) + b"\n" for record in steps))
    return path


def require_same(columns, expected):
    assert len(columns) == len(expected)
    assert columns.clocks == expected.clocks
    pairs = [
        (getattr(columns, name), getattr(expected, name)) for name in ("start_ns", "dur_ns", "num_seqs", "phase")
    ]
    for name in ("optionals", "section_ns", "has_section"):
        mine, theirs = getattr(columns, name), getattr(expected, name)
        assert list(mine) == list(theirs)
        pairs += [(mine[key], theirs[key]) for key in theirs]
    assert (columns.accepted_by_position is None) == (expected.accepted_by_position is None)
    if expected.accepted_by_position is not None:
        pairs.append((columns.accepted_by_position, expected.accepted_by_position))
    for mine, theirs in pairs:
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(steps=records)
def test_the_columns_of_a_log_are_those_of_its_records(tmp_path, steps):
    log, damage = read_log(written(tmp_path / "steps.jsonl", steps))
    assert damage is None
    assert list(log) == steps
    for is_warmup in (False, True):
        require_same(log.columns(is_warmup=is_warmup), columns_from(steps, is_warmup=is_warmup))
        require_same(columns_by_table(steps, is_warmup=is_warmup), columns_from(steps, is_warmup=is_warmup))


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
    monkeypatch.setattr(step_log, "_decode_singly", None)
    log, _ = read_log(written(tmp_path / "steps.jsonl", steps))
    require_same(log.columns(), columns_from(steps))
    assert log.columns().optional("fused") is None
    assert log[3] == steps[3]
    assert log[-2:] == tuple(steps[-2:])


@pytest.mark.parametrize("position", [0, 1, 50, 98, 99])
def test_a_section_that_only_one_step_has_is_columns_wherever_that_step_stands(tmp_path, position):
    steps = [step(i, sections_ns={"rare": 5} if i == position else {"sample": 1}) for i in range(100)]
    columns = read_log(written(tmp_path / "steps.jsonl", steps))[0].columns()
    assert columns.section_ns["rare"].sum() == 5
    assert columns.has_section["rare"].nonzero()[0].tolist() == [position]
    assert columns.has_section["sample"].sum() == 99


GOOD = encode(step())


@pytest.mark.parametrize(
    "line",
    [
        GOOD.replace(b'"dur_ns":7', b'"dur_ns":8,"unheard_of":{"dur_ns":[1,{"x":2}]}'),
        GOOD.replace(b'"dur_ns":7', b'"dur_ns":7,"dur_ns":9'),
        GOOD.replace(b'"dur_ns":7', b'"dur_ns":7,"guided_rows":null'),
        GOOD.replace(b'"dur_ns":7', b'"dur_ns":7,"sections_ns":{}'),
        GOOD.replace(b'"dur_ns":7', b'"dur_ns":7,"accepted_by_position":[]'),
        GOOD.replace(b'"dur_ns":7', b'"dur_ns":7,"accepted_by_position":null'),
        GOOD.replace(b'"dur_ns":7', b'"dur_ns":7,"accepted_by_position":[1],"accepted_by_position":[2,3]'),
        GOOD.replace(b'"dur_ns":7', b'"dur_ns":7,"sections_ns":{"a":1,"a":2}'),
        GOOD.replace(b'"dur_ns":7', b'"dur_ns":7,"sections_ns":{"\\u0061":1,"a:b":2}'),
        GOOD.replace(b'"dur_ns"', b'"dur\\u005fns"'),
        b"  " + GOOD.replace(b":", b" :  ") + b" \r",
        b"",
        b"   ",
    ],
)
def test_a_line_that_nobody_here_wrote_means_to_columns_what_it_means_to_records(tmp_path, line):
    path = tmp_path / "steps.jsonl"
    path.write_bytes(b"\n".join([*[encode(step(i)) for i in range(20)], line, GOOD]))
    log, damage = read_log(path)
    assert damage is None
    require_same(log.columns(), columns_from(list(log)))
    kinds = msgspec.json.Decoder(StepRecord)
    assert list(log) == [kinds.decode(text) for text in path.read_bytes().split(b"\n") if text.strip()]


@pytest.mark.parametrize(
    "field",
    [
        "dur_ns",
        "sections_ns",
        "guided_rows",
        "clock",
        "is_greedy",
        "is_warmup",
        "num_seqs",
        "accepted_by_position",
    ],
)
@pytest.mark.parametrize(
    "value",
    [
        b"null",
        b"1.0",
        b'"1"',
        b"true",
        b"1",
        b"[1]",
        b"[1,null]",
        b"[1.0]",
        b'{"a":null}',
        b"9223372036854775808",
        b"NaN",
    ],
)
def test_a_value_of_another_kind_is_damage_to_columns_if_and_only_if_it_is_to_records(tmp_path, field, value):
    plain = msgspec.to_builtins(step(sections_ns={"a": 1})) | {field: msgspec.Raw(value)}
    line = encode(plain)
    path = tmp_path / "steps.jsonl"
    path.write_bytes(b"\n".join([*[encode(step(i)) for i in range(20)], line, GOOD]) + b"\n")
    log, damage = read_log(path)
    fault = fault_of(line)
    if fault is None:
        assert damage is None
        require_same(log.columns(), columns_from(list(log)))
    else:
        assert str(damage).startswith(f"{path}:21: ")
        assert f"{fault}; it begins" in str(damage)
        assert len(log) == len(log.columns()) == len(list(log)) == 20


def fault_of(line):
    try:
        msgspec.json.decode(line, type=StepRecord)
    except msgspec.DecodeError as error:
        return str(error)
    return None


def test_a_damaged_line_of_a_long_log_is_named_and_what_came_before_is_kept(tmp_path):
    run = RunDirectory(write_results(tmp_path / "r").runs()[0].path)
    whole = list(run.steps())
    run.step_log.write_bytes(run.step_log.read_bytes() + encode(step(9, is_warmup=True)) + b"\n" + GOOD[:-9])
    loaded = load_run(run, ReadLimits(kept_steps=0, steps_block=300))
    assert loaded.is_damaged
    (warning,) = [warning for warning in loaded.warnings if warning.code == DAMAGED_LINE]
    assert warning.message.startswith(f"{run.step_log}:{len(whole) + 2}: the line is cut off")
    assert list(loaded.steps) == [*whole, step(9, is_warmup=True)]
    require_same(loaded.columns, columns_from(whole))
    require_same(loaded.warmup_columns, columns_from(loaded.steps, is_warmup=True))


def test_few_steps_and_many_are_the_same_run(tmp_path):
    run = write_results(tmp_path / "r").runs()[1]
    few = load_run(run)
    many = load_run(run, ReadLimits(kept_steps=0))
    assert isinstance(few.steps, tuple)
    assert tuple(many.steps) == few.steps
    require_same(many.columns, few.columns)


@pytest.fixture(name="stored_log")
def _stored(tmp_path, monkeypatch):
    """A long log with a copy beside it."""
    monkeypatch.setattr(step_log, "COPY_FROM_BYTES", 0)
    steps = [step(i, is_warmup=i < 3, sections_ns={"sample": i}, kv_used_blocks=i or None) for i in range(50)]
    path = written(tmp_path / "steps.jsonl", steps)
    read_log(path)[0].write_copy()
    return path


def test_a_copy_is_read_instead_of_the_log(stored_log, monkeypatch):
    steps = list(read_log(stored_log)[0])
    monkeypatch.setattr(step_log, "decode_whole", None)
    log, damage = read_log(stored_log)
    assert damage is None
    assert len(log) == 50
    for is_warmup in (False, True):
        require_same(log.columns(is_warmup=is_warmup), columns_from(steps, is_warmup=is_warmup))


def test_a_copy_does_not_count_once_its_log_has_changed(stored_log):
    stored_log.write_bytes(stored_log.read_bytes().replace(b'"dur_ns":7', b'"dur_ns":8', 1))
    log, _ = read_log(stored_log)
    require_same(log.columns(is_warmup=True), columns_from(list(log), is_warmup=True))
    assert log.columns(is_warmup=True).dur_ns.tolist() == [8, 7, 7]


def test_a_copy_that_cannot_be_read_costs_nothing_but_time(stored_log):
    copy_path(stored_log).write_bytes(b"PAR1, but no copy")
    log, damage = read_log(stored_log)
    assert damage is None
    assert len(log) == 50


def test_the_copy_of_a_damaged_log_is_not_made(tmp_path, monkeypatch):
    monkeypatch.setattr(step_log, "COPY_FROM_BYTES", 0)
    path = written(tmp_path / "steps.jsonl", [step(i) for i in range(5)])
    path.write_bytes(path.read_bytes()[:-5])
    log, damage = read_log(path)
    log.write_copy()
    assert damage is not None
    assert not copy_path(path).exists()


def test_the_copy_of_a_short_log_is_not_made(tmp_path):
    path = written(tmp_path / "steps.jsonl", [step()])
    read_log(path)[0].write_copy()
    assert [entry.name for entry in tmp_path.iterdir()] == ["steps.jsonl"]


def test_a_log_without_a_step_has_columns_without_a_value(tmp_path):
    log, damage = read_log(written(tmp_path / "steps.jsonl", ()))
    assert damage is None
    require_same(log.columns(), columns_from(()))
    assert len(log.columns()) == 0


def test_a_column_that_no_step_could_have_is_refused_by_name():
    with pytest.raises(
        ValueError, match="'outputs' is not an optional field of a step; those are num_prefill_tokens"
    ):
        columns_from([step()]).optional("outputs")


def test_acceptance_by_position_counts_no_draft_beyond_the_end_of_a_short_one():
    steps = [step(0, accepted_by_position=(3, 1)), step(1), step(2, accepted_by_position=(2,))]
    accepted = columns_from(steps).accepted_by_position
    np.testing.assert_array_equal(accepted, [[3, 1], [np.nan, np.nan], [2, 0]])
    assert columns_from(steps[1:2]).accepted_by_position is None


def test_a_copy_of_another_version_is_passed_over(stored_log, monkeypatch):
    steps = list(read_log(stored_log)[0])
    monkeypatch.setattr(step_log, "_VERSION", "2")
    monkeypatch.setattr(step_log, "decode_whole", decoding := Mock(wraps=step_log.decode_whole))
    require_same(read_log(stored_log)[0].columns(), columns_from(steps))
    assert decoding.called


def test_the_first_reader_of_a_long_log_makes_its_copy_and_leaves_an_old_one_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(step_log, "COPY_FROM_BYTES", 0)
    run = RunDirectory(write_results(tmp_path / "r").runs()[0].path)
    old = run.step_log.with_suffix(".parquet")
    old.write_bytes(b"PAR1, by an earlier version")
    first = load_run(run, ReadLimits(kept_steps=0))
    assert copy_path(run.step_log).is_file()
    monkeypatch.setattr(step_log, "decode_whole", None)
    require_same(load_run(run, ReadLimits(kept_steps=0)).columns, first.columns)
    assert old.read_bytes() == b"PAR1, by an earlier version"


def test_a_run_in_progress_gets_no_copy_of_its_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(step_log, "COPY_FROM_BYTES", 0)
    results = write_results(tmp_path / "r")
    run = results.runs()[0]
    edit_run(results, run.path.name, state="running")
    load_run(run, ReadLimits(kept_steps=0))
    assert not copy_path(run.step_log).exists()


@pytest.mark.parametrize("is_touched", [False, True], ids=["as recorded", "with another time"])
def test_a_log_with_the_recorded_size_and_time_is_not_hashed_again(stored_log, monkeypatch, is_touched):
    recorded = digest_of(stored_log)
    if is_touched:
        os.utime(stored_log, ns=(0, 0))
    monkeypatch.setattr("hashlib.file_digest", hashing := Mock(wraps=hashlib.file_digest))
    log, _ = read_step_log(stored_log, block_bytes=600, recorded=recorded)
    assert len(log) == 50
    assert hashing.called == is_touched


def test_the_phases_of_steps_are_told_apart():
    columns = columns_from([step(i, phase=phase) for i, phase in enumerate(itertools.chain(PHASES, ["decode"]))])
    assert columns.in_phase("decode").tolist() == [False, True, False, True]
