"""A notebook in a file: read a sweep, compare two variants, plot what the sweep shows.

    benchctl run --profile topk-sweep
    python scripts/examples/read_results.py results/topk-sweep/latest sweep.png

Cells are separated by ``# %%``, as Jupyter, VS Code and PyCharm read them. ``results/example`` works as well.
"""

# %% Read a result directory
import sys

import benchctl

path = sys.argv[1] if len(sys.argv) > 1 else "results/example"
experiment = benchctl.load_results(path)
print(f"{experiment.results.manifest.profile}: {len(experiment.runs)} runs, {len(experiment.cells)} cells")
for warning in experiment.warnings:
    print(f"warning {warning.code}: {warning.message}")

# %% Every cell against the baseline of its own blocks
for row in experiment.sweep:
    ratio, low, high = (row.values[key] for key in ("wall_ratio", "wall_ratio_ci_low", "wall_ratio_ci_high"))
    print(f"{row.variant} {row.cell}: wall time x{ratio:.2f} [{low:.2f}, {high:.2f}]")

# %% The verdict, with the block values that it rests on
comparison = benchctl.compare(f"{path}:baseline", f"{path}:guided", threshold=0.02, metrics=["step_ms"])
print(f"{comparison.verdict} (exit code {comparison.exit_code})")
for cell in comparison.cells:
    for metric in cell.metrics:
        if metric.role == "deciding" and metric.estimate is not None:
            estimate = metric.estimate
            print(f"{cell.label} {metric.metric.name}: x{estimate.ratio:.3f} over {estimate.num_blocks} blocks")

# %% Everything is plain data: any library can go on from here
if len(sys.argv) > 2:
    from pathlib import Path

    import vl_convert

    bars = [{"cell": str(row.cell), "ratio": float(row.values["wall_ratio"] or 0)} for row in experiment.sweep]
    spec = {
        "data": {"values": bars},
        "mark": "bar",
        "encoding": {
            "x": {"field": "cell", "type": "nominal"},
            "y": {"field": "ratio", "type": "quantitative", "title": "wall time, ratio to the baseline"},
        },
    }
    Path(sys.argv[2]).write_bytes(vl_convert.vegalite_to_png(spec, scale=2))
    print(f"picture: {sys.argv[2]}")
