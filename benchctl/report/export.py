"""Write a report: summary and sweep as CSV and JSON, ``result.json`` for each run, the page and the pictures.

All files are derived from the records and can be written again at any time; each is replaced in one step.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from benchctl.analysis.summary.analyzed import AnalyzedExperiment, analyze_directory
from benchctl.analysis.summary.columns import SUMMARY_COLUMNS
from benchctl.analysis.summary.summary import SWEEP_COLUMNS
from benchctl.interop.writers.vllm import vllm_result
from benchctl.records.digests import record_derived
from benchctl.records.files import write_bytes_atomic, write_json_atomic
from benchctl.report.charts.figure import chart_bytes, why_not_drawn
from benchctl.report.charts.table import draw_pictures
from benchctl.report.documents import NODE_COLUMNS, node_values, summary_document, sweep_document
from benchctl.report.page.page import directory_page
from benchctl.report.page.verdict import PageVerdict, directory_verdict
from benchctl.report.table import csv_bytes
from benchctl.untrusted.files import make_folder

PAGE_NAME: Final = "report.html"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFiles:
    """The files of a report, the reason for each skipped picture, messages about files that are not whole, and the
    verdict of the page.
    """

    root: Path
    written: tuple[Path, ...]
    skipped: tuple[str, ...] = ()
    damage: tuple[str, ...]
    verdict: PageVerdict


def write_report(results_path: Path, *, allow_suspect: bool = False, directory: Path | None = None) -> ReportFiles:
    """Read a result directory and write everything that is derived from it into it, or into ``directory``.

    Suspect runs count only with ``allow_suspect``; tables and page then say so.

    Raises UsageError when ``results_path`` is not a result directory, SchemaVersionError when it is newer.
    """
    analysis = analyze_directory(results_path, allow_suspect=allow_suspect)
    return write_pictures(analysis, write_derived(analysis, directory))


def write_derived(analysis: AnalyzedExperiment, directory: Path | None = None) -> ReportFiles:
    """Write tables, results of runs and the page into the directory that was analyzed, or into ``directory``."""
    root = directory or analysis.results.path
    root.mkdir(parents=True, exist_ok=True)
    written = [*_write_tables(analysis, root), *_write_run_results(analysis, root)]
    page, verdict = root / PAGE_NAME, directory_verdict(analysis)
    write_bytes_atomic(page, directory_page(analysis, verdict=verdict).encode(), within=root)
    written.append(page)
    if root == analysis.results.path:
        record_derived(root, written)
    return ReportFiles(
        root=root,
        written=tuple(written),
        damage=analysis.damage,
        verdict=verdict,
    )


def write_pictures(analysis: AnalyzedExperiment, files: ReportFiles) -> ReportFiles:
    """Draw the pictures beside the files of a report; the first takes a second or two, so they come last."""
    if (reason := why_not_drawn()) is not None:
        return replace(files, skipped=(f"plots/: {reason}",))
    folder, written, skipped = files.root / "plots", list(files.written), []
    for name, chart in draw_pictures(analysis).items():
        if chart.skipped is not None:
            skipped.append(f"{name}: {chart.skipped}")
            continue
        make_folder(folder, within=files.root)
        write_bytes_atomic(folder / name, chart_bytes(chart), within=files.root)
        written.append(folder / name)
    if files.root == analysis.results.path:
        record_derived(files.root, written)
    return replace(files, written=tuple(written), skipped=tuple(skipped))


def _write_tables(analysis: AnalyzedExperiment, root: Path) -> list[Path]:
    documents = {"summary.json": summary_document(analysis), "sweep_summary.json": sweep_document(analysis)}
    tables = {
        "summary.csv": csv_bytes(SUMMARY_COLUMNS, (run.values for run in analysis.runs)),
        "sweep_summary.csv": csv_bytes(SWEEP_COLUMNS, analysis.sweep_values()),
    }
    if analysis.nodes:
        tables["nodes_summary.csv"] = csv_bytes(NODE_COLUMNS, node_values(analysis.nodes))
    for name, document in documents.items():
        write_json_atomic(root / name, document, within=root)
    for name, content in tables.items():
        write_bytes_atomic(root / name, content, within=root)
    return [root / name for name in (*tables, *documents)]


def _write_run_results(analysis: AnalyzedExperiment, root: Path) -> list[Path]:
    arrival = None if analysis.profile is None else analysis.profile.workload.arrival
    written = []
    for run in analysis.runs:
        if run.is_usable:
            path = root / "runs" / run.record.run_id / "result.json"
            make_folder(path.parent, within=root)
            write_json_atomic(path, vllm_result(run.run, analysis.results.manifest, arrival), within=root)
            written.append(path)
    return written
