"""A result directory in the files of another tool: one directory for each arm, in it its runs as repeats.

vllm     OUT/<arm>/<run>.json
aiperf   OUT/<arm>/<run>/profile_export_aiperf.json and profile_export.jsonl
lenvm    OUT/summary.csv, a row per run
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Literal, TypeAlias

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.experiment.summary import RunSummary
from benchctl.errors import RecordError
from benchctl.interop.writers.aiperf import aiperf_records, aiperf_result
from benchctl.interop.writers.lenvm import lenvm_csv
from benchctl.interop.writers.vllm import vllm_result
from benchctl.profile.model import Arrival
from benchctl.records.directory import arm_label
from benchctl.records.files import document_bytes, encode, write_bytes_atomic
from benchctl.records.record import Manifest
from benchctl.untrusted.files import make_folder

Format: TypeAlias = Literal["vllm", "aiperf", "lenvm"]
_NO_PART: Final = re.compile(r"[/\\\x00-\x1f]|^\.+")
"""What a part of a path cannot hold, or must not begin with."""


def write_foreign(analysis: AnalyzedExperiment, form: Format, out: Path) -> tuple[Path, ...]:
    """Write every finished run that can be read whole. Raises RecordError when there is none.

    Inside the result directory nothing is written through a link; another ``out`` is its user's own.
    """
    arrival = None if analysis.profile is None else analysis.profile.workload.arrival
    usable = [run for run in analysis.runs if run.is_usable]
    if not usable:
        problem = f"{analysis.results.path}: no run is finished and whole; 'benchctl show' says why"
        raise RecordError("\n".join([*analysis.damage, problem]))
    root = analysis.results.path
    within = root if out.is_relative_to(root) else None
    if form == "lenvm":
        _make(out, within)
        write_bytes_atomic(out / "summary.csv", lenvm_csv(usable), within=within)
        return (out / "summary.csv",)
    written: list[Path] = []
    for run in usable:
        folder = out / arm_directory(run) / ("" if form == "vllm" else run.record.run_id)
        _make(folder, within)
        for name, content in _WRITERS[form](run, analysis.results.manifest, arrival).items():
            write_bytes_atomic(folder / name, content, within=within)
            written.append(folder / name)
    return tuple(written)


def _make(folder: Path, within: Path | None) -> None:
    if within is None:
        folder.mkdir(parents=True, exist_ok=True)
    else:
        make_folder(folder, within=within)


def arm_directory(run: RunSummary) -> str:
    """``guided-top_k5``: the arm as one part of a path."""
    label = arm_label(run.record.variant, run.record.cell).replace(" ", "-").replace("=", "")
    return _NO_PART.sub("_", label)


def _vllm_files(run: RunSummary, manifest: Manifest, arrival: Arrival | None) -> dict[str, bytes]:
    return {f"{run.record.run_id}.json": document_bytes(vllm_result(run.run, manifest, arrival))}


def _aiperf_files(run: RunSummary, manifest: Manifest, arrival: Arrival | None) -> dict[str, bytes]:
    return {
        "profile_export_aiperf.json": document_bytes(aiperf_result(run.run, manifest, arrival)),
        "profile_export.jsonl": b"".join(encode(line) + b"\n" for line in aiperf_records(run.run)),
    }


_WRITERS: Final[Mapping[Format, Callable[[RunSummary, Manifest, Arrival | None], dict[str, bytes]]]] = {
    "vllm": _vllm_files,
    "aiperf": _aiperf_files,
}
"""Content by name of the files of one run."""
