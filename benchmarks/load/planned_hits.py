"""Planned and measured prefix hits: how far apart they are on the simulator, and on a real vLLM.

In virtual time each server gets three loads of 200 requests: 4 hit rates, 3 numbers of groups, 3 kinds of lengths,
3 schedules. A row of the table has the largest difference of any of its 27 loads. Controls are the same loads
without priming, and with a cache that holds half of the prefixes: the check must fail. Nothing depends on time.
Exit code 1 where a difference is above 2 points, or a control does not differ.

    python -m benchmarks.load.planned_hits [--requests 200] [--real DIR]

``--real`` starts one vLLM of the preset vllm-cpu with a tiny model of its own in DIR (new or empty), attaches to
it, and sends two loads of each of three hit rates; it needs ``benchctl engines install vllm``.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from itertools import count, product
from pathlib import Path
from typing import Any, Final

from benchctl.analysis.experiment.experiment import Experiment, load_experiment
from benchctl.analysis.metrics.latency import measured, total
from benchctl.analysis.validity.answers import planned_hit_frac
from benchctl.measure.directory import Origin
from benchctl.measure.experiment import create_simulation, run_experiment
from benchctl.measure.run import Listener
from benchctl.measure.virtual import simulate_run
from benchctl.profile.load import parse_profile
from benchctl.profile.planning import variant_settings
from benchctl.sim.virtual import VirtualServer
from benchctl.workload.prepare import prepare_requests
from benchmarks.common.attached_vllm import attached_vllm
from benchmarks.common.harness import options, show, write

HIT_RATES: Final = (0.2, 0.5, 0.8, 0.95)
GROUPS: Final = (1, 4, 32)
LENGTHS: Final = {
    "640": 640,
    "320 to 1280": {"mean": 640, "cv": 0.3, "min": 320, "max": 1280},
    "256, 640, 1280": [256, 640, 1280],
}
ARRIVALS: Final = {
    "8 slots": {"kind": "closed-loop", "max_concurrency": 8},
    "64 slots": {"kind": "closed-loop", "max_concurrency": 64},
    "poisson, 20/s": {"kind": "poisson", "request_rate": 20.0},
}
TOLERANCE: Final = 0.02
LOADS: Final = 3


def profile_text(requests: int, groups: int, rate: float, lengths: object, arrival: object, **engine: Any) -> str:
    """A profile of one server with a cache, as JSON, which is YAML, too."""
    prefix = {"groups": groups, "hit_rate": rate}
    workload = {"dataset": "synthetic", "num_prompts": requests, "input_len": lengths, "output_len": 8}
    simulated = {"kind": "sim", "options": {"noise": "none", "enable_prefix_caching": True, **engine}}
    profile = {"name": "planned-hits", "blocks": 1, "loads_per_server": LOADS, "engine": simulated}
    return json.dumps(
        profile | {"workload": workload | {"arrival": arrival, "prefix": prefix}, "variants": {"baseline": {}}}
    )


def simulated(text: str, directory: Path) -> Experiment:
    """The experiment of that profile in virtual time."""
    profile = parse_profile(text, "planned-hits")
    prepared = prepare_requests(profile)
    results = create_simulation(profile, prepared, Origin(output_root=directory, argv=()))
    run_experiment(results, profile, prepared.requests, Listener(), simulate_run)
    return load_experiment(results.path)


def plan_and_hits(experiment: Experiment) -> tuple[float, list[float]]:
    """The planned share, and that of each load of its runs."""
    loads = [metrics for run in experiment.results.runs for metrics in map(experiment.metrics, run.loads)]
    return planned_hit_frac(experiment.results.requests) or 0.0, [
        metrics["prefix_hit_frac"] or 0.0 for metrics in loads
    ]


def hits_without_priming(text: str) -> float:
    """The share where a load meets an empty cache, less the planned one."""
    profile = parse_profile(text, "unprimed")
    requests = prepare_requests(profile).requests
    server = VirtualServer(variant_settings(profile, "baseline", {}), on_step=lambda _step: None)
    records = measured(tuple(server.send(requests, profile.workload.arrival)))
    hits, prompt = total([each.cached_tokens for each in records]), total([each.prompt_tokens for each in records])
    return (hits or 0) / (prompt or 1) - (planned_hit_frac(requests) or 0.0)


def simulator_rows(requests: int, directory: Path) -> Iterator[dict[str, Any]]:
    """The largest difference of each hit rate and schedule, in points."""
    numbers = count()
    for rate, (arrival, schedule) in product(HIT_RATES, ARRIVALS.items()):
        plans, differences = [], []
        for groups, lengths in product(GROUPS, LENGTHS.values()):
            text = profile_text(requests, groups, rate, lengths, schedule)
            planned, of_loads = plan_and_hits(simulated(text, directory / str(next(numbers))))
            plans.append(planned)
            differences += [100 * (hits - planned) for hits in of_loads]
        yield {
            "hit_rate": rate,
            "load": arrival,
            "planned": f"{min(plans):.3f} to {max(plans):.3f}",
            "loads": len(differences),
            "largest difference, points": max(differences, key=abs),
        }


def control_rows(requests: int, directory: Path) -> Iterator[dict[str, Any]]:
    """What differs without priming, and with a cache that is too small; both where 32 prefixes meet 64 slots."""
    for rate in HIT_RATES:
        text = profile_text(requests, 32, rate, 640, ARRIVALS["64 slots"])
        half = profile_text(
            requests, 32, rate, 640, ARRIVALS["8 slots"], num_kv_blocks=max(round(rate * 40) * 16, 8 * 41)
        )
        small = simulated(half, directory / f"small-{rate}")
        planned, of_loads = plan_and_hits(small)
        failed = [run.record.state for run in small.results.runs] == ["suspect"]
        yield {
            "hit_rate": rate,
            "unprimed, points": 100 * hits_without_priming(text),
            "cache of half the prefixes, points": 100 * min(hits - planned for hits in of_loads),
            "check": "fails" if failed else "holds",
        }


def real_rows(directory: Path) -> Iterator[dict[str, Any]]:
    """Two loads of each hit rate on one vLLM, to which benchctl attaches."""
    with attached_vllm(directory) as measure:
        for rate in (0.2, 0.5, 0.8):
            document = json.loads(profile_text(48, 4, rate, 640, {"kind": "closed-loop", "max_concurrency": 8}))
            document["loads_per_server"] = 2
            document["workload"]["prefix"]["block"] = 128
            experiment, code = measure(f"hits-{rate}", document)
            planned, of_loads = plan_and_hits(experiment)
            for number, hits in enumerate(of_loads, start=1):
                yield {
                    "hit_rate": rate,
                    "load": number,
                    "planned": planned,
                    "measured": hits,
                    "difference, points": 100 * (hits - planned),
                    "exit code": code,
                }


def main() -> None:
    arguments = options(__doc__, requests=200, real="")
    if arguments.real:
        directory = Path(arguments.real)
        directory.mkdir(exist_ok=True)
        rows = list(real_rows(directory.absolute()))
        show(rows, "Prefix hits of a vLLM on this machine's CPU")
        write(arguments.json, rows)
        sys.exit(any(abs(row["difference, points"]) > 100 * TOLERANCE for row in rows))
    with tempfile.TemporaryDirectory() as folder:
        rows = list(simulator_rows(arguments.requests, Path(folder)))
        controls = list(control_rows(arguments.requests, Path(folder)))
    show(rows, "Measured less planned prefix hits in virtual time")
    show(controls, "Controls: 32 prefixes")
    write(arguments.json, {"simulator": rows, "controls": controls})
    are_planned = all(abs(row["largest difference, points"]) <= 100 * TOLERANCE for row in rows)
    do_differ = all(row["check"] == "fails" and row["unprimed, points"] < -100 * TOLERANCE for row in controls)
    sys.exit(not (are_planned and do_differ))


if __name__ == "__main__":
    main()
