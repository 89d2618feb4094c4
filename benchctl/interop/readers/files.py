"""Result files of other load generators as a side of a comparison, recognised by their keys.

A FILE holds one run, or one per line (``--append-result``, SGLang), or one per benchmark (GuideLLM). A DIR holds
repeats: every ``profile_export_aiperf.json`` below it, or else all ``*.json`` and ``*.jsonl`` in it. ``FILE,FILE``
lists some.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from benchctl.errors import RecordError, UsageError
from benchctl.interop.readers import aiperf as foreign_aiperf
from benchctl.interop.readers import sglang as foreign_sglang
from benchctl.interop.readers import vllm as foreign_vllm
from benchctl.interop.readers.aiperf import aiperf_run, is_aiperf
from benchctl.interop.readers.guidellm import guidellm_runs, is_guidellm
from benchctl.interop.readers.latencies import aiperf_latencies
from benchctl.interop.readers.run import ForeignRun
from benchctl.interop.readers.sglang import is_sglang, sglang_run
from benchctl.interop.readers.vllm import is_vllm, vllm_run
from benchctl.records.archive import is_archive
from benchctl.untrusted import FOREIGN_BYTES
from benchctl.untrusted.files import files_below, is_there, require_files
from benchctl.untrusted.reading import UnreadableError, json_value, read_text
from benchctl.untrusted.text import visible_line

MANIFEST: Final = "manifest.json"
AIPERF_FILE: Final = "profile_export_aiperf.json"
AIPERF_RECORDS: Final = "profile_export.jsonl"
_SUFFIXES: Final = frozenset({".json", ".jsonl"})
_KEY_CHARS: Final = 60
_NOT_A_RUN: Final = (".pytorch.json",)
"""Suffix of a second copy that vLLM writes for a dashboard."""


def is_foreign(text: str) -> bool:
    """True if a side of a comparison names result files of other tools instead of a result directory."""
    path = Path(text)
    if not exists(path):
        return all(part and exists(Path(part)) and Path(part).is_file() for part in text.split(","))
    try:
        if is_archive(path):
            return False
        if path.is_dir():
            is_ours = any(is_there(path / name, within=path) for name in (MANIFEST, "plan.json"))
            return not is_ours and bool(_files_in(path))
    except PermissionError:
        return False
    return path.is_file() or path.is_fifo()  # of a shell: compare <(...) FILE


def read_foreign(text: str) -> tuple[ForeignRun, ...]:
    """Every run that ``text`` names, in the order of its files. Raises RecordError for a file without a result."""
    paths = [Path(text)] if exists(Path(text)) else [Path(part) for part in text.split(",")]
    files = [file for path in paths for file in (_files_in(path) if path.is_dir() else [path])]
    if not files:
        raise UsageError(f"{text}: no result file found; name a FILE, or a DIR with such files")
    return tuple(run for file in files for run in _runs_of(file))


def exists(path: Path) -> bool:
    """False also for what is too long for a path: a list of files, or a directory with a variant."""
    try:
        return path.exists()
    except OSError:
        return False


def _files_in(directory: Path) -> list[Path]:
    """The result files in a directory. Raises OutsideError where one is a link or no regular file."""
    exports = files_below(directory, AIPERF_FILE)
    if exports:
        require_files([path.with_name(AIPERF_RECORDS) for path in exports], within=directory)
        return exports
    paths = sorted(
        path for path in directory.iterdir() if path.suffix in _SUFFIXES and not path.name.endswith(_NOT_A_RUN)
    )
    require_files(paths, within=directory)
    return paths


def _runs_of(path: Path) -> Iterator[ForeignRun]:
    for where, document in _documents(path):
        if is_guidellm(document):
            yield from guidellm_runs(document, where)
        elif is_aiperf(document):
            yield replace(
                aiperf_run(document, where), latencies_ms=aiperf_latencies(path.with_name(AIPERF_RECORDS))
            )
        elif is_sglang(document):
            yield sglang_run(document, where)
        elif is_vllm(document):
            yield vllm_run(document, where)
        else:
            raise RecordError(_unknown(document, where))


def _documents(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The JSON objects of a file with their locations: the whole file, or one object per line."""
    try:
        documents = _decoded(path)
    except UnreadableError as error:
        raise RecordError(f"{error}; write it again with its tool, or remove a line cut short") from error
    for where, document in documents:
        if not isinstance(document, dict):
            raise RecordError(
                f"{where}: holds {type(document).__name__}, not an object: it is not the result of one run"
            )
        yield where, document


def _decoded(path: Path) -> list[tuple[str, Any]]:
    """The one document of a file, or that of each line if the first line is one."""
    text = read_text(path, FOREIGN_BYTES)
    lines = [(f"{path}:{number}", line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    try:
        return [(str(path), json_value(text, path))]
    except UnreadableError as error:
        if len(lines) < 2:
            raise
        try:
            json_value(lines[0][1], path)
        except UnreadableError:
            raise error from None
    return [(where, json_value(line, where)) for where, line in lines]


def _unknown(document: Mapping[str, Any], where: str) -> str:
    known_tools = (
        f"vllm bench serve ({', '.join(foreign_vllm.KEYS)}), "
        f"SGLang's bench_serving ({', '.join(foreign_sglang.KEYS)}), "
        f"AIPerf ({', '.join(foreign_aiperf.KEYS)}, each with a unit), GuideLLM (benchmarks, each with metrics)"
    )
    keys = ", ".join(visible_line(key, _KEY_CHARS) for key in list(document)[:6]) or "none"
    return f"{where}: not a result that can be read. Looked for: {known_tools}. Found keys: {keys}"
