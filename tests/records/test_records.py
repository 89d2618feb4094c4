"""The result directory: what was written is what is read, and damage is named by file and line, in a sentence."""

import json
import platform
import shutil
from array import array
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from generate import result_format_reference
from hypothesis import HealthCheck, given, settings, strategies as st
from support.hostile_files import HOSTILE, WRONG_VALUES, refusal_of, write_hostile
from support.peaks import cpu_peaks
from support.results.builders import BASELINE, GUIDED, PROFILE_YAML, edit_requests, edit_run, write_results

from benchctl.analysis.metrics.chunks import chunks_of, latencies_ns
from benchctl.errors import RecordError, SchemaVersionError, UsageError
from benchctl.records import files
from benchctl.records.columns import read_steps
from benchctl.records.directory import ResultDirectory, RunDirectory, cell_name, open_results, run_directory_name
from benchctl.records.files import JsonlWriter, encode, read_jsonl, write_json_atomic
from benchctl.records.integrity import read_digests
from benchctl.records.loaded import DAMAGED_LINE, LoadedRun, load_results, load_run
from benchctl.records.peaks import PEAKS, machine_peaks
from benchctl.records.record import ChoiceRecord, RequestError, RequestRecord, RunRecord
from benchctl.records.schema import StepRecord
from benchctl.records.stores import NOISE, stored_durations
from benchctl.report.export import list_directories

RUN = f"runs/{BASELINE}"
DOCUMENTS = {
    "manifest.json": lambda path: ResultDirectory(path).manifest(),
    "plan.json": lambda path: ResultDirectory(path).plan(),
    f"{RUN}/run.json": load_results,
    "noise.json": lambda path: NOISE.read(path / "noise.json"),
    "peaks.json": lambda path: PEAKS.read(path / "peaks.json"),
    "digests.json": read_digests,
}
LOGS = ("steps.jsonl", "requests.jsonl", "gpu.jsonl", "host.jsonl", "client.jsonl", "prometheus.jsonl")
BLANK = {"empty", "one line feed"}
"""Contents that a log may have: no lines."""
GOOD = StepRecord(step=1, start_ns=5, dur_ns=7, clock="host", phase="decode", num_seqs=2, sections_ns={"sample": 3})
replace = msgspec.structs.replace


@pytest.fixture(name="path")
def _path(tmp_path: Path) -> Path:
    return write_results(tmp_path / "r", num_requests=2).path


def loaded(path: Path) -> LoadedRun:
    """The run whose files are damaged."""
    return load_run(ResultDirectory(path).run(BASELINE))


def test_what_was_written_is_what_is_read(tmp_path: Path) -> None:
    results = load_results(write_results(tmp_path / "r").path)
    assert (len(results.runs), results.profile_yaml) == (6, PROFILE_YAML)
    assert [run.record.run_id for run in results.runs][:2] == [BASELINE, GUIDED]
    assert results.runs[1].columns.known_values("guided_rows")[0] == 8
    assert results.runs[0].requests[0].completion_tokens == 16
    assert not any(run.warnings or run.is_damaged for run in results.runs)


def test_every_record_is_on_disk_before_the_writer_closes_and_blank_lines_and_missing_files_are_none(
    tmp_path: Path,
) -> None:
    path = tmp_path / "steps.jsonl"
    assert list(read_jsonl(path, StepRecord)) == []
    with JsonlWriter(path) as writer:
        for number in range(3):
            writer.write(GOOD)
            assert list(read_jsonl(path, StepRecord)) == [GOOD] * (number + 1)
    path.write_bytes(b"\n" + encode(GOOD) + b"\n\n")
    assert list(read_jsonl(path, StepRecord)) == [GOOD]


@given(st.dictionaries(st.sampled_from(["sample", "lvm_forward", "model_forward"]), st.integers(0, 10**13)))
def test_equal_records_are_equal_bytes_whatever_the_order_of_their_keys(sections: dict[str, int]) -> None:
    forwards, backwards = (replace(GOOD, sections_ns=dict(each)) for each in (sections, reversed(sections.items())))
    assert encode(forwards) == encode(backwards)
    assert msgspec.json.decode(encode(forwards), type=StepRecord) == forwards
    assert b"candidates" not in encode(forwards), "unknown is absent, and not zero"


def test_records_before_a_damaged_line_are_read(tmp_path: Path) -> None:
    path, lines = tmp_path / "steps.jsonl", b"".join(encode(replace(GOOD, step=i)) + b"\n" for i in range(3))
    index_of_text = encode(GOOD).replace(b'"step":1', b'"step":"one"') + b"\n"
    for damage in (b"{", b'{"step":1', b"{}\n", b"\xff\n", index_of_text):
        path.write_bytes(lines + damage + lines)
        records = read_jsonl(path, StepRecord)
        assert [next(records).step for _ in range(3)] == [0, 1, 2]
        with pytest.raises(RecordError, match=r"steps\.jsonl:4: .*" + ("step" if damage == index_of_text else "")):
            next(records)


def test_a_torn_last_line_is_named_and_is_damage_unless_its_run_was_still_going_on(path: Path) -> None:
    torn = path / RUN / "steps.jsonl"
    torn.write_bytes(torn.read_bytes()[:-20])
    (warning,) = loaded(path).warnings
    assert (len(loaded(path).columns), loaded(path).is_damaged, warning.code) == (7, True, "damaged-line")
    assert [text for text in (f"{torn}:8", "cut off", "--resume") if text not in warning.message] == []
    edit_run(ResultDirectory(path), BASELINE, state="running")
    assert (len(loaded(path).warnings), loaded(path).is_damaged) == (1, False)


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
        remedy = rf"manifest\.json: schema_version {version} is {problem}.*the benchctl that wrote it"
        with pytest.raises(SchemaVersionError, match=remedy):
            open_results(path)


def test_run_directories_read_without_a_map_and_are_safe_as_paths() -> None:
    assert run_directory_name(7, 2, "guided", {"top_k": 3}) == "007-b2-guided-top_k3"
    assert not set("/ ") & set(run_directory_name(7, 2, "guided", {"value_model": "../../models/x y"}))
    assert cell_name({"top_k": 3, "value_model": "qwen2.5-1.5b"}) == "top_k=3, value_model=qwen2.5-1.5b"


def test_every_file_of_a_result_directory_and_every_field_is_in_the_reference_and_times_have_units(
    path: Path,
) -> None:
    reference = result_format_reference()
    names = {each.name for each in path.rglob("*") if each.is_file()}
    assert [name for name in sorted(names) if f"{name}`" not in reference] == []
    lines = [line for line in reference.splitlines() if line.count(" | ") == 4]
    rows = [line.split(" | ") for line in lines if line.startswith("| `")]
    assert len(rows) > 150
    for name, kind, unit, _, meaning in rows:
        assert kind.strip(), name
        assert len(meaning.rstrip(" |")) > 1, name
        assert ("_ns" in name) == (unit == "ns"), name


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_damaged_document_is_named(path: Path, document: str) -> None:
    for name in HOSTILE:
        write_hostile(path / document, name)
        refusal = refusal_of(lambda: DOCUMENTS[document](path))
        assert refusal.startswith(str(path / document)), (name, refusal)
        assert len(refusal) < 1000, name


@pytest.mark.parametrize("log", LOGS)
def test_a_damaged_log_is_a_warning_that_names_file_and_line(path: Path, log: str) -> None:
    for name in HOSTILE:
        write_hostile(path / RUN / log, name)
        run = loaded(path)
        damage = [warning.message for warning in run.warnings if warning.code == DAMAGED_LINE]
        assert run.is_damaged == bool(damage) == (name not in BLANK), name
        assert all(text.startswith(f"{path / RUN / log}:1: ") and len(text) < 1000 for text in damage), damage


def test_an_impossible_step_is_a_damaged_line_with_field_and_value(path: Path) -> None:
    log = path / RUN / "steps.jsonl"
    for field, value in (
        ("dur_ns", -5),
        ("dur_ns", 1 << 62),
        ("num_seqs", -7),
        ("num_seqs", 1 << 53),
        ("start_ns", (1 << 62) + 1),
        ("sections_ns", {"sample": -1}),
        ("accepted_by_position", [1] * 257),
        ("sections_ns", {f"s{i}": 1 for i in range(257)}),
    ):
        wrong = msgspec.to_builtins(GOOD) | {field: value}
        log.write_bytes(b"\n".join([encode(GOOD), encode(wrong), encode(GOOD), b""]))
        run = loaded(path)
        beginning = msgspec.json.encode(value).decode().replace(":", ": ").replace(",", ", ")[:20]
        (damage,) = run.damage
        assert (len(run.columns), damage.startswith(f"{log}:2: {field} is {beginning}")) == (1, True), damage


def test_a_log_with_ever_new_sections_ends_before_it_fills_the_memory(tmp_path: Path, monkeypatch) -> None:
    log = tmp_path / "steps.jsonl"
    sections = [{f"s{number}-{i}": 1 for i in range(100)} for number in range(40)]
    log.write_bytes(b"".join(encode(replace(GOOD, sections_ns=each)) + b"\n" for each in sections))
    monkeypatch.setattr(files, "_BLOCK_BYTES", 1)
    *_, damage = read_steps(log, within=tmp_path)
    assert "different sections" in str(damage)
    assert str(damage).startswith(f"{log}:11: ")


def with_chunks(change: Callable[[ChoiceRecord], dict[str, object]], request: RequestRecord) -> RequestRecord:
    """The request with these changes of each of its choices."""
    choices = tuple(replace(choice, **change(choice)) for choice in request.choices)
    return replace(request, choices=choices, sent_ns=None, done_ns=None)


def test_an_impossible_request_is_a_damaged_line(path: Path) -> None:
    log = path / RUN / "requests.jsonl"
    whole = log.read_bytes()
    cases = [
        (partial(replace, done_ns=1), "done_ns is 1, before sent_ns"),
        (partial(replace, sent_ns=1 << 60, done_ns=1 << 61), "chunk_ns begins with"),
        (partial(replace, prompt_tokens=-1), "prompt_tokens is -1: Expected `int` >= 0"),
        (partial(replace, scheduled_ns=1 << 63), "scheduled_ns is 9223372036854775808"),
        (partial(with_chunks, lambda choice: {"chunk_ns": choice.chunk_ns[::-1]}), "chunk_ns has"),
    ]
    for name in ("chunk_ns", "chunk_late_ns", "chunk_tokens", "chunk_chars"):
        for number in (-(1 << 62) - 1, 1 << 63):
            change = partial(lambda name, number, choice: {name: (number,) * len(choice.chunk_ns)}, name, number)
            cases.append((partial(with_chunks, change), ""))
    for change, problem in cases:
        edit_requests(ResultDirectory(path), BASELINE, change)
        damage = loaded(path).damage[0]
        assert damage.startswith(f"{log}:1: "), change
        assert problem in damage
        log.write_bytes(whole)


def test_list_shows_damaged_and_unreadable_directories_among_the_others(path: Path, monkeypatch) -> None:
    for number, name in enumerate(HOSTILE):
        for document in ("manifest.json", f"{RUN}/run.json", "plan.json"):
            copy = shutil.copytree(path, path.parent / f"{number:02d}-{document.replace('/', '-')}")
            write_hostile(copy / document, name)
    locked = shutil.copytree(path, path.parent / "locked")

    def open_but_one(directory: Path) -> ResultDirectory:
        if directory == locked:
            raise PermissionError(13, "Permission denied", str(directory))
        return ResultDirectory(directory)

    monkeypatch.setattr("benchctl.report.export.open_results", open_but_one)  # the tests may run as root
    entries = {Path(entry["path"]): entry for entry in list_directories(path.parent)}
    honest = entries.pop(path)
    assert (honest["state"], honest["problem"], honest["damage"]) == ("done", None, None)
    problem = entries.pop(locked)["problem"]
    assert problem == f"{locked} cannot be read: Permission denied; correct its permissions"
    assert len(entries) == 3 * len(HOSTILE)
    for name, entry in entries.items():
        assert entry["state"] == "damaged", name
        assert f"{entry['path']}/" in (entry["problem"] or entry["damage"] or ""), name


def test_damaged_files_of_a_store_do_not_count(tmp_path: Path, monkeypatch) -> None:
    for store in ("PEAKS", "DURATIONS"):
        monkeypatch.setenv(f"BENCHCTL_{store}_DIR", str(tmp_path))
    peaks = cpu_peaks(host=platform.node())
    for number, name in enumerate(HOSTILE):
        write_hostile(tmp_path / "key" / f"20260101-{number:04d}.json", name)
        write_hostile(tmp_path / "sim.jsonl", name)
        assert stored_durations("sim") == (), name
    assert machine_peaks(()) is None
    write_json_atomic(tmp_path / "key" / "20250101-aaaa.json", peaks)
    assert machine_peaks(()) == peaks


def test_values_of_other_types_are_refused_by_field(path: Path) -> None:
    document = msgspec.json.decode((path / "manifest.json").read_bytes())
    for field in document:
        for value in WRONG_VALUES:
            (path / "manifest.json").write_bytes(msgspec.json.encode(document | {field: value}))
            refusal = refusal_of(lambda: ResultDirectory(path).manifest())
            assert not refusal or refusal.startswith(f"{path / 'manifest.json'}: "), (field, value, refusal)
            assert field != "blocks" or value != -1 or "blocks is -1: Expected `int` >= 0" in refusal


FIELDS = ("chunk_ns", "chunk_late_ns", "chunk_tokens", "chunk_chars")
counts = st.integers(0, 300) | st.integers(0, 2**40)


@st.composite
def choices(draw):
    chunk_ns = draw(st.lists(st.integers(0, 2**62), max_size=5).map(sorted).map(tuple))
    numbers = st.none() | st.lists(counts, min_size=len(chunk_ns), max_size=len(chunk_ns)).map(tuple)
    fields = {name: draw(numbers) for name in FIELDS[1:]}
    return ChoiceRecord(index=0, chunk_ns=chunk_ns, text=draw(st.text(max_size=9)), **fields)


records = st.builds(
    RequestRecord,
    request_id=st.text(max_size=5),
    index=counts,
    is_warmup=st.booleans(),
    scheduled_ns=st.just(0),
    sent_ns=st.just(0),
    done_ns=st.just(2**62),
    choices=st.lists(choices(), max_size=3).map(tuple),
    error=st.none() | st.builds(RequestError, kind=st.text(max_size=5), message=st.text(max_size=5)),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=80)
@given(requests=st.lists(records, max_size=6))
def test_a_record_is_what_its_line_says_and_gaps_of_arrays_are_those_of_tuples(tmp_path, requests):
    directory = RunDirectory(tmp_path / "run")
    directory.write(RunRecord(schema_version=3, index=0, run_id="r", block=0, position=0, variant="v"))
    directory.request_log.write_bytes(b"".join(encode(request) + b"\n" for request in requests))
    run = load_run(directory)
    assert run.warnings == ()
    assert latencies_ns(run.requests) == latencies_ns(requests)
    gaps = [
        later - earlier
        for request in requests
        for choice in request.choices
        for earlier, later in pairwise(choice.chunk_ns)
    ]
    assert list(latencies_ns(requests)["itl"]) == gaps
    assert chunks_of(requests).num_simultaneous == chunks_of(run.requests).num_simultaneous == gaps.count(0)
    for choice in (choice for request in run.requests for choice in request.choices):
        numbers = {name: getattr(choice, name) for name in FIELDS}
        assert {type(each) for each in numbers.values() if each} <= {array}
        for name, each in numbers.items():
            msgspec.structs.force_setattr(choice, name, None if each is None else tuple(each))
    assert list(map(encode, run.requests)) == list(map(encode, requests))


def test_a_time_that_comes_again_after_a_later_one_is_not_simultaneous():
    """The wall clock was set, which moves stamps of the kernel."""
    times = ChoiceRecord(index=0, chunk_ns=(10, 11, 10, 10))
    record = RequestRecord(request_id="0", index=0, scheduled_ns=0, choices=(times,))
    assert chunks_of([record]).num_simultaneous == 1
