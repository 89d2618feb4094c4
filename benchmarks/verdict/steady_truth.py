"""Are warmth and drift named where they are planted, and nowhere else? Servers of which the truth is known.

Each experiment is one simulated server life in virtual time, with noise of the published size, random lengths, and
at most one planted fault (options of the engine ``sim``); the warnings are those of ``benchctl show``. A fault is
named where the warning says what was planted: as many steps that met a shape first as the load had pauses, a drift
upwards, as many slow first steps as the load had (give or take two: steps with prompts are not timed). The same
output every time. Ends with exit code 1 when a demand is refuted.
"""

import argparse
import re
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Final

import msgspec

from benchctl.analysis.validity.steadiness import steadiness_warnings
from benchctl.measure.warmup import warmup_bursts
from benchctl.profile.load import parse_profile
from benchctl.profile.model import Profile
from benchctl.profile.planning import variant_settings
from benchctl.records.columns import columns_from
from benchctl.records.loaded import LoadedRun
from benchctl.records.record import RunRecord
from benchctl.records.schema import SCHEMA_VERSION, StepRecord
from benchctl.sim.virtual import VirtualServer
from benchctl.workload.opening import opening_of
from benchctl.workload.prepare import prepare_requests
from benchmarks.common.harness import show
from benchmarks.verdict.shares import Demand, Row, row

PROFILE: Final = """\
name: steady-truth
seed: {seed}
engine: {{kind: sim, options: {{noise: published, {options}}}}}
model: qwen2.5-7b
workload:
  dataset: generated
  num_prompts: {num_prompts}
  output_len: {{mean: 48, cv: 0.5, max: 160}}
  samples_per_prompt: {choices}
  samples_as: one-request
  arrival: {arrival}
  num_warmups: {warmups}
load: {{begin: {begin}}}
variants: {{baseline: {{}}}}
"""
CLOSED: Final = "{kind: closed-loop, max_concurrency: 16}"
OPEN: Final = "{kind: poisson, request_rate: 20}"
NAMED: Final = Demand(0.95, 1.0)
SILENT: Final = Demand(0.95, 1.0)
PAUSE_NS: Final = 900_000_000
"""Steps that take longer have a planted pause of a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Loads of one kind on a server with at most one fault."""

    name: str
    arrival: str = CLOSED
    options: str = ""
    num_prompts: int = 600
    warmups: int = 2
    choices: int = 1
    begin: str = "drained"
    is_sorted: bool = False
    """Requests are sent from the shortest answer to the longest."""
    names: Callable[[LoadedRun, str], bool] | None = None
    """Whether a warning says what was planted; None for a server without faults."""


def measure(condition: Condition, seed: int) -> tuple[Profile, LoadedRun]:
    """One server life."""
    profile = parse_profile(
        PROFILE.format(
            seed=seed,
            options=condition.options,
            choices=condition.choices,
            arrival=condition.arrival,
            warmups=condition.warmups,
            num_prompts=condition.num_prompts,
            begin=condition.begin,
        ),
        condition.name,
    )
    settings, steps = variant_settings(profile, "baseline", {}), list[StepRecord]()
    requests = prepare_requests(profile).requests
    if condition.is_sorted:
        requests = [
            msgspec.structs.replace(request, index=index)
            for index, request in enumerate(sorted(requests, key=lambda each: each.max_tokens))
        ]
    server = VirtualServer(settings, noise_seed=seed, on_step=steps.append)
    records = [record for burst in warmup_bursts(requests, profile, settings) for record in server.send(burst)]
    opening, num_warmups = opening_of(requests, profile)
    records += server.send((*opening, *requests), profile.workload.arrival, num_warmups)
    record = RunRecord(
        schema_version=SCHEMA_VERSION,
        index=0,
        run_id="run",
        block=0,
        position=0,
        variant="baseline",
        state="done",
        clock="virtual",
    )
    return profile, LoadedRun(
        record=record,
        requests=tuple(records),
        columns=columns_from(steps),
        warmup_columns=columns_from(steps, is_warmup=True),
    )


def names_pauses(run: LoadedRun, text: str) -> bool:
    """As many steps as there were pauses."""
    number = re.search(r"shape-met-first (\d+) step", text)
    return number is not None and int(number[1]) == int((run.columns.dur_ns > PAUSE_NS).sum())


def names_drift(_run: LoadedRun, text: str) -> bool:
    """Steps that take longer and longer."""
    return "decode_step_ms rises" in text


def names_slow_steps(planted: int) -> Callable[[LoadedRun, str], bool]:
    """The slow steps that the warm-up left to the load."""

    def names(run: LoadedRun, text: str) -> bool:
        number = re.search(r"the first (\d+) steps", text)
        left = planted - len(run.warmup_columns)
        return number is not None and abs(int(number[1]) - left) <= 2

    return names


def names_slow_20(run: LoadedRun, text: str) -> bool:
    """All of twenty slow steps, which no warm-up took."""
    return names_slow_steps(20)(run, text)


def names_slow_30(run: LoadedRun, text: str) -> bool:
    """What a warm-up left of thirty."""
    return names_slow_steps(30)(run, text)


CONDITIONS: Final = (
    Condition(name="stationary, closed loop of 16"),
    Condition(name="stationary, closed loop that begins running", begin="running"),
    Condition(name="stationary, closed loop, answers sorted by length", is_sorted=True),
    Condition(name="stationary, closed loop, two choices", choices=2),
    Condition(name="stationary, open loop, Poisson 20/s", arrival=OPEN),
    Condition(name="stationary, open loop, Poisson 40/s", arrival="{kind: poisson, request_rate: 40}"),
    Condition(
        name="pause of 1 s at each new batch size, closed loop",
        options="first_use_pause_s: 1.0",
        names=names_pauses,
    ),
    Condition(
        name="pause of 1 s at each new batch size, open loop, 32 sequences at most",
        arrival=OPEN,
        options="first_use_pause_s: 1.0, max_num_seqs: 32",
        names=names_pauses,
    ),
    Condition(name="drift of 3 % over the load, closed loop", options="drift: 0.03", names=names_drift),
    Condition(name="drift of 3 % over the load, open loop", arrival=OPEN, options="drift: 0.03", names=names_drift),
    Condition(
        name="20 slow first steps, no warm-up", options="slow_first_steps: 20", warmups=0, names=names_slow_20
    ),
    Condition(
        name="30 slow first steps, of which the warm-up took 17",
        options="slow_first_steps: 30",
        names=names_slow_30,
    ),
)


def events(condition: Condition, seed: int) -> dict[str, bool]:
    """What the warnings of one experiment say."""
    profile, run = measure(condition, seed)
    warnings = steadiness_warnings(run, profile.workload.arrival)
    text = "; ".join(f"{warning.code} {warning.message}" for warning in warnings)
    if condition.names is None:
        return {"nothing said": not warnings}
    return {"named": condition.names(run, text)}


def judge(condition: Condition, num_experiments: int, pool: ProcessPoolExecutor) -> Row:
    """All experiments of a condition."""
    futures = [pool.submit(events, condition, seed) for seed in range(num_experiments)]
    demand = {"nothing said": SILENT} if condition.names is None else {"named": NAMED}
    return row({"load and fault": condition.name}, [future.result() for future in futures], demand)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experiments", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    with ProcessPoolExecutor(options.jobs) as pool:
        rows = []
        for condition in CONDITIONS:
            rows.append(judge(condition, options.experiments, pool))
            print(" | ".join(rows[-1].cells().values()), file=sys.stderr, flush=True)
    show([each.cells() for each in rows], f"{options.experiments} experiments each, per cent")
    return int(any(each.failures for each in rows))


if __name__ == "__main__":
    sys.exit(main())
