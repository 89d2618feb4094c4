"""What was altered, copied or mixed up since it was measured is noticed, and what was not is left in peace."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import typer.testing
from support.results.builders import edit_manifest, edit_run, edit_steps, write_results

from benchctl.analysis.compare.compare import CompareOptions, compare_sides
from benchctl.analysis.compare.result import Comparison
from benchctl.analysis.experiment.pairing import parse_side
from benchctl.cli.app import app
from benchctl.errors import AlteredError, NotComparableError, RecordError
from benchctl.measure.directory import Origin, reopen_experiment
from benchctl.measure.experiment import Listener, create_experiment, run_experiment
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
BASELINE, GUIDED = "000-b0-baseline", "001-b0-guided-top_k5"
OTHER_DIGITS = bytes.maketrans(b"45", b"54")
Ended = Callable[[PlannedRun, RunRecord], None]


def listener(ended: Ended = lambda _planned, _record: None) -> Listener:
    return Listener(
        on_run_start=lambda _planned, _number: None,
        on_request_end=lambda _number: None,
        on_run_end=ended,
        on_log_line=lambda _line: None,
    )


@pytest.fixture(name="measured", scope="module")
def _measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two blocks of a baseline and a guided server, measured on the simulator."""
    profile = load_profile("ci-smoke", engine="sim-exact", overrides=[*QUICK, "seed=4"])
    prepared = prepare_requests(profile)
    origin = Origin(output_root=tmp_path_factory.mktemp("measured"), label=None, argv=("test",))
    results = create_experiment(profile, prepared, origin)
    assert run_experiment(results, profile, prepared.requests, listener()).num_done == 4
    return results.path


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


def call(*arguments: str) -> "typer.testing.Result":
    return typer.testing.CliRunner().invoke(app, list(arguments))


def codes(comparison: Comparison) -> set[str]:
    return {warning.code for warning in comparison.warnings}


def add_copies(results: ResultDirectory, times: int) -> None:
    """Let the blocks of a directory be in it ``times`` times, with all renumbered that says which they are."""
    plan, blocks = results.plan(), results.manifest().blocks
    runs = list(plan.runs)
    for again in range(1, times):
        for planned in plan.runs:
            index, block = planned.index + again * len(plan.runs), planned.block + again * blocks
            run_id = f"{index:03d}-b{block}{planned.run_id[planned.run_id.index('-', 4) :]}"
            copy = msgspec.structs.replace(planned, index=index, block=block, run_id=run_id)
            shutil.copytree(results.run(planned.run_id).path, results.run(run_id).path)
            record = results.run(run_id).read()
            results.run(run_id).write(msgspec.structs.replace(record, **msgspec.structs.asdict(copy)))
            runs.append(copy)
    results.write_plan(msgspec.structs.replace(plan, runs=tuple(runs)))
    edit_manifest(results, blocks=blocks * times)


def test_what_was_measured_is_intact_and_each_file_has_a_digest(measured: Path) -> None:
    results = ResultDirectory(measured)
    for planned in results.plan().runs:
        directory = results.run(planned.run_id)
        files = directory.read().files
        assert {"requests.jsonl", "steps.jsonl", "steps.raw.jsonl", "server.log", "client.jsonl"} <= files.keys()
        assert files["steps.jsonl"] == digest_of(directory.step_log)
    verified = verify_directory(measured, is_fresh=True)
    assert verified.alterations == ()
    assert verified.unrecorded == ()
    assert verified.hashed_bytes > 0
    assert verify_directory(measured).hashed_bytes == 0, "sizes and times are those that were recorded"
    assert not codes(compare(measured)) & {"altered-file", "missing-file"}


@pytest.mark.parametrize("share", [0.5, 1.5])
def test_a_step_log_that_was_halved_or_multiplied_is_named(copy: ResultDirectory, share: float) -> None:
    edit_steps(copy, run_of(copy, "guided"), lambda s: msgspec.structs.replace(s, dur_ns=round(s.dur_ns * share)))
    with pytest.raises(AlteredError, match=rf"{run_of(copy, 'guided')}/steps\.jsonl") as refused:
        compare(copy.path)
    assert refused.value.exit_code == 4
    assert "--allow-altered" in str(refused.value)
    assert "altered-file" in codes(compare(copy.path, allow_altered=True))


def test_a_log_of_the_same_length_is_named_too(copy: ResultDirectory) -> None:
    path = copy.run(run_of(copy, "guided")).step_log
    path.write_bytes(path.read_bytes().translate(OTHER_DIGITS))
    with pytest.raises(AlteredError, match="has other content than when it was recorded"):
        compare(copy.path)


def test_blocks_that_were_added_by_hand_are_named(copy: ResultDirectory) -> None:
    add_copies(copy, 4)
    with pytest.raises(AlteredError, match=r"plan\.json has [\d,]+ bytes and had [\d,]+ when it was recorded"):
        compare(copy.path)
    assert "altered-file" in codes(
        compare(copy.path, allow_altered=True, allow=("argv.--step-log", "argv.--config"))
    )


def test_positions_that_were_edited_are_named(copy: ResultDirectory) -> None:
    edit_run(copy, run_of(copy, "guided"), position=7)
    with pytest.raises(AlteredError, match=r"run\.json has other content than when it was recorded"):
        compare(copy.path)


def test_a_request_set_that_was_edited_is_named(copy: ResultDirectory) -> None:
    path = copy.path / "requests.jsonl"
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(AlteredError, match=r"requests\.jsonl has [\d,]+ bytes and had [\d,]+ when it was recorded"):
        compare(copy.path)


def test_another_engine_version_in_one_arm_is_a_difference_that_can_be_declared(older: ResultDirectory) -> None:
    for planned in older.plan().runs:
        edit_run(older, planned.run_id, engine_version="2" if planned.variant == "guided" else "1")
    with pytest.raises(NotComparableError) as refused:
        compare(older.path)
    assert refused.value.differences == ('engine_version: "1" against "2"',)
    allowed = compare(older.path, allow=("engine_version",)).allowed
    assert 'engine_version: "1" against "2"' in map(str, allowed)


def test_a_version_that_was_edited_is_named_beside_the_file(copy: ResultDirectory) -> None:
    edit_run(copy, run_of(copy, "guided"), engine_version="edited")
    with pytest.raises(AlteredError) as refused:
        compare(copy.path)
    assert f"runs/{run_of(copy, 'guided')}/run.json" in str(refused.value)
    assert "engine_version: " in str(refused.value)


def test_an_engine_version_that_changes_within_an_arm_is_a_difference(older: ResultDirectory) -> None:
    edit_run(older, GUIDED, engine_version="2")
    assert compare(older.path).verdict == "regression"
    for planned in older.plan().runs[2:]:
        edit_run(older, planned.run_id, engine_version="1")
    with pytest.raises(NotComparableError, match='engine_version: "1" against "2" or "1"'):
        compare(older.path)


def test_a_version_that_servers_tell_themselves_is_told_once_and_allowed_by_both_names(
    older: ResultDirectory,
) -> None:
    for planned in older.plan().runs:
        version = "2" if planned.variant == "guided" else "1"
        config = older.run(planned.run_id).read().effective_config | {"server.version": version}
        edit_run(older, planned.run_id, engine_version=version, effective_config=config)
    with pytest.raises(NotComparableError) as refused:
        compare(older.path)
    assert refused.value.differences == ('server.version: "1" against "2"',)
    for name in ("engine_version", "server.version"):
        differences = [str(difference) for difference in compare(older.path, allow=(name,)).allowed]
        assert [line for line in differences if "version" in line] == ['server.version: "1" against "2"']


def test_an_experiment_that_went_on_on_another_machine_is_not_comparable_without_leave(
    older: ResultDirectory,
) -> None:
    for planned in older.plan().runs:
        edit_run(older, planned.run_id, host="one" if planned.block < 3 else "two")
    with pytest.raises(NotComparableError, match='host: "one" or "two" against "one" or "two"'):
        compare(older.path)
    assert compare(older.path, allow=("host",)).verdict == "regression"


def test_two_experiments_on_two_machines_are_doubted_as_ever_and_not_refused(
    tmp_path: Path, older: ResultDirectory
) -> None:
    other = write_results(tmp_path / "other", block_factors=SIX)
    edit_manifest(other, created_at="2026-02-01T00:00:00Z")
    for results, name in ((older, "one"), (other, "two")):
        for planned in results.plan().runs:
            edit_run(results, planned.run_id, host=name, engine_version=name)
    assert "machines-differ" in codes(compare(older.path, other.path))


@pytest.mark.parametrize(
    ("name", "exit_code"), [("prometheus.jsonl", 4), ("server.log", 3), ("steps.raw.jsonl", 3)]
)
def test_files_that_no_number_rests_on_are_told_and_decide_nothing(
    copy: ResultDirectory, name: str, exit_code: int
) -> None:
    (copy.run(run_of(copy, "guided")).path / name).unlink()
    compared = call("compare", f"{copy.path}:baseline", f"{copy.path}:guided", "--json")
    assert compared.exit_code == exit_code or getattr(compared.exception, "exit_code", None) == exit_code
    assert call("verify", str(copy.path)).exit_code == 4
    assert f"{name} is missing" in call("verify", str(copy.path)).stdout


def test_show_and_list_say_what_was_altered(copy: ResultDirectory) -> None:
    edit_run(copy, run_of(copy, "guided"), position=7)
    result = call("show", str(copy.path))
    assert result.exit_code == 0
    assert "altered-file" in result.stdout
    listed = json.loads(call("list", str(copy.path.parent), "--json").stdout)["results"][0]
    assert listed["altered"] == f"altered: runs/{run_of(copy, 'guided')}/run.json"
    assert "altered: runs/" in call("list", str(copy.path.parent)).stdout


def test_verify_reads_everything_and_says_it_by_text_json_and_exit_code(copy: ResultDirectory) -> None:
    intact = call("verify", str(copy.path))
    assert (intact.exit_code, "is intact" in intact.stdout) == (0, True)
    document = json.loads(call("verify", str(copy.path), "--json").stdout)
    assert (document["intact"], document["alterations"], document["unrecorded"]) == (True, [], [])
    assert document["sha256"] in intact.stdout
    (copy.path / "plan.json").write_bytes((copy.path / "plan.json").read_bytes() + b"\n")
    altered = call("verify", str(copy.path), "--json")
    assert altered.exit_code == 4
    (alteration,) = json.loads(altered.stdout)["alterations"]
    assert (alteration["code"], alteration["file"], alteration["decides"]) == ("altered-file", "plan.json", True)


def test_verify_believes_no_time_that_was_put_back(measured: Path, tmp_path: Path) -> None:
    path = tmp_path / "copy"
    shutil.copytree(measured, path)
    log = ResultDirectory(path).run(run_of(ResultDirectory(path), "guided")).step_log
    before = log.stat()
    log.write_bytes(log.read_bytes().translate(OTHER_DIGITS))
    os.utime(log, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert verify_directory(path).alterations == ()
    (alteration,) = verify_directory(path, is_fresh=True).alterations
    assert alteration.file.endswith("/steps.jsonl")


def test_what_was_derived_may_change_or_go(copy: ResultDirectory) -> None:
    assert call("report", str(copy.path)).exit_code == 0
    for name in ("summary.csv", "report.html"):
        (copy.path / name).write_text("edited")
    for path in copy.path.glob("runs/*/result.json"):
        path.unlink()
    (copy.path / "noise.json").unlink(missing_ok=True)
    edit_manifest(copy, state="suspect")
    assert verify_directory(copy.path).alterations == ()


@pytest.mark.parametrize("file", FILE_MEASUREMENTS)
def test_a_measurement_that_was_not_on_file_when_the_experiment_began_is_refused_and_named(
    copy: ResultDirectory, file: str
) -> None:
    (copy.path / file).write_text("{}")
    with pytest.raises(AlteredError, match=f"{file} has no digest: it was added after the experiment began"):
        compare(copy.path)
    verified = call("verify", str(copy.path))
    assert verified.exit_code == 4
    assert f"altered-file: {file} has no digest" in verified.stdout
    (copy.path / DIGESTS_FILE).unlink()
    begin_digests(copy)
    assert verify_directory(copy.path, is_fresh=True).alterations == ()


def test_verify_names_files_of_a_report_that_were_edited_and_files_without_a_digest(copy: ResultDirectory) -> None:
    assert call("report", str(copy.path)).exit_code == 0
    intact = call("verify", str(copy.path))
    assert (intact.exit_code, "covered by no digest" in intact.stdout) == (0, False)
    for name in ("summary.csv", "report.html", f"runs/{run_of(copy, 'guided')}/result.json"):
        (copy.path / name).write_text("edited")
    (copy.path / "notes.txt").write_text("added")
    altered = call("verify", str(copy.path), "--json")
    assert altered.exit_code == 4
    document = json.loads(altered.stdout)
    told = {alteration["file"].rpartition("/")[2]: alteration["decides"] for alteration in document["alterations"]}
    assert told == {"summary.csv": False, "report.html": False, "result.json": False}
    assert document["uncovered"] == ["notes.txt"]
    assert "covered by no digest: notes.txt" in call("verify", str(copy.path)).stdout
    assert call("report", str(copy.path)).exit_code == 0
    assert call("verify", str(copy.path)).exit_code == 0


@pytest.mark.parametrize("file", ["manifest.json", DIGESTS_FILE])
def test_what_says_what_was_measured_is_protected_itself(copy: ResultDirectory, file: str) -> None:
    if file == DIGESTS_FILE:
        (copy.path / file).unlink()
    else:
        edit_manifest(copy, seed=99)
    assert [alteration.file for alteration in verify_directory(copy.path).alterations] == [file]


def test_digests_that_cannot_be_read_are_an_alteration(copy: ResultDirectory) -> None:
    (copy.path / DIGESTS_FILE).write_text("{")
    (alteration,) = verify_directory(copy.path).alterations
    assert (alteration.file, "cannot be read" in alteration.what) == (DIGESTS_FILE, True)


def test_older_directories_open_without_noise_and_verify_says_what_it_cannot_know() -> None:
    result = call("verify", str(EXAMPLE))
    assert result.exit_code == 0
    assert "was written by benchctl 0.1.0 without digests, so that nothing can be verified" in result.stdout
    assert verify_directory(EXAMPLE).alterations == ()
    listed = json.loads(call("list", str(EXAMPLE), "--json").stdout)["results"]
    assert [entry["altered"] for entry in listed] == [None]


@pytest.fixture(name="begun")
def _begun(tmp_path: Path) -> ResultDirectory:
    """An experiment that was interrupted after its first run."""
    profile = load_profile("ci-smoke", engine="sim-exact", overrides=[*QUICK])
    prepared = prepare_requests(profile)
    results = create_experiment(profile, prepared, Origin(output_root=tmp_path, label=None, argv=("test",)))

    def interrupt(_planned: PlannedRun, _record: RunRecord) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_experiment(results, profile, prepared.requests, listener(interrupt))
    return results


def test_a_resumed_run_is_recorded_anew_and_its_earlier_files_are_nobodys_concern(begun: ResultDirectory) -> None:
    first = begun.plan().runs[0].run_id
    edit_run(begun, first, state="suspect")
    assert [change.file for change in verify_directory(begun.path).alterations] == [f"runs/{first}/run.json"]
    reopened = reopen_experiment(begun.path, None)
    assert run_experiment(begun, reopened.profile, reopened.requests, listener()).num_done == 4
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
    run_experiment(begun, reopened.profile, reopened.requests, listener())
    began = {run_id: begun.run(run_id).read().times.launch_ns or 0 for run_id in (third, runs[3].run_id)}
    assert began[runs[3].run_id] < began[third]
    assert begun.run(third).read().position == runs[2].position


def test_while_a_run_goes_on_nothing_is_recorded_of_its_end(begun: ResultDirectory) -> None:
    first, second = (planned.run_id for planned in begun.plan().runs[:2])
    digests = read_digests(begun.path)
    assert digests is not None
    assert f"runs/{first}/run.json" in digests.files
    assert f"runs/{second}/run.json" not in digests.files
    record = begun.run(first).read()
    begun.run(second).write(
        msgspec.structs.replace(
            record, **msgspec.structs.asdict(begun.plan().runs[1]), state="running", files={}, times=record.times
        )
    )
    verified = verify_directory(begun.path)
    assert (verified.alterations, verified.unrecorded) == ((), (second,))
