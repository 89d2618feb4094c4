"""A step-time model fitted to a real engine of this machine, and what it predicts of loads that it has not seen.

    python -m benchmarks.steptime.real_engine [--engine vllm-cpu] [--directory DIR] [--prompts 8] [--rounds 2]

Steps are measured at three concurrencies, and a model is fitted to them. It then predicts two other concurrencies
and a second prompt length before they are measured: the time of each step, and by the same code as ``benchctl run
--dry-run`` the wall time of the load. The model that is served has random weights; peaks of the CPU are nominal,
because the fit absorbs how far they are off.

Run it on a machine that does nothing else: whatever runs beside the engine is in its step times. A virtual machine
changes its speed by itself from minute to minute; so the loads take turns, each on a fresh server in every round,
and the table says by how much the wall times of one load differ between rounds, and how far steps of equal work
are apart within a run: no prediction can be closer.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import yaml

from benchctl.analysis.experiment.observed import read_sources
from benchctl.interop.tables import TableDefaults
from benchctl.profile.load import load_profile
from benchctl.records.loaded import load_results
from benchctl.sim.predict import predict_plan
from benchctl.steptime.evaluate import hold_out
from benchctl.steptime.fit import FitOptions, fit_model
from benchctl.steptime.model import write_model
from benchctl.units import s_from_ns
from benchctl.workload.prepare import prepare_requests
from benchmarks.common.table import show

STEP_GOAL, WALL_GOAL = 0.10, 0.10
HARDWARE = "cpu:0.2:20"
"""Nominal peaks of one core, TFLOP/s and GB/s."""
FIT = FitOptions(ridge=0.0)
"""Typical coefficients are those of GPUs."""
SHAPE = (
    "--hidden",
    "1024",
    "--layers",
    "16",
    "--heads",
    "16",
    "--kv-heads",
    "4",
    "--ffn",
    "3072",
    "--vocab",
    "4096",
)
FITTED_TO, PREDICTED = (1, 4, 12), (2, 8)
_STEADY = (
    "engine.options.client_cores=0",
    'engine.options.env.VLLM_CPU_OMP_THREADS_BIND="0"',
    'engine.options.env.OMP_NUM_THREADS="1"',
)
"""The engine computes on one core, and leaves the other to its front end and the client."""
WORDS, OTHER_WORDS = 48, 144


@dataclass(frozen=True)
class Load:
    """One load: prompts of so many words on average, and the requests that are open at a time."""

    concurrency: int
    words: int
    num_prompts: int
    seed: int

    @property
    def name(self):
        return f"c{self.concurrency}-w{self.words}"


def main():
    options = _options()
    busy = os.getloadavg()[0]
    print(f"{options.engine} on {os.cpu_count()} cores, load average {busy:.2f} before the first run", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.directory or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        model = _served_model(directory)
        loads = [Load(c, WORDS, options.prompts + 2 * c, seed) for seed, c in enumerate(FITTED_TO)]
        fitted_to = [
            _measure(load, model, options.engine, directory) for _ in range(options.rounds) for load in loads
        ]
        fitted = _fit(fitted_to, directory / "model.json")
        held_out = [Load(c, WORDS, options.prompts + 2 * c, 10 + c) for c in PREDICTED]
        held_out.append(Load(FITTED_TO[1], OTHER_WORDS, options.prompts + 2 * FITTED_TO[1], 20))
        predictions = [_predicted(load, model, options.engine, directory) for load in held_out]
        rounds = [
            [_measure(load, model, options.engine, directory) for load in held_out] for _ in range(options.rounds)
        ]
        measured = zip(*rounds, strict=True)
        rows = [_row(load.name, fitted, *each) for load, *each in zip(held_out, predictions, measured, strict=True)]
        show([{name: value for name, value in row.items() if not name.startswith("_")} for row in rows])
        _print_verdict(rows)


def _options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", default="vllm-cpu", help="preset of the engine (vllm-cpu, transformers-cpu)")
    parser.add_argument("--directory", type=Path, help="keep model and results here; default: a temporary one")
    parser.add_argument("--prompts", type=int, default=8, help="requests of a load, beside two for each open one")
    parser.add_argument("--rounds", type=int, default=2, help="fresh servers for each load")
    return parser.parse_args()


def _served_model(directory):
    model = directory / "served"
    if not model.is_dir():
        _benchctl("models", "make-tiny", str(model), *SHAPE)
    return model


def _profile(load, model, engine, directory):
    """The file of a load's profile: lengths vary, so that a fit can tell prompts, contexts and batches apart."""
    path = directory / f"{load.name}.yaml"
    document = {
        "name": load.name,
        "engine": engine,
        "model": str(model),
        "hardware": HARDWARE,
        "seed": load.seed,
        "blocks": 1,
        "workload": {
            "dataset": "synthetic",
            "input_len": {"mean": load.words, "cv": 1.0, "min": 8, "max": 400},
            "output_len": {"mean": 48, "cv": 0.5, "min": 8},
            "num_prompts": load.num_prompts,
            "arrival": {"kind": "closed-loop", "max_concurrency": load.concurrency},
        },
        "variants": {"baseline": {}},
    }
    path.write_text(yaml.safe_dump(document))
    return path


def _measure(load, model, engine, directory):
    """Run a load; returns the directory of its results."""
    results = directory / "results"
    settings = [word for setting in _STEADY for word in ("--set", setting)]
    _benchctl(
        "run", "--profile", str(_profile(load, model, engine, directory)), "-o", str(results), "-q", *settings
    )
    return (results / load.name / "latest").resolve()


def _benchctl(*words):
    done = subprocess.run([sys.executable, "-m", "benchctl", *words], capture_output=True, text=True, check=False)
    if done.returncode not in {0, 4}:  # 4: suspect, such as a client that was late on two cores
        sys.exit(f"benchctl {' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


def _fit(paths, path):
    """The model of the steps in these results, written to a file with its error on each run left out."""
    observed = _observed(paths)
    model = fit_model(observed, FIT)
    summary = hold_out(observed, FIT).summary()
    model = replace(model, provenance=replace(model.provenance, held_out=(summary,)))
    write_model(path, model)
    print(f"fitted to {model.provenance.num_steps} steps of {len(paths)} runs, {path}:")
    for coefficient in model.coefficients:
        low, high = coefficient.low, coefficient.high
        print(f"  {coefficient.name:24s} {coefficient.value:12.4g} {coefficient.unit:2s} [{low:.4g}, {high:.4g}]")
    print(f"  whole runs left out: {summary.mape_frac:.1%} off, {summary.bias_frac:+.1%} on average")
    return model


def _observed(paths):
    return read_sources(paths, TableDefaults(hardware=HARDWARE), allow_suspect=True).observed


def _predicted(load, model, engine, directory):
    profile = load_profile(str(_profile(load, model, engine, directory)))
    requests = prepare_requests(profile).requests
    return predict_plan(profile, requests, [], directory / "model.json").runs["baseline"]


def _row(name, model, predicted, paths):
    errors, scatter, steps_us, walls_s = [], [], [], []
    for path, observed in zip(paths, _observed(paths), strict=True):
        kept = ~observed.is_saturated
        step_us = model.extrapolate_us(observed.work, observed.deployment)
        errors.append((step_us / observed.duration_us - 1)[kept])
        scatter.append(_scatter(observed)[kept])
        steps_us.append(observed.duration_us)
        times = load_results(path).runs[0].record.times
        walls_s.append(s_from_ns(times.last_token_ns - times.first_send_ns))
    pooled, wall_s = np.concatenate(errors), float(np.mean(walls_s))
    return {
        "load": name,
        "steps": len(pooled),
        "mean step ms": float(np.concatenate(steps_us).mean()) / 1e3,
        "predicted": predicted.step_s * 1e3,
        "step MAPE": f"{np.abs(pooled).mean():.1%}",
        "own scatter": f"{np.concatenate(scatter).mean():.1%}",
        "bias": f"{pooled.mean():+.1%}",
        "wall s": wall_s,
        "rounds differ": f"{np.ptp(walls_s) / wall_s:.0%}",
        "predicted s": predicted.load_s,
        "wall error": f"{predicted.load_s / wall_s - 1:+.1%}",
        "_mape": float(np.abs(pooled).mean()),
        "_wall": abs(predicted.load_s / wall_s - 1),
    }


def _scatter(observed):
    """Distance of each step from the median of those of the same run with as many rows and no prompt, or with one.

    Steps of equal work differ by this much, so that no model is closer.
    """
    work, duration_us = observed.work, observed.duration_us
    kinds = np.where(work.prefill_tokens > 0, -1.0, work.num_decodes)
    medians = np.empty_like(duration_us)
    for kind in np.unique(kinds):
        same = kinds == kind
        per_token = duration_us[same] / (work.prefill_tokens[same] if kind < 0 else 1.0)
        medians[same] = np.median(per_token) * (work.prefill_tokens[same] if kind < 0 else 1.0)
    return np.abs(medians / duration_us - 1)


def _print_verdict(rows):
    for what, key, goal in (("step time MAPE", "_mape", STEP_GOAL), ("wall time error", "_wall", WALL_GOAL)):
        worst = max(row[key] for row in rows)
        print(f"{what}: {worst:.1%} at worst, goal {goal:.0%}: {'holds' if worst <= goal else 'DOES NOT HOLD'}")


if __name__ == "__main__":
    main()
