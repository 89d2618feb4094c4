"""An engine that starts ``programs/paced_server.py``, and what measuring it needs."""

import asyncio
import itertools
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchctl.engines.engine import Diagnosis, LaunchSite, raw_step_log
from benchctl.engines.vllm import VllmEngine
from benchctl.load.client import StreamClient
from benchctl.load.exchange import CANCELLED, Exchange
from benchctl.measure.server.process import choose_port
from benchctl.measure.server.server import Launch, ServerProcess
from benchctl.profile.model import Profile
from benchctl.profile.sections import Timeouts
from benchctl.records.files import read_jsonl
from benchctl.records.record import Call, PlannedRun, PreparedRequest, RequestRecord
from benchctl.records.schema import StepRecord

SERVER = Path(__file__).parent / "programs" / "paced_server.py"


@dataclass(frozen=True)
class PacedEngine:
    """What ``measure`` asks of an engine, for a server whose truth is known."""

    truth: Path
    flags: tuple[str, ...] = ()
    clock: str = "host"
    kind: str = "sim"
    is_launched: bool = True
    needs_first_generation: bool = False
    essential_processes: tuple[str, ...] = ()
    metrics_at: str | None = None

    def check_available(self, settings: Any) -> None:
        pass

    def check_requests(self, requests: Any, settings: Any) -> None:
        pass

    def health_path(self, settings: Any) -> str:
        return "/health"

    def metrics_path(self, settings: Any) -> str | None:
        return self.metrics_at

    def base_url(self, settings: Any, port: int) -> str:
        return f"http://127.0.0.1:{port}"

    def has_steps(self, settings: Any) -> bool:
        return True

    def time_scale(self, settings: Any) -> float:
        return 1.0

    def argv(self, settings: Any, site: LaunchSite) -> tuple[str, ...]:
        files = ("--truth", str(self.truth), "--step-log", str(site.step_log))
        return (sys.executable, str(SERVER), "--port", str(site.port), *files, *self.flags)

    def env(self, settings: Any, site: LaunchSite) -> dict[str, str]:
        return {"PACED_API_KEY": "very secret", "PACED_COLOUR": "blue"}

    def request_call(self, request: PreparedRequest, settings: Any) -> Any:
        body = {"prompt": request.prompt, "max_tokens": request.max_tokens, "n": request.n}
        headers = {"x-request-id": request.request_id}
        return Call(request=request, path="/v1/completions", headers=headers, body=msgspec.json.encode(body))

    def prompt_counter(self, settings: Any) -> None:
        return None

    def build(self, settings: Any) -> dict[str, str]:
        return {"paced": "1.2"}

    async def announce(self, client: Any, requests: Sequence[PreparedRequest], **how: Any) -> None:
        pass

    async def effective_config(self, client: Any, settings: Any, site: LaunchSite) -> dict[str, Any]:
        return dict((await client.get("/info")).json())

    async def after_load_warnings(self, client: Any) -> tuple[()]:
        return ()

    def read_steps(self, directory: Path) -> Iterator[StepRecord]:
        return read_jsonl(raw_step_log(directory), StepRecord)

    def first_uses(self, log: str) -> tuple[str, ...]:
        return VllmEngine().first_uses(log)

    def diagnose(self, log_tail: str) -> Diagnosis | None:
        if "address already in use" in log_tail:
            return Diagnosis(cause="port-taken", remedy="choose another port")
        return None

    def truths(self) -> dict[str, dict[str, Any]]:
        """By request: when the server got it and sent its tokens."""
        lines = (json.loads(line) for line in self.truth.read_text().splitlines())
        return {line["request_id"]: line for line in lines}


def request(index: int, max_tokens: int = 4, n: int = 1, *, arrival_ns: int = 0, **how: Any) -> PreparedRequest:
    """A request that tells the paced server how to answer it."""
    return PreparedRequest(
        request_id=f"r{index}",
        index=index,
        arrival_ns=arrival_ns,
        prompt=json.dumps(how),
        prompt_tokens=7,
        max_tokens=max_tokens,
        ignore_eos=True,
        n=n,
        seed=index,
        source=f"paced:{index}",
    )


def profile(**changes: Any) -> Profile:
    """A small profile; ``workload``, ``timeouts`` and ``telemetry`` are merged, the rest replaces."""
    arrival = changes.pop("arrival", {"kind": "closed-loop", "max_concurrency": 2})
    workload = {"dataset": "generated", "num_prompts": 1, "arrival": arrival, "num_warmups": 0}
    return Profile.model_validate(
        {
            "name": "paced",
            "engine": {"kind": "sim"},
            "workload": workload | changes.pop("workload", {}),
            "variants": {"baseline": {}},
            "timeouts": {"ready_s": 10.0, "stop_s": 3.0, "request_s": 20.0} | changes.pop("timeouts", {}),
            "telemetry": {"gpu_hz": 0.0, "host_hz": 20.0} | changes.pop("telemetry", {}),
            **changes,
        }
    )


def planned(index: int = 0) -> PlannedRun:
    return PlannedRun(index=index, run_id=f"{index:03d}-b0-baseline", block=0, position=0, variant="baseline")


def launch(directory: Path, *flags: str, **timeouts: float) -> Launch:
    """How to start a paced server that writes its truth and its log into ``directory``."""
    engine = PacedEngine(truth=directory / "truth.jsonl", flags=flags)
    port = choose_port(None)
    return Launch(
        argv=engine.argv(None, LaunchSite(port=port, directory=directory)),
        env=dict(os.environ),
        port=port,
        health_path=engine.health_path(None),
        log=directory / "server.log",
        timeouts=Timeouts.model_validate({"ready_s": 10.0, "stop_s": 3.0, "request_s": 20.0} | timeouts),
        diagnose=engine.diagnose,
    )


@contextmanager
def up(how: Launch) -> Iterator[ServerProcess]:
    """A server that is started and ready."""

    async def wait_ready() -> None:
        async with StreamClient(how.base_url, how.timeouts) as client:
            await server.wait_ready(client.control)

    with ServerProcess(how) as server:
        asyncio.run(wait_ready())
        yield server


@contextmanager
def running(directory: Path) -> Iterator[Launch]:
    """A paced server that is ready, and how it was launched."""
    how = launch(directory)
    with up(how):
        yield how


def call(asked: PreparedRequest, *, is_warmup: bool = False) -> Call:
    """``asked`` in the paced server's dialect, ready to be sent."""
    return msgspec.structs.replace(PacedEngine(truth=Path()).request_call(asked, None), is_warmup=is_warmup)


async def send(client: StreamClient, call: Call, scheduled_ns: int) -> Exchange:
    """Send ``call`` as soon as its connection is open, and receive the stream."""
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    exchange = client.begin(call, lambda _: None if ended.done() else ended.set_result(None))
    exchange.scheduled_ns = scheduled_ns
    client.launch(exchange)
    try:
        await ended
    except asyncio.CancelledError:
        client.stop(exchange, CANCELLED)
        raise
    return exchange


def most_at_once(records: Sequence[RequestRecord]) -> int:
    """The largest number of requests that were on their way together."""
    edges = sorted([(record.sent_ns, 1) for record in records] + [(record.done_ns, -1) for record in records])
    return max(itertools.accumulate(change for _, change in edges))
