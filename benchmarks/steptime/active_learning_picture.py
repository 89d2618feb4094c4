"""Errors of coefficients and of predictions by the GPU time spent, for runs chosen by diagnosis and at random."""

import numpy as np

from benchctl.report.charts import figure

ERRORS = {"worst": "largest error of a coefficient, %", "mape": "mean error of predictions, %"}
SIDES = ("diagnose", "random")


def draw(ways, goal):
    """PNG: for both ways the median over repetitions, and a band of 10% to 90%; the goal is dashed."""
    num_rounds = min(len(states) for states, _ in ways)
    rows = []
    for side, name in enumerate(SIDES):
        costs = np.median([[state.cost_s for state in way[side][:num_rounds]] for way in ways], axis=0)
        for error in ERRORS:
            values = np.array([[100 * getattr(state, error) for state in way[side][:num_rounds]] for way in ways])
            for cost, low, middle, high in zip(costs, *np.percentile(values, (10, 50, 90), axis=0), strict=True):
                points = {"low": float(low), "middle": float(middle), "high": float(high)}
                rows.append({"side": name, "error": error, "cost": float(cost), **points})
    panels = []
    for error, title in ERRORS.items():
        values = [row[name] for row in rows for name in ("low", "high") if row["error"] == error]
        layers = [
            figure.layer("area", y_by="low", y2_by="high", opacity=0.15),
            figure.layer("line", y_by="middle"),
            figure.layer("point", y_by="middle"),
            *([figure.level(100 * goal)] if error == "worst" else []),
        ]
        where = [f"datum.error === '{error}'"]
        encoding = figure.by_series(SIDES, name="side")
        panels.append(figure.panel(220, figure.log_axis(title, values), layers, where=where, encoding=encoding))
    spec = figure.picture(panels, rows, figure.axis("GPU seconds", "cost"), legend=SIDES)
    return figure.picture_bytes(spec, "Runs that a diagnosis asks for, beside random runs of the same cost")
