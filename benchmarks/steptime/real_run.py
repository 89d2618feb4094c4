"""A real vLLM run, predicted from measured layer tables and the engine's settings, beside what happened.

    python -m benchmarks.steptime.real_run DIR [--dataset FILE] [--model NAME] [--layer-profile DIR]

DIR holds meta.json, requests.jsonl and timeseries.csv of the run, and a layer profile of the same model and
device; ``benchmarks/steptime/run_folder.py`` describes the files. Nothing is fitted to the run: its times are read
to be compared. TTFT and E2EL count from the moment at which the engine queues a request.
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np

from benchctl.errors import UsageError
from benchctl.sim.core import SimLoad
from benchctl.sim.simulation import simulate
from benchmarks.common.harness import show, text
from benchmarks.steptime.run_folder import LoadCurve, RequestTimes, read_run

GOALS = {("e2el", "mean"): 0.03, ("ttft", "mean"): 0.08, ("e2el", "P99"): 0.08}
"""Largest error as a share of the measured value."""


def predict(run):
    """The simulation of a run, and its requests and load curve in the words of the real one."""
    simulation = simulate(run.config, [SimLoad(requests=run.requests, arrival_ns=run.arrival_ns)])
    requests = simulation.requests
    order = np.argsort(requests.index)
    queued_s, first_s, last_s = (
        column[order] / 1e9 for column in (requests.arrival_ns, requests.first_token_ns, requests.last_token_ns)
    )
    start_s = queued_s.min()
    times = RequestTimes(
        queued_s=queued_s - start_s,
        first_token_s=first_s - start_s,
        last_token_s=last_s - start_s,
        output_tokens=requests.output_tokens[order],
    )
    return simulation, times, _curve(simulation, start_s, run.config.num_kv_blocks)


def _curve(simulation, start_s, num_blocks):
    steps = simulation.step_columns()
    ends_s = (steps.start_ns + steps.dur_ns) / 1e9 - start_s
    t_s = np.arange(1, np.ceil(ends_s[-1]) + 1)
    last = np.searchsorted(ends_s, t_s, side="right") - 1
    used = steps.optional("kv_used_blocks")
    return LoadCurve(t_s=t_s, running=steps.num_seqs[last].astype(float), kv_frac=used[last] / num_blocks)


def rows_of(real, predicted):
    """A row for each compared number: measured, predicted, error, and the goal where there is one."""
    rows = []
    for name in ("ttft", "tpot", "e2el"):
        measured_ms, predicted_ms = getattr(real, f"{name}_ms")(), getattr(predicted, f"{name}_ms")()
        for statistic, of in (("mean", np.mean), ("median", np.median), ("P99", lambda v: np.percentile(v, 99))):
            rows.append(_row(name, statistic, "ms", float(of(measured_ms)), float(of(predicted_ms))))
    tokens = int(real.output_tokens.sum())
    durations = real.duration_s(), predicted.duration_s()
    rows.append(_row("duration", "", "s", *durations))
    rows.append(_row("output tokens", "", "1/s", *(tokens / duration for duration in durations)))
    return rows


def _row(name, statistic, unit, measured, predicted):
    error, goal = predicted / measured - 1, GOALS.get((name, statistic))
    return {
        "what": f"{statistic} {name}".strip(),
        "unit": unit,
        "measured": measured,
        "predicted": predicted,
        "error": f"{error:+.2%}",
        "goal": None if goal is None else f"{goal:.0%}",
        "holds": None if goal is None else "yes" if abs(error) <= goal else "NO",
        "_error": error,
    }


def curve_rows(real, predicted):
    """Mean distance of the two curves, second by second, over the seconds that both have."""
    seconds = min(len(real.t_s), len(predicted.t_s))
    rows = []
    for name, unit, scale in (("running", "requests", 1), ("kv_frac", "%", 100)):
        measured, simulated = (getattr(curve, name)[:seconds] * scale for curve in (real, predicted))
        rows.append(
            {
                "curve": f"{name.removesuffix('_frac')} ({unit})",
                "measured mean": float(measured.mean()),
                "predicted mean": float(simulated.mean()),
                "mean distance": float(np.abs(measured - simulated).mean()),
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--dataset", type=Path, help="the replayed requests; looked for beside DIR without it")
    parser.add_argument("--model", help="built-in shape, or a directory with the model's config.json")
    parser.add_argument(
        "--layer-profile", type=Path, metavar="DIR", help="folder of tables; looked for in DIR without it"
    )
    options = parser.parse_args()
    try:
        run = read_run(
            options.folder, dataset=options.dataset, model=options.model, layer_profile=options.layer_profile
        )
        start = time.process_time()
        simulation, predicted, curve = predict(run)
        spent_s = time.process_time() - start
    except UsageError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    rows = rows_of(run.times, predicted)
    show([{name: value for name, value in row.items() if name[0] != "_"} for row in rows], str(options.folder))
    if run.curve is not None:
        show(curve_rows(run.curve, curve))
    requests = simulation.requests
    print(f"\npreemptions, predicted: {requests.preemptions.sum()} of {(requests.preemptions > 0).sum()} requests")
    print(f"simulated {len(requests)} requests, {len(simulation.step_columns())} steps in {text(spent_s)} CPU s")
    for remark in run.remarks:
        print(f"note: {remark}")
    return 0 if all(row["holds"] != "NO" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
