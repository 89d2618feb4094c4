"""A long ``requests.jsonl``: its copy says what its lines say, counts only while it fits, and may always go."""

from array import array

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.results.builders import edit_requests, edit_run, write_results
from typer.testing import CliRunner

from benchctl.analysis.metrics.latency import itls_ns, latencies_ns, pooled_itls_ns
from benchctl.cli.app import app
from benchctl.records.columns import columns as request_arrays
from benchctl.records.columns.columns import CHUNK_FIELDS, copy_path, read_requests
from benchctl.records.columns.tensor_file import tensors_of
from benchctl.records.directory import RunDirectory
from benchctl.records.files import encode
from benchctl.records.integrity.digests import digests_of_run, record_run
from benchctl.records.integrity.integrity import verify_directory
from benchctl.records.loaded import DAMAGED_LINE, ReadLimits, load_run
from benchctl.records.record import ChoiceRecord, RequestError, RequestRecord

BASELINE, GUIDED = "000-b0-baseline", "001-b0-guided-top_k5"
SIX = tuple({"baseline": 1 + 0.004 * i, "guided": 1.02 - 0.003 * i} for i in range(6))
counts = st.integers(0, 300) | st.integers(0, 2**40)
moments = st.integers(-(2**62), 2**62)
numbers = st.lists(counts, max_size=5).map(tuple)
choices = st.builds(
    ChoiceRecord,
    index=st.integers(0, 9),
    chunk_ns=st.lists(st.integers(0, 300) | moments, max_size=5).map(sorted).map(tuple),
    chunk_late_ns=st.none() | numbers,
    chunk_tokens=st.none() | numbers,
    chunk_chars=st.none() | numbers,
    output_tokens=st.none() | st.integers(0, 9),
    text=st.text(max_size=9),
)
records = st.builds(
    RequestRecord,
    request_id=st.text(max_size=5),
    index=counts,
    is_warmup=st.booleans(),
    scheduled_ns=moments,
    sent_ns=st.none() | moments,
    done_ns=st.none() | moments,
    choices=st.lists(choices, max_size=3).map(tuple),
    error=st.none() | st.builds(RequestError, kind=st.text(max_size=5), message=st.text(max_size=5)),
)


@pytest.fixture(name="long_from_one_byte", autouse=True)
def _long_from_one_byte(monkeypatch):
    monkeypatch.setattr("benchctl.records.loaded.DEFAULT_LIMITS", ReadLimits(few_requests=0))


@pytest.fixture(name="results")
def _results(tmp_path):
    """A directory with digests, as a measurement leaves it."""
    results = write_results(tmp_path / "r", block_factors=SIX)
    for run in results.runs():
        edit_run(results, run.path.name, files=digests_of_run(run))
        record_run(results, run.path.name)
    return results


def written(path, requests):
    path.write_bytes(b"".join(encode(request) + b"\n" for request in requests))
    return path


def with_tuples(request):
    """A request whose numbers are tuples, as the reader of lines makes them."""
    plain = [
        {name: tuple(value) for name in CHUNK_FIELDS if (value := getattr(choice, name)) is not None}
        for choice in request.choices
    ]
    pairs = zip(request.choices, plain, strict=True)
    choices = tuple(msgspec.structs.replace(choice, **values) for choice, values in pairs)
    return msgspec.structs.replace(request, choices=choices)


def plainly(requests):
    return [with_tuples(request) for request in requests]


def show(path):
    return CliRunner().invoke(app, ["show", str(path)])


def test_the_numbers_of_chunks_are_what_is_kept_as_arrays():
    assert CHUNK_FIELDS == {"chunk_ns": (), "chunk_late_ns": None, "chunk_tokens": None, "chunk_chars": None}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(requests=st.lists(records, max_size=6))
def test_a_copy_holds_every_record_as_its_line_does(tmp_path, requests):
    path = written(tmp_path / "requests.jsonl", requests)
    for _ in range(2):  # the first reader makes the copy, the second reads it
        assert plainly(read_requests(path, writes_copy=True)) == requests
    assert copy_path(path).is_file()


def test_the_first_reader_makes_the_copy_and_the_next_decodes_no_line(results, monkeypatch):
    run = results.run(BASELINE)
    first = load_run(run)
    monkeypatch.setattr(request_arrays, "_packed", None)
    second = load_run(run)
    assert plainly(first.requests) == plainly(second.requests) == list(run.requests())
    assert {type(choice.chunk_ns) for request in second.requests for choice in request.choices} == {array}


def test_anyone_can_read_the_arrays_of_a_copy(results):
    run = results.run(BASELINE)
    load_run(run)
    tensors, metadata = tensors_of(copy_path(run.request_log).read_bytes())
    expected = [t for request in run.requests() for choice in request.choices for t in choice.chunk_ns]
    assert tensors["chunk_ns"].tolist() == expected
    assert metadata["requests_sha256"] == digests_of_run(run)["requests.jsonl"].sha256


def test_a_copy_of_something_else_is_passed_over_and_made_anew(results):
    run = results.run(BASELINE)
    before = load_run(run).requests
    edit_requests(results, BASELINE, lambda request: msgspec.structs.replace(request, prompt_tokens=21))
    stale = copy_path(run.request_log).read_bytes()
    assert {request.prompt_tokens for request in before} == {20}
    assert {request.prompt_tokens for request in load_run(run).requests} == {21}
    assert copy_path(run.request_log).read_bytes() != stale


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: b"",
        lambda content: b"no tensors at all",
        lambda content: content[:-9],
        lambda content: content[:-9] + bytes(9),
        lambda content: content.replace(b"chunk_ns", b"chunk_xx"),
        lambda content: content.replace(b'"I64"', b'"F64"'),
        lambda content: content.replace(b'"version":"1"', b'"version":"0"'),
    ],
    ids=["empty", "no tensors", "too short", "zeros at the end", "another name", "another type", "another version"],
)
def test_a_copy_that_was_damaged_costs_nothing_but_time(results, spoil):
    run = results.run(BASELINE)
    load_run(run)
    copy = copy_path(run.request_log)
    good = copy.read_bytes()
    copy.write_bytes(spoil(good))
    loaded = load_run(run)
    assert plainly(loaded.requests) == list(run.requests())
    assert loaded.warnings == ()
    assert copy.read_bytes() == good


def test_where_nothing_can_be_written_everything_is_read_all_the_same(results):
    run = results.run(BASELINE)
    copy_path(run.request_log).mkdir()  # root may write anywhere, but not here
    assert plainly(load_run(run).requests) == list(run.requests())
    assert copy_path(run.request_log).is_dir()


def test_nothing_is_kept_of_a_run_that_goes_on(results):
    edit_run(results, BASELINE, state="running")
    run = results.run(BASELINE)
    assert plainly(load_run(run).requests) == list(run.requests())
    assert not copy_path(run.request_log).exists()


def test_a_damaged_line_is_told_as_ever_and_no_copy_is_kept(results):
    run = results.run(BASELINE)
    run.request_log.write_bytes(run.request_log.read_bytes()[:-20])
    loaded = load_run(run)
    assert len(loaded.requests) == 3
    assert loaded.is_damaged
    assert [warning.code for warning in loaded.warnings] == [DAMAGED_LINE]
    assert "requests.jsonl:4" in loaded.damage[0]
    assert not copy_path(run.request_log).exists()


@pytest.mark.parametrize("times", [(2**64,), (2**62 + 1,), (5_000_000, 1)], ids=["128 bits", "64 bits", "disorder"])
def test_times_that_cannot_be_are_left_to_the_reader_of_lines(tmp_path, times):
    wrong = RequestRecord(request_id="r", index=0, scheduled_ns=0, choices=(ChoiceRecord(index=0, chunk_ns=times),))
    path = written(tmp_path / "requests.jsonl", [wrong])
    assert read_requests(path, writes_copy=True) is None
    assert not copy_path(path).exists()


def test_a_copy_changes_no_digest_and_may_be_made_altered_or_deleted(results):
    def codes_of_alterations():
        verification = verify_directory(results.path, is_fresh=True)
        return verification.alterations, verification.num_files

    before = codes_of_alterations()
    assert not before[0]
    run = results.run(BASELINE)
    load_run(run)
    assert codes_of_alterations() == before
    assert digests_of_run(run) == run.read().files
    copy_path(run.request_log).write_bytes(b"altered")
    assert codes_of_alterations() == before
    copy_path(run.request_log).unlink()
    assert codes_of_alterations() == before


def test_what_is_shown_is_the_same_with_and_without_copies(results, monkeypatch):
    monkeypatch.setattr("benchctl.records.loaded.DEFAULT_LIMITS", ReadLimits(few_requests=1 << 30))
    by_lines = show(results.path)
    assert not list(results.path.glob("runs/*/*.safetensors"))
    monkeypatch.setattr("benchctl.records.loaded.DEFAULT_LIMITS", ReadLimits(few_requests=0))
    first, second = show(results.path), show(results.path)
    assert len(list(results.path.glob("runs/*/*.safetensors"))) == 12
    assert by_lines.exit_code == 0
    assert by_lines.stdout == first.stdout == second.stdout


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.lists(st.lists(st.integers(0, 2**62), max_size=4).map(sorted), max_size=3), max_size=4))
def test_gaps_of_arrays_are_those_of_tuples(tmp_path, times):
    requests = [
        RequestRecord(
            request_id=str(i),
            index=i,
            scheduled_ns=0,
            sent_ns=0,
            done_ns=9,
            choices=tuple(ChoiceRecord(index=c, chunk_ns=tuple(ns)) for c, ns in enumerate(of_request)),
        )
        for i, of_request in enumerate(times)
    ]
    read = read_requests(written(tmp_path / "requests.jsonl", requests), writes_copy=False)
    assert pooled_itls_ns(read) == pooled_itls_ns(requests)
    assert [itls_ns(request) for request in read] == [itls_ns(request) for request in requests]
    assert latencies_ns(read) == latencies_ns(requests)


def test_steps_of_a_log_of_middling_length_are_kept_as_columns(results):
    run = RunDirectory(results.run(GUIDED).path)
    few = load_run(run)
    many = load_run(run, ReadLimits(kept_steps=0))
    assert tuple(many.steps) == few.steps
    assert len(many.steps) == len(few.steps)
    assert many.steps[0] == few.steps[0]
    assert many.columns.dur_ns.tolist() == few.columns.dur_ns.tolist()
    assert len(many.warmup_columns) == 0
