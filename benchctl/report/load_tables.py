"""The result of a single load: its ``result.json``, and the printed tables."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from benchctl.analysis.metrics.latency import smallest_sample
from benchctl.analysis.metrics.table import CLIENT_METRICS, LATENCIES, METRICS
from benchctl.interop.vllm_result import total_throughput, vllm_figures
from benchctl.profile.arrival import Arrival
from benchctl.records.record import Manifest, RunRecord
from benchctl.records.schema import SCHEMA_VERSION
from benchctl.report.table import Column, Table, table_of
from benchctl.units import UNKNOWN, four_digits, whole

if TYPE_CHECKING:
    from benchctl.analysis.metrics.run import LoadFigures

_NAMES: Final = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "end to end", "send_lag": "send lag"}


def load_result(figures: "LoadFigures", record: RunRecord, manifest: Manifest, arrival: Arrival) -> dict[str, Any]:
    """The keys of ``vllm bench serve``, then our own; unknown is null.

    The details of each request, which vLLM writes when it is asked to, are in the run's ``requests.jsonl``, and
    ``benchctl report`` writes them here as well.
    """
    return {
        "date": record.started_at or manifest.created_at,
        "backend": record.effective_config.get("server.dialect"),
        "label": manifest.label,
        "model_id": record.effective_config.get("server.served_model"),
        "tokenizer_id": None,
        **vllm_figures(
            figures.metrics,
            arrival,
            num_requests=figures.num_requests,
        ),
        "schema_version": SCHEMA_VERSION,
        "run_id": record.run_id,
        "state": record.state,
        "goodput": {
            "limits_ms": dict(figures.limits_ms),
            "num_good": figures.num_good,
            "share": figures.metrics["slo_attained_frac"],
        }
        if figures.limits_ms
        else None,
        "stop": manifest.stop,
        "seed": manifest.seed,
        "errors_by_kind": dict(figures.errors),
        "cached_tokens": figures.metrics["cached_tokens"],
        "client": {name: figures.metrics[name] for name in CLIENT_METRICS},
        "offered_load": None if figures.offered is None else asdict(figures.offered),
        "definitions": {f"{latency}_ms": METRICS[f"{latency}_ms"].formula for latency in LATENCIES}
        | {name: METRICS[name].formula for name in CLIENT_METRICS},
    }


def totals_table(figures: "LoadFigures") -> Table:
    """Requests, tokens, throughput, the share of the load that reached the server, and the accuracy of times."""
    failed = f"{figures.num_requests - figures.num_completed} failed"
    if figures.errors:
        failed += f" ({', '.join(f'{count} {kind}' for kind, count in sorted(figures.errors.items()))})"
    metrics = figures.metrics
    cores, late_ms = metrics["client_cpu_cores"], metrics["max_loop_lag_ms"]
    sampled = [] if cores is None else [f"{four_digits(cores)} cores"]
    sampled += [] if late_ms is None else [f"its loop at most {four_digits(late_ms)} ms late"]
    rows = {
        "requests": f"{figures.num_completed} completed, {failed}",
        "duration": f"{four_digits(metrics['wall_s'])} s from the first send to the last output",
        "tokens": f"{whole(metrics['prompt_tokens'])} in prompts, {whole(metrics['output_tokens'])} of output",
        "throughput": f"{four_digits(metrics['output_throughput'])} output tokens/s, "
        f"{four_digits(total_throughput(figures.metrics))} tokens/s, "
        f"{four_digits(metrics['request_throughput'])} requests/s",
        **dict(_rest(figures)),
        "arrival times": f"{_share(metrics['kernel_stamp_frac'])} of the chunks stamped by the kernel; "
        f"{_share(metrics['coalesced_chunk_frac'])} read together with the next one (an upper bound)",
        "client": "; ".join(sampled) or "not sampled: the load was too short",
    }
    columns = (Column("what", "", is_left=True), Column("text", "", is_left=True))
    return Table("", columns, tuple({"what": what, "text": text} for what, text in rows.items()))


def _rest(figures: "LoadFigures") -> Iterator[tuple[str, str]]:
    """The requests within the limits, where there are limits; the share of the load that reached the server; of a
    closed loop also the delay before slots were refilled.
    """
    load, metrics = figures.offered, figures.metrics
    if figures.limits_ms:
        limits = " and ".join(f"{_NAMES[name]} <= {limit:g} ms" for name, limit in figures.limits_ms.items())
        good = (
            f"{whole(figures.num_good)} of {figures.num_requests} requests ({_share(metrics['slo_attained_frac'])})"
        )
        yield "goodput", f"{good}: {limits}; {four_digits(metrics['goodput'])} requests/s"
    if load is None:
        yield "load", "all at once"
        return
    yield "load", f"{four_digits(load.met)} of {four_digits(load.planned)} {load.unit}"
    idle_frac = metrics["slot_idle_frac"]
    if idle_frac is not None:
        names = ("p50_refill_gap_ms", "p99_refill_gap_ms", "p99_refill_connect_ms")
        half, most, connecting = (four_digits(metrics[name]) for name in names)
        filled = f"filled again after {half} ms (p50), {most} ms (p99)"
        connects = f"a connection took {connecting} ms of it (p99)"
        yield "slots", f"empty for {idle_frac:.2%} of their time; {filled}; {connects}"


def durations_table(figures: "LoadFigures") -> Table:
    """Latencies by vLLM's definitions, and the delays of sends."""
    rows = (
        (title, *(four_digits(figures.metrics[f"{prefix}{name}_ms"]) for prefix in ("", "p50_", "p99_", "max_")))
        for name, title in _NAMES.items()
    )
    return table_of(("", "mean", "median", "p99", "max"), rows, left=("",), title="Durations, ms")


def missing_tail(figures: "LoadFigures") -> str | None:
    """The reason for a missing p99; None where there is one."""
    needed = smallest_sample(99)
    if figures.num_completed >= needed:
        return None
    return f"p99 needs {needed} completed requests; there are {figures.num_completed}"


def _share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1%}"
