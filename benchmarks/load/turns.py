"""Turns of conversations: whether any comes before an answer and the thinking, and what the cache had of them.

In virtual time: 3 numbers of turns, 3 think times, 2 schedules, several seeds. "early" are turns that were sent
before the answer before them was complete and their user had thought, by the records alone. Hits are held against
the bounds that the check has, and against a cache without limits that is looked through text by text. Nothing
depends on time. Exit code 1 where a turn is early, or a share of hits is further off than 2 points.

    python -m benchmarks.load.turns [--conversations 20] [--http] [--real DIR]

``--http`` sends some of the loads to a simulated server over HTTP, by one and by two processes of the client, and
says whether it took the same steps. ``--real`` does so to one vLLM of the preset vllm-cpu with a tiny model in DIR.
"""

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, pairwise, product, takewhile
from operator import eq
from pathlib import Path
from typing import Any, Final

from benchctl.analysis.experiment.experiment import Experiment
from benchctl.analysis.metrics.latency import measured
from benchctl.measure.run import RunContext, measure_run
from benchctl.measure.virtual import simulate_run
from benchctl.profile.load import parse_profile
from benchctl.profile.planning import plan_runs
from benchctl.records.directory import RequestSets, RunDirectory
from benchctl.records.record import PreparedRequest, RequestRecord
from benchctl.workload.prepare import prepare_requests
from benchctl.workload.tokenizers import tokenize_chat
from benchctl.workload.turns import with_answers_in
from benchmarks.common.attached_vllm import attached_vllm
from benchmarks.common.harness import options, show, write
from benchmarks.load.planned_hits import simulated

NUMBERS: Final = {"2": 2, "8": 8, "1 to 12": {"mean": 4, "cv": 0.6, "max": 12}}
THINKS: Final = {
    "0": {"think_s": 0.0},
    "1": {"think_s": 1.0},
    "mean 1": {"think_s": 1.0, "think_cv": 1.0},
}
ARRIVALS: Final = {
    "8 users": {"kind": "closed-loop", "max_concurrency": 8},
    "poisson, 2/s": {"kind": "poisson", "request_rate": 2.0},
}
SEEDS: Final = 5
TOLERANCE: Final = 0.02
BLOCK: Final = 16


def profile_text(
    conversations: int, number: object, think: Mapping[str, object], arrival: object, **more: Any
) -> str:
    """A profile of one server with a cache, as JSON, which is YAML, too."""
    turns = {"number": number, **think}
    workload = {"dataset": "synthetic", "num_prompts": conversations, "input_len": [30, 70], "output_len": 24}
    options_of_sim = {"noise": "published", "enable_prefix_caching": True, "num_kv_blocks": 100_000}
    profile = {"name": "turns", "blocks": 1, "engine": {"kind": "sim", "options": options_of_sim}}
    workload |= {"arrival": arrival, "turns": turns}
    return json.dumps(profile | {"workload": workload, "variants": {"baseline": {}}} | more)


def num_early(records: Sequence[RequestRecord], requests: Sequence[PreparedRequest], time_scale: float) -> int:
    """Turns that were sent too early, by two times of the client and the plan."""
    by_index = {record.index: record for record in records}
    pairs = [
        (by_index[before.index], by_index[turn.index], turn) for before, turn in pairwise(requests) if turn.turn
    ]
    return sum(
        (after.sent_ns or 0) < (before.done_ns or 0) + round(turn.think_ns / time_scale)
        for before, after, turn in pairs
    )


def hits_by_text(records: Sequence[RequestRecord], requests: Sequence[PreparedRequest]) -> float:
    """The share of prompt tokens that a cache without limits has.

    Of each turn these are the whole blocks that its prompt has in common with the prompt and the answer before it,
    whose last token was never computed.
    """
    texts = {record.index: record.choices[0].text for record in records}
    num_found = num_tokens = 0
    known: list[str] = []
    said: list[str] = []
    for request in requests:
        if not request.turn:
            known, said = [], []
        pieces = tokenize_chat(with_answers_in(request, said).messages or ())
        num_found += (
            sum(1 for _ in takewhile(lambda pair: eq(*pair), zip(known, pieces, strict=False))) // BLOCK * BLOCK
        )
        num_tokens += len(pieces)
        known = (pieces + texts[request.index].replace(" ", "\0 ").split("\0")[1:])[:-1]
        said.append(texts[request.index])
    return num_found / num_tokens


def virtual_rows(conversations: int, directory: Path) -> Iterator[dict[str, Any]]:
    """Of each kind of conversation and schedule all seeds together."""
    numbers = count()
    for (number, turns), (think, seconds), (arrival, schedule) in product(
        NUMBERS.items(), THINKS.items(), ARRIVALS.items()
    ):
        num_turns = early = failed = 0
        shares, differences = [], []
        for seed in range(SEEDS):
            text = profile_text(conversations, turns, seconds, schedule, seed=seed)
            experiment = simulated(text, directory / str(next(numbers)))
            (run,), requests = experiment.results.runs, experiment.results.requests
            records = measured(run.requests)
            num_turns += sum(bool(request.turn) for request in requests)
            early += num_early(records, requests, 1.0)
            failed += not all(check.ok for check in experiment.checks(run) if check.name in CHECKED)
            shares.append(experiment.metrics(run)["prefix_hit_frac"] or 0.0)
            differences.append(100 * (shares[-1] - hits_by_text(records, requests)))
        yield {
            "turns": number,
            "think s": think,
            "load": arrival,
            "later turns": num_turns,
            "early": early,
            "checks failed": failed,
            "hits": f"{min(shares):.3f} to {max(shares):.3f}",
            "largest difference to texts, points": max(differences, key=abs),
        }


CHECKED: Final = ("turns", "prefix-cache")


def http_rows(conversations: int, directory: Path) -> Iterator[dict[str, Any]]:
    """The same load over HTTP, by one and by two processes, beside its steps in virtual time."""
    for (think, seconds), (arrival, schedule), workers in product(THINKS.items(), ARRIVALS.items(), (1, 2)):
        text = profile_text(conversations, 4, seconds, schedule, load={"workers": workers})
        profile = parse_profile(text, "turns")
        engine = profile.engine.model_copy(update={"options": profile.engine.options | {"time_scale": 20.0}})
        profile = profile.model_copy(update={"engine": engine})
        requests = prepare_requests(profile).requests
        (planned,) = plan_runs(profile).runs
        logs, early = [], 0
        for by in (simulate_run, measure_run):
            run = RunDirectory(directory / f"{think}-{arrival}-{workers}-{by.__name__}".replace("/", "-"))
            record = by(RunContext(profile=profile, requests=RequestSets.single(requests)), planned, run)
            logs.append(run.step_log.read_bytes())
            records = [each for each in run.requests() if not each.is_warmup]
            early = num_early(records, requests, record.time_scale or 1.0)
        lags = sorted((each.sent_ns or 0) - each.scheduled_ns for each in records if each.turn)
        yield {
            "think s": think,
            "load": arrival,
            "processes": workers,
            "later turns": len(lags),
            "early": early,
            "median lag ms": lags[len(lags) // 2] / 1e6,
            "p99 lag ms": lags[len(lags) * 99 // 100] / 1e6,
            "steps": "equal" if logs[0] == logs[1] else "differ",
        }


def real_rows(conversations: int, directory: Path) -> Iterator[dict[str, Any]]:
    """Conversations on one vLLM, to which benchctl attaches; the tiny model's words are no words, so that they make
    other tokens when they come back.
    """
    with attached_vllm(directory) as measure:
        for arrival, schedule in ARRIVALS.items():
            document = json.loads(profile_text(conversations, 4, THINKS["mean 1"], schedule))
            document["workload"] |= {"input_len": [100, 200]}
            experiment, code = measure(f"turns-{arrival.partition(' ')[0].strip(',')}", document)
            yield _real_row(experiment, arrival, code)


def _real_row(experiment: Experiment, arrival: str, code: int) -> dict[str, Any]:
    (run,), requests = experiment.results.runs, experiment.results.requests
    details = {check.name: check for check in experiment.checks(run)}
    return {
        "load": arrival,
        "later turns": sum(bool(request.turn) for request in requests),
        "early": num_early(measured(run.requests), requests, 1.0),
        "hits": experiment.metrics(run)["prefix_hit_frac"],
        "whole blocks of 128": possible_hits(measured(run.requests), 128),
        "check": details["prefix-cache"].detail,
        "exit code": code,
    }


def possible_hits(records: Sequence[RequestRecord], block: int) -> str:
    """The least and the most that a cache with such blocks has, by the server's own counts."""
    pairs = [(a, b) for a, b in pairwise(sorted(records, key=lambda record: record.index)) if b.turn]
    prompt = sum(record.prompt_tokens or 0 for record in records)
    least = sum((a.prompt_tokens or 0) // block * block for a, _ in pairs) / prompt
    most = sum(((a.prompt_tokens or 0) + (a.completion_tokens or 0)) // block * block for a, _ in pairs) / prompt
    return f"{least:.3f} to {most:.3f}"


def main() -> None:
    arguments = options(__doc__, conversations=20, http=False, real="")
    if arguments.real:
        directory = Path(arguments.real)
        directory.mkdir(exist_ok=True)
        rows = list(real_rows(min(arguments.conversations, 12), directory.absolute()))
        show(rows, "Conversations on a vLLM on this machine's CPU")
        write(arguments.json, rows)
        sys.exit(any(row["early"] for row in rows))
    with tempfile.TemporaryDirectory() as folder:
        if arguments.http:
            rows = list(http_rows(arguments.conversations, Path(folder)))
            is_as_planned = all(row["steps"] == "equal" and not row["early"] for row in rows)
        else:
            rows = list(virtual_rows(arguments.conversations, Path(folder)))
            is_as_planned = all(
                not row["early"]
                and not row["checks failed"]
                and abs(row["largest difference to texts, points"]) <= 100 * TOLERANCE
                for row in rows
            )
    show(rows, "Conversations over HTTP" if arguments.http else "Conversations in virtual time")
    write(arguments.json, rows)
    sys.exit(not is_as_planned)


if __name__ == "__main__":
    main()
