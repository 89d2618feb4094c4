"""Does benchctl's client see what ``vllm bench serve`` sees?

Both send the same prompts, with the same lengths and limit of concurrency, to the same kind of fresh server, in
alternating order. Of each round the median over requests is taken, of each client the median over rounds. They
agree when these differ by no more than 5 % or 1 ms, and when every count is exactly the same.

    python -m benchmarks.load.agreement --tokenizer tiny/                              # against the simulator
    python -m benchmarks.load.agreement --tokenizer tiny/ --engine llamacpp --model tiny/tiny.gguf

benchctl attaches to the server as to one that someone else started, so that both clients find the same. The servers
are those that vLLM's client can talk to: they state usage in an event of its own and take fields that
only vLLM knows (``transformers serve`` answers those with 422). The simulator keeps its pace by the clock, so that
what differs is the clients'; llama-server computes, and competes with the client for the machine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from benchctl.analysis.metrics.latency import is_completed, latencies_ns, measured
from benchctl.engines.engine import LaunchSite, engine_for
from benchctl.engines.environment import engines_directory
from benchctl.measure.redaction import server_env
from benchctl.measure.run import RunContext, measure_run
from benchctl.measure.server.process import choose_port
from benchctl.profile.load import parse_profile
from benchctl.profile.model import Profile
from benchctl.profile.planning import variant_settings
from benchctl.records.directory import RunDirectory
from benchctl.records.files import read_jsonl
from benchctl.records.record import Message, PlannedRun, PreparedRequest, RequestRecord
from benchctl.units import ms_from_ns
from benchctl.workload.prepare import prepare_requests
from benchmarks.common.fresh_server import fresh_server

LIMIT_FRAC, LIMIT_MS = 0.05, 1.0
DURATIONS = ("ttft", "tpot", "e2el")
COUNTS = ("completed", "prompt tokens", "output tokens")
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
class Seen:
    """What one client saw in one round: medians over requests in ms, and counts."""

    medians_ms: dict[str, float]
    counts: dict[str, int]


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


def seen_by_benchctl(trial: Trial, index: int) -> Seen:
    directory = RunDirectory(trial.directory / f"ours-{index}")
    planned = PlannedRun(index=index, run_id=f"{index:03d}", block=index, position=0, variant="baseline")
    with serving(trial, f"ours-{index}") as url:
        record = measure_run(RunContext(profile=trial.attached(url), requests=trial.requests), planned, directory)
    if record.state not in ("done", "suspect"):
        raise SystemExit(f"benchctl's run failed: {record.failure}")
    requests = measured(read_jsonl(directory.path / "requests.jsonl", RequestRecord))
    completed = [request for request in requests if is_completed(request)]
    spent = latencies_ns(completed)
    return Seen(
        {name: statistics.median(map(ms_from_ns, spent[name])) for name in DURATIONS},
        {
            "completed": len(completed),
            "prompt tokens": sum(request.prompt_tokens or 0 for request in completed),
            "output tokens": sum(request.completion_tokens or 0 for request in completed),
        },
    )


def seen_by_vllm(trial: Trial, index: int) -> Seen:
    with serving(trial, f"theirs-{index}") as url:
        found = run_vllm(trial, index, url)
    outputs, spans = found["output_lens"], found["latencies"]
    tpots = [(e2el - ttft) / (n - 1) for e2el, ttft, n in zip(spans, found["ttfts"], outputs, strict=True) if n > 1]
    medians_s = {"ttft": found["ttfts"], "tpot": tpots, "e2el": spans}
    return Seen(
        {name: 1e3 * statistics.median(values) for name, values in medians_s.items()},
        {
            "completed": found["completed"],
            "prompt tokens": sum(found["input_lens"]),
            "output tokens": sum(outputs),
        },
    )


def run_vllm(trial: Trial, index: int, url: str) -> dict[str, Any]:
    """Its result with the details of each request; it asks what benchctl asks beside prompt, length and seed."""
    asked, attached = trial.asked, trial.attached(url)
    settings = variant_settings(attached, "baseline", {})
    body = json.loads(engine_for("attach").request_call(trial.requests[0], settings).body)
    extra = {name: value for name, value in body.items() if name not in NOT_EXTRA}
    dataset = trial.directory / "dataset.json"
    turns = [[{"value": request.messages[0].content}, {"value": ""}] for request in trial.requests]
    dataset.write_text(json.dumps([{"conversations": pair} for pair in turns]))
    argv = [str(asked.vllm), "bench", "serve", "--backend", "openai-chat", "--endpoint", "/v1/chat/completions"]
    argv += ["--base-url", url, "--model", body["model"], "--tokenizer", asked.tokenizer]
    argv += ["--dataset-name", "sharegpt", "--dataset-path", str(dataset), "--disable-shuffle"]
    argv += ["--sharegpt-output-len", str(asked.output_len), "--num-prompts", str(len(turns))]
    argv += ["--max-concurrency", str(asked.concurrency), "--num-warmups", str(asked.concurrency)]
    # A connection for each request, as benchctl's client has: a server that closes an idle one would lose another.
    argv += ["--extra-body", json.dumps(extra), "--header", "Connection=close"]
    argv += ["--disable-tqdm", "--save-result", "--save-detailed"]
    argv += ["--result-dir", str(trial.directory), "--result-filename", f"theirs-{index}.json"]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False)
    if ended.returncode:
        said = f"{ended.stdout[-2000:]}{ended.stderr[-4000:]}"
        raise SystemExit(f"vllm bench serve ended with {ended.returncode}:\n{said}")
    return dict(json.loads((trial.directory / f"theirs-{index}.json").read_text()))


def rounds(trial: Trial, count: int) -> dict[str, list[Seen]]:
    """ABBA: whoever begins changes from round to round."""
    clients = {OURS: seen_by_benchctl, THEIRS: seen_by_vllm}
    found: dict[str, list[Seen]] = {OURS: [], THEIRS: []}
    for index in range(count):
        for name in (OURS, THEIRS) if index % 2 == 0 else (THEIRS, OURS):
            seen = clients[name](trial, index)
            found[name].append(seen)
            medians = "   ".join(f"{metric} {ms:9.3f} ms" for metric, ms in seen.medians_ms.items())
            print(f"round {index}   {name:10}   {medians}", flush=True)
    return found


def verdict(found: dict[str, list[Seen]]) -> str:
    """Print both sides of each figure: they ``agree``, ``disagree``, or are ``undecided`` where rounds overlap."""
    marks = []
    print(f"\n{'':16} {OURS:>10} {THEIRS:>10} {'difference':>13}   rounds of {OURS}, of {THEIRS}")
    for metric in DURATIONS:
        values = {name: [seen.medians_ms[metric] for seen in seen_by] for name, seen_by in found.items()}
        ours, theirs = (statistics.median(values[name]) for name in (OURS, THEIRS))
        marks.append(compared(values[OURS], values[THEIRS]))
        ranges = ", ".join(f"{min(values[name]):.3f} to {max(values[name]):.3f}" for name in (OURS, THEIRS))
        shown = f"{ours:10.3f} {theirs:10.3f} {ours - theirs:+10.3f} ms"
        print(f"{metric + ' median, ms':16} {shown}   {ranges} {marks[-1]}")
    for name in COUNTS:
        ours, theirs = ({seen.counts[name] for seen in found[side]} for side in (OURS, THEIRS))
        marks.append("agree" if ours == theirs and len(ours) == 1 else "disagree")
        shown = ("/".join(map(str, sorted(counts))) for counts in (ours, theirs))
        print(" ".join((f"{name:16}", *(f"{counts:>10}" for counts in shown), marks[-1])))
    return next((mark for mark in ("disagree", "undecided") if mark in marks), "agree")


def compared(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Medians over rounds within the limit agree; others disagree where no round of one lies among the other's."""
    first, second = statistics.median(ours), statistics.median(theirs)
    if abs(first - second) <= max(LIMIT_MS, LIMIT_FRAC * second):
        return "agree"
    return "undecided" if min(ours) <= max(theirs) and min(theirs) <= max(ours) else "disagree"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=sorted(ENGINES), default="sim")
    parser.add_argument("--model", default="qwen2.5-7b", help="a GGUF file for llamacpp")
    parser.add_argument("--tokenizer", required=True, help="the directory with its tokenizer, for vLLM's client")
    parser.add_argument("--vllm", type=Path, default=engines_directory() / "vllm" / "bin" / "vllm")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-prompts", type=int, default=48)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=4)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        trial = Trial(asked, (), Path(directory))
        requests = user_messages(prepare_requests(trial.profile(ENGINES[asked.engine])).requests)
        found = rounds(replace(trial, requests=requests), asked.rounds)
    word = verdict(found)
    print(f"\n{word}: medians within {LIMIT_FRAC:.0%} or {LIMIT_MS:g} ms, counts exactly")
    sys.exit({"agree": 0, "disagree": 1, "undecided": 3}[word])


if __name__ == "__main__":
    main()
