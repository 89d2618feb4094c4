"""Result files of other load generators as a side of a comparison, recognised by their keys.

A FILE holds one run, or one per line (``--append-result``, SGLang), or one per benchmark (GuideLLM). A DIR holds
repeats: every ``profile_export_aiperf.json`` below it, or else all ``*.json`` and ``*.jsonl`` in it. ``FILE,FILE``
lists some.

Two tools may use one name for two things, and two names for one. Only numbers with the definition of
``analysis/metrics/table.py`` are taken over; the others are left out, and a note says so.

vllm      ``vllm bench serve --save-result``: every name has the same meaning here. Prompt tokens are those of the
          client's own tokenizer, without the chat template. Where nothing was answered, latencies are zeros.
sglang    ``python -m sglang.bench_serving --output-file``: names are mostly vLLM's. Left out: inter-token
          latencies, which newer versions spread over the tokens of a chunk, and
          ``total_output_tokens_retokenized``, which the engine did not count.
aiperf    ``aiperf profile``: each metric is an object with a unit. ``inter_token_latency`` is (latency - time to
          first token) / (tokens - 1) of each request: tpot here; itl is ``inter_chunk_latency`` where that counts
          gaps and not requests. Throughputs there divide by the time in which the tool was busy (0.13): they are
          computed here from its counts and ``benchmark_duration``.
guidellm  ``benchmarks.json``. Left out: ``time_per_output_token_ms``, which counts from the send, and percentiles,
          which are not interpolated between ranks. ``request_latency`` lasts until the stream ends, and the mean
          of ``inter_token_latency_ms`` weighs requests by tokens: end-to-end latency and tpot are computed from
          the requests in the file, if it has all of them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Literal, TypeAlias

from benchctl.errors import RecordError, UsageError
from benchctl.interop.foreign_values import (
    AIPERF_LATENCIES,
    AIPERF_TOTALS,
    GUIDELLM,
    PERCENTS,
    SERVING_LATENCIES,
    SERVING_SETTINGS,
    SERVING_TOTALS,
    Latencies,
    Setting,
    aiperf_latencies,
    detailed_latencies,
    guidellm_latencies,
    number_at,
    numbers_at,
    numbers_in_ms,
    object_in,
    setting_at,
)
from benchctl.records.archive import is_archive
from benchctl.units import MS_PER_S
from benchctl.untrusted import FOREIGN_BYTES
from benchctl.untrusted.files import UnreadableError, files_below, is_there, json_value, read_text, require_files
from benchctl.untrusted.text import visible_line

Source: TypeAlias = Literal["vllm", "sglang", "aiperf", "guidellm", "benchctl"]
"""The tool that drove the load."""
MANIFEST: Final = "manifest.json"
AIPERF_FILE: Final = "profile_export_aiperf.json"
AIPERF_RECORDS: Final = "profile_export.jsonl"
_SUFFIXES: Final = frozenset({".json", ".jsonl"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignRun:
    """One run of another tool.

    ``where`` is the location: the file, and the line or entry if it holds several runs. ``metrics`` are the known
    numbers only, by the names and in the units of ``METRICS``. ``settings`` must be equal for two runs to be
    compared; ``load_point`` are the settings of the load on the server. ``failure`` counts the requests that were
    not answered. ``latencies_ms`` are those of single requests, as far as the tool has written them.
    """

    source: Source
    where: str
    metrics: Mapping[str, float]
    settings: Mapping[str, Setting]
    failure: str | None = None
    notes: tuple[str, ...] = ()
    latencies_ms: Latencies = field(default_factory=dict)

    @property
    def load_point(self) -> tuple[tuple[str, Setting], ...]:
        return tuple((key, self.settings.get(key)) for key in ("request_rate", "max_concurrency"))


_NOTES: Final = {
    "no-itl": (
        "SGLang's inter-token latency is not that of vLLM in every version and is not compared: see tpot_ms"
    ),
    "no-failures": (
        "SGLang's file names neither planned nor failed requests, except with --output-details: whether all were "
        "answered is not known"
    ),
    "tokenized": (
        "AIPerf counts tokens with its own tokenizer unless it is set to use those of the server; tpot_ms and the "
        "throughput of tokens rest on them"
    ),
    "names": (
        "AIPerf's inter_token_latency is read as tpot_ms, which it is; throughputs are its counts over its "
        "benchmark_duration"
    ),
    "no-tpot": (
        "GuideLLM's time_per_output_token_ms includes the first token and is not compared; tpot_ms is the mean of "
        "its inter_token_latency_ms over requests, and e2el_ms ends with the last token, not with the stream"
    ),
    "sampled": (
        "the report keeps only some of the requests (sample size), so tpot_ms and e2el_ms are unknown: its own "
        "means are defined differently"
    ),
    "trimmed": (
        "warm-up and cool-down were cut off: the throughputs are those of the time between, and wall_s is unknown"
    ),
}


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
    files = (path for path in directory.iterdir() if path.suffix in _SUFFIXES)
    # vLLM writes a second copy for a dashboard
    paths = sorted(path for path in files if not path.name.endswith(".pytorch.json"))
    require_files(paths, within=directory)
    return paths


_KEYS: Final = {
    "vllm": ("model_id", "num_prompts", "completed", "request_throughput"),
    "sglang": ("completed", "mean_e2e_latency_ms", "request_throughput"),
    "aiperf": ("request_latency", "request_throughput"),
}
"""Keys that identify a result of each tool."""


def _runs_of(path: Path) -> Iterator[ForeignRun]:
    try:
        documents = _documents(path)
    except UnreadableError as error:
        raise RecordError(f"{error}; write it again with its tool, or remove a line cut short") from error
    for where, document in documents:
        if not isinstance(document, dict):
            raise RecordError(
                f"{where}: holds {type(document).__name__}, not an object: it is not the result of one run"
            )
        if _is_guidellm(document):
            yield from _guidellm_runs(document, where)
        elif all("unit" in object_in(document.get(key)) for key in _KEYS["aiperf"]):
            yield _aiperf_run(document, where, path.with_name(AIPERF_RECORDS))
        elif document.keys() >= set(_KEYS["sglang"]):
            yield _serving_run("sglang", document, where)
        elif document.keys() >= set(_KEYS["vllm"]):
            yield _serving_run("vllm", document, where)
        else:
            raise RecordError(_unknown(document, where))


def _unknown(document: Mapping[str, Any], where: str) -> str:
    known_tools = (
        f"vllm bench serve ({', '.join(_KEYS['vllm'])}), SGLang's bench_serving ({', '.join(_KEYS['sglang'])}), "
        f"AIPerf ({', '.join(_KEYS['aiperf'])}, each with a unit), GuideLLM (benchmarks, each with metrics)"
    )
    keys = ", ".join(visible_line(key, 60) for key in list(document)[:6]) or "none"
    return f"{where}: not a result that can be read. Looked for: {known_tools}. Found keys: {keys}"


def _documents(path: Path) -> list[tuple[str, Any]]:
    """The document of a file, or of each line where the first one is an object, with its location."""
    text = read_text(path, FOREIGN_BYTES)
    try:
        return [(str(path), json_value(text, path))]
    except UnreadableError:
        lines = [(f"{path}:{number}", line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        if len(lines) < 2 or not (lines[0][1].startswith("{") and lines[0][1].rstrip().endswith("}")):
            raise
    return [(where, json_value(line, where)) for where, line in lines]


def _serving_run(source: Literal["vllm", "sglang"], document: Mapping[str, Any], where: str) -> ForeignRun:
    """``vllm bench serve``, or SGLang's ``bench_serving``, whose names are mostly the same."""
    is_vllm = source == "vllm"
    metrics = numbers_at(document, SERVING_TOTALS, where)
    if metrics.get("num_completed"):
        metrics |= numbers_at(document, SERVING_LATENCIES[source], where)
    errors = document.get("errors")
    if not is_vllm and isinstance(errors, list):
        metrics["num_failed"] = float(sum(bool(error) for error in errors))
    return _foreign_run(
        source,
        where,
        metrics,
        {key: setting_at(document, key) for key in SERVING_SETTINGS[source] if key in document},
        notes=() if is_vllm else ("no-itl",) if "num_failed" in metrics else ("no-itl", "no-failures"),
        latencies_ms=detailed_latencies(document, has_itl=is_vllm),
    )


def _aiperf_run(document: Mapping[str, Any], where: str, records: Path) -> ForeignRun:
    metrics = numbers_at(document, AIPERF_TOTALS, where)
    if not document.get("error_summary"):
        metrics.setdefault("num_failed", 0.0)
    duration_ms = numbers_in_ms(document, {"wall_s": "benchmark_duration.avg"}, where)
    metrics |= {name: value / MS_PER_S for name, value in duration_ms.items()}
    metrics |= _throughputs(metrics, metrics.get("wall_s"))
    for ours, theirs in AIPERF_LATENCIES.items():
        num_values = number_at(document, f"{theirs}.count", where) or 0
        if ours == "itl" and num_values <= metrics.get("num_completed", 0):
            continue  # one value for each request: their means
        paths = {f"p{percent}_{ours}_ms": f"{theirs}.p{percent}" for percent in (50, *PERCENTS)}
        metrics |= numbers_in_ms(document, {f"{ours}_ms": f"{theirs}.avg", **paths}, where)
    return _foreign_run(
        "aiperf",
        where,
        metrics,
        _aiperf_settings(document),
        failure="the run was cancelled" if document.get("was_cancelled") is True else None,
        notes=("tokenized", "names"),
        latencies_ms=aiperf_latencies(records),
    )


def _aiperf_settings(document: Mapping[str, Any]) -> dict[str, Setting]:
    """Model and load from the configuration in the export, which has had two forms."""
    config = document.get("input_config")
    if not isinstance(config, dict):
        return {}
    phases = config.get("phases")
    if isinstance(phases, list):
        phases = {str(object_in(phase).get("name")): phase for phase in reversed(phases)}
    load = object_in(config.get("loadgen")) or object_in(object_in(phases).get("profiling"))
    models = object_in(config.get("endpoint")).get("model_names")
    if models is None:
        models = config.get("models")
        models = models.get("items") if isinstance(models, dict) else models
    names = models if isinstance(models, list) else [models] if isinstance(models, str) else []
    return {
        "model_id": ", ".join(str(name.get("name") if isinstance(name, dict) else name) for name in names) or None,
        "request_rate": setting_at(load, "request_rate") or setting_at(load, "rate") or "inf",
        "max_concurrency": setting_at(load, "concurrency"),
    }


def _is_guidellm(document: Mapping[str, Any]) -> bool:
    benchmarks = document.get("benchmarks")
    return isinstance(benchmarks, list) and all(isinstance(b, dict) and "metrics" in b for b in benchmarks)


def _guidellm_runs(document: Mapping[str, Any], where: str) -> Iterator[ForeignRun]:
    """Every benchmark of a report, one for each load."""
    if not document["benchmarks"]:
        raise RecordError(f"{where}: the report has no benchmark; run GuideLLM again")
    for index, benchmark in enumerate(document["benchmarks"]):
        yield _guidellm_run(benchmark, f"{where}#{index}")


def _guidellm_run(benchmark: Mapping[str, Any], where: str) -> ForeignRun:
    metrics = numbers_at(benchmark, GUIDELLM, where)
    if "num_requests" not in metrics:
        raise RecordError(
            f"{where}: metrics.request_totals is missing; every benchmark of GuideLLM 0.4 or newer has it"
        )
    metrics |= _throughputs(metrics, metrics.get("wall_s"))
    cut_off_s = [number_at(benchmark, f"{part}_duration", where) or 0.0 for part in ("warmup", "cooldown")]
    # A shorter part of a benchmark of GuideLLM does not count as cut off
    is_trimmed = max(cut_off_s) > 0.001
    if is_trimmed:
        metrics.pop("wall_s", None)
    if not metrics.get("num_completed"):
        metrics.pop("ttft_ms", None)
    requests = object_in(benchmark.get("requests")).get("successful")
    has_all = isinstance(requests, list) and len(requests) == metrics.get("num_completed")
    latencies_ms = guidellm_latencies(requests, where) if isinstance(requests, list) and has_all else {}
    metrics |= {f"{name}_ms": fmean(latencies_ms[name]) for name in ("tpot", "e2el") if name in latencies_ms}
    num_cut = number_at(benchmark, "metrics.request_totals.incomplete", where)
    return _foreign_run(
        "guidellm",
        where,
        metrics,
        _guidellm_settings(object_in(benchmark.get("config"))),
        why=f" ({num_cut:.0f} of them cut off when the benchmark ended)" if num_cut else "",
        notes=("no-tpot", *([] if has_all else ["sampled"]), *(["trimmed"] if is_trimmed else [])),
        latencies_ms=latencies_ms,
    )


def _guidellm_settings(config: Mapping[str, Any]) -> dict[str, Setting]:
    strategy, model = object_in(config.get("strategy")), setting_at(object_in(config.get("backend")), "model")
    if not strategy:
        return {"model_id": model}
    kind = setting_at(strategy, "type_")
    streams = setting_at(strategy, "streams" if "streams" in strategy else "max_concurrency")
    return {
        "strategy": kind,
        "request_rate": setting_at(strategy, "rate") if "rate" in strategy else "inf",
        "max_concurrency": 1.0 if kind == "synchronous" else streams,
        "model_id": model,
    }


def _foreign_run(
    source: Source,
    where: str,
    metrics: dict[str, float],
    settings: Mapping[str, Setting],
    *,
    failure: str | None = None,
    why: str = "",
    notes: tuple[str, ...] = (),
    latencies_ms: Latencies,
) -> ForeignRun:
    """A run, with the third of its counts of requests where two are known.

    ``notes`` are keys of ``_NOTES``. ``failure`` is otherwise the sentence about its requests that were not
    answered, ending in ``why``.
    """
    if {"num_requests", "num_completed"} <= metrics.keys():
        metrics.setdefault("num_failed", metrics["num_requests"] - metrics["num_completed"])
    elif {"num_failed", "num_completed"} <= metrics.keys():
        metrics["num_requests"] = metrics["num_failed"] + metrics["num_completed"]
    planned = metrics.get("num_requests")
    return ForeignRun(
        source=source,
        where=where,
        metrics=metrics,
        settings={**settings, "num_prompts": planned, "total_input_tokens": metrics.get("prompt_tokens")},
        failure=failure or unanswered(metrics.get("num_failed"), planned, why),
        notes=tuple(_NOTES[note] for note in notes),
        latencies_ms=latencies_ms,
    )


def unanswered(failed: float | None, total: float | None, why: str = "") -> str | None:
    """The sentence about requests that were not answered; None if none is known to have failed."""
    if not failed:
        return None
    return f"{failed:.0f} of {'an unknown number of' if total is None else f'{total:.0f}'} requests failed{why}"


def _throughputs(metrics: Mapping[str, float], duration_s: float | None) -> dict[str, float]:
    counts = {"request_throughput": "num_completed", "output_throughput": "output_tokens"}
    return {rate: metrics[count] / duration_s for rate, count in counts.items() if duration_s and count in metrics}
