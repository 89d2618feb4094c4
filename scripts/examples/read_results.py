"""A notebook in a file: read a result, compare its arms, plot what changed.

    python scripts/examples/read_results.py results/topk-sweep/latest ratios.png   # every arm against the baseline
    python scripts/examples/read_results.py results/old/latest results/new/latest  # one directory against another

Cells are separated by ``# %%``, as Jupyter, VS Code and PyCharm read them. ``results/example`` works as well.
"""

# %% Read a result directory
import sys
from pathlib import Path

import benchctl

*paths, picture = sys.argv[1:] if sys.argv[-1].endswith(".png") else [*sys.argv[1:], ""]
paths = paths or ["results/example"]
experiment = benchctl.load_results(paths[-1].partition(":")[0])
manifest = experiment.results.manifest
print(f"{manifest.profile}: {len(experiment.runs)} runs, {len(experiment.cells)} cells")
for warning in experiment.warnings:
    print(f"warning {warning.code}: {warning.message}")

# %% Verdicts, with the ratio, the interval and the block values on which each rests
variants = dict.fromkeys(cell.variant for cell in experiment.cells if cell.variant != manifest.baseline)
sides = [(f"{paths[0]}:{manifest.baseline}", f"{paths[0]}:{variant}") for variant in variants]
rows = []
for a, b in sides if len(paths) == 1 else [(paths[0], paths[1])]:
    comparison = benchctl.compare(a, b)
    print(
        f"{comparison.b_name} against {comparison.a_name}: {comparison.verdict} (exit code {comparison.exit_code})"
    )
    for cell in comparison.cells:
        for metric in cell.deciding:
            if (estimate := metric.estimate) is not None:
                arm, name, num = cell.b_label, metric.metric.name, estimate.num_blocks
                row = {"ratio": estimate.ratio, "low": estimate.ci_low, "high": estimate.ci_high}
                rows.append({"arm": arm, "metric": name, **row})
                low, high = (
                    "unknown" if end is None else f"{end:.3f}" for end in (estimate.ci_low, estimate.ci_high)
                )
                print(f"{arm} {name}: x{estimate.ratio:.3f} [{low}, {high}], blocks: {num}")

# %% Everything is plain data: any library can go on from here
if picture and rows:
    import vl_convert

    ratio = {"field": "ratio", "type": "quantitative", "title": "ratio", "scale": {"zero": False}}
    spec = {
        "data": {"values": rows},
        "title": "simulated" if comparison.is_simulated else "measured",
        "facet": {"row": {"field": "metric", "title": None, "header": {"labelAngle": 0, "labelAlign": "left"}}},
        "spec": {
            "encoding": {"y": {"field": "arm", "title": None}},
            "layer": [
                {"mark": "rule", "encoding": {"x": {**ratio, "field": "low"}, "x2": {"field": "high"}}},
                {"mark": {"type": "point", "filled": True}, "encoding": {"x": ratio}},
            ],
        },
    }
    Path(picture).write_bytes(vl_convert.vegalite_to_png(spec, scale=2))
    print(f"picture: {picture}")
