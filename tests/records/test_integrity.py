"""What was altered, copied or mixed up since it was measured is noticed, and what was not is left in peace."""

import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from support.cli import in_process
from support.results.builders import GUIDED, edit_manifest, edit_run, write_results

from benchctl.analysis.compare.compare import CompareOptions, compare_sides
from benchctl.analysis.compare.result import Comparison
from benchctl.analysis.experiment.pairing import parse_side
from benchctl.errors import AlteredError, NotComparableError, RecordError
from benchctl.measure.directory import Origin, reopen_experiment
from benchctl.measure.experiment import MeasureRun, create_experiment, run_experiment
from benchctl.measure.run import Listener, measure_run
from benchctl.measure.virtual import simulate_run
from benchctl.profile.load import load_profile
from benchctl.records.directory import ResultDirectory
from benchctl.records.integrity import (
    DIGESTS_FILE,
    FILE_MEASUREMENTS,
    begin_digests,
    digest_of,
    read_digests,
    verify_directory,
)
from benchctl.records.record import PlannedRun, RunRecord
from benchctl.workload.prepare import prepare_requests

EXAMPLE = Path(__file__).parents[1] / "fixtures" / "example-without-digests"
QUICK = (
    "engine.options.time_scale=200.0",
    "workload.num_prompts=2",
    "workload.output_len=8",
    "telemetry.host_hz=0",
)
SIX = ({"baseline": 1.0, "guided": 1.1},) * 6
OTHER_DIGITS = bytes.maketrans(b"45", b"54")
Ended = Callable[[PlannedRun, RunRecord], None]


def nothing(*_: object) -> None:
    """For a listener that does nothing."""


def listener(ended: Ended = nothing) -> Listener:
    return Listener(on_run_start=nothing, on_request_end=nothing, on_run_end=ended, on_log_line=nothing)


def begun_with(root: Path, ended: Ended = nothing, measure: MeasureRun = measure_run) -> ResultDirectory:
    """Two blocks of a baseline and a guided server, measured on the simulator until ``ended`` ends it."""
    profile = load_profile("ci-smoke", engine="sim-exact", overrides=[*QUICK, "seed=4"])
    prepared = prepare_requests(profile)
    results = create_experiment(profile, prepared, Origin(output_root=root, label=None, argv=("test",)))
    with suppress(KeyboardInterrupt):
        run_experiment(results, profile, prepared.requests, listener(ended), measure)
    return results


@pytest.fixture(name="measured", scope="module")
def _measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return begun_with(tmp_path_factory.mktemp("measured")).path


@pytest.fixture(name="copy")
def _copy(measured: Path, tmp_path: Path) -> ResultDirectory:
    """A copy whose files have the times of the copying."""
    path = tmp_path / "copy"
    shutil.copytree(measured, path, copy_function=shutil.copyfile)
    return ResultDirectory(path)


@pytest.fixture(name="older")
def _older(tmp_path: Path) -> ResultDirectory:
    """A directory without digests, as older versions wrote them."""
    return write_results(tmp_path / "older", block_factors=SIX)


def run_of(results: ResultDirectory, variant: str) -> str:
    return next(planned.run_id for planned in results.plan().runs if planned.variant == variant)


def compare(path: Path, other: Path | None = None, **options: object) -> Comparison:
    sides = parse_side(f"{path}:baseline"), parse_side(f"{other or path}:guided")
    return compare_sides(*sides, CompareOptions(**options))  # type: ignore[arg-type]


def call(*arguments: object, code: int = 0) -> str:
    actual, out, err = in_process(*arguments)
    assert actual == code, out + err
    return out


def codes(comparison: Comparison) -> set[str]:
    return {warning.code for warning in comparison.warnings}


def test_what_was_measured_is_intact_and_each_file_has_a_digest(measured: Path) -> None:
    results = ResultDirectory(measured)
    for directory in results.runs():
        digests = directory.read().files
        assert {"requests.jsonl", "steps.jsonl", "steps.raw.jsonl", "server.log", "client.jsonl"} <= digests.keys()
        assert digests["steps.jsonl"] == digest_of(directory.step_log)
    verified = verify_directory(measured, is_fresh=True)
    assert (verified.alterations, verified.unrecorded, verified.hashed_bytes > 0) == ((), (), True)
    assert verify_directory(measured).hashed_bytes == 0, "sizes and times are those that were recorded"
    assert not codes(compare(measured)) & {"altered-file", "missing-file"}


def add_line_feed(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


def exchange_digits(path: Path) -> None:
    path.write_bytes(path.read_bytes().translate(OTHER_DIGITS))


def test_files_that_were_edited_are_named_and_compared_only_with_leave(
    copy: ResultDirectory, measured: Path
) -> None:
    guided = run_of(copy, "guided")
    for file, edit, problem in (
        (f"runs/{guided}/steps.jsonl", exchange_digits, "has other content than when it was recorded"),
        (f"runs/{guided}/steps.jsonl", add_line_feed, r"has [\d,]+ bytes and had [\d,]+ when it was recorded"),
        (f"runs/{guided}/run.json", lambda _: edit_run(copy, guided, position=7), "has other content"),
        (f"runs/{guided}/run.json", lambda _: edit_run(copy, guided, engine_version="edited"), "engine_version: "),
        ("plan.json", add_line_feed, "when it was recorded"),
        ("requests.jsonl", add_line_feed, "when it was recorded"),
    ):
        edit(copy.path / file)
        with pytest.raises(AlteredError, match=rf"(?s){re.escape(file)}.*{problem}") as refused:
            compare(copy.path)
        assert (refused.value.exit_code, "--allow-altered" in str(refused.value)) == (4, True)
        assert "altered-file" in codes(compare(copy.path, allow_altered=True, allow=("engine_version",)))
        shutil.copyfile(measured / file, copy.path / file)


def edit_runs(results: ResultDirectory, change: Callable[[PlannedRun], dict[str, object]]) -> None:
    for planned in results.plan().runs:
        edit_run(results, planned.run_id, **change(planned))


def differences_of(path: Path) -> tuple[str, ...]:
    """The differences for which a comparison is refused."""
    with pytest.raises(NotComparableError) as refused:
        compare(path)
    return refused.value.differences


def test_versions_and_machines_that_differ_within_an_experiment_are_differences_that_can_be_declared(
    older: ResultDirectory,
) -> None:
    edit_run(older, GUIDED, engine_version="2")
    assert compare(older.path).verdict == "regression", "the version of the others is unknown"
    edit_runs(older, lambda run: {"engine_version": "2" if run.run_id == GUIDED else "1"})
    assert differences_of(older.path) == ('engine_version: "1" against "2" or "1"',)
    edit_runs(older, lambda run: {"engine_version": "2" if run.variant == "guided" else "1"})
    assert differences_of(older.path) == ('engine_version: "1" against "2"',)
    assert 'engine_version: "1" against "2"' in map(str, compare(older.path, allow=("engine_version",)).allowed)
    edit_runs(older, lambda run: {"engine_version": None, "host": "one" if run.block < 3 else "two"})
    assert differences_of(older.path) == ('host: "one" or "two" against "one" or "two"',)
    assert compare(older.path, allow=("host",)).verdict == "regression"


def test_a_version_that_servers_tell_themselves_is_told_once_and_allowed_by_both_names(
    older: ResultDirectory,
) -> None:
    for planned in older.plan().runs:
        version = "2" if planned.variant == "guided" else "1"
        config = older.run(planned.run_id).read().effective_config | {"server.version": version}
        edit_run(older, planned.run_id, engine_version=version, effective_config=config)
    assert differences_of(older.path) == ('server.version: "1" against "2"',)
    for name in ("engine_version", "server.version"):
        differences = map(str, compare(older.path, allow=(name,)).allowed)
        assert [line for line in differences if "version" in line] == ['server.version: "1" against "2"']


def test_files_that_no_number_rests_on_are_told_and_decide_nothing(copy: ResultDirectory) -> None:
    for name, code in (("steps.raw.jsonl", 3), ("server.log", 3), ("prometheus.jsonl", 4)):
        (copy.run(run_of(copy, "guided")).path / name).unlink()
        call("compare", f"{copy.path}:baseline", f"{copy.path}:guided", code=code)
        assert f"{name} is missing" in call("verify", copy.path, code=4)


def test_verify_show_and_list_say_what_was_altered_by_text_json_and_exit_code(copy: ResultDirectory) -> None:
    text, verified = call("verify", copy.path), json.loads(call("verify", copy.path, "--json"))
    assert (verified["intact"], verified["alterations"], verified["unrecorded"]) == (True, [], [])
    assert [each for each in ("is intact", verified["sha256"]) if each not in text] == []
    file = f"runs/{run_of(copy, 'guided')}/run.json"
    edit_run(copy, run_of(copy, "guided"), position=7)
    (alteration,) = json.loads(call("verify", copy.path, "--json", code=4))["alterations"]
    assert (alteration["code"], alteration["file"], alteration["decides"]) == ("altered-file", file, True)
    assert "altered-file" in call("show", copy.path)
    (listed,) = json.loads(call("list", copy.path.parent, "--json"))["results"]
    assert listed["altered"] == f"altered: {file}"
    assert f"altered: {file}" in call("list", copy.path.parent)


def test_verify_believes_no_time_that_was_put_back(measured: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(measured, tmp_path / "copy"))
    log = ResultDirectory(path).run(run_of(ResultDirectory(path), "guided")).step_log
    before = log.stat()
    exchange_digits(log)
    os.utime(log, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert verify_directory(path).alterations == ()
    (alteration,) = verify_directory(path, is_fresh=True).alterations
    assert alteration.file.endswith("/steps.jsonl")


@pytest.mark.usefixtures("without_pictures")
def test_what_was_derived_may_change_or_go_and_verify_names_it_and_files_without_a_digest(
    copy: ResultDirectory,
) -> None:
    call("report", copy.path)
    assert "covered by no digest" not in call("verify", copy.path)
    for name in ("summary.csv", "report.html", f"runs/{run_of(copy, 'guided')}/result.json"):
        (copy.path / name).write_text("edited")
    (copy.path / "notes.txt").write_text("added")
    edit_manifest(copy, state="suspect")
    document = json.loads(call("verify", copy.path, "--json", code=4))
    told = {alteration["file"].rpartition("/")[2]: alteration["decides"] for alteration in document["alterations"]}
    assert told == {"summary.csv": False, "report.html": False, "result.json": False}
    assert document["uncovered"] == ["notes.txt"]
    assert "covered by no digest: notes.txt" in call("verify", copy.path, code=4)
    assert verify_directory(copy.path).alterations == ()
    call("report", copy.path)
    call("verify", copy.path)


@pytest.mark.parametrize("file", FILE_MEASUREMENTS)
def test_a_measurement_that_was_not_on_file_when_the_experiment_began_is_refused_and_named(
    copy: ResultDirectory, file: str
) -> None:
    (copy.path / file).write_text("{}")
    with pytest.raises(AlteredError, match=f"{file} has no digest: it was added after the experiment began"):
        compare(copy.path)
    assert f"altered-file: {file} has no digest" in call("verify", copy.path, code=4)
    (copy.path / DIGESTS_FILE).unlink()
    begin_digests(copy)
    assert verify_directory(copy.path, is_fresh=True).alterations == ()


def test_what_says_what_was_measured_is_protected_itself(copy: ResultDirectory) -> None:
    edit_manifest(copy, seed=99)
    assert [alteration.file for alteration in verify_directory(copy.path).alterations] == ["manifest.json"]
    edit_manifest(copy, seed=4)
    (copy.path / DIGESTS_FILE).write_text("{")
    (alteration,) = verify_directory(copy.path).alterations
    assert (alteration.file, "cannot be read" in alteration.what) == (DIGESTS_FILE, True)
    (copy.path / DIGESTS_FILE).unlink()
    assert [alteration.file for alteration in verify_directory(copy.path).alterations] == [DIGESTS_FILE]


def test_older_directories_open_without_noise_and_verify_says_what_it_cannot_know() -> None:
    unknown = "was written by benchctl 0.1.0 without digests, so that nothing can be verified"
    assert unknown in call("verify", EXAMPLE)
    assert verify_directory(EXAMPLE).alterations == ()
    assert [entry["altered"] for entry in json.loads(call("list", EXAMPLE, "--json"))["results"]] == [None]


@pytest.fixture(name="interrupted", scope="module")
def _interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment that was interrupted after its first run, and whose runs are simulated in virtual time."""

    def interrupt(_planned: PlannedRun, _record: RunRecord) -> None:
        raise KeyboardInterrupt

    return begun_with(tmp_path_factory.mktemp("begun"), interrupt, simulate_run).path


@pytest.fixture(name="begun")
def _begun(interrupted: Path, tmp_path: Path) -> ResultDirectory:
    return ResultDirectory(Path(shutil.copytree(interrupted, tmp_path / "begun")))


def test_a_resumed_run_is_recorded_anew_and_its_earlier_files_are_nobodys_concern(begun: ResultDirectory) -> None:
    first = begun.plan().runs[0].run_id
    edit_run(begun, first, state="suspect")
    assert [change.file for change in verify_directory(begun.path).alterations] == [f"runs/{first}/run.json"]
    reopened = reopen_experiment(begun.path, None)
    assert run_experiment(begun, reopened.profile, reopened.requests, listener(), simulate_run).num_done == 4
    assert begun.run(first).read().attempt == 2
    verified = verify_directory(begun.path, is_fresh=True)
    assert (verified.alterations, verified.unrecorded) == ((), ())


def test_an_experiment_goes_on_in_the_order_that_is_stored_and_only_where_nobody_changed_it(
    begun: ResultDirectory,
) -> None:
    second, third = (planned.run_id for planned in begun.plan().runs[1:3])
    content = (begun.path / "plan.json").read_bytes()
    (begun.path / "plan.json").write_bytes(content.replace(second.encode(), b"001-b0-other"))
    with pytest.raises(RecordError, match=r"plan\.json was changed since the experiment began"):
        reopen_experiment(begun.path, None)
    (begun.path / "plan.json").write_bytes(content)
    (begun.path / DIGESTS_FILE).unlink()  # as an older version left it, whose plans had other orders
    plan = begun.plan()
    runs = tuple(msgspec.structs.replace(run, position=1 - run.position) if run.block else run for run in plan.runs)
    begun.write_plan(msgspec.structs.replace(plan, runs=(*runs[:2], runs[3], runs[2])))
    reopened = reopen_experiment(begun.path, None)
    ended: list[str] = []
    told = listener(lambda run, _: ended.append(run.run_id))
    run_experiment(begun, reopened.profile, reopened.requests, told, simulate_run)
    assert ended == [second, runs[3].run_id, third]
    assert begun.run(third).read().position == runs[2].position


def test_while_a_run_goes_on_nothing_is_recorded_of_its_end(begun: ResultDirectory) -> None:
    first, second = (planned.run_id for planned in begun.plan().runs[:2])
    digests = read_digests(begun.path)
    names = {f"runs/{run_id}/run.json": run_id == first for run_id in (first, second)}
    assert {name: name in digests.files for name in names} == names
    planned = msgspec.structs.asdict(begun.plan().runs[1])
    begun.run(second).write(msgspec.structs.replace(begun.run(first).read(), **planned, state="running", files={}))
    verified = verify_directory(begun.path)
    assert (verified.alterations, verified.unrecorded) == ((), (second,))
