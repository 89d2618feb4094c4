"""Every file of a result directory may hold anything: commands name the file and why, without a traceback."""

import platform
import shutil
from functools import partial
from pathlib import Path

import msgspec
import pytest
from support.hostile_files import HOSTILE, WRONG_VALUES, refusal_of, write_hostile
from support.peaks import cpu_peaks
from support.results.builders import edit_requests, write_results

from benchctl.records import files
from benchctl.records.columns import read_steps
from benchctl.records.directory import ResultDirectory
from benchctl.records.files import encode, write_json_atomic
from benchctl.records.integrity import read_digests
from benchctl.records.loaded import DAMAGED_LINE, load_results, load_run
from benchctl.records.peaks import PEAKS, machine_peaks
from benchctl.records.record import RequestRecord
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


@pytest.fixture(name="path")
def _path(tmp_path: Path) -> Path:
    return write_results(tmp_path / "r", num_requests=2).path


def loaded(path: Path):
    """The run whose files are damaged."""
    return load_run(ResultDirectory(path).run(Path(RUN).name))


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
    log.write_bytes(b"".join(encode(msgspec.structs.replace(GOOD, sections_ns=each)) + b"\n" for each in sections))
    monkeypatch.setattr(files, "_BLOCK_BYTES", 1)
    *_, damage = read_steps(log, within=tmp_path)
    assert "different sections" in str(damage)
    assert str(damage).startswith(f"{log}:11: ")


def test_an_impossible_request_is_a_damaged_line(path: Path) -> None:
    results, log = ResultDirectory(path), path / RUN / "requests.jsonl"
    whole = log.read_bytes()

    def with_numbers(request: RequestRecord, name: str, number: int) -> RequestRecord:
        """Every chunk of the request has this number."""
        choices = tuple(
            msgspec.structs.replace(choice, **{name: (number,) * len(choice.chunk_ns)})
            for choice in request.choices
        )
        return msgspec.structs.replace(request, choices=choices, sent_ns=None, done_ns=None)

    def reversed_chunks(request: RequestRecord) -> RequestRecord:
        choices = tuple(
            msgspec.structs.replace(choice, chunk_ns=tuple(reversed(choice.chunk_ns))) for choice in request.choices
        )
        return msgspec.structs.replace(request, choices=choices, sent_ns=None, done_ns=None)

    replace = msgspec.structs.replace
    cases = [
        (partial(replace, done_ns=1), "done_ns is 1, before sent_ns"),
        (partial(replace, sent_ns=1 << 60, done_ns=1 << 61), "chunk_ns begins with"),
        (partial(replace, prompt_tokens=-1), "prompt_tokens is -1: Expected `int` >= 0"),
        (partial(replace, scheduled_ns=1 << 63), "scheduled_ns is 9223372036854775808"),
        (reversed_chunks, "chunk_ns has"),
    ]
    for name in ("chunk_ns", "chunk_late_ns", "chunk_tokens", "chunk_chars"):
        cases += [(partial(with_numbers, name=name, number=n), "") for n in (-(1 << 62) - 1, 1 << 63)]
    for change, problem in cases:
        edit_requests(results, Path(RUN).name, change)
        damage = loaded(path).damage[0]
        assert damage.startswith(f"{log}:1: "), change
        assert problem in damage
        log.write_bytes(whole)


def test_list_shows_damaged_and_unreadable_directories_among_the_others(path: Path, monkeypatch) -> None:
    for number, name in enumerate([*HOSTILE, "locked"]):
        for document in ("manifest.json", f"{RUN}/run.json", "plan.json") if name in HOSTILE else ("",):
            copy = path.parent / f"{number:02d}-{document.replace('/', '-')}"
            shutil.copytree(path, copy)
            if name in HOSTILE:
                write_hostile(copy / document, name)

    def refuse(directory: Path) -> ResultDirectory:
        if directory == copy:
            raise PermissionError(13, "Permission denied", str(directory))
        return ResultDirectory(directory)

    monkeypatch.setattr("benchctl.report.export.open_results", refuse)  # the tests may run as root
    entries = {Path(entry["path"]): entry for entry in list_directories(path.parent)}
    assert len(entries) == 2 + 3 * len(HOSTILE)
    honest, locked = entries.pop(path), entries.pop(copy)
    assert (honest["state"], honest["problem"], honest["damage"]) == ("done", None, None)
    assert locked["problem"] == f"{locked['path']} cannot be read: Permission denied; correct its permissions"
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
