"""Nothing outside a result directory is read or written because of what a stranger put into it."""

import json
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
FAST = [name for name in COMMANDS if name != "report"]  # which draws pictures
READ = [
    *("manifest.json", "plan.json", "profile.yaml", "requests.jsonl", "digests.json"),
    *(f"{RUN}/{name}" for name in ("run.json", "requests.jsonl", "steps.jsonl", "prometheus.jsonl", "server.log")),
    RUN,
    "runs",
]
"""Entries that are read."""
WRITTEN = ["plots", "export", "report.html", ".report.html.partial", "summary.csv", f"{RUN}/result.json"]
"""Entries that are written, and may not be there."""
COMMON = ["a link to a file like it", "a FIFO"]
RARE = [kind for kind in KINDS if kind not in COMMON]


def common_first(kinds: list[str]) -> list[Any]:
    return [pytest.param(kind, marks=() if kind in COMMON else pytest.mark.slow) for kind in kinds]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "results" / "r"
    results = write_results(path, block_factors=[{"baseline": factor, "guided": factor} for factor in (1.0, 1.01)])
    edit_manifest(results, profile_sha256=profile_sha256(parse_profile(PROFILE_YAML, "profile.yaml")))
    begin_digests(results)
    for run in results.runs():
        run.server_log.write_text("a line\n")
        edit_run(results, run.path.name, files=digests_of_run(run))
        record_run(results, run.path.name)
    surround(path)
    return path


def call(root: Path, command: str) -> tuple[int, str]:
    """Exit code and output of a command, which ends soon and changes and shows nothing outside of ``root``."""
    before = tree_of(root.parent, root)
    with within_seconds(60 if command == "report" else 20):  # pictures take 2 s, and more beside other tests
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


def assert_refused(root: Path, entry: str, commands: list[str]) -> None:
    """Each command names the entry that is none, or does not need it; none touches what is outside."""
    for command in commands:
        code, output = call(root, command)
        if code == 4 and command not in {"list", "compare"}:
            assert Path(entry).name in output.replace("\n", ""), (command, output)
        assert code in {0, 3, 4}, (command, output)
    assert files_with(root, SECRET) == []


@pytest.mark.parametrize("kind", COMMON)
@pytest.mark.parametrize("entry", READ)
def test_an_entry_that_is_no_file_of_the_directory_is_not_read(root: Path, entry: str, kind: str) -> None:
    replace_entry(root, entry, kind)
    assert_refused(root, entry, FAST)
    if entry not in {"digests.json", f"{RUN}/server.log"}:
        assert call(root, "show")[0] == 4


def sampled(entries: list[str], kinds: list[str]) -> list[Any]:
    """Each entry with one kind and each kind with one entry are tried always, the others every night."""
    always, otherwise = [pytest.mark.slow], [pytest.mark.slow, pytest.mark.nightly]
    return [
        pytest.param(entry, kind, marks=always if i % len(kinds) == j else otherwise)
        for i, entry in enumerate(entries)
        for j, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize(("entry", "kind"), sampled(READ, RARE))
def test_no_kind_of_entry_leads_out_of_the_directory(root: Path, entry: str, kind: str) -> None:
    if kind == "a directory" and entry in {RUN, "runs"}:
        pytest.skip("it is one")
    replace_entry(root, entry, kind)
    assert_refused(root, entry, list(COMMANDS))


@pytest.mark.parametrize("kind", COMMON)
@pytest.mark.parametrize("entry", [name for name in READ if name.count("/") < 2])
def test_no_experiment_continues_through_an_entry_that_leads_elsewhere(root: Path, entry: str, kind: str) -> None:
    reopen_experiment(root, None)
    replace_entry(root, entry, kind)
    before = tree_of(root.parent, root)
    with within_seconds(10), pytest.raises(RecordError, match=Path(entry).name):
        reopen_experiment(root, None)
    assert tree_of(root.parent, root) == before


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_repeated_run_moves_aside_what_it_finds_and_follows_none_of_it(root: Path, kind: str) -> None:
    for name in ("run.json", "steps.jsonl", "server.log"):
        replace_entry(root, f"{RUN}/{name}", kind)
    (root / RUN / "attempt-1").symlink_to(root.parent / "outside" / "folder")
    before, run = tree_of(root.parent, root), ResultDirectory(root).run(Path(RUN).name)
    with within_seconds(10):
        number = begin_attempt(run)
    assert number == 3
    assert sorted(path.name for path in run.path.iterdir()) == ["attempt-1", "attempt-2"]
    assert tree_of(root.parent, root) == before


@pytest.mark.parametrize("kind", common_first([kind for kind in KINDS if kind != "a directory"]))
def test_no_folder_of_a_report_or_an_export_is_a_link(root: Path, kind: str) -> None:
    (root.parent / "outside" / "copy" / "plots").mkdir()
    (root.parent / "outside" / "copy" / "export").mkdir()
    for entry, command in {"plots": "report", "export": "export"}.items():
        replace_entry(root, entry, kind)
        code, output = call(root, command)
        assert code == 4
        assert f"{root.name}/{entry} is " in output.replace("\n", "")


@pytest.mark.parametrize("kind", common_first([kind for kind in KINDS if kind != "a directory"]))
def test_a_written_file_replaces_the_entry_and_not_what_it_leads_to(root: Path, kind: str) -> None:
    names = ["report.html", ".report.html.partial", "summary.csv", f"{RUN}/result.json", f"{RUN}/steps.safetensors"]
    surroundings = tree_of(root.parent, root)
    for name in names:
        (root.parent / "outside" / "copy" / name).write_text(SECRET)
        replace_entry(root, name, kind)
    assert tree_of(root.parent, root) != surroundings
    code, output = call(root, "report")
    assert code == 0, output
    for name in ("report.html", "summary.csv", f"{RUN}/result.json"):
        assert (root / name).is_file()
        assert not (root / name).is_symlink()
    assert files_with(root, SECRET) == []


def test_a_directory_in_the_place_of_a_page_is_named(root: Path) -> None:
    (root / "report.html").mkdir()
    code, output = call(root, "report")
    assert code == 4
    assert "report.html is a directory, and a file belongs in its place" in output


NO_RUN_ID = [
    *(
        "../../outside",
        "..",
        ".",
        "",
        "/etc",
        "a/b",
        "a\\b",
        "a\0b",
        "a\nb",
        " ",
        "-x",
        ".hidden",
        "CON:",
        "r" * 300,
        "é",
    ),
    *("../r/runs/000-b0-baseline", "\ud83d\ude00"),
]


@pytest.mark.parametrize("run_id", NO_RUN_ID)
def test_a_run_that_is_no_plain_name_is_refused_wherever_it_stands(root: Path, run_id: str) -> None:
    edit(root / "plan.json", lambda plan: plan["runs"][1].update(run_id=run_id))
    for command in FAST if run_id == NO_RUN_ID[0] else ["show"]:
        code, output = call(root, command)
        assert code == (0 if command == "list" else 4), (command, output)
        if command != "list":
            assert "plan.json: runs[1].run_id is" in output.replace("\n", " "), (command, output)
    with pytest.raises(RecordError, match=r"plan\.json: runs\[1\]\.run_id is"):
        reopen_experiment(root, None)


@pytest.mark.parametrize("run_id", ["../../outside", "/etc", "a\0b", ""])
def test_a_record_of_a_run_with_another_name_than_a_runs_is_refused(root: Path, run_id: str) -> None:
    edit(root / RUN / "run.json", lambda run: run.update(run_id=run_id))
    code, output = call(root, "show")
    assert code == 4
    assert "run.json: run_id is" in output


@pytest.mark.parametrize("variant", ["..", "../x", "", "a/b"])
def test_a_variant_that_is_no_part_of_a_path_is_refused(root: Path, variant: str) -> None:
    edit(root / "plan.json", lambda plan: plan["runs"][0].update(variant=variant))
    edit(root / "runs" / "000-b0-baseline" / "run.json", lambda run: run.update(variant=variant))
    code, output = call(root, "export")
    assert code == 4
    assert "variant is" in output


def test_no_value_of_a_cell_leads_an_export_out_of_its_directory(root: Path) -> None:
    for number in (1, 3):
        edit(root / "plan.json", lambda plan, n=number: plan["runs"][n].update(cell={"a": "/../../x\0"}))
    for path in root.glob("runs/*guided*/run.json"):
        edit(path, lambda run: run.update(cell={"a": "/../../x\0"}))
    code, output = call(root, "export")
    assert code == 0, output
    assert sorted(path.name for path in (root / "export" / "vllm").iterdir()) == ["baseline", "guided-a_.._.._x_"]


@pytest.mark.parametrize("name", ["../../outside/file", "/etc/passwd", "", "runs//run.json", "a\0b", "."])
def test_a_digest_of_a_file_elsewhere_is_refused_unread(root: Path, name: str) -> None:
    digest = {"sha256": "0" * 64, "size_bytes": len(SECRET), "mtime_ns": 0}
    edit(root / DIGESTS_FILE, lambda digests: digests["files"].update({name: digest}))
    code, output = call(root, "verify")
    assert code == 4
    assert "names no file of the directory" in output
    edit(root / RUN / "run.json", lambda run: run["files"].update({f"../{name}": digest}))
    code, output = call(root, "show")
    assert code == 4
    assert "run.json: it names no file of the directory" in output


def test_a_line_without_an_end_is_not_read_to_its_end(root: Path) -> None:
    log = root / RUN / "steps.jsonl"
    with log.open("ab") as file:
        file.truncate(1 << 40)  # takes no room on the disk
    with within_seconds(10):
        run = load_run(ResultDirectory(root).run(Path(RUN).name))
    assert run.is_damaged
    assert "no such file is larger than" in run.damage[0]
    with log.open("ab") as file:
        file.truncate(LINE_BYTES * 4)
    with within_seconds(10):
        run = load_run(ResultDirectory(root).run(Path(RUN).name))
    assert len(run.columns) == 8
    assert "steps.jsonl:9: the line is longer than 17 MB" in run.damage[0]


def test_a_document_beyond_its_bound_is_refused_unread(root: Path) -> None:
    with (root / "plan.json").open("ab") as file:
        file.truncate(1 << 40)
    code, output = call(root, "show")
    assert code == 4
    assert "plan.json has 1099511.6 MB, and no such file is larger than 67 MB" in output


def edit(path: Path, change: Any) -> None:
    document = json.loads(path.read_bytes())
    change(document)
    path.write_text(json.dumps(document))
