"""Every file of a result directory may hold anything: commands name the file and why, without a traceback."""

import platform
import shutil
from pathlib import Path

import msgspec
import pytest
from support.cli import benchctl
from support.hostile_files import HOSTILE, refusal_of, write_hostile
from support.peaks import cpu_peaks
from support.results.builders import edit_requests, write_results

from benchctl.errors import InvalidDataError, RecordError
from benchctl.records import files
from benchctl.records.columns import read_steps
from benchctl.records.directory import ResultDirectory
from benchctl.records.files import encode, write_json_atomic
from benchctl.records.integrity import read_digests
from benchctl.records.loaded import DAMAGED_LINE, load_results, load_run
from benchctl.records.peaks import PEAKS, machine_peaks
from benchctl.records.schema import StepRecord
from benchctl.records.stores import NOISE, stored_durations
from benchctl.report.export import list_directories

RUN = "runs/000-b0-baseline"
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


@pytest.fixture(scope="module", name="honest")
def _honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_results(tmp_path_factory.mktemp("honest") / "r", num_requests=2).path


@pytest.fixture(name="path")
def _path(honest: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(honest, tmp_path / "r"))


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_damaged_document_is_named(path: Path, document: str, name: str) -> None:
    write_hostile(path / document, name)
    with pytest.raises(InvalidDataError) as refusal:
        DOCUMENTS[document](path)
    assert str(refusal.value).startswith(str(path / document)), refusal.value
    assert len(str(refusal.value)) < 1000


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("log", LOGS)
def test_a_damaged_log_is_a_warning_that_names_file_and_line(path: Path, log: str, name: str) -> None:
    write_hostile(path / RUN / log, name)
    run = load_run(ResultDirectory(path).run(Path(RUN).name))
    damage = [warning.message for warning in run.warnings if warning.code == DAMAGED_LINE]
    assert run.is_damaged == bool(damage) == (name not in BLANK)
    assert all(message.startswith(f"{path / RUN / log}:1: ") and len(message) < 1000 for message in damage), damage


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dur_ns", -5),
        ("dur_ns", 1 << 62),
        ("num_seqs", -7),
        ("num_seqs", 1 << 53),
        ("start_ns", (1 << 62) + 1),
        ("sections_ns", {"sample": -1}),
        ("accepted_by_position", [1] * 257),
        ("sections_ns", {f"s{i}": 1 for i in range(257)}),
    ],
)
def test_an_impossible_step_is_a_damaged_line_with_field_and_value(path: Path, field: str, value: object) -> None:
    log = path / RUN / "steps.jsonl"
    wrong = msgspec.to_builtins(GOOD) | {field: value}
    log.write_bytes(encode(GOOD) + b"\n" + encode(wrong) + b"\n" + encode(GOOD) + b"\n")
    run = load_run(ResultDirectory(path).run(Path(RUN).name))
    assert len(run.columns) == 1
    (damage,) = run.damage
    beginning = msgspec.json.encode(value).decode().replace(":", ": ").replace(",", ", ")[:20]
    assert damage.startswith(f"{log}:2: {field} is {beginning}")


def test_a_log_with_ever_new_sections_ends_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "steps.jsonl"
    with log.open("wb") as file:
        for number in range(40):
            sections = {f"s{number}-{i}": 1 for i in range(100)}
            file.write(encode(msgspec.structs.replace(GOOD, sections_ns=sections)) + b"\n")
    monkeypatch.setattr(files, "_BLOCK_BYTES", 1)
    *_, damage = read_steps(log, within=tmp_path)
    assert "different sections" in str(damage)
    assert str(damage).startswith(f"{log}:11: ")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"done_ns": 1}, "done_ns is 1, before sent_ns"),
        ({"sent_ns": 1 << 60, "done_ns": 1 << 61}, "chunk_ns begins with"),
        ({"prompt_tokens": -1}, "prompt_tokens is -1: Expected `int` >= 0"),
        ({"scheduled_ns": 1 << 63}, "scheduled_ns is 9223372036854775808"),
    ],
)
def test_an_impossible_request_is_a_damaged_line(path: Path, changes: dict[str, int], problem: str) -> None:
    results = ResultDirectory(path)
    edit_requests(results, Path(RUN).name, lambda request: msgspec.structs.replace(request, **changes))
    run = load_run(results.run(Path(RUN).name))
    (damage,) = run.damage
    assert damage.startswith(f"{path / RUN / 'requests.jsonl'}:1: ")
    assert problem in damage


@pytest.mark.parametrize("name", ["chunk_ns", "chunk_late_ns", "chunk_tokens", "chunk_chars"])
@pytest.mark.parametrize("number", [-(1 << 62) - 1, 1 << 63])
def test_numbers_of_chunks_that_cannot_be_are_a_damaged_line(path: Path, name: str, number: int) -> None:
    def change(request):
        choices = tuple(
            msgspec.structs.replace(choice, **{name: (number,) * len(choice.chunk_ns)})
            for choice in request.choices
        )
        return msgspec.structs.replace(request, choices=choices, sent_ns=None, done_ns=None)

    results = ResultDirectory(path)
    edit_requests(results, Path(RUN).name, change)
    run = load_run(results.run(Path(RUN).name))
    assert "requests.jsonl:1: " in run.damage[0]
    assert f"$.choices[0].{name}[" in run.damage[0] or "Integer" in run.damage[0]


def test_chunks_that_arrive_before_the_one_before_are_a_damaged_line(path: Path) -> None:
    def reverse(request):
        choices = tuple(
            msgspec.structs.replace(choice, chunk_ns=tuple(reversed(choice.chunk_ns))) for choice in request.choices
        )
        return msgspec.structs.replace(request, choices=choices, sent_ns=None, done_ns=None)

    results = ResultDirectory(path)
    edit_requests(results, Path(RUN).name, reverse)
    run = load_run(results.run(Path(RUN).name))
    assert "chunk_ns has" in run.damage[0]


def test_list_shows_damaged_directories_among_the_others(path: Path) -> None:
    for number, name in enumerate(HOSTILE):
        for document in ("manifest.json", f"{RUN}/run.json", "plan.json"):
            copy = path.parent / f"{number:02d}-{document.replace('/', '-')}"
            shutil.copytree(path, copy)
            write_hostile(copy / document, name)
    entries = {Path(entry["path"]).name: entry for entry in list_directories(path.parent)}
    assert len(entries) == 1 + 3 * len(HOSTILE)
    honest = entries.pop("r")
    assert (honest["state"], honest["problem"], honest["damage"]) == ("done", None, None)
    for name, entry in entries.items():
        assert entry["state"] == "damaged", name
        assert f"{entry['path']}/" in (entry["problem"] or entry["damage"] or ""), name


@pytest.mark.parametrize("document", ["manifest.json", f"{RUN}/run.json"])
@pytest.mark.parametrize("name", ["invalid UTF-8", "nested lists"])
def test_commands_name_the_damaged_document(path: Path, document: str, name: str) -> None:
    write_hostile(path / document, name)
    listed = benchctl("list", path.parent)
    assert listed.returncode == 0
    assert "damaged" in listed.stdout
    for command in (("show", path), ("compare", path, path), ("verify", path)):
        done = benchctl(*command)
        assert "Traceback" not in done.stderr, done.stderr
        if command[0] != "verify":
            assert done.returncode == InvalidDataError.exit_code, done.stderr
            assert document in done.stderr.replace("\n", ""), done.stderr


def test_an_unreadable_directory_is_listed_as_such(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(path, path.parent / "locked")

    def refuse(directory: Path) -> ResultDirectory:
        if directory.name == "locked":
            raise PermissionError(13, "Permission denied", str(directory))
        return ResultDirectory(directory)

    monkeypatch.setattr("benchctl.report.export.open_results", refuse)  # the tests may run as root
    readable, locked = list_directories(path.parent)
    assert readable["problem"] is None
    assert locked["problem"] == f"{locked['path']} cannot be read: Permission denied; correct its permissions"


@pytest.mark.parametrize("name", HOSTILE)
def test_damaged_files_of_a_store_do_not_count(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PEAKS.variable, str(tmp_path))
    monkeypatch.setenv("BENCHCTL_DURATIONS_DIR", str(tmp_path))
    peaks = cpu_peaks(host=platform.node())
    write_hostile(tmp_path / "key" / "20260101-aaaa.json", name)
    write_hostile(tmp_path / "sim.jsonl", name)
    assert machine_peaks(()) is None
    assert stored_durations("sim") == ()
    (tmp_path / "key" / "20250101-aaaa.json").touch()
    write_json_atomic(tmp_path / "key" / "20250101-aaaa.json", peaks)
    assert machine_peaks(()) == peaks


def test_numbers_as_text_and_other_types_are_refused_by_field(path: Path) -> None:
    document = msgspec.json.decode((path / "manifest.json").read_bytes())
    for field in document:
        for value in ("text", -1, 1e999, None, [], {"a": [None]}, 10**30, True):
            (path / "manifest.json").write_bytes(msgspec.json.encode(document | {field: value}))
            refusal = refusal_of(lambda: ResultDirectory(path).manifest())
            assert not refusal or refusal.startswith(str(path / "manifest.json")), refusal
    (path / "manifest.json").write_bytes(msgspec.json.encode(document | {"blocks": -2}))
    with pytest.raises(RecordError, match=r"manifest.json: blocks is -2: Expected `int` >= 0"):
        ResultDirectory(path).manifest()
