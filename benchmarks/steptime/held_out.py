"""Errors of step-time models on whole runs left out, beside the goals and the published errors.

    python -m benchmarks.steptime.held_out [TABLE.csv ...] [--hardware h100-sxm]

Without tables it takes ``../shared/data/steps/vllm-h100-steps.csv``. Each run is predicted by a fit to all the
others, each model by a fit to the other models; a run of a model that no other run has is thus a test of both. At
last, the steps of each range of batches are predicted by a fit to all other batches.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchctl.analysis.experiment.observed import read_sources
from benchctl.interop.tables import TableDefaults
from benchctl.steptime.design import group_label, select_steps
from benchctl.steptime.evaluate import Evaluation, HoldOut, compare_structures, predict_runs
from benchctl.steptime.fit import FitOptions, fit_model
from benchctl.steptime.work import ObservedSteps

TABLE = Path(__file__).resolve().parents[3] / "shared/data/steps/vllm-h100-steps.csv"
GOALS = "goals for overlap: MAPE <= 5%, |bias| <= 3%, coverage 85-95% (nominal 90%)"
PUBLISHED = "published on steps drawn from the runs of the fit itself: original 6.97%, roofline 32.5%"
BATCHES = ((0, 23), (24, 35), (36, 47), (48, 63), (64, 95), (96, 255), (64, 255), (48, 255))


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
    evaluations = compare_structures(observed, FitOptions(), by)
    for evaluation in evaluations:
        print(line(evaluation.structure, evaluation))
    for group in evaluations[0].groups:
        print(
            f"  overlap, {group.label[-24:]:24} {group.num_steps:6} {group.mape_frac:8.2%} {group.bias_frac:+8.2%} "
            f"{group.p90_frac:8.2%} {group.coverage_frac:8.1%}"
        )
    print()


def print_batches(observed: Sequence[ObservedSteps]) -> None:
    print(f"{'batches left out':34} {'steps':>6} {'inside':>8}")
    for least, most in BATCHES:
        fitted, left_out = [], []
        for run in observed:
            is_out = (run.work.num_seqs >= least) & (run.work.num_seqs <= most)
            fitted.append(select_steps(run, np.flatnonzero(~is_out)))
            left_out.append(select_steps(run, np.flatnonzero(is_out)))
        covered = predict_runs(fit_model(fitted), left_out).is_covered
        print(f"{f'{least} to {most}':34} {len(covered):6} {covered.mean():8.1%}")


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
    print_batches(observed)


if __name__ == "__main__":
    main()
