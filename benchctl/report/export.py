"""The files of a report: tables, ``result.json`` of each run, page and pictures; and the list of result
directories.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

import msgspec

from benchctl.analysis.analyzed import AnalyzedExperiment, analyze_directory
from benchctl.analysis.experiment.columns import SUMMARY_COLUMNS
from benchctl.analysis.experiment.summary import SWEEP_COLUMNS
from benchctl.errors import BenchctlError, InvalidDataError, RecordError, UsageError
from benchctl.interop.vllm_result import vllm_result
from benchctl.records.directory import ResultDirectory, RunDirectory, open_results
from benchctl.records.files import document_bytes, read_if_there, write_bytes_atomic
from benchctl.records.integrity import record_derived, verify_directory
from benchctl.records.record import RunRecord
from benchctl.records.writers import current_manifest
from benchctl.report.charts.figure import Chart, chart_bytes, note_of, on_paper, why_not_drawn
from benchctl.report.charts.vega import load_vega, vega_bytes
from benchctl.report.curve_tables import curve_rows
from benchctl.report.documents import NODE_COLUMNS, node_values, summary_document, sweep_document
from benchctl.report.page.page import directory_page, draw_charts
from benchctl.report.page.plots import draw_forest
from benchctl.report.table import csv_bytes
from benchctl.report.verdicts import PageVerdict, directory_verdict
from benchctl.second_process import Call, second_process
from benchctl.units import first_of
from benchctl.untrusted.files import OutsideError, is_there, make_folder

PAGE_NAME: Final = "report.html"
Picture: TypeAlias = Callable[[], bytes]
"""Waits for the bytes of a picture that is being drawn."""
Draw: TypeAlias = Callable[[Chart], Picture]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFiles:
    """The files of a report, messages about files that are not whole, and the verdict and charts of the page."""

    root: Path
    written: tuple[Path, ...]
    pictures: Mapping[str, Picture]
    """Those that are being drawn, by their files."""
    no_pictures: str | None
    """The reason why none can be drawn here."""
    damage: tuple[str, ...]
    verdict: PageVerdict
    charts: tuple[Chart, ...]
    """The ratios of all arms first, then the charts of the page and those of files only."""

    @property
    def skipped(self) -> tuple[str, ...]:
        """The pictures that are not drawn, by their reasons."""
        if self.no_pictures is not None:
            return (f"plots/: {self.no_pictures}",)
        files: dict[str, list[str]] = {}
        for chart in self.charts:
            if chart.file and chart.skipped is not None:
                files.setdefault(chart.skipped, []).append(chart.file)
        return tuple(f"{', '.join(names)}: {reason}" for reason, names in files.items())


def write_report(results_path: Path, *, allow_suspect: bool = False, directory: Path | None = None) -> ReportFiles:
    """Read a result directory and write everything that is derived from it into it, or into ``directory``.

    Suspect runs count only with ``allow_suspect``; tables and page then say so.

    Raises UsageError when ``results_path`` is not a result directory, SchemaVersionError when it is newer.
    """
    with drawing() as draw:
        analysis = analyze_directory(results_path, allow_suspect=allow_suspect)
        return write_pictures(analysis, write_derived(analysis, draw, directory))


@contextmanager
def drawing() -> Iterator[Draw]:
    """Yields what begins to draw a chart, in a second process, which gets ready at once: that takes a second."""
    with second_process() if why_not_drawn() is None else nullcontext() as call:
        if call is not None:
            call(load_vega)
        yield partial(_begun, call)


def _begun(call: Call | None, chart: Chart) -> Picture:
    suffix, spec = Path(chart.file).suffix, on_paper(chart.spec, chart.title, note_of(chart))
    answer = None if call is None else call(vega_bytes, spec, suffix)

    def picture() -> bytes:
        if answer is None or answer.exception() is not None:
            return vega_bytes(spec, suffix)
        return cast("bytes", answer.result())

    return picture


def write_derived(analysis: AnalyzedExperiment, draw: Draw, directory: Path | None = None) -> ReportFiles:
    """Write tables, results of runs and the page into the directory that was analyzed, or into ``directory``."""
    root, verdict = directory or analysis.results.path, directory_verdict(analysis)
    page_charts = charts = draw_charts(analysis, verdict.comparisons)
    estimated = [
        each
        for each in verdict.comparisons
        if any(metric.estimate is not None for cell in each.cells for metric in cell.deciding)
    ]
    if estimated:
        charts = (draw_forest(*estimated, chart_id="ratios", file="ratios.png"), *charts)
    no_pictures = why_not_drawn()
    drawn = [chart for chart in charts if chart.file and chart.spec and no_pictures is None]
    pictures = {f"plots/{chart.file}": draw(chart) for chart in drawn}
    written = tuple(_write(root, name, content) for name, content in _contents(analysis, verdict, page_charts))
    if root == analysis.results.path and not pictures:  # else with them
        record_derived(root, written)
    return ReportFiles(
        root=root,
        written=written,
        pictures=pictures,
        no_pictures=no_pictures,
        damage=analysis.damage,
        verdict=verdict,
        charts=charts,
    )


def _contents(
    analysis: AnalyzedExperiment, verdict: PageVerdict, charts: Sequence[Chart]
) -> Iterator[tuple[str, bytes]]:
    """Every file of a report but its pictures, by its path in the directory."""
    columns = [column for column in SUMMARY_COLUMNS if column not in analysis.lacks]
    yield "summary.csv", csv_bytes(columns, (run.values for run in analysis.runs))
    yield "sweep_summary.csv", csv_bytes(SWEEP_COLUMNS, analysis.sweep_values())
    if analysis.nodes:
        yield "nodes_summary.csv", csv_bytes(NODE_COLUMNS, node_values(analysis.nodes))
    if points := [row for curve in analysis.curves for row in curve_rows(curve)]:
        yield "curves.csv", csv_bytes(list(points[0]), points)
    yield "summary.json", document_bytes(summary_document(analysis) | {"verdict": verdict.word})
    yield "sweep_summary.json", document_bytes(sweep_document(analysis))
    directory = ResultDirectory(analysis.results.path)
    for run in analysis.runs:
        arrival = analysis.experiment.arrival_of(run.record)
        for load in run.run.loads if run.is_usable else ():
            result = vllm_result(load, analysis.experiment.metrics(load), analysis.results.manifest, arrival)
            yield f"{directory.run_folder(run.record.run_id)}/result{load.suffix}.json", document_bytes(result)
    yield PAGE_NAME, directory_page(analysis, verdict=verdict, charts=charts).encode()


def _write(root: Path, name: str, content: bytes) -> Path:
    path = root / name
    make_folder(path.parent, within=root)
    write_bytes_atomic(path, content, within=root, is_derived=True)
    return path


def write_pictures(analysis: AnalyzedExperiment, files: ReportFiles) -> ReportFiles:
    """Write the pictures beside the files of a report."""
    pictures = tuple(_write(files.root, name, picture()) for name, picture in files.pictures.items())
    written = (*files.written, *pictures)
    if pictures and files.root == analysis.results.path:
        record_derived(files.root, written)
    return replace(files, written=written)


def write_figures(files: ReportFiles, directory: Path) -> tuple[Path, ...]:
    """Write every chart as PNG, SVG and PDF into ``directory``: ratios with intervals, block values, then the rest.

    Raises UsageError where nothing can be drawn.
    """
    drawn = [chart for chart in files.charts if chart.spec]
    directory.mkdir(parents=True, exist_ok=True)
    return tuple(
        _write(directory, f"{number:02d}-{chart.id}{suffix}", chart_bytes(chart, suffix))
        for number, chart in enumerate(drawn, start=1)
        for suffix in (".png", ".svg", ".pdf")
    )


_NAMES: Final = (
    *("path", "created_at", "profile", "engine", "state", "label", "num_done", "num_planned", "num_blocks_done"),
    *("num_blocks", "nodes", "is_simulated", "verdict", "problem", "damage", "altered"),
)


def list_directories(root: Path) -> tuple[dict[str, Any], ...]:
    """Result directories in ``root`` and one level below it, newest first, unreadable ones last.

    What is unknown of one is None; the state of one with a document that cannot be read is ``damaged``. ``nodes``
    are those that measured runs, as far as records name them; ``verdict`` is that of its last report; ``problem``
    says why nothing else of it can be read, ``damage`` why a run cannot, ``altered`` what is not as measured.

    Raises UsageError when ``root`` is not a directory.
    """
    if not root.is_dir():
        raise UsageError(
            f"{root} is not a directory; name the one that holds results, or measure with 'benchctl run'"
        )
    unknown = dict.fromkeys(_NAMES) | {"nodes": ()}
    entries = sorted(
        (unknown | {"path": str(path)} | _entry(path) for path in _candidates(root)),
        key=lambda entry: (entry["created_at"] or "", entry["path"]),
        reverse=True,
    )
    unreadable = [entry for entry in reversed(entries) if entry["problem"] is not None]
    return (*(entry for entry in entries if entry["problem"] is None), *unreadable)


def _candidates(root: Path) -> Iterator[Path]:
    """The root itself when it is a result directory, else its children or their children."""
    if _is_result(root):
        yield root
        return
    for child in _directories(root):
        below = [] if _is_result(child) else _directories(child)
        yield from below if any(map(_is_result, below)) else [child]


def _is_result(path: Path) -> bool:
    try:
        return is_there(path / "manifest.json", within=path)
    except (OSError, OutsideError):
        return False


def _directories(path: Path) -> list[Path]:
    try:
        children = [child for child in path.iterdir() if child.is_dir() and not child.name.startswith(".")]
    except OSError:
        return []
    return sorted(child for child in children if not child.is_symlink())  # ``latest`` links to one of the others


def _entry(path: Path) -> dict[str, Any]:
    try:
        return _entry_of(open_results(path))
    except UsageError:
        return {"problem": "not a result directory"}
    except OSError as error:
        return {"problem": f"{path} cannot be read: {error.strerror}; correct its permissions"}
    except RecordError as error:
        return {"state": "damaged", "problem": str(error)}
    except InvalidDataError as error:
        return {"problem": str(error)}


def _entry_of(results: ResultDirectory) -> dict[str, Any]:
    manifest = current_manifest(results)
    plan = results.due_plan()
    records = [_read(results.run(planned.run_id)) for planned in plan.runs]
    readable = [record for record in records if isinstance(record, RunRecord)]
    done = {record.run_id for record in readable if record.state == "done"}
    damage = next((str(record) for record in records if isinstance(record, RecordError)), None)
    altered = list(dict.fromkeys(alteration.file for alteration in verify_directory(results.path).alterations))
    return {
        "path": str(results.path),
        "created_at": manifest.created_at,
        "profile": manifest.profile,
        "engine": manifest.engine,
        "state": manifest.state if damage is None else "damaged",
        "label": manifest.label,
        "num_done": sum(record.state == "done" for record in readable),
        "num_planned": len(plan.runs),
        "num_blocks_done": plan.num_blocks_of(done),
        "num_blocks": len({planned.block for planned in plan.runs}),
        "nodes": tuple(sorted({record.node.name for record in readable if record.node is not None})),
        "is_simulated": manifest.is_simulated,
        "verdict": _reported_verdict(results.path),
        "damage": damage,
        "altered": "altered: " + first_of(altered, 2) if altered else None,
    }


class _Summary(msgspec.Struct):
    """The part of ``summary.json`` that a list shows."""

    verdict: str | None = None


def _reported_verdict(directory: Path) -> str | None:
    try:
        content = read_if_there(directory / "summary.json", within=directory)
        return None if content is None else msgspec.json.decode(content, type=_Summary).verdict
    except (BenchctlError, OSError, msgspec.MsgspecError):  # a report that is not whole has no verdict
        return None


def _read(run: RunDirectory) -> RunRecord | InvalidDataError | None:
    """The record of a run, None before it has begun, or the reason why it cannot be read."""
    try:
        return run.read() if run.is_begun() else None
    except InvalidDataError as error:
        return error
