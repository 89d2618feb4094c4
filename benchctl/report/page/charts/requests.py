"""The requests over the run, one bar each: waiting, then answered."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchctl.analysis.metrics.request_timing import first_token_ns, is_completed, last_token_ns, measured
from benchctl.analysis.summary.runs import RunSummary
from benchctl.records.request import RequestRecord
from benchctl.report.charts.arms import ArmStyle, arm_styles, runs_by_block
from benchctl.report.charts.palette import GREY, VERMILION
from benchctl.report.page.charts import figure
from benchctl.units import NS_PER_S

MAX_REQUESTS: Final = 200
_LEAST_REQUESTS: Final = 50
_MAX_BARS: Final = 8_000
"""Of all runs; where they have more, each run shows fewer requests."""
_PANEL_PX: Final = 150
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
    """A panel for the first arm and one for another, from the runs of one block.

    Block and other arm can be chosen; at first the block is the one that most arms finished. None for forward
    passes, which have no requests.
    """
    if source.analysis.passes is not None:
        return None
    arms = arm_styles(source.analysis)
    sent = [run for arm in arms for run in arm.cell.runs if spans_of(run.run.requests)]
    blocks = runs_by_block(arms, sent)
    if not blocks:
        return figure.no_chart(_ID, _TITLE, "no finished run has a request that was sent")
    first_block, runs = next(iter(blocks.items()))
    labels = list(dict.fromkeys(arm.label for runs in blocks.values() for arm, _ in runs))
    is_virtual = any(run.record.clock == "virtual" for _, run in runs)
    num_drawn = max(_LEAST_REQUESTS, min(MAX_REQUESTS, _MAX_BARS // sum(map(len, blocks.values()))))
    return figure.drawn(
        _ID,
        _TITLE,
        [
            {**trace, "meta": _meta(block, arm.label, labels)}
            for block, runs in blocks.items()
            for arm, run in runs
            for trace in _traces(
                arm,
                evenly(spans_of(run.run.requests, run.record.clock_factor), num_drawn),
                panel=min(1, labels.index(arm.label)),
            )
        ],
        _layout(labels, is_virtual=is_virtual),
        caption=_caption([run for runs in blocks.values() for _, run in runs], num_drawn),
        definition=(
            "Grey: from send to the first output, which is queueing and prefill. Coloured: from the first to the "
            "last output, which is decoding. A cross marks a request that failed. As the client saw it"
            + (", multiplied by time_scale to match the simulator's virtual time." if is_virtual else ".")
        ),
        choices=(figure.block_choice(blocks, first_block), _other_arm(labels)),
    )


def _other_arm(labels: Sequence[str]) -> figure.Choice:
    """The selector of the arm in the lower panel; without an option where there is no other."""
    others = tuple((label, label) for label in labels[1:])
    return figure.Choice(name="arm", label=f"Below {labels[0]}", options=others, selected=labels[-1])


def _meta(block: int, label: str, labels: Sequence[str]) -> Mapping[str, str]:
    """The options that a trace is shown with: those of the first arm with any other arm."""
    return {"block": str(block)} if label == labels[0] else {"block": str(block), "arm": label}


def _layout(labels: Sequence[str], *, is_virtual: bool) -> Mapping[str, Any]:
    num_panels = min(2, len(labels))
    height = _REST_PX + _PANEL_PX * num_panels
    time = figure.axis("time since the first send, " + ("virtual s" if is_virtual else "s"))
    requests = figure.axis("request no.", autorange="reversed", tickformat="d", nticks=5)
    titles = [
        {**title, "meta": {"arm": label}}
        for label in labels[1:]
        for title in figure.panel_titles([labels[0], label])[1:]
    ]
    return figure.layout(
        height,
        margin={"l": 8, "r": 12, "t": _GAP_PX, "b": 8},
        barmode="overlay",
        **figure.panels(time, [requests] * num_panels, gap_frac=_GAP_PX / height),
        annotations=[*figure.panel_titles(labels[:1]), *titles],
    )


def _caption(runs: Sequence[RunSummary], num_drawn: int) -> str:
    most = max(len(spans_of(run.run.requests)) for run in runs)
    which = "Each bar is one request"
    if most > num_drawn:
        which = f"Each bar is one request, {num_drawn} of up to {most:,} at equal distances"
    return f"{which}, in s: grey until the first output, coloured while it decodes."


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
            "%{text}, from %{base:.4~g} s: first output after %{x:.4~g} s",
        ),
        _bars(
            arm.color,
            [span for span, _, _ in decodes],
            [first_s for _, first_s, _ in decodes],
            [(first_s if last_s is None else last_s) - first_s for _, first_s, last_s in decodes],
            "request %{y}, from %{base:.4~g} s: decoded for %{x:.4~g} s",
        ),
    ]
    if failed:
        traces.append(_crosses(failed))
    return [{**trace, "yaxis": figure.panel_axis(panel)} for trace in traces]


def _bars(
    hex_color: str, spans: Sequence[Span], base: Sequence[float], width: Sequence[float], what: str
) -> figure.Trace:
    ids = {"text": [span.request_id for span in spans], "textposition": "none"} if "%{text}" in what else {}
    return {
        "type": "bar",
        "orientation": "h",
        "base": figure.rounded(base, 7),
        "x": figure.rounded(width, 7),
        "y": [span.row for span in spans],
        **ids,
        "width": 0.9 * (spans[-1].row - spans[0].row + 1) / len(spans) if spans else None,
        "marker": {"color": hex_color, "line": {"width": 0}},
        "hovertemplate": f"{what}<extra></extra>",
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
