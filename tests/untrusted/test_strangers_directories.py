"""Nothing outside a result directory is read or written because of what a stranger put into it."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.results.builders import PROFILE_YAML, edit_manifest, edit_run, write_results
from support.strangers import KINDS, SECRET, files_with, replace_entry, surround, tree_of, within_seconds
from typer.testing import CliRunner

from benchctl.cli.app import app
from benchctl.errors import BenchctlError, RecordError
from benchctl.measure.directory import begin_attempt, reopen_experiment
from benchctl.profile.load import parse_profile, profile_sha256
from benchctl.records.directory import ResultDirectory
from benchctl.records.integrity import DIGESTS_FILE, begin_digests, digests_of_run, record_run
from benchctl.records.loaded import load_run
from benchctl.untrusted import LINE_BYTES

RUN = "runs/001-b0-guided-top_k5"
COMMANDS = {
    "show": ["show", "{}"],
    "show --json": ["show", "{}", "--json"],
    "compare": ["compare", "{}"],
    "compare of two": ["compare", "{}:baseline", "{}:guided"],
    "list": ["list", "{}/.."],
    "watch": ["watch", "{}", "--once"],
    "verify": ["verify", "{}"],
    "export": ["export", "{}", "--format", "vllm"],
    "report": ["report", "{}"],
}
READ = [
    *("manifest.json", "plan.json", "profile.yaml", "requests.jsonl", "digests.json"),
    *(f"{RUN}/{name}" for name in ("run.json", "requests.jsonl", "steps.jsonl", "prometheus.jsonl", "server.log")),
    RUN,
    "runs",
]
"""Entries that are read."""
COMMON = ["a link to a file like it", "a FIFO"]
NO_DIRECTORY = [kind for kind in KINDS if kind != "a directory"]


@pytest.fixture(scope="module", name="pristine")
def _pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pristine") / "r"
    results = write_results(path, block_factors=[{"baseline": factor, "guided": factor} for factor in (1.0, 1.01)])
    edit_manifest(results, profile_sha256=profile_sha256(parse_profile(PROFILE_YAML, "profile.yaml")))
    begin_digests(results)
    for run in results.runs():
        run.server_log.write_text("a line\n")
        edit_run(results, run.path.name, files=digests_of_run(run))
        record_run(results, run.path.name)
    return path


@pytest.fixture(name="root")
def _root(pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A result directory among files that nobody may touch; reports of it draw no pictures, which take long."""
    monkeypatch.setattr("benchctl.report.export.why_not_drawn", lambda: "not asked for")
    path = Path(shutil.copytree(pristine, tmp_path / "results" / "r"))
    surround(path)
    return path


def restore(root: Path, pristine: Path) -> None:
    shutil.rmtree(root)
    shutil.copytree(pristine, root)


def call(root: Path, command: str) -> tuple[int, str]:
    """Exit code and output of a command, which ends soon and changes and shows nothing outside of ``root``."""
    before = tree_of(root.parent, root)
    with within_seconds(30):
        result = CliRunner().invoke(app, [word.format(root) for word in COMMANDS[command]])
    assert tree_of(root.parent, root) == before, command
    output = result.output
    error, code = result.exception, result.exit_code
    if isinstance(error, BenchctlError):
        output, code = f"{output}{error}", error.exit_code
    elif error is not None and not isinstance(error, SystemExit | OSError):
        raise error
    assert SECRET not in output, command
    return code, output


def refusal_of(root: Path, command: str) -> str:
    """The output of a command that is refused because of what is in the directory."""
    code, output = call(root, command)
    assert code == 4, (command, output)
    return output.replace("\n", " ")


def check_attack(root: Path, entry: str, kind: str, commands: list[str]) -> None:
    """Each command names the entry that is none, or does not need it; none touches what is outside."""
    replace_entry(root, entry, kind)
    for command in commands:
        code, output = call(root, command)
        if code == 4 and command not in {"list", "compare"}:
            assert Path(entry).name in output.replace("\n", ""), (command, entry, kind, output)
        assert code in {0, 3, 4}, (command, entry, kind, output)
    assert files_with(root, SECRET) == []
    if kind in COMMON and entry not in {"digests.json", f"{RUN}/server.log"}:
        refusal_of(root, "show")


ATTACKS = [
    (entry, kind)
    for entry in READ
    for kind in KINDS
    if (entry, kind) not in {(RUN, "a directory"), ("runs", "a directory")}
]
ALWAYS = {(entry, kind) for i, entry in enumerate(READ) for kind in (COMMON[0], list(KINDS)[i % len(KINDS)])}
"""Each entry with two kinds and each kind with one entry, others every night."""
FEW = ["show", "compare of two", "verify", "export"]


@pytest.mark.slow
@pytest.mark.parametrize("attacks", ["sample", pytest.param("all", marks=pytest.mark.nightly)])
def test_no_kind_of_entry_leads_out_of_the_directory(root: Path, pristine: Path, attacks: str) -> None:
    for attack in ATTACKS:
        if attacks == "all" or attack in ALWAYS:
            commands = [name for name in COMMANDS if name != "report"] if attack[1] == COMMON[0] else FEW
            check_attack(root, *attack, list(COMMANDS) if attacks == "all" else commands)
            restore(root, pristine)


def test_no_experiment_continues_through_an_entry_that_leads_elsewhere(root: Path, pristine: Path) -> None:
    reopen_experiment(root, None)
    for entry in (name for name in READ if name.count("/") < 2):
        for kind in COMMON:
            replace_entry(root, entry, kind)
            before = tree_of(root.parent, root)
            with within_seconds(10), pytest.raises(RecordError, match=Path(entry).name):
                reopen_experiment(root, None)
            assert tree_of(root.parent, root) == before, (entry, kind)
            restore(root, pristine)


def test_a_repeated_run_moves_aside_what_it_finds_and_follows_none_of_it(root: Path, pristine: Path) -> None:
    for kind in KINDS:
        for name in ("run.json", "steps.jsonl", "server.log"):
            replace_entry(root, f"{RUN}/{name}", kind)
        (root / RUN / "attempt-1").symlink_to(root.parent / "outside" / "folder")
        before, run = tree_of(root.parent, root), ResultDirectory(root).run(Path(RUN).name)
        with within_seconds(10):
            assert begin_attempt(run) == 3
        assert sorted(path.name for path in run.path.iterdir()) == ["attempt-1", "attempt-2"], kind
        assert tree_of(root.parent, root) == before, kind
        restore(root, pristine)


def test_no_folder_of_a_report_or_an_export_is_a_link(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # with pictures
    for entry, command, kinds in (("plots", "report", COMMON[:1]), ("export", "export", NO_DIRECTORY)):
        (root.parent / "outside" / "copy" / entry).mkdir()
        for kind in kinds:
            replace_entry(root, entry, kind)
            assert f"{root.name}/{entry} is " in refusal_of(root, command), kind


def test_a_written_file_replaces_the_entry_and_not_what_it_leads_to(root: Path, pristine: Path) -> None:
    written = ["report.html", "summary.csv", f"{RUN}/result.json"]
    names = [*written, ".report.html.partial", f"{RUN}/steps.safetensors"]
    for name in names:
        (root.parent / "outside" / "copy" / name).write_text(SECRET)
    for kind in NO_DIRECTORY:
        for name in names:
            replace_entry(root, name, kind)
        code, output = call(root, "report")
        assert code == 0, (kind, output)
        assert all((root / name).is_file() and not (root / name).is_symlink() for name in written), kind
        assert files_with(root, SECRET) == []
        restore(root, pristine)
    (root / "report.html").mkdir()
    assert "report.html is a directory, and a file belongs in its place" in refusal_of(root, "report")


NO_RUN_IDS = (
    "../../outside", "..", ".", "", "/etc", "a/b", "a\\b", "a\0b", "a\nb", " ", "-x", ".hidden", "CON:", "r" * 300,
    "é", "../r/runs/000-b0-baseline", "\ud83d\ude00",
)  # fmt: skip


def test_a_run_or_a_variant_that_is_no_plain_name_is_refused_everywhere(root: Path, pristine: Path) -> None:
    for run_id in NO_RUN_IDS:
        edit(root / "plan.json", lambda plan, name=run_id: plan["runs"][1].update(run_id=name))
        for command in set(COMMANDS) - {"list"} if run_id == NO_RUN_IDS[0] else ["show"]:
            assert "plan.json: runs[1].run_id is" in refusal_of(root, command), run_id
        with pytest.raises(RecordError, match=r"plan\.json: runs\[1\]\.run_id is"):
            reopen_experiment(root, None)
    restore(root, pristine)
    for run_id in ("../../outside", "/etc", "a\0b", ""):
        edit(root / RUN / "run.json", lambda run, name=run_id: run.update(run_id=name))
        assert "run.json: run_id is" in refusal_of(root, "show"), run_id
    restore(root, pristine)
    for variant in ("..", "../x", "", "a/b"):
        edit(root / "plan.json", lambda plan, name=variant: plan["runs"][0].update(variant=name))
        edit(root / "runs/000-b0-baseline/run.json", lambda run, name=variant: run.update(variant=name))
        assert "variant is" in refusal_of(root, "export"), variant


def test_no_value_of_a_cell_leads_an_export_out_of_its_directory(root: Path) -> None:
    for number in (1, 3):
        edit(root / "plan.json", lambda plan, n=number: plan["runs"][n].update(cell={"a": "/../../x\0"}))
    for path in root.glob("runs/*guided*/run.json"):
        edit(path, lambda run: run.update(cell={"a": "/../../x\0"}))
    code, output = call(root, "export")
    assert code == 0, output
    assert sorted(path.name for path in (root / "export" / "vllm").iterdir()) == ["baseline", "guided-a_.._.._x_"]


def test_a_digest_of_a_file_elsewhere_is_refused_unread(root: Path, pristine: Path) -> None:
    digest = {"sha256": "0" * 64, "size_bytes": len(SECRET), "mtime_ns": 0}
    for name in ("../../outside/file", "/etc/passwd", "", "runs//run.json", "a\0b", "."):
        edit(root / DIGESTS_FILE, lambda digests, name=name: digests["files"].update({name: digest}))
        assert "names no file of the directory" in refusal_of(root, "verify"), name
        edit(root / RUN / "run.json", lambda run, name=name: run["files"].update({f"../{name}": digest}))
        assert "run.json: it names no file of the directory" in refusal_of(root, "show"), name
        restore(root, pristine)


def test_a_document_beyond_its_bound_and_a_line_without_an_end_are_not_read_to_their_end(root: Path) -> None:
    log = root / RUN / "steps.jsonl"
    for size, problem in (
        (1 << 40, "no such file is larger than"),
        (LINE_BYTES * 4, "jsonl:9: the line is longer"),
    ):
        os.truncate(log, size)  # takes no room on the disk
        with within_seconds(10):
            run = load_run(ResultDirectory(root).run(Path(RUN).name))
        assert problem in run.damage[0]
    assert len(run.columns) == 8
    os.truncate(root / "plan.json", 1 << 40)
    assert "plan.json has 1099511.6 MB, and no such file is larger than 67 MB" in refusal_of(root, "show")


def edit(path: Path, change: Any) -> None:
    document = json.loads(path.read_bytes())
    change(document)
    path.write_text(json.dumps(document))
