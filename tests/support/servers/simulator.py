"""Requests for the simulator's core, and its server as a real process."""

import json
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import httpx
from support.waiting import wait_until

from benchctl.guided.params import GuidanceParams
from benchctl.measure.server.process import choose_port
from benchctl.records.files import encode, read_jsonl
from benchctl.records.record import Message
from benchctl.records.schema import StepRecord
from benchctl.sim.answers import Answer, PlannedAnswers
from benchctl.sim.config import SimConfig
from benchctl.sim.core import Core, Phase, SimLoad
from benchctl.sim.costs.cost_model import StepBatch, cost_model_for
from benchctl.sim.engine import SimulatedEngine
from benchctl.sim.requests import Prompt, Request, SamplingParams
from benchctl.sim.simulation import Simulation, simulate
from benchctl.workload.tokenizers import tokenize_chat

FILTERED = SamplingParams(top_k=5, min_p=0.01)
NEUTRAL = GuidanceParams(mode="centered_exp", value_scale=0.0)
VALUE_MODEL = "qwen2.5-1.5b"


def decode_batch(rows: int, context: int, **fields: Any) -> StepBatch:
    """Decoding rows alone whose contexts add up to ``context`` after the step."""
    defaults: dict[str, Any] = {"num_decode_tokens": rows, "num_sampling": rows, "is_greedy": False}
    defaults |= {"attended_positions": context, "decode_context": context} | fields
    return StepBatch(num_seqs=rows, num_prefill_tokens=0, context_tokens=context, **defaults)


MIXED_BATCH = StepBatch(
    num_seqs=7,
    num_prefill_tokens=100,
    num_decode_tokens=5,
    num_sampling=6,
    context_tokens=5 * 120 + 80 + 220,
    attended_positions=5 * 120 + (60 * 20 + 60 * 61 // 2) + (40 * 180 + 40 * 41 // 2),
    decode_context=5 * 120,
    is_greedy=True,
)
"""Five rows of 120 tokens, 60 tokens of a prompt behind 20, and the last 40 of another behind 180."""


def prompt_of(num_tokens: int, name: str = "p", block_size: int = 16) -> Prompt:
    return Prompt.of([f"{name}{i}" for i in range(num_tokens)], block_size)


def request_of(name: str, *, prompt_tokens: int = 20, max_tokens: int = 8, **fields: Any) -> Request:
    """A request of forced length with a prompt of its own."""
    defaults = {"ignore_eos": True, "prompt": prompt_of(prompt_tokens, name)}
    return Request(request_id=name, max_tokens=max_tokens, **{**defaults, **fields})


def run(requests: Sequence[Request], *, arrival_ns: Sequence[int] | None = None, **config: Any) -> Simulation:
    load = SimLoad(requests=tuple(requests), arrival_ns=None if arrival_ns is None else tuple(arrival_ns))
    return simulate(SimConfig(**config), [load])


@dataclass(frozen=True)
class FinishedSequence:
    """One choice of a request after its end, in the order of RequestColumns; times are virtual ns."""

    simulation: Simulation
    request: Request
    choice: int
    seq_id: int
    arrival_ns: int
    first_token_ns: int
    last_token_ns: int
    prompt_tokens: int
    num_output: int
    num_cached: int
    num_preemptions: int

    @property
    def answer(self) -> Answer:
        rules = cost_model_for(self.simulation.config).rules
        return PlannedAnswers(self.request, rules.answer_length).answer(self.choice)


def sequences_of(simulation: Simulation) -> list[FinishedSequence]:
    """Finished sequences in the order of their end."""
    columns = simulation.requests
    values = zip(*(getattr(columns, field.name).tolist() for field in fields(columns)), strict=True)
    return [
        FinishedSequence(simulation, simulation.loads[load].requests[index], *others)
        for load, index, *others in values
    ]


def measured_steps(simulation: Simulation) -> list[StepRecord]:
    """The steps of the load without those of the warm-up."""
    return [step for step in simulation.steps if not step.is_warmup]


def phase_of(names_ns: dict[str, int], *, max_concurrency: int | None = None, is_warmup: bool = False) -> Phase:
    """A phase whose requests are announced, each with its arrival."""
    how = {"max_concurrency": max_concurrency, "is_warmup": is_warmup}
    return Phase(SimLoad(announced=list(names_ns), arrival_ns=list(names_ns.values()), **how))


def announced_log_of(config: SimConfig, load: SimLoad) -> list[bytes]:
    """The steps of a server to which the load is announced, one at a time."""
    core = Core(SimulatedEngine(config))
    arrivals_ns = load.arrival_ns or (0,) * len(load.requests)
    names_ns = {request.request_id: at for request, at in zip(load.requests, arrivals_ns, strict=True)}
    core.announce(phase_of(names_ns, max_concurrency=load.max_concurrency, is_warmup=load.is_warmup))
    for request in load.requests:
        core.submit(request)
    return [encode(output.record) for output in iter(core.next_step, None)]


def question_request(index: int, question: str, *, n: int, seed: int, **fields: Any) -> Request:
    """A question as the published experiment asks it, up to 6,000 tokens of natural length."""
    messages = [
        Message(role="system", content="You are Qwen, created by Alibaba Cloud. You are a helpful assistant."),
        Message(
            role="user",
            content=f"Please reason step by step, and put your final answer within \\boxed{{}}.\n\n{question}",
        ),
    ]
    prompt = Prompt.of(tokenize_chat(messages), 16)
    return Request(request_id=f"q{index}", prompt=prompt, max_tokens=6000, n=n, seed=seed + index, **fields)


def free_port() -> int:
    """A free port below the range of outgoing connections, one of which could take it, and below that of runs."""
    first = random.SystemRandom().randrange(10_000, 19_000)
    return choose_port(None, range(first, first + 1000))


@dataclass
class SimServer:
    process: "subprocess.Popen[bytes]"
    client: httpx.Client
    step_log: Path
    log: Path

    def steps(self) -> list[StepRecord]:
        return list(read_jsonl(self.step_log, StepRecord))

    def metric(self, name: str) -> float:
        lines = [line for line in self.client.get("/metrics").text.splitlines() if line.startswith(name + "{")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def health(self) -> int | None:
        """The status of the health check; None before the server listens."""
        assert self.process.poll() is None, "the server ended before it was ready"
        with suppress(httpx.NetworkError):
            return self.client.get("/health").status_code
        return None

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(timeout=30)


@contextmanager
def sim_server(
    directory: Path, *, time_scale: float = 100.0, wait: bool = True, **settings: Any
) -> Iterator[SimServer]:
    """``python -m benchctl.sim`` on a free port, ended with the block."""
    directory.mkdir(parents=True, exist_ok=True)
    config = directory / "config.json"
    config.write_text(json.dumps({"time_scale": time_scale, **settings}))
    port, step_log, log = free_port(), directory / "steps.raw.jsonl", directory / "server.log"
    argv = [sys.executable, "-m", "benchctl.sim", "--port", str(port), "--step-log", str(step_log)]
    argv += ["--config", str(config)]
    with log.open("wb") as sink:
        process = subprocess.Popen(argv, stdout=sink, stderr=subprocess.STDOUT)
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20)
    server = SimServer(process, client, step_log, log)
    try:
        if wait:
            wait_until("the server is ready", lambda: server.health() == 200)
        yield server
    finally:
        client.close()
        if process.poll() is None:
            process.terminate()
        process.wait(timeout=30)


def events(text: str) -> list[dict[str, Any]]:
    """The JSON events of a stream, which must end with [DONE]."""
    data = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert data[-1] == "[DONE]"
    return [json.loads(item) for item in data[:-1]]
