"""The result directory: raw records survive crashes, damage is named, versions are respected."""

import json
from array import array
from pathlib import Path

import msgspec
import pytest
from generate import result_format_reference
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.results.builders import PROFILE_YAML, edit_run, write_results

from benchctl.analysis.metrics.latency import itls_ns, latencies_ns, num_simultaneous, pooled_itls_ns
from benchctl.errors import RecordError, SchemaVersionError, UsageError
from benchctl.records.directory import RunDirectory, cell_name, open_results, run_directory_name
from benchctl.records.files import JsonlWriter, encode, read_jsonl, write_bytes_atomic
from benchctl.records.loaded import load_results, load_run
from benchctl.records.record import ChoiceRecord, RequestError, RequestRecord, RunRecord
from benchctl.records.schema import StepRecord


def step(number: int) -> StepRecord:
    return StepRecord(step=number, start_ns=0, dur_ns=1, clock="virtual", phase="decode", num_seqs=1)


def test_what_was_written_is_what_is_read(tmp_path: Path) -> None:
    write_results(tmp_path / "r")
    results = load_results(tmp_path / "r")
    assert len(results.runs) == 6
    assert results.profile_yaml == PROFILE_YAML
    assert [run.record.run_id for run in results.runs][:2] == ["000-b0-baseline", "001-b0-guided-top_k5"]
    assert results.runs[1].columns.known_values("guided_rows")[0] == 8
    assert results.runs[0].requests[0].completion_tokens == 16
    assert not any(run.warnings or run.is_damaged for run in results.runs)


def test_every_record_is_on_disk_before_the_writer_closes(tmp_path: Path) -> None:
    with JsonlWriter(tmp_path / "steps.jsonl") as writer:
        for number in range(3):
            writer.write(step(number))
            assert len(list(read_jsonl(tmp_path / "steps.jsonl", StepRecord))) == number + 1


def test_unknown_is_absent_and_not_zero() -> None:
    line = json.loads(encode(step(1)))
    assert "candidates" not in line
    assert "num_prefill_tokens" not in line


@given(
    st.dictionaries(
        st.sampled_from(["sample", "lvm_forward", "model_forward"]), st.integers(min_value=0, max_value=10**13)
    )
)
def test_equal_records_are_equal_bytes_whatever_the_order_of_their_keys(sections: dict[str, int]) -> None:
    forwards = msgspec.structs.replace(step(1), sections_ns=sections)
    backwards = msgspec.structs.replace(step(1), sections_ns=dict(reversed(sections.items())))
    assert encode(forwards) == encode(backwards)
    assert msgspec.json.decode(encode(forwards), type=StepRecord) == forwards


def test_records_before_a_damaged_line_are_read(tmp_path: Path) -> None:
    path, lines = tmp_path / "steps.jsonl", b"".join(encode(step(number)) + b"\n" for number in range(3))
    index_of_text = encode(step(1)).replace(b'"step":1', b'"step":"one"') + b"\n"
    for damage in (b"{", b'{"step":1', b"{}\n", b"\xff\n", index_of_text):
        path.write_bytes(lines + damage + lines)
        records = read_jsonl(path, StepRecord)
        assert [next(records) for _ in range(3)] == [step(number) for number in range(3)]
        with pytest.raises(RecordError, match=r"steps\.jsonl:4: .*" + ("step" if damage == index_of_text else "")):
            next(records)


def test_a_torn_last_line_is_named_and_is_damage_unless_its_run_was_still_going_on(tmp_path: Path) -> None:
    results = write_results(tmp_path / "r")
    torn = results.runs()[0].path / "steps.jsonl"
    torn.write_bytes(torn.read_bytes()[:-20])
    run = load_results(tmp_path / "r").runs[0]
    (warning,) = run.warnings
    assert (len(run.columns), run.is_damaged, warning.code) == (7, True, "damaged-line")
    assert [text for text in (f"{torn}:8", "cut off", "--resume") if text not in warning.message] == []
    edit_run(results, run.record.run_id, state="running")
    run = load_results(tmp_path / "r").runs[0]
    assert (len(run.warnings), run.is_damaged) == (1, False)


def test_blank_lines_and_missing_files_are_no_records(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    assert list(read_jsonl(path, StepRecord)) == []
    path.write_bytes(b"\n" + encode(step(1)) + b"\n\n")
    assert list(read_jsonl(path, StepRecord)) == [step(1)]


def test_a_directory_with_missing_damaged_or_foreign_documents_is_refused_by_their_names(tmp_path: Path) -> None:
    path = tmp_path / "r"
    for problem in ("it does not exist", "not a result directory"):
        with pytest.raises(UsageError, match=problem):
            open_results(path)
        path.mkdir(exist_ok=True)
    write_results(path)
    manifest = json.loads((path / "manifest.json").read_text())
    senseless = [manifest | {"schema_version": version} for version in (None, "1", 0, True)]
    for name, content, problem in (
        ("manifest.json", None, r"has no manifest\.json: .*copy"),
        *(("manifest.json", content, r"manifest\.json") for content in (b"{", b"[]", b'{"schema_version": 3}')),
        *(("manifest.json", json.dumps(each).encode(), "not a positive whole number") for each in senseless),
        ("plan.json", None, "plan.json is missing"),
        ("profile.yaml", None, "profile.yaml is missing"),
        ("profile.yaml", b"name: \xff\n", r"profile.yaml is not UTF-8 text .*; restore the file from a copy"),
    ):
        whole = (path / name).read_bytes()
        (path / name).unlink()
        if content is not None:
            (path / name).write_bytes(content)
        with pytest.raises(RecordError, match=problem):
            load_results(path)
        (path / name).write_bytes(whole)
    for version, problem in ((99, "newer than 3"), (2, "older than 3")):
        (path / "manifest.json").write_text(json.dumps(manifest | {"schema_version": version}))
        told = rf"manifest\.json: schema_version {version} is {problem}.*the benchctl that wrote it"
        with pytest.raises(SchemaVersionError, match=told):
            open_results(path)


def test_replacing_a_document_leaves_no_partial_file(tmp_path: Path) -> None:
    write_bytes_atomic(tmp_path / "a.json", b"1")
    write_bytes_atomic(tmp_path / "a.json", b"2")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_bytes() == b"2"


def test_run_directories_read_without_a_map_and_are_safe_as_paths() -> None:
    assert run_directory_name(7, 2, "guided", {"top_k": 3}) == "007-b2-guided-top_k3"
    name = run_directory_name(7, 2, "guided", {"value_model": "../../models/x y"})
    assert "/" not in name
    assert " " not in name
    assert cell_name({"top_k": 3, "value_model": "qwen2.5-1.5b"}) == "top_k=3, value_model=qwen2.5-1.5b"
    assert cell_name({}) == ""


def test_every_file_of_a_result_directory_is_in_the_reference(tmp_path: Path) -> None:
    names = {path.name for path in write_results(tmp_path / "results").path.rglob("*") if path.is_file()}
    reference = result_format_reference()
    assert names
    assert [name for name in sorted(names) if f"{name}`" not in reference] == []


def test_every_field_has_a_meaning_and_times_have_units() -> None:
    lines = [line for line in result_format_reference().splitlines() if line.count(" | ") == 4]
    rows = [line.split(" | ") for line in lines if line.startswith("| `")]
    assert len(rows) > 150
    for name, kind, unit, _, meaning in rows:
        assert kind.strip(), name
        assert len(meaning.rstrip(" |")) > 1, name
        assert ("_ns" in name) == (unit == "ns"), name


FIELDS = ("chunk_ns", "chunk_late_ns", "chunk_tokens", "chunk_chars")
counts = st.integers(0, 300) | st.integers(0, 2**40)
times = st.lists(st.integers(0, 2**62), max_size=5).map(sorted).map(tuple)


@st.composite
def choices(draw):
    chunk_ns = draw(times)
    numbers = st.none() | st.lists(counts, min_size=len(chunk_ns), max_size=len(chunk_ns)).map(tuple)
    fields = {name: draw(numbers) for name in FIELDS[1:]}
    return ChoiceRecord(index=0, chunk_ns=chunk_ns, text=draw(st.text(max_size=9)), **fields)


records = st.builds(
    RequestRecord,
    request_id=st.text(max_size=5),
    index=counts,
    is_warmup=st.booleans(),
    scheduled_ns=counts,
    choices=st.lists(choices(), max_size=3).map(tuple),
    error=st.none() | st.builds(RequestError, kind=st.text(max_size=5), message=st.text(max_size=5)),
)


def loaded(path, requests):
    """The requests of a run as they are read."""
    directory = RunDirectory(path)
    directory.write(RunRecord(schema_version=3, index=0, run_id="r", block=0, position=0, variant="v"))
    directory.request_log.write_bytes(b"".join(encode(request) + b"\n" for request in requests))
    run = load_run(directory)
    assert run.warnings == ()
    return run.requests


def plainly(requests):
    """Requests whose numbers are tuples, as they are written."""
    for request in requests:
        for choice in request.choices:
            for name in FIELDS:
                if (numbers := getattr(choice, name)) is not None:
                    msgspec.structs.force_setattr(choice, name, tuple(numbers))
    return list(requests)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(requests=st.lists(records, max_size=6))
def test_a_record_is_what_its_line_says(tmp_path, requests):
    read = loaded(tmp_path / "run", requests)
    numbers = [getattr(choice, name) for request in read for choice in request.choices for name in FIELDS]
    assert {type(each) for each in numbers if each} <= {array}
    assert plainly(read) == requests


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(st.lists(st.lists(st.lists(st.integers(0, 2**62), max_size=4).map(sorted), max_size=3), max_size=4))
def test_gaps_of_arrays_are_those_of_tuples(tmp_path, times):
    requests = [
        RequestRecord(
            request_id=str(i),
            index=i,
            scheduled_ns=0,
            sent_ns=0,
            done_ns=2**62,
            choices=tuple(ChoiceRecord(index=c, chunk_ns=tuple(ns)) for c, ns in enumerate(of_request)),
        )
        for i, of_request in enumerate(times)
    ]
    read = loaded(tmp_path / "run", requests)
    assert pooled_itls_ns(read) == pooled_itls_ns(requests)
    assert num_simultaneous(read) == pooled_itls_ns(read).count(0)
    assert [itls_ns(request) for request in read] == [itls_ns(request) for request in requests]
    assert latencies_ns(read) == latencies_ns(requests)


def test_a_time_that_comes_again_after_a_later_one_is_not_simultaneous():
    times = ChoiceRecord(
        index=0, chunk_ns=(10, 11, 10, 10)
    )  # the wall clock was set, which moves stamps of the kernel
    assert num_simultaneous([RequestRecord(request_id="0", index=0, scheduled_ns=0, choices=(times,))]) == 1
