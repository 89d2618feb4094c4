"""Machine minutes until a real vLLM has its verdict: one load per server and divided alpha, against several loads,
looks with group-sequential levels, and an end at the verdict.

One experiment on this machine's CPU, with several loads on each server, has two questions: ``aa``, the baseline
against itself, is to be equivalent within 5 %; ``planted``, whose sampler works about 5 % longer in every step, is
to be a regression. On the recorded loads all designs are replayed (``replay.py``), after the ratio is
set to the true one, 1 or 1.05; one load per server measures one of the recorded loads, after one wave of warm-up.
The size of the planted change is measured beforehand: on one server that has the extra work in every other load.

What DIR has is not measured again, and what was cut off goes on. ``--busy`` processes compute in bursts meanwhile.

    python -m benchmarks.verdict.vllm_minutes DIR [--blocks 9] [--loads 5] [--busy 0] [--rounds 0] [--read]

``--rounds N`` plants the work that another DIR has calibrated, ``--read`` only prints what DIR has.
"""

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

import numpy as np

from benchctl.analysis.experiment.experiment import load_experiment
from benchctl.analysis.statistics.components import variance_components
from benchctl.analysis.statistics.estimate import MIN_PAIRED_BLOCKS, estimate_paired
from benchctl.steptime.speculation_law import Estimate
from benchctl.units import count_of
from benchmarks.common.busy import busy_processes
from benchmarks.common.harness import Figures, options, show, write
from benchmarks.common.pinned_vllm import Window, load_together, mean_step_ns, pinned_vllm
from benchmarks.verdict.replay import (
    WITHIN,
    Design,
    Question,
    divided_levels,
    judged,
    least_fixed,
    logs_by_server,
    recentred,
    recorded_blocks,
    replay,
    seconds_of,
    sequential_levels,
    summary,
)

CHANGE: Final = 0.05
PLANTED: Final = Path(__file__).parent / "planted"
PROCESSOR: Final = ["--logits-processors", "planted_work:PlantedWork"]
PROFILE: Final = """
description: a vLLM, itself, and with a sampler that works longer
extends: aa
blocks: {blocks}
loads_per_server: {loads}
workload: {{dataset: synthetic, num_prompts: 48, samples_per_prompt: 1, input_len: 64, output_len: 96}}
variants:
  planted: {{server: {{env: {env}}}}}
"""
QUESTIONS: Final = {
    "aa": ("again", 0.05, 0.0, "equivalent"),
    "planted": ("planted", 0.01, math.log1p(CHANGE), "regression"),
}
"""Of each question the variant, the margin, the true ln(B / A), and the right answer."""
TRIAL_ROUNDS, TRIAL_PAIRS = 20, 6
MANY_LOOKS: Final = 12
SUSPECT: Final = 4
"""Exit code where a run does not count; the others do."""


def server_options(rounds: str) -> dict[str, str]:
    """The environment of a server that does so much extra work."""
    return {"PYTHONPATH": str(PLANTED), "PLANTED_ROUNDS": rounds}


def calibrate(directory: Path, model: str, pairs: int) -> dict[str, Any]:
    """The rounds of work that lengthen a step by 5 %, and by how much they do, over ``pairs`` of loads."""
    switch, home = directory / "rounds", directory / "calibration"
    switch.write_text("0")
    shutil.rmtree(home, ignore_errors=True)
    overrides = [
        f"engine.options.extra_args={json.dumps(PROCESSOR)}",
        f"engine.options.env={json.dumps(server_options(str(switch)))}",
    ]
    with pinned_vllm(model, 0, 18413, home, overrides) as server:

        def loads(rounds: int, count: int) -> list[tuple[Window, Window]]:
            """Windows without and with the work; what comes first changes from pair to pair."""
            windows: dict[int, list[Window]] = {0: [], rounds: []}
            for index in range(count):
                for number in (0, rounds) if index % 2 == 0 else (rounds, 0):
                    switch.write_text(str(number))
                    windows[number] += load_together([server], [[1]], waves=2)
            return list(zip(windows[0], windows[rounds], strict=True))

        def step_ns(of_pairs: Sequence[tuple[Window, Window]]) -> list[tuple[float, float]]:
            steps = server.steps()
            return [
                (mean_step_ns(steps, without), mean_step_ns(steps, with_work)) for without, with_work in of_pairs
            ]

        loads(1, 2)
        trial = step_ns(loads(TRIAL_ROUNDS, TRIAL_PAIRS))
        of_round_ns = median(after - before for before, after in trial) / TRIAL_ROUNDS
        rounds = max(1, round(CHANGE * median(before for before, _ in trial) / of_round_ns))
        measured = step_ns(loads(rounds, pairs))
    estimate = estimate_paired([math.log(after / before) for before, after in measured])
    return {
        "rounds": rounds,
        "ratio": estimate.ratio,
        "low": estimate.ci_low,
        "high": estimate.ci_high,
        "pairs": pairs,
        "step_ms": median(before for before, _ in measured) / 1e6,
        "round_us": of_round_ns / 1e3,
    }


def measure(directory: Path, model: str, rounds: int, blocks: int, loads: int) -> None:
    """The experiment, as far as it is not measured."""
    profile, results = directory / "minutes.yaml", directory / "minutes"
    command = ["--resume", str(results), "--quiet"]
    if not results.exists():
        profile.write_text(PROFILE.format(blocks=blocks, loads=loads, env=json.dumps(server_options(str(rounds)))))
        command = ["--profile", str(profile), "--output", str(results), "--engine", "vllm-cpu"]
        command += ["--set", f"model={model}", "--no-store-noise", "--quiet"]
        command += ["--set", f"engine.options.extra_args={json.dumps(PROCESSOR)}"]
        command += ["--set", f"engine.options.env={json.dumps(server_options('0'))}"]
    ended = subprocess.run([sys.executable, "-m", "benchctl", "run", *command], check=False)
    if ended.returncode not in {0, SUSPECT}:
        sys.exit(f"'benchctl run' ended with exit code {ended.returncode}; start again to go on")


def components_table(questions: dict[str, Question]) -> Iterator[Figures]:
    """Scatter between servers and between loads, and drift, of each metric of each experiment."""
    for name, question in questions.items():
        for metric in question.metrics:
            components = variance_components(logs_by_server(question.blocks, metric))
            if components is not None:
                yield {
                    "experiment": name,
                    "metric": metric,
                    "between servers, %": in_percent(components.between),
                    "between loads, %": in_percent(components.within),
                    "drift per load, %": in_percent(components.drift),
                }


def in_percent(estimate: Estimate) -> str:
    low, high = estimate.low or 0.0, estimate.high or 0.0
    return f"{100 * estimate.value:.2f} [{100 * low:.2f}, {100 * high:.2f}]"


def costs_table(questions: dict[str, Question]) -> Iterator[Figures]:
    """Seconds of a run."""
    for name, question in questions.items():
        servers = [server for block in question.blocks for server in block]
        loads = [seconds for server in servers for seconds in server.loads_s]
        yield {
            "experiment": name,
            "blocks": len(question.blocks),
            "loads": question.most_loads,
            "start, warm-up, end, s": fmean(server.other_s for server in servers),
            "of it later warm-up waves, s": fmean(server.later_waves_s for server in servers),
            "a load, s": fmean(loads),
        }


def recorded_table(questions: dict[str, Question]) -> Iterator[Figures]:
    """What the experiments say as they were measured, with all their loads."""
    for name, question in questions.items():
        loads = [question.most_loads] * len(question.blocks)
        for metric in judged(question.blocks, loads, question.metrics, question.rules(0.95), question.estimator):
            if metric.estimate is not None and metric.estimate.log_interval is not None:
                low, high = (100 * math.expm1(bound) for bound in metric.estimate.log_interval)
                yield {
                    "experiment": name,
                    "metric": metric.metric.name,
                    "change, %": f"{100 * (metric.estimate.ratio - 1):+.2f} [{low:+.2f}, {high:+.2f}]",
                    "verdict": metric.verdict,
                    "minutes": seconds_of(question.blocks, loads) / 60,
                }


def designs(most_loads: int) -> Iterator[Design]:
    """The rule that ended at a precision, and ends at the verdict for several numbers of loads and of looks."""
    yield Design(
        "1 load, 3 % precise, alpha / looks", 1, "precision", divided_levels, precision_frac=0.03, has_one_wave=True
    )
    yield Design("auto, until verdict", "auto", "verdict", sequential_levels)
    yield Design(f"auto, until verdict, {MANY_LOOKS} looks", "auto", "verdict", sequential_levels, MANY_LOOKS)
    for number in (1, 3, 5, 7):
        if number <= most_loads:
            name = f"{count_of(number, 'load')}, until verdict, {MANY_LOOKS} looks"
            yield Design(name, number, "verdict", sequential_levels, MANY_LOOKS)


def answer(question: Question, most_blocks: int, replays: int) -> list[Figures]:
    """A row for each design; the first is one load per server and a number of blocks that is fixed."""
    stream = np.random.default_rng(1)
    rows = [least_fixed(question, 1, replays, stream)]
    for design in designs(question.most_loads):
        outcomes = [replay(question, design, most_blocks, stream) for _ in range(replays)]
        rows.append(summary(question, design, outcomes))
    fixed = rows[0]["minutes, mean"]
    return [
        {**row, "mean / fixed": row["minutes, mean"] / fixed, "80 % / fixed": row[WITHIN] and row[WITHIN] / fixed}
        for row in rows
    ]


def read(directory: Path) -> dict[str, Question]:
    """The questions with what DIR has recorded."""
    experiment = load_experiment(directory / "minutes")
    metrics, estimator = experiment.profile.primary_metrics, experiment.profile.comparison.estimator
    return {
        name: Question(recorded_blocks(experiment, variant, metrics), metrics, estimator, margin, truth, right)
        for name, (variant, margin, truth, right) in QUESTIONS.items()
    }


def main() -> None:
    chosen = options(
        __doc__,
        "directory",
        blocks=9,
        loads=5,
        busy=0,
        rounds=0,
        pairs=30,
        most_blocks=40,
        replays=200,
        read=False,
    )
    directory = Path(chosen.directory)
    directory.mkdir(parents=True, exist_ok=True)
    model, planted = directory / "tiny", directory / "planted.json"
    if not chosen.read:
        if not model.exists():
            subprocess.run([sys.executable, "-m", "benchctl", "models", "make-tiny", str(model)], check=True)
        if not chosen.rounds and not planted.exists():
            write(planted, calibrate(directory, str(model), chosen.pairs))
        rounds = chosen.rounds or json.loads(planted.read_text())["rounds"]
        with busy_processes(chosen.busy):
            measure(directory, str(model), rounds, chosen.blocks, chosen.loads)
    if planted.exists():
        size = json.loads(planted.read_text())
        print("planted: {rounds} rounds, step_ms x {ratio:.4f} [{low:.4f}, {high:.4f}]".format(**size))
    questions = read(directory)
    show(list(costs_table(questions)), "What it takes")
    show(list(components_table(questions)), "Scatter of the logarithm, with 95 % intervals")
    show(list(recorded_table(questions)), "As measured, with all loads")
    print(f"\nReplays: {chosen.replays}. Their blocks and loads are drawn anew from these records, not measured.")
    for name, question in questions.items():
        if len(question.blocks) < MIN_PAIRED_BLOCKS:
            print(f"\n{name}: {len(question.blocks)} blocks are too few to be replayed")
            continue
        rows = answer(recentred(question), chosen.most_blocks, chosen.replays)
        count = f"replayed on the recorded loads of {len(question.blocks)} blocks"
        show(rows, f"{name}: minutes until {question.right}, {count}")


if __name__ == "__main__":
    main()
