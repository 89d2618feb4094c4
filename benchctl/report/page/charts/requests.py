"""The requests over the run, one bar each: waiting, then answered."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchctl.analysis.metrics.request_timing import first_token_ns, is_completed, last_token_ns, measured
from benchctl.analysis.summary.runs import RunSummary
from benchctl.records.request import RequestRecord
from benchctl.report.charts.arms import ArmStyle, arm_styles, runs_of_one_block
from benchctl.report.charts.palette import GREY, VERMILION
from benchctl.report.page.charts import figure
from benchctl.units import NS_PER_S

MAX_REQUESTS: Final = 200
_MAX_PANELS: Final = 6
_PANEL_PX: Final = 140
_GAP_PX: Final = 36
_REST_PX: Final = 90
_ID: Final = "request-timeline"
_TITLE: Final = "Requests over the run"


@dataclass(frozen=True, slots=True)
class Span:
    """One request, in seconds since the first send: sent, first output, end of its last output."""

    row: int
    """Position in the order of sending, from 1."""
    request_id: str
    sent_s: float
    first_s: float | None
    """None without any output."""
    last_s: float | None
    error: str | None


def spans_of(requests: Sequence[RequestRecord], time_scale: float = 1.0) -> tuple[Span, ...]:
    """All that were sent and are no warm-up, in the order of sending; times multiplied by ``time_scale``."""
    sends = [(request.sent_ns, request) for request in measured(requests) if request.sent_ns is not None]
    sent = sorted(sends, key=lambda pair: (pair[0], pair[1].index))
    origin_ns = sent[0][0] if sent else 0

    def seconds(t_ns: int | None) -> float | None:
        return None if t_ns is None else (t_ns - origin_ns) * time_scale / NS_PER_S

    return tuple(
        Span(
            row=i,
            request_id=request.request_id,
            sent_s=(sent_ns - origin_ns) * time_scale / NS_PER_S,
            first_s=seconds(first_token_ns(request)),
            last_s=seconds(last_token_ns(request)),
            error=None
            if is_completed(request)
            else "not answered to its end"
            if request.error is None
            else request.error.kind,
        )
        for i, (sent_ns, request) in enumerate(sent, start=1)
    )


def evenly(spans: Sequence[Span], at_most: int = MAX_REQUESTS) -> tuple[Span, ...]:
    """At most ``at_most`` of the spans at equal distances, first and last among them."""
    if len(spans) <= at_most:
        return tuple(spans)
    return tuple(spans[round(i * (len(spans) - 1) / (at_most - 1))] for i in range(at_most))


def draw_requests(source: figure.ChartSource) -> figure.Chart | None:
    """A panel for each arm, from the run of the block that most arms finished.

    None for forward passes, which have no requests.
    """
    if source.analysis.passes is not None:
        return None
    arms = arm_styles(source.analysis)
    sent = [run for arm in arms for run in arm.cell.runs if spans_of(run.run.requests)]
    runs = runs_of_one_block(arms, sent)
    if not runs:
        return figure.no_chart(_ID, _TITLE, "no finished run has a request that was sent")
    panel_runs = runs[:_MAX_PANELS]
    is_virtual = any(run.record.clock == "virtual" for _, run in panel_runs)
    return figure.drawn(
        _ID,
        _TITLE,
        [
            trace
            for i, (arm, run) in enumerate(panel_runs)
            for trace in _traces(arm, evenly(spans_of(run.run.requests, run.record.clock_factor)), panel=i)
        ],
        _layout([arm.label for arm, _ in panel_runs], is_virtual=is_virtual),
        caption=_caption(panel_runs, num_arms=len(arms)),
        definition=(
            "Grey: from send to the first output, which is queueing and prefill. Coloured: from the first to the "
            "last output, which is decoding. A cross marks a request that failed. As the client saw it"
            + (", multiplied by time_scale to match the simulator's virtual time." if is_virtual else ".")
        ),
    )


def _layout(labels: Sequence[str], *, is_virtual: bool) -> Mapping[str, Any]:
    height = _REST_PX + _PANEL_PX * len(labels)
    time = figure.axis("time since the first send, " + ("virtual s" if is_virtual else "s"))
    requests = figure.axis("request no.", autorange="reversed", tickformat="d", nticks=5)
    return figure.layout(
        height,
        margin={"l": 8, "r": 12, "t": _GAP_PX, "b": 8},
        barmode="overlay",
        **figure.panels(time, [requests] * len(labels), gap_frac=_GAP_PX / height),
        annotations=figure.panel_titles(labels),
    )


def _caption(runs: Sequence[tuple[ArmStyle, RunSummary]], *, num_arms: int) -> str:
    counts = [len(spans_of(run.run.requests)) for _, run in runs]
    which = "Each bar is one request"
    if max(counts) > MAX_REQUESTS:
        which = f"Each bar is one request, {MAX_REQUESTS} of up to {max(counts):,} at equal distances"
    which += f", in block {runs[0][1].record.block}, in s"
    arms = f"; the first {len(runs)} of {num_arms} arms" if num_arms > len(runs) else ""
    return f"{which}: grey until the first output, coloured while it decodes{arms}."


def _traces(arm: ArmStyle, spans: Sequence[Span], *, panel: int) -> list[figure.Trace]:
    waits = [(span, span.sent_s if span.first_s is None else span.first_s) for span in spans]
    decodes = [(span, span.first_s, span.last_s) for span in spans if span.first_s is not None]
    failed = [(span, end_s) for span, end_s in waits if span.error is not None]
    traces = [
        _bars(
            GREY,
            [span for span, _ in waits],
            [span.sent_s for span, _ in waits],
            [end_s - span.sent_s for span, end_s in waits],
            "first output after %{x:.4~g} s",
        ),
        _bars(
            arm.color,
            [span for span, _, _ in decodes],
            [first_s for _, first_s, _ in decodes],
            [(first_s if last_s is None else last_s) - first_s for _, first_s, last_s in decodes],
            "decoded for %{x:.4~g} s",
        ),
    ]
    if failed:
        traces.append(_crosses(failed))
    return [{**trace, "yaxis": figure.panel_axis(panel)} for trace in traces]


def _bars(
    hex_color: str, spans: Sequence[Span], base: Sequence[float], width: Sequence[float], what: str
) -> figure.Trace:
    return {
        "type": "bar",
        "orientation": "h",
        "base": figure.rounded(base),
        "x": figure.rounded(width),
        "y": [span.row for span in spans],
        "text": [span.request_id for span in spans],
        "textposition": "none",
        "width": 0.9 * (spans[-1].row - spans[0].row + 1) / len(spans) if spans else None,
        "marker": {"color": hex_color, "line": {"width": 0}},
        "hovertemplate": f"%{{text}}, from %{{base:.4~g}} s: {what}<extra></extra>",
        "showlegend": False,
    }


def _crosses(failed: Sequence[tuple[Span, float]]) -> figure.Trace:
    return {
        "type": "scatter",
        "mode": "markers",
        "x": figure.rounded(end_s for _, end_s in failed),
        "y": [span.row for span, _ in failed],
        "text": [f"{span.request_id}: {span.error}" for span, _ in failed],
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {"symbol": "x", "size": 9, "color": VERMILION, "line": {"width": 1, "color": "#ffffff"}},
        "showlegend": False,
    }
