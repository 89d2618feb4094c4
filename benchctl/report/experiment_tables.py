"""Tables of an analyzed experiment, and the notes that they number. ms and % exist from here on, not before."""

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import fmean
from typing import Any, Final

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.attribution.breakdown import Section
from benchctl.analysis.compare.cells import MetricByNode, NodeResults
from benchctl.analysis.compare.words import WarningKind, warning_kind
from benchctl.analysis.experiment.ladder import Difference
from benchctl.analysis.experiment.summary import CellSummary, Spread
from benchctl.analysis.metrics.latency import known_values
from benchctl.analysis.statistics.carry_over import TERMS
from benchctl.analysis.validity.answers import planned_hit_frac
from benchctl.analysis.validity.machines import machines_of, machines_text
from benchctl.profile.engine_table import is_virtual
from benchctl.profile.sections import SharedPrefix
from benchctl.records.directory import RequestSets
from benchctl.records.record import ESTIMATE, SERVER, Manifest, PreparedRequest, WarmupRecord
from benchctl.records.schema import ResultWarning
from benchctl.records.warning_codes import by_severity
from benchctl.report.table import Column, Table
from benchctl.steptime.speculation_law import Estimate
from benchctl.units import (
    count_of,
    four_digits,
    ms_from_ns,
    p_value,
    percentage,
    percentage_change,
    range_of,
    shortened_inside,
    three_digits,
    whole,
)
from benchctl.untrusted.text import visible_line


def prompt_lengths_text(requests: Sequence[PreparedRequest], engine: str) -> str | None:
    """``256 tokens each, counted by tokenizer 3f2a91c0``; None for a set without requests."""
    if not requests:
        return None
    lengths = [request.prompt_tokens for request in requests]
    low, high = min(lengths), max(lengths)
    tokens = f"{low} tokens each" if low == high else f"{low} to {high} tokens (mean {four_digits(fmean(lengths))})"
    sources = dict.fromkeys(counted_by(request.prompt_tokens_from, engine) for request in requests)
    return f"{tokens}, {' or '.join(sources)}"


def planned_hits_text(sets: RequestSets, prefix: SharedPrefix | None) -> str | None:
    """``prefixes of 512 tokens in 4 groups: planned prefix hits 0.80``, or of conversations; None without plan.

    Where load points have sets of their own, from the least share to the largest.
    """
    plans = known_values(planned_hit_frac(requests) for _, requests in sets.sets)
    if not plans:
        return None
    requests = [request for _, each in sets.sets for request in each]
    what = f"conversations of up to {max(request.turn or 0 for request in requests) + 1} turns"
    if prefix is not None:
        lengths = range_of([request.shared_tokens for request in requests])
        what = f"prefixes of {lengths} tokens in {count_of(prefix.groups, 'group')}"
    return f"{what}: planned prefix hits {range_of(plans, '.2f')}"


def hits_text(analysis: AnalyzedExperiment) -> str | None:
    """``planned 0.80, measured 0.79 (candidate)`` for each cell, a mean over runs; None without a plan."""
    texts = []
    for cell in analysis.cells:
        hits = known_values(analysis.experiment.metrics(run.run)["prefix_hit_frac"] for run in cell.runs)
        planned = planned_hit_frac(analysis.results.sets.of(cell.cell), cell.runs[0].settings) if hits else None
        if planned is not None:
            texts.append(f"planned {planned:.2f}, measured {fmean(hits):.2f} ({cell.label})")
    return "; ".join(texts) or None


def counted_by(source: str, engine: str) -> str:
    """The source of counts in words. The simulator counts by the rule of the estimate, which is exact for it."""
    if source == SERVER:
        return "counted by the server"
    if source == ESTIMATE:
        return "counted as the simulator counts" if is_virtual(engine) else "estimated"
    kind, _, digest = source.partition(" ")
    return f"counted by {kind} {digest[:8]}"  # of a SHA-256: enough to tell tokenizers apart


_RUN_COLUMNS: Final = {
    "wall_s": "wall s",
    "output_throughput": "tok/s",
    "step_ms": "step ms",
    "tokens_per_step": "tok/step",
    "ttft_ms": "TTFT ms",
    "tpot_ms": "TPOT ms",
}
_SLO_COLUMNS: Final = {"goodput": "goodput req/s", "slo_attained_frac": "within SLO"}
"""Where requests have an objective."""
_PASS_COLUMNS: Final = {
    "wall_s": "wall s",
    "step_ms": "mean ms",
    "p50_step_ms": "median ms",
    "p95_step_ms": "p95 ms",
}
"""Of an experiment of forward passes."""
_EXTRA: Final = frozenset({"output_throughput", "ttft_ms"})
"""Columns that a narrow table of cells leaves out."""
_NUMBERS: Final = {"num_failed": whole}
"""Columns whose numbers are not in four digits."""


def headline(analysis: AnalyzedExperiment) -> str:
    """The measured experiment in three lines."""
    manifest, plan = analysis.results.manifest, analysis.results.plan
    ended = {run.record.run_id for run in analysis.runs if run.record.state == "done"}
    code = f"benchctl {manifest.benchctl_version}"
    if manifest.git is not None:
        code += f" ({manifest.git.sha[:10]}{', work tree changed' if manifest.git.is_dirty else ''})"
    label = f" · {manifest.label}" if manifest.label else ""
    work = _requests_text(analysis) if analysis.passes is None else passes_text(analysis)
    baseline = "" if manifest.baseline == "baseline" else f" · baseline {manifest.baseline}"
    done = f"{len(ended)} of {len(plan.runs)} runs done"
    if manifest.state == "running":
        nodes = {run.record.node.name for run in analysis.runs if run.record.node is not None}
        done += f" in {count_of(plan.num_blocks_of(ended), 'whole block')}"
        done += f" on {len(nodes)} nodes" if len(nodes) > 1 else ""
    lines = (
        f"{manifest.profile}{label} · {manifest.state} · {done} · {blocks_text(manifest)}{baseline}",
        f"engine {manifest.engine} · {work} · seed {manifest.seed}",
        f"{manifest.created_at} · {code} · {machines_text(machines_of(analysis.results))}",
    )
    return "\n".join(map(visible_line, lines))


def _requests_text(analysis: AnalyzedExperiment) -> str:
    """The request set; with the lengths of its prompts for servers whose tokenizer is not benchctl's own rule."""
    manifest, requests = analysis.results.manifest, analysis.results.sets
    lengths = None if is_virtual(manifest.engine) else prompt_lengths_text(requests.requests, manifest.engine)
    prompts = "" if lengths is None else f" · prompts of {lengths}"
    rate = None if analysis.profile is None else analysis.profile.workload.arrival.launch_rate_limit
    limit = "" if rate is None else f" · at most {rate:g} launches per second"
    source = f"{manifest.dataset} ({manifest.request_set_sha256[:10]})"
    return f"{number_text(analysis, ' requests')} of {source}{prompts}{limit} · stop {manifest.stop}"


def number_text(analysis: AnalyzedExperiment, noun: str = "") -> str:
    """The number of requests of a load, and of times that a server got them if several: ``20 to 640 3 times``."""
    numbers = sorted({len(run.record.loads) or 1 for run in analysis.runs})
    times = "" if numbers in ([], [1]) else f" {' or '.join(map(str, numbers))} times"
    return f"{analysis.results.sets.number}{noun}{times}"


def passes_text(analysis: AnalyzedExperiment) -> str:
    """``forward passes of llama-68m in float32 on AMD EPYC, torch 2.9.0``, as far as a run says it."""
    config = _config_of_passes(analysis)
    model, dtype = config.get("model", "an unknown model"), config.get("server.dtype", "unknown numbers")
    torch = config.get("server.torch_version")
    device = device_of_passes(analysis) or "an unknown device"
    return f"forward passes of {model} in {dtype} on {device}" + (f", torch {torch}" if torch else "")


def device_of_passes(analysis: AnalyzedExperiment) -> str | None:
    """The device that computed forward passes; None where no run says it, and for an experiment of requests."""
    return None if analysis.passes is None else _config_of_passes(analysis).get("server.device_name")


def _config_of_passes(analysis: AnalyzedExperiment) -> Mapping[str, Any]:
    return next((run.record.effective_config for run in analysis.runs if run.record.effective_config), {})


def blocks_text(manifest: Manifest) -> str:
    """``8 blocks``, with those that were added, or how a stopping rule ended the experiment."""
    rule = manifest.stopping
    if rule is None:
        added = sum(extension.to_blocks - extension.from_blocks for extension in manifest.extensions)
        return count_of(manifest.blocks, "block") + (f", {added} of them added" if added else "")
    goal = "a verdict" if rule.precision_frac is None else f"±{percentage(rule.precision_frac)}"
    if rule.ended_after is None:
        return f"at most {manifest.blocks} blocks (wanted {goal})"
    reached = f"{goal} unlikely" if rule.looks[-1].ends_for == "futility" else f"{goal} reached"
    return f"{rule.ended_after} of at most {manifest.blocks} blocks ({reached})"


def footnotes(analysis: AnalyzedExperiment) -> tuple[ResultWarning, ...]:
    """Every warning once, the gravest first: the same warning in many runs is one footnote."""
    met: dict[WarningKind, ResultWarning] = {}
    for warning in chain(analysis.warnings, *(run.warnings for run in analysis.runs)):
        met.setdefault(warning_kind(warning), warning)
    return by_severity(met.values())


def _request_columns(analysis: AnalyzedExperiment) -> dict[str, str]:
    return {**_RUN_COLUMNS, **{name: text for name, text in _SLO_COLUMNS.items() if name not in analysis.lacks}}


def runs_table(analysis: AnalyzedExperiment) -> Table:
    """Every planned run: its state, its main numbers, the numbers of its footnotes."""
    numbers = {warning_kind(note): number for number, note in enumerate(footnotes(analysis), start=1)}
    names = {**_request_columns(analysis), "num_failed": "failed"} if analysis.passes is None else _PASS_COLUMNS
    begun = {run.record.run_id: run for run in analysis.runs}
    rows: list[dict[str, Any]] = [
        {"run": planned.run_id, "state": "planned", **dict.fromkeys(names), "notes": []}
        if (run := begun.get(planned.run_id)) is None
        else {"run": planned.run_id, "state": run.state}
        | {name: _NUMBERS.get(name, four_digits)(run.number(name)) for name in names}
        | {
            "warmup": run.record.warmup,
            "notes": sorted({numbers[kind] for w in run.warnings if (kind := warning_kind(w)) in numbers}),
        }
        for planned in analysis.results.plan.runs
    ]
    columns = (
        Column("run", "run", is_left=True),
        Column("state", "state", is_left=True),
        *(Column(name, heading) for name, heading in names.items()),
        Column("warmup", "warm-up", _warmup_text, is_left=True),
        Column("notes", "notes", lambda marks: " ".join(map(str, marks))),
    )
    return Table("Runs, in the order of execution", columns, tuple(rows))


def _warmup_text(warmup: WarmupRecord) -> str:
    return f"{count_of(len(warmup.waves), 'wave')}{'' if warmup.is_steady else ', unsteady'}"


def cells_table(analysis: AnalyzedExperiment) -> Table | None:
    """Every variant and cell as centre and scatter over blocks; None without a finished run or an infeasible cell.

    Forward passes have a table of their own.
    """
    cells = [cell for cell in analysis.cells if cell.runs or cell.infeasible]
    if analysis.passes is not None or not cells:
        return None
    names = _request_columns(analysis)
    title = (
        "Cells, centre ± scatter over blocks (mean and standard deviation of the logarithms, weighted by the "
        f"estimator {analysis.experiment.estimator})"
    )
    columns = (
        Column("label", "cell", is_left=True),
        Column("blocks", "blocks", is_left=True),
        *(Column(name, heading, _spread, is_extra=name in _EXTRA) for name, heading in names.items()),
        Column("num_failed", "failed", lambda failed: whole(failed.centre * failed.n)),
    )
    rows = (
        {"label": cell.label, "blocks": f"infeasible ({cell.infeasible})"}
        if cell.infeasible
        else {"label": cell.label, "blocks": blocks_that_count(cell)}
        | {name: cell.spreads.get(name) for name in (*names, "num_failed")}
        for cell in cells
    )
    return Table(title, columns, tuple(rows))


def blocks_that_count(cell: CellSummary) -> str:
    """The number of runs of an arm that count, and of those that were left out."""
    return f"{len(cell.runs)}" + (f" ({cell.num_unusable} left out)" if cell.num_unusable else "")


def _spread(spread: Spread) -> str:
    return four_digits(spread.centre) + ("" if spread.scatter_frac is None else f" ± {spread.scatter_frac:.1%}")


def breakdown_table(analysis: AnalyzedExperiment) -> Table | None:
    """Sections of a step by cell, ms: sum / all steps, which adds up; in brackets the mean where it runs.

    Where the log times the sampler alone, the table begins with the sampler and says so.
    """
    cells = {cell.label: breakdown for cell in analysis.cells if (breakdown := cell.breakdown()) is not None}
    if all(len(breakdown.tree) == 1 for breakdown in cells.values()):
        return None
    notes = sorted({breakdown.clock_note for breakdown in cells.values()})
    covers_steps = all(breakdown.covers_steps for breakdown in cells.values())
    timed = "Time per step" if covers_steps else "Time in the sampler per step (not of whole steps)"
    # sections of the fullest tree in its order, then those that only other cells have
    trees = {label: {section.name: section for section in cell.tree} for label, cell in cells.items()}
    fullest = max(trees.values(), key=len)
    sections = dict(chain(fullest.items(), *(tree.items() for tree in trees.values())))
    rows = [
        {"section": "  " * section.depth + name}
        | {label: tree[name] for label, tree in trees.items() if name in tree}
        for name, section in sections.items()
    ]
    columns = (Column(label, label.replace(" ", "\n", 1), _section) for label in cells)
    title = f"{timed}, ms: sum / all steps (mean where it runs)\n{'; '.join(notes)}"
    return Table(title, (Column("section", "section", is_left=True), *columns), tuple(rows))


def _section(section: Section) -> str:
    mean = four_digits(ms_from_ns(section.mean_ns))
    if section.record_mean_ns is None or section.step_frac == 1:
        return mean
    return f"{mean} ({four_digits(ms_from_ns(section.record_mean_ns))})"


_SWEEP_COLUMNS: Final = (
    Column("base_wall_s", "wall base s", four_digits, is_extra=True),
    Column("lvm_wall_s", "wall cell s", four_digits, is_extra=True),
    Column("num_steps_ratio", "steps", four_digits),
    Column("step_ms_ratio", "step time", four_digits),
)
_FLOPS_COLUMNS: Final = (
    Column("flops_ratio", "FLOPs publ.", four_digits),
    Column("flops_ratio_observed", "FLOPs obs.", four_digits),
    # A share below 0 has no size: FLOPs grew more than time, as where a step waits for memory.
    Column("unexplained_frac_observed", "beyond FLOPs", lambda share: f"{share:.0%}" if share >= 0 else "<0%"),
)


_SAME_WORK_FRAC: Final = 0.005


def sweep_table(analysis: AnalyzedExperiment) -> Table | None:
    """Every cell against the baseline of the same block, with FLOPs where they differ; None without any."""
    if analysis.passes is not None or not (analysis.sweep or analysis.infeasible):
        return None
    ratios = [row.number(column.key) for row in analysis.sweep for column in _FLOPS_COLUMNS[:2]]
    is_more_work = any(ratio is not None and abs(ratio - 1) > _SAME_WORK_FRAC for ratio in ratios)
    numbers = (*_SWEEP_COLUMNS, *(_FLOPS_COLUMNS if is_more_work else ()))
    estimates = [estimate for row in analysis.sweep for estimate in row.estimates.values()]
    confidence = f"{estimates[0].confidence * 100:.3g} %" if estimates else "95 %"
    columns = (
        Column("label", "cell", is_left=True),
        Column("n_blocks", "blocks", is_left=True),
        Column("wall", f"wall time ({confidence} interval)"),
        *numbers,
    )
    rows: list[dict[str, Any]] = [
        {
            "label": row.label,
            "n_blocks": row.values["n_blocks"],
            "wall": _wall_ratio(*(row.number(f"wall_ratio{end}") for end in ("", "_ci_low", "_ci_high"))),
            **{column.key: row.number(column.key) for column in numbers},
        }
        for row in analysis.sweep
    ]
    infeasible = [(cell.label, f"infeasible ({cell.infeasible})") for cell in analysis.infeasible]
    rows += [{"label": label, "n_blocks": 0, "wall": reason} for label, reason in infeasible]
    return Table("Against the baseline of the same block: ratios as compare estimates them", columns, tuple(rows))


def _wall_ratio(ratio: float | None, low: float | None, high: float | None) -> str | None:
    interval = f" [{three_digits(low)}, {three_digits(high)}]" if low is not None and high is not None else ""
    return None if ratio is None else f"{three_digits(ratio)}{interval}"


def ladder_table(analysis: AnalyzedExperiment) -> Table | None:
    """Differences of neighbours, ± half of the 95 % interval over blocks; None where nothing has controls."""
    if not analysis.ladders:
        return None
    title = "Ladder of controls: what each step adds to the one before it, ± half of the 95 % interval over blocks"
    columns = (
        Column("cell", "cell", is_left=True),
        Column("what", "price of", is_left=True),
        Column("step", "step", is_left=True),
        Column("blocks", "blocks"),
        Column("wall_s", "wall s", _amount),
        Column("step_ms", "step ms", _amount),
    )
    rows = (
        {
            "cell": ladder.label if i == 0 else "",
            "what": price.what,
            "step": f"{price.lower} > {price.upper}",
            "blocks": max((difference.num_blocks for difference in price.differences.values()), default=0),
            **{name: price.differences.get(name) for name in ("wall_s", "step_ms")},
        }
        for ladder in analysis.ladders
        for i, price in enumerate((*ladder.prices, ladder.whole))
    )
    return Table(title, columns, tuple(rows))


def _amount(difference: Difference) -> str:
    interval = "" if difference.half_width is None else f" ± {difference.half_width:.2g}"
    return f"{difference.mean:+.4g}{interval}"


PARTS_OF_SCATTER: Final = {"between": "between servers", "within": "between loads", "drift": "drift per load"}
"""Variance components, with their headings."""


def scatter_table(analysis: AnalyzedExperiment) -> Table | None:
    """The variance components of the primary metrics; None where no server got several loads."""
    parts = PARTS_OF_SCATTER
    columns = (Column("metric", "metric", is_left=True), *(Column(*each, in_percent) for each in parts.items()))
    rows = [
        {"metric": name} | {part: getattr(each, part) for part in parts} for name, each in analysis.scatter.items()
    ]
    title = "Scatter in %, with 95 % intervals: between servers of a block, between loads of a server"
    return Table(title, columns, tuple(rows)) if rows else None


def carry_over_table(analysis: AnalyzedExperiment) -> Table | None:
    """The carry-over of metrics and ratios; None where no server got several load points."""
    columns = (
        Column("metric", "metric", is_left=True),
        *(Column(term, term.replace("_", " "), in_percent) for term in reversed(TERMS)),
        Column("p_value", "p", p_value),
    )
    rows = [{"metric": name, **each.effects, "p_value": each.p_value} for name, each in analysis.carry_over.items()]
    title = (
        "Carry-over between the loads of a server in %, with 95 % intervals: in its first load, after a larger one "
        "against after a smaller one, and with each further load"
    )
    return Table(title, columns, tuple(rows)) if rows else None


def scatter_lines(analysis: AnalyzedExperiment) -> list[str]:
    """The price of the declared precision, and the reason for the number of loads that was chosen."""
    choice = analysis.results.manifest.loads
    precision = [] if analysis.precision is None else [f"precision: {analysis.precision}"]
    return [*precision, *([] if choice is None else [f"loads_per_server: {choice.reason}"])]


def in_percent(estimate: Estimate) -> str:
    """``1.2 [0.8, 2.1]``."""
    value, low, high = (f"{100 * (end or 0.0):.2g}" for end in (estimate.value, estimate.low, estimate.high))
    return f"{value} [{low}, {high}]"


def nodes_table(variants: Sequence[NodeResults], *, show_all: bool = False) -> Table | None:
    """The nodes of a metric, then the ratio over all blocks with the test of equal nodes; None without any.

    Without ``show_all`` those of one metric of each cell: the one in which nodes differ the most surely, else the
    first; of its nodes the twelve that are farthest from the ratio over blocks.
    """
    if not variants:
        return None
    rows: list[dict[str, Any]] = []
    for results in variants:
        chosen: dict[str, MetricByNode] = {}
        for metric in (*results.differing, *results.metrics):
            chosen.setdefault(metric.label, metric)
        metrics = results.metrics if show_all else sorted(chosen.values(), key=results.metrics.index)
        for before, metric in zip((None, *metrics), metrics, strict=False):
            first, *more = _rows_of_nodes(metric, most=len(metric.rows) if show_all else 12)
            cell = {} if before is not None and before.label == metric.label else {"cell": metric.label}
            rows += [first | {"metric": metric.metric} | cell, *more]
    columns = (
        *(Column(name, name, is_left=True) for name in ("cell", "metric", "node", "blocks")),
        Column("change", f"change ({percentage(variants[0].confidence)} CI)"),
        Column("p", "p", p_value),
    )
    title = (
        "Results by node: the verdict is 'over blocks'; p is that of equal nodes, by the F test of one metric alone"
    )
    if all(row.num_blocks == 1 for results in variants for metric in results.metrics for row in metric.rows):
        title += "; no node did two blocks: a node cannot be told from a block"
    return Table(title, columns, tuple(rows))


def _rows_of_nodes(metric: MetricByNode, most: int) -> list[dict[str, Any]]:
    blocks = metric.over_blocks
    farthest = sorted(metric.rows, key=lambda row: -abs(math.log(row.ratio / blocks.ratio)))[:most]
    num_others = len(metric.rows) - len(farthest)
    ends = [percentage_change(end - 1) for end in (blocks.ci_low, blocks.ci_high) if end is not None]
    return [
        *(
            {
                "node": shortened_inside(row.node, 40),
                "blocks": row.num_blocks,
                "change": percentage_change(row.ratio - 1),
            }
            for row in metric.rows
            if row in farthest
        ),
        *([{"node": f"and {count_of(num_others, 'node')} more"}] if num_others else []),
        {
            "node": "over blocks",
            "blocks": blocks.num_blocks,
            "change": percentage_change(blocks.ratio - 1) + (f" [{', '.join(ends)}]" if ends else ""),
            "p": metric.p_value,
        },
    ]
