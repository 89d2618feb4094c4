"""The result directory: raw records survive crashes, damage is named, versions are respected."""

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.results.builders import PROFILE_YAML, write_results

from benchctl.errors import RecordError, SchemaVersionError, UsageError
from benchctl.records.directory import cell_name, open_results, run_directory_name
from benchctl.records.files import JsonlWriter, encode, read_jsonl, write_bytes_atomic
from benchctl.records.loaded import load_results
from benchctl.records.record import RequestError, RequestRecord
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


@pytest.mark.parametrize("damage", [b"{", b'{"step":1', b"{}\n", b"\xff\n"])
def test_records_before_a_damaged_line_are_read(tmp_path: Path, damage: bytes) -> None:
    path, lines = tmp_path / "steps.jsonl", b"".join(encode(step(number)) + b"\n" for number in range(3))
    path.write_bytes(lines + damage + lines)
    records = read_jsonl(path, StepRecord)
    assert [next(records) for _ in range(3)] == [step(number) for number in range(3)]
    with pytest.raises(RecordError, match=r"steps\.jsonl:4: "):
        next(records)


def test_a_torn_last_line_is_named_and_what_came_before_is_kept(tmp_path: Path) -> None:
    results = write_results(tmp_path / "r")
    torn = results.runs()[0].path / "steps.jsonl"
    torn.write_bytes(torn.read_bytes()[:-20])
    run = load_results(tmp_path / "r").runs[0]
    assert len(run.columns) == 7
    assert run.is_damaged
    (warning,) = run.warnings
    assert warning.code == "damaged-line"
    assert f"{torn}:8" in warning.message
    assert "cut off" in warning.message
    assert "--resume" in warning.message


def test_a_torn_line_of_a_run_that_was_still_going_on_is_only_a_warning(tmp_path: Path) -> None:
    results = write_results(tmp_path / "r")
    directory = results.runs()[0]
    directory.write(msgspec.structs.replace(directory.read(), state="running"))
    torn = directory.path / "requests.jsonl"
    torn.write_bytes(torn.read_bytes()[:-1] + b"{")
    run = load_results(tmp_path / "r").runs[0]
    assert run.warnings
    assert not run.is_damaged


def test_blank_lines_and_missing_files_are_no_records(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    assert list(read_jsonl(path, StepRecord)) == []
    path.write_bytes(b"\n" + encode(step(1)) + b"\n\n")
    assert list(read_jsonl(path, StepRecord)) == [step(1)]


def test_a_line_of_the_wrong_shape_names_the_field(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    record = RequestRecord(
        request_id="a", index=0, scheduled_ns=1, error=RequestError(kind="connect", message="refused")
    )
    path.write_bytes(encode(record).replace(b'"index":0', b'"index":"zero"') + b"\n")
    with pytest.raises(RecordError, match=r"requests\.jsonl:1: .*index"):
        list(read_jsonl(path, RequestRecord))


def test_a_directory_without_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a result directory"):
        open_results(tmp_path)
    with pytest.raises(UsageError, match="it does not exist"):
        open_results(tmp_path / "nowhere")
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(RecordError, match=r"has no manifest\.json: .*copy"):
        open_results(tmp_path)


def test_a_profile_that_is_no_text_is_an_error_of_the_record(tmp_path: Path) -> None:
    write_results(tmp_path)
    (tmp_path / "profile.yaml").write_bytes(b"name: \xff\n")
    with pytest.raises(RecordError, match=r"profile.yaml is not UTF-8 text .*; restore the file from a copy"):
        load_results(tmp_path)


@pytest.mark.parametrize("file", ["plan.json", "profile.yaml"])
def test_a_missing_document_says_that_the_directory_is_incomplete(tmp_path: Path, file: str) -> None:
    write_results(tmp_path / "r")
    (tmp_path / "r" / file).unlink()
    with pytest.raises(RecordError, match=rf"{file} is missing"):
        load_results(tmp_path / "r")


@pytest.mark.parametrize(("version", "problem"), [(99, "newer than 3"), (2, "older than 3")])
def test_another_schema_is_refused_by_name(tmp_path: Path, version: int, problem: str) -> None:
    write_results(tmp_path / "r")
    manifest = tmp_path / "r" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"schema_version": version}))
    with pytest.raises(
        SchemaVersionError,
        match=rf"manifest\.json: schema_version {version} is {problem}.*the benchctl that wrote it",
    ):
        open_results(tmp_path / "r")


@pytest.mark.parametrize("version", [None, "1", 0, True])
def test_a_senseless_schema_version_is_refused(tmp_path: Path, version: object) -> None:
    write_results(tmp_path / "r")
    manifest = tmp_path / "r" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"schema_version": version}))
    with pytest.raises(RecordError, match="not a positive whole number"):
        open_results(tmp_path / "r")


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"schema_version": 1}'])
def test_a_damaged_document_is_named(tmp_path: Path, content: bytes) -> None:
    write_results(tmp_path / "r")
    (tmp_path / "r" / "manifest.json").write_bytes(content)
    with pytest.raises(RecordError, match=r"manifest\.json"):
        open_results(tmp_path / "r")


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
