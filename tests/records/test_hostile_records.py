"""Every file of a result directory may hold anything: commands name the file and why, without a traceback."""

import shutil
from pathlib import Path

import msgspec
import pytest
from support.cli import benchctl
from support.hostile_files import HOSTILE, refusal_of, write_hostile
from support.peaks import cpu_peaks
from support.results.builders import edit_requests, write_results

from benchctl.errors import InvalidDataError, RecordError
from benchctl.records.columns.columns import columns_from, copy_bytes, copy_path, table_of, write_copy
from benchctl.records.columns.step_log import read_step_log
from benchctl.records.directory import ResultDirectory
from benchctl.records.files import encode
from benchctl.records.integrity.digests import digest_of, read_digests
from benchctl.records.loaded import DAMAGED_LINE, ReadLimits, load_results, load_run
from benchctl.records.schema import StepRecord
from benchctl.records.stores.peaks_store import machine_peaks, read_noise
from benchctl.records.stores.stores import read_peaks, stored_durations, write_peaks
from benchctl.report.catalog import list_directories

RUN = "runs/000-b0-baseline"
DOCUMENTS = {
    "manifest.json": lambda path: ResultDirectory(path).manifest(),
    "plan.json": lambda path: ResultDirectory(path).plan(),
    f"{RUN}/run.json": load_results,
    "noise.json": lambda path: read_noise(path / "noise.json"),
    "peaks.json": lambda path: read_peaks(path / "peaks.json"),
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
@pytest.mark.parametrize("few", [0, 1 << 30], ids=["long", "short"])
@pytest.mark.parametrize("log", LOGS)
def test_a_damaged_log_is_a_warning_that_names_file_and_line(path: Path, log: str, few: int, name: str) -> None:
    write_hostile(path / RUN / log, name)
    run = load_run(ResultDirectory(path).run(Path(RUN).name), ReadLimits(kept_steps=few, few_requests=few))
    damage = [warning.message for warning in run.warnings if warning.code == DAMAGED_LINE]
    assert run.is_damaged == bool(damage) == (name not in BLANK)
    assert all(message.startswith(f"{path / RUN / log}:1: ") and len(message) < 1000 for message in damage), damage


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("log", ["steps.jsonl", "requests.jsonl"])
def test_a_damaged_copy_of_a_log_does_not_count(path: Path, log: str, name: str) -> None:
    directory, limits = ResultDirectory(path).run(Path(RUN).name), ReadLimits(kept_steps=0, few_requests=0)
    before = load_run(directory, limits)
    write_hostile(copy_path(path / RUN / log), name)
    after = load_run(directory, limits)
    assert (len(after.requests), len(after.steps)) == (len(before.requests), len(before.steps))
    assert not after.is_damaged


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
@pytest.mark.parametrize("kept_steps", [0, 1 << 30], ids=["columns", "records"])
def test_an_impossible_step_is_a_damaged_line_with_field_and_value(
    path: Path, kept_steps: int, field: str, value: object
) -> None:
    log = path / RUN / "steps.jsonl"
    wrong = msgspec.to_builtins(GOOD) | {field: value}
    log.write_bytes(encode(GOOD) + b"\n" + encode(wrong) + b"\n" + encode(GOOD) + b"\n")
    run = load_run(ResultDirectory(path).run(Path(RUN).name), ReadLimits(kept_steps=kept_steps))
    assert len(run.steps) == 1
    (damage,) = run.damage
    beginning = msgspec.json.encode(value).decode().replace(":", ": ").replace(",", ", ")[:20]
    assert damage.startswith(f"{log}:2: {field} is {beginning}")


@pytest.mark.parametrize(
    ("name", "number"),
    [("dur_ns", -5), ("num_seqs", -7), ("sections_ns.sample", -1), ("phase", 9), ("clock", 9), ("unknown", 1)],
)
def test_a_copy_with_impossible_numbers_does_not_count(tmp_path: Path, name: str, number: int) -> None:
    log = tmp_path / "steps.jsonl"
    log.write_bytes((encode(GOOD) + b"\n") * 3)
    arrays = dict(table_of([GOOD] * 3).arrays)
    arrays[name] = arrays["start_ns"].astype("int32") * 0 + number
    sha256 = digest_of(log, within=tmp_path).sha256
    write_copy(log, copy_bytes(log, arrays, version="3", log_sha256=sha256), within=tmp_path)
    steps, damage = read_step_log(log, block_bytes=1 << 20)
    assert damage is None
    assert steps.columns().dur_ns.tolist() == columns_from([GOOD] * 3).dur_ns.tolist() == [7, 7, 7]


def test_a_log_with_ever_new_sections_ends_before_it_fills_the_memory(tmp_path: Path) -> None:
    log = tmp_path / "steps.jsonl"
    with log.open("wb") as file:
        for number in range(40):
            sections = {f"s{number}-{i}": 1 for i in range(100)}
            file.write(encode(msgspec.structs.replace(GOOD, sections_ns=sections)) + b"\n")
    _, damage = read_step_log(log, block_bytes=1)
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
@pytest.mark.parametrize("few", [0, 1 << 30], ids=["long", "short"])
def test_an_impossible_request_is_a_damaged_line(
    path: Path, few: int, changes: dict[str, int], problem: str
) -> None:
    results = ResultDirectory(path)
    edit_requests(results, Path(RUN).name, lambda request: msgspec.structs.replace(request, **changes))
    run = load_run(results.run(Path(RUN).name), ReadLimits(few_requests=few))
    (damage,) = run.damage
    assert damage.startswith(f"{path / RUN / 'requests.jsonl'}:1: ")
    assert problem in damage


@pytest.mark.parametrize("few", [0, 1 << 30], ids=["long", "short"])
@pytest.mark.parametrize("name", ["chunk_ns", "chunk_late_ns", "chunk_tokens", "chunk_chars"])
@pytest.mark.parametrize("number", [-(1 << 62) - 1, 1 << 63])
def test_numbers_of_chunks_that_cannot_be_are_a_damaged_line(path: Path, few: int, name: str, number: int) -> None:
    def change(request):
        choices = tuple(
            msgspec.structs.replace(choice, **{name: (number,) * len(choice.chunk_ns)})
            for choice in request.choices
        )
        return msgspec.structs.replace(request, choices=choices, sent_ns=None, done_ns=None)

    results = ResultDirectory(path)
    edit_requests(results, Path(RUN).name, change)
    run = load_run(results.run(Path(RUN).name), ReadLimits(few_requests=few))
    assert f"requests.jsonl:1: request 'r00000': {name} has numbers from {number}" in run.damage[0]


@pytest.mark.parametrize("few", [0, 1 << 30], ids=["long", "short"])
def test_chunks_that_arrive_before_the_one_before_are_a_damaged_line(path: Path, few: int) -> None:
    def reverse(request):
        choices = tuple(
            msgspec.structs.replace(choice, chunk_ns=tuple(reversed(choice.chunk_ns))) for choice in request.choices
        )
        return msgspec.structs.replace(request, choices=choices, sent_ns=None, done_ns=None)

    results = ResultDirectory(path)
    edit_requests(results, Path(RUN).name, reverse)
    run = load_run(results.run(Path(RUN).name), ReadLimits(few_requests=few))
    assert "chunk_ns has" in run.damage[0]


def test_list_shows_damaged_directories_among_the_others(path: Path) -> None:
    for number, name in enumerate(HOSTILE):
        for document in ("manifest.json", f"{RUN}/run.json", "plan.json"):
            copy = path.parent / f"{number:02d}-{document.replace('/', '-')}"
            shutil.copytree(path, copy)
            write_hostile(copy / document, name)
    entries = {entry.path.name: entry for entry in list_directories(path.parent)}
    assert len(entries) == 1 + 3 * len(HOSTILE)
    honest = entries.pop("r")
    assert (honest.state, honest.problem, honest.damage) == ("done", None, None)
    for name, entry in entries.items():
        assert entry.state == "damaged", name
        assert f"{entry.path}/" in (entry.problem or entry.damage or ""), name


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

    monkeypatch.setattr("benchctl.report.catalog.open_results", refuse)  # the tests may run as root
    readable, locked = list_directories(path.parent)
    assert readable.problem is None
    assert locked.problem == f"{locked.path} cannot be read: Permission denied; correct its permissions"


@pytest.mark.parametrize("name", HOSTILE)
def test_damaged_files_of_a_store_do_not_count(tmp_path: Path, name: str) -> None:
    write_hostile(tmp_path / "key" / "20260101-aaaa.json", name)
    write_hostile(tmp_path / "sim.jsonl", name)
    assert machine_peaks(tmp_path, (), cpu_peaks().host) is None
    assert stored_durations(tmp_path, "sim") == ()
    (tmp_path / "key" / "20250101-aaaa.json").touch()
    write_peaks(tmp_path / "key" / "20250101-aaaa.json", cpu_peaks())
    assert machine_peaks(tmp_path, (), cpu_peaks().host) == cpu_peaks()


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
