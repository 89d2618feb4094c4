"""A result directory in the files of another tool: one directory for each arm, in it its runs as repeats.

vllm     OUT/<arm>/<run>.json
aiperf   OUT/<arm>/<run>/profile_export_aiperf.json and profile_export.jsonl
lenvm    OUT/summary.csv, a row per run
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal, TypeAlias

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.summary.runs import RunSummary
from benchctl.errors import RecordError
from benchctl.interop.writers.aiperf import aiperf_records, aiperf_result
from benchctl.interop.writers.lenvm import lenvm_csv
from benchctl.interop.writers.vllm import vllm_result
from benchctl.profile.sections.workload import Arrival
from benchctl.records.directory import arm_label
from benchctl.records.jsonl import encode, write_bytes_atomic, write_json_atomic

Format: TypeAlias = Literal["vllm", "aiperf", "lenvm"]


def write_foreign(analysis: AnalyzedExperiment, form: Format, out: Path) -> tuple[Path, ...]:
    """Write every finished run that can be read whole. Raises RecordError when there is none."""
    arrival = None if analysis.profile is None else analysis.profile.workload.arrival
    usable = [run for run in analysis.runs if run.is_usable]
    if not usable:
        raise RecordError(f"{analysis.results.path}: no run is finished and whole; 'benchctl show' says why")
    if form == "lenvm":
        out.mkdir(parents=True, exist_ok=True)
        write_bytes_atomic(out / "summary.csv", lenvm_csv(usable))
        return (out / "summary.csv",)
    return tuple(
        path for run in usable for path in _WRITERS[form](analysis, run, arrival, out / arm_directory(run))
    )


def arm_directory(run: RunSummary) -> str:
    """``guided-top_k5``: the arm as one part of a path."""
    return arm_label(run.record.variant, run.record.cell).replace(" ", "-").replace("=", "").replace("/", "_")


def _write_vllm(
    analysis: AnalyzedExperiment, run: RunSummary, arrival: Arrival | None, directory: Path
) -> list[Path]:
    path = directory / f"{run.record.run_id}.json"
    directory.mkdir(parents=True, exist_ok=True)
    write_json_atomic(path, vllm_result(run.run, analysis.results.manifest, arrival))
    return [path]


def _write_aiperf(
    analysis: AnalyzedExperiment, run: RunSummary, arrival: Arrival | None, directory: Path
) -> list[Path]:
    folder = directory / run.record.run_id
    folder.mkdir(parents=True, exist_ok=True)
    summary, records = folder / "profile_export_aiperf.json", folder / "profile_export.jsonl"
    write_json_atomic(summary, aiperf_result(run.run, analysis.results.manifest, arrival))
    write_bytes_atomic(records, b"".join(encode(line) + b"\n" for line in aiperf_records(run.run)))
    return [summary, records]


_WRITERS: Final[dict[Format, Callable[[AnalyzedExperiment, RunSummary, Arrival | None, Path], list[Path]]]] = {
    "vllm": _write_vllm,
    "aiperf": _write_aiperf,
}
