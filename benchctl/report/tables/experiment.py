"""Lengths of the prompts of a request set in words, with who counted them.

Tables of an analyzed experiment for the terminal. ms and % exist from here on, not before.
Results by node as headings, rows and sentences, for every form of table.
Both ways of backfill as a table, and what follows in sentences. Times are in ms.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from statistics import fmean
from typing import Any, Final

from rich.table import Table

from benchctl.analysis.attribution.breakdown import Breakdown, Section
from benchctl.analysis.bonus.bonus import BackfillVerdict, Comparison, Cost
from benchctl.analysis.bonus.sentences import context_in_words, verdict_sentences
from benchctl.analysis.compare.nodes import MetricByNode, NodeResults
from benchctl.analysis.compare.words import WarningKind, warning_kind
from benchctl.analysis.metrics.bounds import marked
from benchctl.analysis.summary.analyzed import AnalyzedExperiment
from benchctl.analysis.summary.flops_bridge import flops_bridge
from benchctl.analysis.summary.summary import CellSummary, Spread
from benchctl.analysis.validity.machines import machines_of, machines_text
from benchctl.costs.hardware import Hardware
from benchctl.formats import (
    UNKNOWN,
    change_in_interval,
    count_of,
    first_of,
    four_digits,
    p_value,
    percentage,
    shortened_inside,
    signed_four_digits,
    three_digits,
    whole,
)
from benchctl.profile.choices import Mode
from benchctl.records.record import ESTIMATE, SERVER, Manifest, PreparedRequest
from benchctl.records.schema import ResultWarning
from benchctl.records.warning_codes import by_severity
from benchctl.report.text.plain_table import plain_table
from benchctl.units import TERA, ms_from_ns
from benchctl.untrusted.text import visible_line

_SHOWN_HEX: Final = 8
"""Digits of a tokenizer's SHA-256 that are shown: enough to tell tokenizers apart."""


def prompt_lengths_text(requests: Sequence[PreparedRequest], engine: str) -> str | None:
    """``256 tokens each, counted by tokenizer 3f2a91c0``; None for a set without requests."""
    if not requests:
        return None
    lengths = [request.prompt_tokens for request in requests]
    low, high = min(lengths), max(lengths)
    tokens = f"{low} tokens each" if low == high else f"{low} to {high} tokens (mean {four_digits(fmean(lengths))})"
    sources = dict.fromkeys(counted_by(request.prompt_tokens_from, engine) for request in requests)
    return f"{tokens}, {' or '.join(sources)}"


def counted_by(source: str, engine: str) -> str:
    """The source of counts in words. The simulator counts by the rule of the estimate, which is exact for it."""
    if source == SERVER:
        return "counted by the server"
    if source == ESTIMATE:
        return "counted as the simulator counts" if engine == "sim" else "estimated"
    kind, _, digest = source.partition(" ")
    return f"counted by {kind} {digest[:_SHOWN_HEX]}"


_RUN_COLUMNS: Final = {
    "wall s": "wall_s",
    "tok/s": "output_throughput",
    "step ms": "step_ms",
    "tok/step": "tokens_per_step",
    "TTFT ms": "ttft_ms",
    "TPOT ms": "tpot_ms",
}
_PASS_COLUMNS: Final = {
    "wall s": "wall_s",
    "mean ms": "step_ms",
    "median ms": "p50_step_ms",
    "p95 ms": "p95_step_ms",
}
"""Of an experiment of forward passes."""
_SWEEP_COLUMNS: Final = {
    "wall base s": "base_wall_s",
    "wall cell s": "lvm_wall_s",
    "steps": "num_steps_ratio",
    "step time": "step_ms_ratio",
    "FLOPs publ.": "flops_ratio",
    "FLOPs obs.": "flops_ratio_observed",
}


def headline(analysis: AnalyzedExperiment) -> str:
    """The measured experiment in three lines."""
    manifest = analysis.results.manifest
    num_done = sum(run.record.state == "done" for run in analysis.runs)
    num_planned = len(analysis.results.plan.runs)
    code = f"benchctl {manifest.benchctl_version}"
    if manifest.git is not None:
        code += f" ({manifest.git.sha[:10]}{', work tree changed' if manifest.git.is_dirty else ''})"
    label = f" · {manifest.label}" if manifest.label else ""
    work = _requests_text(analysis) if analysis.passes is None else passes_text(analysis)
    baseline = "" if manifest.baseline == "baseline" else f" · baseline {manifest.baseline}"
    done = f"{num_done} of {num_planned} runs done"
    if manifest.state == "running":
        plan = analysis.results.plan
        ended = {run.record.run_id for run in analysis.runs if run.record.state == "done"}
        nodes = {run.record.node.name for run in analysis.runs if run.record.node is not None}
        done += f" in {count_of(plan.num_blocks_of(ended), 'whole block')}" + (
            f" on {len(nodes)} nodes" if len(nodes) > 1 else ""
        )
    lines = (
        f"{manifest.profile}{label} · {manifest.state} · {done} · {blocks_text(manifest)}{baseline}",
        f"engine {manifest.engine} · {work} · seed {manifest.seed}",
        f"{manifest.created_at} · {code} · {machines_text(machines_of(analysis.results))}",
    )
    return "\n".join(map(visible_line, lines))


def _requests_text(analysis: AnalyzedExperiment) -> str:
    """The request set; with the lengths of its prompts for servers whose tokenizer is not benchctl's own rule."""
    manifest, requests = analysis.results.manifest, analysis.results.requests
    lengths = None if manifest.engine == "sim" else prompt_lengths_text(requests, manifest.engine)
    prompts = "" if lengths is None else f" · prompts of {lengths}"
    rate = None if analysis.profile is None else analysis.profile.workload.arrival.launch_rate_limit
    limit = "" if rate is None else f" · at most {rate:g} launches per second"
    return (
        f"{len(requests)} requests of {manifest.dataset} ({manifest.request_set_sha256[:10]}){prompts}{limit} · "
        f"stop {manifest.stop}"
    )


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
    if rule.ended_after is None:
        return f"at most {manifest.blocks} blocks (wanted ±{percentage(rule.precision_frac)})"
    return f"{rule.ended_after} of at most {manifest.blocks} blocks (±{percentage(rule.precision_frac)} reached)"


def footnotes(analysis: AnalyzedExperiment) -> tuple[ResultWarning, ...]:
    """Every warning once, the gravest first: the same warning in many runs is one footnote."""
    met: dict[WarningKind, ResultWarning] = {}
    for warning in chain(analysis.warnings, *(run.warnings for run in analysis.runs)):
        met.setdefault(warning_kind(warning), warning)
    return by_severity(met.values())


def footnote_lines(analysis: AnalyzedExperiment) -> list[str]:
    """``[1] code: message (which runs)``."""
    lines = []
    for number, note in enumerate(footnotes(analysis), start=1):
        run_ids = [run.record.run_id for run in analysis.runs if _mentions(run.warnings, note)]
        runs = first_of(run_ids, 3)
        lines.append(f"[{number}] {note.code}: {note.message}" + (f" ({runs})" if runs else ""))
    return lines


def runs_table(analysis: AnalyzedExperiment) -> Table:
    """Every planned run: its state, its main numbers, its footnotes."""
    notes, columns = footnotes(analysis), run_columns(analysis)
    names = [*columns, *(["failed"] if analysis.passes is None else []), "notes"]
    table = plain_table("Runs, in the order of execution", ["run", "state"], names)
    begun = {run.record.run_id: run for run in analysis.runs}
    for planned in analysis.results.plan.runs:
        run = begun.get(planned.run_id)
        if run is None:
            table.add_row(planned.run_id, "planned", *[UNKNOWN] * (len(names) - 1), "")
            continue
        numbers = [marked(four_digits(run.number(column)), column in run.bounds) for column in columns.values()]
        if analysis.passes is None:
            numbers.append(whole(run.number("num_failed")))
        marks = " ".join(str(i) for i, note in enumerate(notes, start=1) if _mentions(run.warnings, note))
        table.add_row(planned.run_id, run.state, *numbers, marks)
    return table


def run_columns(analysis: AnalyzedExperiment) -> Mapping[str, str]:
    """The numbers of a run in a table, by their titles: those of requests, or of forward passes."""
    return _RUN_COLUMNS if analysis.passes is None else _PASS_COLUMNS


def cells_table(analysis: AnalyzedExperiment) -> Table | None:
    """Every variant and cell as centre and scatter over blocks; None without a finished run or an infeasible cell.

    Forward passes have a table of their own.
    """
    if analysis.passes is not None:
        return None
    cells = [cell for cell in analysis.cells if cell.runs or cell.infeasible]
    if not cells:
        return None
    title = (
        "Cells, centre ± scatter over blocks (mean and standard deviation of the logarithms, weighted by the "
        f"estimator {analysis.experiment.estimator})"
    )
    table = plain_table(title, ["cell", "blocks"], [*_RUN_COLUMNS, "failed"])
    for cell in cells:
        if cell.infeasible:
            table.add_row(cell.label, _infeasible(cell))
            continue
        spreads = [_spread(cell.spreads.get(column)) for column in _RUN_COLUMNS.values()]
        left_out = f" ({cell.num_unusable} left out)" if cell.num_unusable else ""
        failed = cell.spreads.get("num_failed")
        num_failed = whole(None if failed is None else failed.centre * failed.n)
        table.add_row(cell.label, f"{len(cell.runs)}{left_out}", *spreads, num_failed)
    return table


def breakdown_table(analysis: AnalyzedExperiment) -> Table | None:
    """Sections of a step by cell, ms: sum / all steps, which adds up; in brackets the mean where it runs.

    Where the log times the sampler alone, the table begins with the sampler and says so.
    """
    cells = {cell.label: breakdown for cell in analysis.cells if (breakdown := cell.breakdown()) is not None}
    if not cells or not any(breakdown.step.children for breakdown in cells.values()):
        return None
    notes = sorted({breakdown.clock_note for breakdown in cells.values()})
    covers_steps = all(breakdown.covers_steps for breakdown in cells.values())
    timed = "Time per step" if covers_steps else "Time in the sampler per step (not of whole steps)"
    title = f"{timed}, ms: sum / all steps (mean where it runs)\n{'; '.join(notes)}"
    table = plain_table(title, ["section"], [label.replace(" ", "\n", 1) for label in cells])
    for depth, name in _section_names(cells):
        sections = [breakdown.section(name) for breakdown in cells.values()]
        table.add_row("  " * depth + name, *(_section(section) for section in sections))
    return table


def sweep_table(analysis: AnalyzedExperiment) -> Table | None:
    """Every cell against the baseline of the same block; None where there is none to compare."""
    if analysis.passes is not None or not (analysis.sweep or analysis.infeasible):
        return None
    title = "Against the baseline of the same block: ratios as compare estimates them"
    table = plain_table(
        title,
        ["cell", "blocks"],
        [f"wall time ({_confidence(analysis)} interval)", *_SWEEP_COLUMNS, "beyond FLOPs"],
    )
    for row in analysis.sweep:
        ratio, low, high = (row.number(f"wall_ratio{end}") for end in ("", "_ci_low", "_ci_high"))
        interval = f" [{three_digits(low)}, {three_digits(high)}]" if low is not None and high is not None else ""
        wall = UNKNOWN if ratio is None else f"{three_digits(ratio)}{interval}"
        share = row.number("unexplained_frac_observed")
        # A share below 0 has no size: FLOPs grew more than time, as where a step waits for memory.
        left = UNKNOWN if share is None else f"{share:.0%}" if share >= 0 else "<0%"
        numbers = [four_digits(row.number(column)) for column in _SWEEP_COLUMNS.values()]
        table.add_row(row.label, str(row.values["n_blocks"]), wall, *numbers, left)
    for cell in analysis.infeasible:
        table.add_row(cell.label, "0", _infeasible(cell))
    return table


def _confidence(analysis: AnalyzedExperiment) -> str:
    estimates = [estimate for row in analysis.sweep for estimate in row.estimates.values()]
    return f"{estimates[0].confidence * 100:.3g} %" if estimates else "95 %"


def flops_table(analysis: AnalyzedExperiment) -> Table | None:
    """From published to observed FLOPs, each correction with its price; None where no run has both accounts."""
    bridges = [bridge for cell in analysis.cells if (bridge := flops_bridge(cell)) is not None]
    if not bridges:
        return None
    title = "FLOPs of a run, TFLOP: from the published rule to the step log (model FLOPs, not measured)"
    table = plain_table(title, ["account"], [bridge.label.replace(" ", "\n", 1) for bridge in bridges])
    table.add_column("reason", no_wrap=True)
    table.add_row("published", *(four_digits(bridge.published_flops / TERA) for bridge in bridges))
    for code, meaning in {step.code: step.meaning for bridge in bridges for step in bridge.steps}.items():
        prices = [{step.code: step.flops for step in bridge.steps}.get(code) for bridge in bridges]
        table.add_row(
            f"  {code}", *("" if flops is None else signed_four_digits(flops / TERA) for flops in prices), meaning
        )
    table.add_row("observed", *(four_digits(bridge.observed_flops / TERA) for bridge in bridges))
    devices = {run.flops.hardware for cell in analysis.cells for run in cell.runs if run.flops is not None}
    peaks = " and ".join(sorted(_peak_text(device) for device in devices if device is not None))
    if peaks and any(bridge.utilization_frac is not None for bridge in bridges):
        percentages = (
            "" if bridge.utilization_frac is None else percentage(bridge.utilization_frac) for bridge in bridges
        )
        table.add_row("  of the peak", *percentages, peaks)
    return table


def _peak_text(hardware: Hardware) -> str:
    """The peak that FLOP/s are compared with, and its origin."""
    origin = "" if hardware.measured_at else f", {hardware.source}"
    return f"{four_digits(hardware.peak_flops_per_s / TERA)} TFLOP/s of {hardware.title}{origin}"


def _section_names(cells: Mapping[str, Breakdown]) -> list[tuple[int, str]]:
    """Sections of the fullest tree in its order; then those that only other cells have."""
    widest = max(cells.values(), key=lambda breakdown: len(list(breakdown.step.walk())))
    names = [(depth, section.name) for depth, section in widest.step.walk()]
    listed = {name for _, name in names}
    for breakdown in cells.values():
        for depth, section in breakdown.step.walk():
            if section.name not in listed:
                names.append((depth, section.name))
                listed.add(section.name)
    return names


def _section(section: Section | None) -> str:
    if section is None:
        return ""
    mean = four_digits(ms_from_ns(section.mean_ns))
    if section.record_mean_ns is None or section.num_records == section.num_steps or section.is_unnamed:
        return mean
    return f"{mean} ({four_digits(ms_from_ns(section.record_mean_ns))})"


def _infeasible(cell: CellSummary) -> str:
    return f"infeasible ({cell.infeasible})"


def _mentions(warnings: Sequence[ResultWarning], note: ResultWarning) -> bool:
    return any(warning_kind(warning) == warning_kind(note) for warning in warnings)


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return UNKNOWN
    return four_digits(spread.centre) + ("" if spread.scatter_frac is None else f" ± {spread.scatter_frac:.1%}")


TITLE: Final = "Results by node"
_NODE_CHARACTERS: Final = 40
"""Of the name of a node in a table; longer ones are cut inside."""
_MOST_NODES: Final = 12
"""Rows of one metric in a terminal: those of the nodes that are farthest from the ratio over blocks."""


def nodes_table(analysis: AnalyzedExperiment) -> Table | None:
    """Every variant against the baseline by node; None where the blocks ran on one."""
    if not analysis.nodes:
        return None
    first = analysis.nodes[0]
    *left, change, p = node_headings(first.confidence)
    table = plain_table(f"{TITLE}: {'; '.join(node_lines(analysis.nodes))}", left, [change, p])
    for results in analysis.nodes:
        for row in node_rows(results, show_all=False):
            table.add_row(*row)
    return table


def node_headings(confidence: float) -> tuple[str, ...]:
    """The columns of the table."""
    return ("cell", "metric", "node", "blocks", f"change ({percentage(confidence)} CI)", "p")


def node_rows(results: NodeResults, *, show_all: bool) -> Iterator[tuple[str, ...]]:
    """The rows of the table: the nodes of a metric, then the ratio over all blocks with the test of equal nodes.

    Without ``show_all`` those of one metric of each cell: the one in which nodes differ the most surely, else the
    first.
    """
    chosen: dict[str, MetricByNode] = {}
    for metric in (*results.differing, *results.metrics):
        chosen.setdefault(metric.label, metric)
    label = None
    for metric in results.metrics if show_all else sorted(chosen.values(), key=results.metrics.index):
        for i, row in enumerate(metric_rows(metric, most=None if show_all else _MOST_NODES)):
            yield (visible_line(metric.label) if metric.label != label else "", "" if i else metric.metric, *row)
            label = metric.label


def metric_rows(metric: MetricByNode, most: int | None = None) -> list[tuple[str, ...]]:
    """Node, blocks, change, p: of ``most`` nodes, then over blocks."""
    farthest, blocks = metric.rows, metric.over_blocks
    if most is not None and len(farthest) > most:
        farthest = tuple(sorted(farthest, key=lambda row: -abs(math.log(row.ratio / blocks.ratio)))[:most])
    rows = [
        (visible_line(shortened_inside(node, _NODE_CHARACTERS)), str(number), change_in_interval(ratio, None), "")
        for node, number, ratio in metric.rows
        if (node, number, ratio) in farthest
    ]
    if len(farthest) < len(metric.rows):
        rows.append((f"and {count_of(len(metric.rows) - len(farthest), 'node')} more", "", "", ""))
    change = change_in_interval(blocks.ratio, metric.blocks_interval)
    test = UNKNOWN if metric.p_value is None else p_value(metric.p_value)
    return [*rows, ("over blocks", str(blocks.num_blocks), change, test)]


def node_lines(variants: Sequence[NodeResults]) -> list[str]:
    """Meaning of the last row, and the reason why nodes cannot be told apart."""
    lines = ["the verdict is 'over blocks'; p is that of equal nodes, by the F test of one metric alone"]
    if all(row.num_blocks == 1 for results in variants for metric in results.metrics for row in metric.rows):
        lines.append("no node did two blocks: a node cannot be told from a block")
    return lines


HEADINGS: Final = (
    "batch",
    "tokens m",
    "T(B)",
    "expansion: T(B+m) - T(B)",
    "prefill of m",
    "expansion - prefill",
    "cheaper",
)


def bonus_table(verdict: BackfillVerdict, modes: tuple[Mode, Mode]) -> Table:
    """The rows of one pair of modes."""
    table = Table(box=None, pad_edge=False)
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == HEADINGS[-1] else "right", no_wrap=True)
    for row in verdict.rows(*modes):
        table.add_row(*row_cells(row))
    return table


def row_cells(row: Comparison) -> list[str]:
    """The texts of a row, in the order of ``HEADINGS``."""
    costs = (row.decode, row.expansion, row.prefill, row.difference)
    return [str(row.batch_size), str(row.bonus_tokens), *map(cost_text, costs), row.cheaper or "inconclusive"]


def cost_text(cost: Cost | None) -> str:
    """``1.23 [1.20, 1.26]``, in milliseconds."""
    if cost is None:
        return UNKNOWN
    centre = _ms(cost.centre_ns)
    if cost.low_ns is None or cost.high_ns is None:
        return centre
    return f"{centre} [{_ms(cost.low_ns)}, {_ms(cost.high_ns)}]"


def _ms(duration_ns: float) -> str:
    """Three digits, and at most four behind the point: a tenth of a microsecond."""
    text = three_digits(ms_from_ns(duration_ns))
    return text if abs(ms_from_ns(duration_ns)) >= 0.1 else f"{ms_from_ns(duration_ns):.4f}"


def bonus_notes(analysis: AnalyzedExperiment) -> Iterator[tuple[str, list[str]]]:
    """The verdict of each context as a title and its sentences; nothing where no ways of backfill are compared."""
    if analysis.bonus is None:
        return
    for design, verdict in analysis.bonus.verdicts:
        yield f"Backfill of bonus tokens, {context_in_words(design)}", verdict_sentences(verdict)
    if analysis.bonus.missing:
        yield "Backfill of bonus tokens, missing", list(analysis.bonus.missing)
