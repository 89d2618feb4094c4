"""Measured and predicted course of a run, one above the other."""

import numpy as np

from benchctl.report.charts import figure

SIDES = ("measured", "predicted")


def rows_of(panel, x, y):
    return [{"panel": panel, "x": float(a), "y": float(b)} for a, b in zip(x, y, strict=True)]


def draw(name, measured, predicted):
    """PNG of running requests, key-value memory, TTFT and E2EL; each side is its times and its curve."""
    rows = []
    for side, (times, curve) in zip(SIDES, (measured, predicted), strict=True):
        e2el_s = np.sort(times.e2el_ms()) / 1e3
        points = [
            *(rows_of("running requests", curve.t_s, curve.running) if curve is not None else ()),
            *(rows_of("key-value memory, %", curve.t_s, 100 * curve.kv_frac) if curve is not None else ()),
            *rows_of("TTFT, s", times.queued_s, times.ttft_ms() / 1e3),
            *rows_of("share of requests", e2el_s, np.arange(1, len(e2el_s) + 1) / len(e2el_s)),
        ]
        rows += [{"side": side, **point} for point in points]
    panels = []
    for title, x_title in (
        ("running requests", "time, s"),
        ("key-value memory, %", "time, s"),
        ("TTFT, s", "time of queueing, s"),
        ("share of requests", "E2EL, s"),
    ):
        mark = (
            figure.layer("point", y_by="y", filled=False, size=20)
            if title == "TTFT, s"
            else figure.layer("line", y_by="y", interpolate="step-after", strokeWidth=1.2)
        )
        encoding = {**figure.by_series(SIDES, name="side"), "x": figure.axis(x_title, "x")}
        y = figure.axis(title, zero=True)
        where = [f"datum.panel === '{title}'"]
        panels.append([figure.panel(180, y, [mark], where=where, encoding=encoding, width=780)])
    spec = figure.grid(panels, SIDES, rows=rows)
    return figure.picture_bytes(spec, f"{name}: a real run and its prediction from measured layers")
