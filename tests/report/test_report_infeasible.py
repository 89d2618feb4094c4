"""Cells that no server can do are told in tables and files, and do not vanish."""

import csv
import io
import json
from pathlib import Path

import pytest
from support.results.builders import edit_run, write_results

from benchctl.analysis.analyzed import analyze_directory
from benchctl.records.directory import ResultDirectory
from benchctl.records.record import RunFailure
from benchctl.report.documents import show_document
from benchctl.report.experiment_tables import cells_table, sweep_table
from benchctl.report.export import write_report

BLOCKS = ({"baseline": 1.0, "guided": 1.0},) * 2
LOST = "guided top_k=5"


@pytest.fixture(name="path")
def _path(tmp_path: Path) -> Path:
    """Two blocks of two cells; the servers of one cell ran out of memory, and were then not tried again."""
    results = write_results(tmp_path / "r", block_factors=BLOCKS, cells=({"top_k": 3}, {"top_k": 5}))
    lost = [run.path.name for run in results.runs() if run.path.name.endswith("top_k5")]
    for run_id, cause in zip(lost, ("out-of-memory", "infeasible"), strict=True):
        edit_run(results, run_id, state="failed", failure=RunFailure(cause=cause, message="no room"))
    return results.path


def test_both_tables_name_an_infeasible_cell(path: Path) -> None:
    analysis = analyze_directory(path)
    (cell,) = [row for row in cells_table(analysis).texts() if row[0] == LOST]
    (row,) = [row for row in sweep_table(analysis).texts() if row[0] == LOST]
    assert cell[1] == "infeasible (out of memory)"
    assert row[1:3] == ["0", "infeasible (out of memory)"]


def test_the_exported_files_name_an_infeasible_cell(path: Path) -> None:
    write_report(path)
    sweep = list(csv.DictReader(io.StringIO((path / "sweep_summary.csv").read_text())))
    assert [(row["cell"], row["n_blocks"], row["infeasible"]) for row in sweep] == [
        ("top_k=3", "2", ""),
        ("top_k=5", "0", "out of memory"),
    ]
    runs = list(csv.DictReader(io.StringIO((path / "summary.csv").read_text())))
    assert sorted(row["failure"] for row in runs) == ["", "", "", "", "infeasible", "out-of-memory"]
    document = json.loads((path / "sweep_summary.json").read_text())
    assert document["infeasible"] == [{"variant": "guided", "factors": {"top_k": 5}, "infeasible": "out of memory"}]
    assert show_document(analyze_directory(path))["infeasible"] == document["infeasible"]


def test_one_block_that_found_room_makes_the_cell_feasible(path: Path) -> None:
    analysis = analyze_directory(path)
    first = next(run.record.run_id for run in analysis.runs if run.record.failure is not None)
    edit_run(ResultDirectory(path), first, state="done", failure=None)
    analysis = analyze_directory(path)
    assert analysis.infeasible == ()
    (cell,) = [row for row in cells_table(analysis).texts() if row[0] == LOST]
    assert cell[1] == "1 (1 left out)"


def test_a_cell_that_failed_otherwise_is_not_called_infeasible(tmp_path: Path) -> None:
    results = write_results(tmp_path / "r", block_factors=BLOCKS)
    for run in results.runs():
        if "guided" in run.path.name:
            failure = RunFailure(cause="server-died", message="gone")
            edit_run(results, run.path.name, state="failed", failure=failure)
    assert analyze_directory(results.path).infeasible == ()
