"""Errors of step-time models on whole runs left out, beside the goals and the published errors.

    python -m benchmarks.steptime.held_out [TABLE.csv ...] [--hardware h100-sxm]

Without tables it takes ``../shared/data/steps/vllm-h100-steps.csv``. Each run is predicted by a fit to all the
others, each model by a fit to the other models; a run of a model that no other run has is thus a test of both.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchctl.analysis.step_time.sources import read_sources
from benchctl.interop.readers.step_table import TableDefaults
from benchctl.steptime.diagnosis.evaluate import Evaluation, HoldOut, compare_structures, hold_out
from benchctl.steptime.fitting.design import group_label
from benchctl.steptime.fitting.fit import FitOptions, fit_model
from benchctl.steptime.structure import Structure
from benchctl.steptime.work import ObservedSteps

TABLE = Path(__file__).resolve().parents[3] / "shared/data/steps/vllm-h100-steps.csv"
GOALS = "goals for overlap: MAPE <= 5%, |bias| <= 3%, coverage 85-95% (nominal 90%)"
PUBLISHED = "published on steps drawn from the runs of the fit itself: original 6.97%, roofline 32.5%"
OTHERS: tuple[Structure, ...] = ("scaling-book", "no-overlap")


def line(label: str, evaluation: Evaluation) -> str:
    whole = evaluation.whole
    return (
        f"{label:34} {whole.num_steps:6} {whole.mape_frac:8.2%} {whole.bias_frac:+8.2%} "
        f"{whole.p90_frac:8.2%} {whole.coverage_frac:8.1%}"
    )


def print_hold_out(observed: Sequence[ObservedSteps], by: HoldOut) -> None:
    if len({group_label(run, by) for run in observed}) < 2:
        print(f"only one {by}: nothing to leave out")
        return
    print(f"{'each ' + by + ' left out':34} {'steps':>6} {'MAPE':>8} {'bias':>8} {'p90':>8} {'inside':>8}")
    evaluations = list(compare_structures(observed, FitOptions(), by))
    evaluations += [hold_out(observed, replace(FitOptions(), structure=structure), by) for structure in OTHERS]
    for evaluation in evaluations:
        print(line(evaluation.structure, evaluation))
    for group in evaluations[0].groups:
        print(
            f"  overlap, {group.label[-24:]:24} {group.num_steps:6} {group.mape_frac:8.2%} {group.bias_frac:+8.2%} "
            f"{group.p90_frac:8.2%} {group.coverage_frac:8.1%}"
        )
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", type=Path, default=[TABLE])
    parser.add_argument("--hardware", default="h100-sxm")
    args = parser.parse_args()
    observed = read_sources(args.tables, TableDefaults(hardware=args.hardware)).observed
    for run in observed:
        deployment = run.deployment
        print(f"{run.run}: {deployment.shape.name} TP{deployment.tensor_parallel}, {len(run.duration_us)} steps")
    start = time.process_time()
    model = fit_model(observed)
    print(f"fit with 200 bootstrap draws: {time.process_time() - start:.2f} CPU s")
    for coefficient in model.coefficients:
        note = "" if coefficient.is_identified else "  (typical, not measured)"
        interval = f"[{coefficient.low:.3f}, {coefficient.high:.3f}]"
        print(f"  {coefficient.name:12} {coefficient.value:9.3f} {interval}{note}")
    print(f"\n{GOALS}\n{PUBLISHED}\n")
    print_hold_out(observed, "run")
    print_hold_out(observed, "model")


if __name__ == "__main__":
    main()
