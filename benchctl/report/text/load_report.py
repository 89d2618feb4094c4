"""What a single load came to: its ``result.json``, and the tables that are printed."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from rich.table import Table
from rich.text import Text

from benchctl.analysis.metrics.bounds import MARK, Bounds, marked
from benchctl.analysis.metrics.offered_load import ClientQuality
from benchctl.analysis.metrics.percentile import PERCENTS, smallest_sample
from benchctl.analysis.metrics.table import CLIENT_METRICS, LATENCIES, METRICS
from benchctl.analysis.summary.load_figures import SEND_LAG, Durations, LoadFigures
from benchctl.formats import UNKNOWN, four_digits, whole
from benchctl.interop.writers.vllm import bounds_document, schedule
from benchctl.profile.workload import Arrival
from benchctl.records.manifest import Manifest
from benchctl.records.run import RunRecord
from benchctl.records.schema import SCHEMA_VERSION

_NAMES: Final = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "end to end", SEND_LAG: "send lag"}


def load_result(
    figures: LoadFigures,
    record: RunRecord,
    manifest: Manifest,
    arrival: Arrival,
    told: ClientQuality,
) -> dict[str, Any]:
    """The keys of ``vllm bench serve``, then our own; unknown is null.

    The details of each request, which vLLM writes when it is asked to, are in the run's ``requests.jsonl``, and
    ``benchctl report`` writes them here as well. ``told`` is what the load generator says of itself.
    """
    return {
        "date": record.started_at or manifest.created_at,
        "backend": record.effective_config.get("server.dialect"),
        "label": manifest.label,
        "model_id": record.effective_config.get("server.served_model"),
        "tokenizer_id": None,
        "num_prompts": figures.num_requests,
        **schedule(arrival),
        "duration": figures.wall_s,
        "completed": figures.num_completed,
        "failed": figures.num_failed,
        "total_input_tokens": figures.prompt_tokens,
        "total_output_tokens": figures.output_tokens,
        "request_throughput": figures.request_throughput,
        "request_goodput": None,
        "output_throughput": figures.output_throughput,
        "total_token_throughput": figures.total_token_throughput,
        **_latencies(figures),
        "schema_version": SCHEMA_VERSION,
        "run_id": record.run_id,
        "state": record.state,
        "stop": manifest.stop,
        "seed": manifest.seed,
        "errors_by_kind": dict(figures.errors),
        "cached_tokens": figures.cached_tokens,
        "client": {name: told.metrics[name] for name in CLIENT_METRICS},
        "offered_load": None if told.offered is None else asdict(told.offered),
        "bounds": bounds_document(told.bounds),
        "definitions": {f"{latency}_ms": METRICS[f"{latency}_ms"].formula for latency in LATENCIES}
        | {name: METRICS[name].formula for name in CLIENT_METRICS},
    }


def _latencies(figures: LoadFigures) -> dict[str, float | None]:
    return {
        key: value for latency in LATENCIES for key, value in _spelt(latency, figures.durations[latency]).items()
    }


def _spelt(name: str, durations: Durations) -> dict[str, float | None]:
    """{mean,median,std,pNN}_<name>_ms, as vLLM calls them."""
    found = {f"mean_{name}_ms": durations.mean, f"median_{name}_ms": durations.percentile[50]}
    found[f"std_{name}_ms"] = durations.std
    return found | {f"p{percent}_{name}_ms": durations.percentile[percent] for percent in PERCENTS}


def totals_table(figures: LoadFigures, told: ClientQuality) -> Table:
    """Requests, tokens, throughput, how much of the load reached the server, and how well the times are known."""
    failed = f"{figures.num_failed} failed"
    if figures.errors:
        failed += f" ({', '.join(f'{count} {kind}' for kind, count in sorted(figures.errors.items()))})"
    rows = {
        "requests": f"{figures.num_completed} completed, {failed}",
        "duration": f"{four_digits(figures.wall_s)} s from the first send to the last output",
        "tokens": f"{whole(figures.prompt_tokens)} in prompts, {whole(figures.output_tokens)} of output",
        "throughput": f"{four_digits(figures.output_throughput)} output tokens/s, "
        f"{four_digits(figures.total_token_throughput)} tokens/s, "
        f"{four_digits(figures.request_throughput)} requests/s",
        **_offered(told),
        "arrival times": f"{_share(figures.kernel_stamp_frac)} of the chunks stamped by the kernel; "
        f"{_share(figures.coalesced_chunk_frac)} read together with the next one (an upper bound)",
        "client": f"{four_digits(told.metrics['client_cpu_cores'])} cores; its loop at most "
        f"{four_digits(told.metrics['max_loop_lag_ms'])} ms late",
    }
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    for name, said in rows.items():
        table.add_row(name, said)
    return table


def _offered(told: ClientQuality) -> dict[str, str]:
    """What the server met of what was asked for; of a closed loop also how soon slots were filled again."""
    if told.offered is None:
        return {"load": "all at once"}
    rows = {"load": f"{four_digits(told.offered.met)} of {four_digits(told.offered.planned)} {told.offered.unit}"}
    idle_frac = told.metrics["slot_idle_frac"]
    if idle_frac is not None:
        names = ("p50_refill_gap_ms", "p99_refill_gap_ms", "p99_refill_connect_ms")
        half, most, connecting = (four_digits(told.metrics[name]) for name in names)
        rows["slots"] = (
            f"empty for {idle_frac:.2%} of their time; filled again after {half} ms (p50), {most} ms (p99); a "
            f"connection took {connecting} ms of it (p99)"
        )
    return rows


def durations_table(figures: LoadFigures, bounds: Mapping[str, Bounds]) -> Table:
    """Latencies by vLLM's definitions, and how late requests were sent."""
    table = Table(title=Text("Durations, ms"), title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for column in ("mean", "median", "p99", "max"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, shown in _NAMES.items():
        durations = figures.durations[name]
        numbers = {f"{name}_ms": durations.mean}
        numbers |= {f"p{percent}_{name}_ms": durations.percentile[percent] for percent in (50, 99)}
        numbers[f"max_{name}_ms"] = durations.largest
        table.add_row(shown, *(marked(four_digits(value), column in bounds) for column, value in numbers.items()))
    return table


def bounds_note(bounds: Mapping[str, Bounds]) -> str | None:
    """What the mark beside a number means, where one has it."""
    if not bounds:
        return None
    told = "; ".join(f"{name} {lies}" for name, lies in bounds.items())
    return f"{MARK} known between bounds only, because the client was late to read: {told}"


def missing_tail(figures: LoadFigures) -> str | None:
    """Why there is no p99, where there is none."""
    needed = smallest_sample(99)
    if figures.num_completed >= needed:
        return None
    return f"p99 needs {needed} completed requests; here are {figures.num_completed}"


def _share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1%}"
