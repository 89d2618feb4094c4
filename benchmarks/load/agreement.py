"""Does benchctl's client see what ``vllm bench serve`` sees?

Both send the same prompts, with the same lengths and limit of concurrency, to the same kind of fresh server, in
alternating order. Of each round the median over requests is taken, of each client the median over rounds. They
agree when these differ by no more than 5 % or 1 ms, and when every count is exactly the same.

    python -m benchmarks.load.agreement tiny/                              # against the simulator
    python -m benchmarks.load.agreement tiny/ --engine llamacpp --model tiny/tiny.gguf

The argument is a directory with the model's tokenizer, for vLLM's client; exit code 1: they disagree, 3: undecided.

benchctl attaches to the server as to one that someone else started, so that both clients find the same. The servers
are those that vLLM's client can talk to: they state usage in an event of its own and take fields that
only vLLM knows (``transformers serve`` answers those with 422). The simulator keeps its pace by the clock, so that
what differs is the clients'; llama-server computes, and competes with the client for the machine.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from benchctl.analysis.metrics.chunks import latencies_ns
from benchctl.analysis.metrics.latency import is_completed, measured
from benchctl.engines.engine import LaunchSite, engine_for
from benchctl.engines.environment import engines_directory
from benchctl.measure.redaction import server_env
from benchctl.measure.run import RunContext, measure_run
from benchctl.measure.server.process import choose_port
from benchctl.profile.load import parse_profile
from benchctl.profile.model import Profile
from benchctl.profile.planning import variant_settings
from benchctl.records.directory import RequestSets, RunDirectory
from benchctl.records.files import read_jsonl
from benchctl.records.record import Message, PlannedRun, PreparedRequest, RequestRecord
from benchctl.units import ms_from_ns
from benchctl.workload.prepare import prepare_requests
from benchmarks.common.fresh_server import fresh_server
from benchmarks.common.harness import Figures, in_turns, options, show, write
from benchmarks.load.peers.tools import words

LIMIT_FRAC, LIMIT_MS = 0.05, 1.0
DURATIONS = ("ttft", "tpot", "e2el")
OURS, THEIRS = "benchctl", "vllm bench"
NOT_EXTRA = frozenset({"messages", "max_tokens", "stream", "stream_options", "model", "seed"})
PROFILE = """\
name: agreement
seed: 1
model: {model}
engine: {engine}
workload:
  dataset: generated
  num_prompts: {num_prompts}
  output_len: {output_len}
  arrival: {{kind: closed-loop, max_concurrency: {concurrency}}}
  num_warmups: {concurrency}
sampling: {{temperature: 0}}
variants: {{baseline: {{}}}}
telemetry: {{gpu_hz: 0, host_hz: 0, prometheus_hz: 0}}
"""
ENGINES = {
    "sim": "{kind: sim, options: {time_scale: 1.0}}",
    "llamacpp": "{kind: llamacpp, options: {max_num_seqs: 8, max_model_len: 1024, threads: 1, n_gpu_layers: 0}}",
}
ATTACHED = "{{kind: attach, options: {{url: '{url}', dialect: {dialect}, served_model: {served}}}}}"
DIALECTS = {"sim": ("vllm", "{model}"), "llamacpp": ("llamacpp", "benchctl")}


@dataclass(frozen=True, slots=True)
class Trial:
    """What both clients are given."""

    asked: argparse.Namespace
    requests: tuple[PreparedRequest, ...]
    directory: Path

    def profile(self, engine: str) -> Profile:
        asked = self.asked
        values = {name: getattr(asked, name) for name in ("num_prompts", "output_len", "concurrency")}
        return parse_profile(PROFILE.format(engine=engine, model=json.dumps(asked.model), **values), "agreement.py")

    def attached(self, url: str) -> Profile:
        """The profile of a client of the server at ``url``."""
        dialect, served = DIALECTS[self.asked.engine]
        name = json.dumps(served.format(model=self.asked.model))
        return self.profile(ATTACHED.format(url=url, dialect=dialect, served=name))


def user_messages(requests: Sequence[PreparedRequest]) -> tuple[PreparedRequest, ...]:
    """Only the question of each: vLLM's client sends one message and no system prompt."""
    return tuple(
        msgspec.structs.replace(request, messages=(Message(role="user", content=request.messages[-1].content),))
        for request in requests
        if request.messages
    )


@contextmanager
def serving(trial: Trial, name: str) -> Iterator[str]:
    """A server that has answered nothing yet; its address."""
    profile = trial.profile(ENGINES[trial.asked.engine])
    settings, engine = variant_settings(profile, "baseline", {}), engine_for(profile.engine.kind)
    site = LaunchSite(port=choose_port(None), directory=trial.directory)
    env = server_env(os.environ, engine.env(settings, site))
    with fresh_server(engine, profile, settings, site, env, trial.directory / f"{name}.log") as base_url:
        yield base_url


def seen_by_benchctl(trial: Trial, numbers: Iterator[int]) -> Figures:
    """Medians over requests in ms, and counts."""
    name = f"ours-{next(numbers)}"
    directory = RunDirectory(trial.directory / name)
    planned = PlannedRun(index=0, run_id=name, block=0, position=0, variant="baseline")
    with serving(trial, name) as url:
        record = measure_run(
            RunContext(profile=trial.attached(url), requests=RequestSets.single(trial.requests)), planned, directory
        )
    if record.state not in ("done", "suspect"):
        raise SystemExit(f"benchctl's run failed: {record.failure}")
    requests = measured(read_jsonl(directory.path / "requests.jsonl", RequestRecord))
    completed = [request for request in requests if is_completed(request)]
    spent = latencies_ns(completed)
    return {
        **{name: statistics.median(map(ms_from_ns, spent[name])) for name in DURATIONS},
        "completed": len(completed),
        "prompt tokens": sum(request.prompt_tokens or 0 for request in completed),
        "output tokens": sum(request.completion_tokens or 0 for request in completed),
    }


def seen_by_vllm(trial: Trial, numbers: Iterator[int]) -> Figures:
    name = f"theirs-{next(numbers)}"
    with serving(trial, name) as url:
        told = run_vllm(trial, name, url)
    outputs, spans = told["output_lens"], told["latencies"]
    tpots = [(e2el - ttft) / (n - 1) for e2el, ttft, n in zip(spans, told["ttfts"], outputs, strict=True) if n > 1]
    medians_s = {"ttft": told["ttfts"], "tpot": tpots, "e2el": spans}
    return {
        **{name: 1e3 * statistics.median(values) for name, values in medians_s.items()},
        "completed": told["completed"],
        "prompt tokens": sum(told["input_lens"]),
        "output tokens": sum(outputs),
    }


def run_vllm(trial: Trial, name: str, url: str) -> dict[str, Any]:
    """Its result with the details of each request; it asks what benchctl asks beside prompt, length and seed."""
    asked, attached = trial.asked, trial.attached(url)
    settings = variant_settings(attached, "baseline", {})
    body = json.loads(engine_for("attach").request_call(trial.requests[0], settings).body)
    extra = {name: value for name, value in body.items() if name not in NOT_EXTRA}
    dataset = trial.directory / "dataset.json"
    turns = [[{"value": request.messages[0].content}, {"value": ""}] for request in trial.requests]
    dataset.write_text(json.dumps([{"conversations": pair} for pair in turns]))
    # A connection for each request, as benchctl's client has: a server that closes an idle one would lose another.
    argv = [str(asked.vllm), "bench", "serve", *words(
        backend="openai-chat", endpoint="/v1/chat/completions", base_url=url, model=body["model"],
        tokenizer=asked.tokenizer, dataset_name="sharegpt", dataset_path=dataset, disable_shuffle=True,
        sharegpt_output_len=asked.output_len, num_prompts=len(turns), max_concurrency=asked.concurrency,
        num_warmups=asked.concurrency, extra_body=json.dumps(extra), header="Connection=close", disable_tqdm=True,
        save_result=True, save_detailed=True, result_dir=trial.directory, result_filename=f"{name}.json",
    )]  # fmt: skip
    ended = subprocess.run(argv, capture_output=True, text=True, check=False)
    if ended.returncode:
        said = f"{ended.stdout[-2000:]}{ended.stderr[-4000:]}"
        raise SystemExit(f"vllm bench serve ended with {ended.returncode}:\n{said}")
    return dict(json.loads((trial.directory / f"{name}.json").read_text()))


def agreed(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Medians over rounds within the limit agree; others disagree where no round of one lies among the other's."""
    first, second = statistics.median(ours), statistics.median(theirs)
    if abs(first - second) <= max(LIMIT_MS, LIMIT_FRAC * second):
        return "agree"
    return "undecided" if min(ours) <= max(theirs) and min(theirs) <= max(ours) else "disagree"


def judged(samples: Mapping[str, Sequence[Figures]]) -> list[dict[str, Any]]:
    """A row for each figure: the sides agree, disagree, or are undecided where rounds overlap."""
    rows = []
    for name in samples[OURS][0]:
        ours, theirs = ([figures[name] for figures in samples[side]] for side in (OURS, THEIRS))
        same = "agree" if set(ours) == set(theirs) and len(set(ours)) == 1 else "disagree"
        word = agreed(ours, theirs) if name in DURATIONS else same
        ranges = {
            f"of {side}": f"{min(each):g} to {max(each):g}" for side, each in ((OURS, ours), (THEIRS, theirs))
        }
        medians = {OURS: statistics.median(ours), THEIRS: statistics.median(theirs)}
        rows.append({"median, ms or count": name, **medians, **ranges, "they": word})
    return rows


def main() -> None:
    asked = options(
        __doc__,
        "tokenizer",
        engine="sim",
        model="qwen2.5-7b",
        vllm=engines_directory() / "vllm" / "bin" / "vllm",
        rounds=5,
        num_prompts=48,
        output_len=64,
        concurrency=4,
    )
    with tempfile.TemporaryDirectory() as directory:
        trial = Trial(asked, (), Path(directory))
        requests = user_messages(prepare_requests(trial.profile(ENGINES[asked.engine])).requests)
        trial, numbers = replace(trial, requests=requests), itertools.count()
        ways = {OURS: partial(seen_by_benchctl, trial, numbers), THEIRS: partial(seen_by_vllm, trial, numbers)}
        rows = judged(in_turns(ways, asked.rounds))
    show(rows, f"medians have to be within {LIMIT_FRAC:.0%} or {LIMIT_MS:g} ms, counts exactly the same")
    write(asked.json, rows)
    marks = {row["they"] for row in rows}
    sys.exit(1 if "disagree" in marks else 3 if "undecided" in marks else 0)


if __name__ == "__main__":
    main()
