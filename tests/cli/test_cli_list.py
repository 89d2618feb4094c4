"""``benchctl list`` on a terminal, in a pipe and as JSON."""

import json
import os
import pty
import re
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path

import pytest
from support.cli import benchctl
from support.results.builders import edit_manifest, write_results
from support.results.planted_progress import plant_block, plant_shared

PROFILE = "a-profile-with-a-very-long-name-that-nobody-would-type-by-hand"


@pytest.fixture(name="root")
def _root(tmp_path: Path) -> Path:
    for number, state in enumerate(("done", "failed", "interrupted")):
        results = write_results(tmp_path / PROFILE / f"20261123T02000{number}Z-0fdbff68", state=state)
        edit_manifest(results, profile=PROFILE, label="a remark " * 8)
    return tmp_path


def on_terminal(root: Path, columns: int) -> list[str]:
    """The lines that ``list`` writes to a terminal of that width."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (30, columns))
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    argv = [sys.executable, "-m", "benchctl", "list", str(root)]
    running = subprocess.Popen(argv, env=environment, stdout=theirs, stderr=subprocess.DEVNULL)
    os.close(theirs)
    shown = bytearray()
    with suppress(OSError):  # the other end of a terminal that nobody has open any more
        while piece := os.read(ours, 4096):
            shown += piece
    os.close(ours)
    assert running.wait(timeout=60) == 0
    return re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).splitlines()


@pytest.mark.parametrize("columns", [100, 120, 160])
def test_a_table_fits_the_terminal_and_still_tells_directories_apart(root: Path, columns: int) -> None:
    head, *lines = on_terminal(root, columns)
    assert head.split() == ["directory", "created", "profile", "engine", "state", "runs", "remarks"]
    assert max(map(len, lines)) <= columns
    assert all("…" in line for line in lines)
    assert len({line.split()[0] for line in lines}) == 3
    assert {line.split()[4] for line in lines} == {"done", "failed", "interrupted"}


def test_in_a_pipe_and_as_json_nothing_is_shortened(root: Path) -> None:
    piped = benchctl("list", root).stdout
    assert "…" not in piped
    assert piped.count(f"{PROFILE}/20261123T02000") == 3
    entries = json.loads(benchctl("list", root, "--json").stdout)["results"]
    assert {entry["state"] for entry in entries} == {"done", "failed", "interrupted"}
    assert {(entry["profile"], entry["label"].strip()) for entry in entries} == {
        (PROFILE, ("a remark " * 8).strip())
    }
    assert {entry["path"] for entry in entries} == {str(path) for path in (root / PROFILE).iterdir()}


def test_an_experiment_in_progress_says_how_many_of_its_blocks_are_done_and_on_how_many_nodes(
    tmp_path: Path,
) -> None:
    results = plant_shared(tmp_path / "shared", 4)
    plant_block(results, 0, num_ended=6, node="n01")
    plant_block(results, 1, num_ended=3, is_running=True, node="n02")
    assert "running  9/24  1 of 4 blocks done · 2 nodes" in " ".join(benchctl("list", tmp_path).stdout.split(" "))
    (entry,) = json.loads(benchctl("list", tmp_path, "--json").stdout)["results"]
    assert (entry["num_blocks_done"], entry["num_blocks"], entry["nodes"]) == (1, 4, ["n01", "n02"])
    first = benchctl("show", results.path).stdout.splitlines()[0]
    assert first.startswith("ci-smoke · running · 9 of 24 runs done in 1 whole block on 2 nodes · 4 blocks")
