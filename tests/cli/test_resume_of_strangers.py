"""``run --resume`` measures into the result directory alone, whatever a stranger put into it."""

import json
import shutil
from pathlib import Path

import pytest
from support.cli import benchctl, only_result, printed, refusal
from support.strangers import SECRET, files_with, replace_entry, surround, tree_of

TINY = ["--set", "workload.num_prompts=1", "--set", "workload.output_len=8"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cwd = tmp_path_factory.mktemp("measured")
    done = benchctl("run", "--profile", "ci-smoke", "--engine", "sim-exact", "--blocks", "1", *TINY, cwd=cwd)
    assert done.returncode in {0, 3}, done.stderr
    return only_result(cwd)


@pytest.fixture
def root(measured: Path, tmp_path: Path) -> Path:
    path = Path(shutil.copytree(measured, tmp_path / "r"))
    surround(path)
    return path


def test_a_run_is_measured_again_beside_the_links_that_stood_for_its_files(root: Path) -> None:
    run = next(path.name for path in sorted((root / "runs").iterdir()))
    for name, kind in {
        "run.json": "a link to a file like it",
        "server.log": "a link to another file",
        "steps.jsonl": "a link to a device",
        "steps.raw.jsonl": "a link to another file",
        "requests.jsonl": "a FIFO",
        "host.jsonl": "a link to nothing",
    }.items():
        replace_entry(root, f"runs/{run}/{name}", kind)
    for name in (".manifest.json.partial", ".digests.json.partial", f"runs/{run}/.run.json.partial", "report.html"):
        replace_entry(root, name, "a link to another file")
    before = tree_of(root.parent, root)
    done = benchctl("run", "--resume", root, "--quiet", cwd=root.parent, timeout_s=60)
    assert done.returncode in {0, 3}, done.stderr
    assert tree_of(root.parent, root) == before
    assert files_with(root, SECRET) == []
    assert json.loads((root / "runs" / run / "run.json").read_text())["state"] == "done"
    assert (root / "runs" / run / "attempt-1" / "server.log").is_symlink()
    printed("show", root)


def test_no_folder_of_a_resumed_experiment_is_a_link(root: Path) -> None:
    for entry in ("plots", "runs"):
        replace_entry(root, entry, "a link to a file like it")
        before = tree_of(root.parent, root)
        assert f"{root / entry} is a link, not a directory" in refusal("run", "--resume", root, "--quiet", code=4)
        assert tree_of(root.parent, root) == before
