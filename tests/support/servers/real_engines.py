"""What tests of real engines share: is an engine installed here, a model for it, its turn, its end."""

import asyncio
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import httpx
import pytest
from support.steps import records_of

from benchctl.analysis.experiment.experiment import experiment_of
from benchctl.costs.shapes import ModelShape
from benchctl.engines.engine import LaunchSite
from benchctl.engines.environment import engines_directory
from benchctl.engines.tiny_models.make import make_model
from benchctl.engines.tiny_models.recipe import Recipe
from benchctl.measure.server.process import choose_port
from benchctl.measure.server.server import Launch, ServerProcess
from benchctl.profile.model import VariantSettings
from benchctl.profile.sections import Timeouts
from benchctl.records.directory import ResultDirectory, cell_name
from benchctl.records.loaded import LoadedResults, load_results
from benchctl.records.record import PreparedRequest
from benchctl.records.warning_codes import CLIENT_SUSPECT_CODES, SUSPECT_CODES


def needs(kind: str) -> pytest.MarkDecorator:
    """Skips a test where the engine has not been installed.

    ``scripts/test`` installs engines and names them in BENCHCTL_DEMANDED_ENGINES: their tests must not be skipped.
    """
    python = engines_directory() / kind / "bin" / "python"
    reason = f"engine {kind} is not installed at {python}; run 'benchctl engines install {kind}'"
    is_demanded = kind in os.environ.get("BENCHCTL_DEMANDED_ENGINES", "").split()
    return pytest.mark.skipif(not is_demanded and not os.access(python, os.X_OK), reason=reason)


SHAPE = ModelShape(
    name="tiny", layers=2, hidden=128, q_heads=4, kv_heads=2, head_dim=32, ffn=256, vocab=2048,
    tied_embeddings=True, qkv_bias=True,
)  # fmt: skip
TINY = Recipe(arch="qwen2", shape=SHAPE, context=4096, dtype="bfloat16", seed=0)
"""A model of random weights for every engine."""
SMALL = replace(TINY, shape=replace(SHAPE, vocab=512))
"""One of few tokens."""


def tiny_model(directory: Path) -> Path:
    """The model, made once in ``directory``."""
    model = directory / "tiny"
    if not model.exists():
        make_model(model, TINY)
    return model


@contextmanager
def turn_of(kind: str, *, is_alone: bool = False) -> Iterator[None]:
    """At most two servers of a heavy engine at a time on this machine, however many tests run side by side.

    Two, because most of a test is the start of a server, which keeps one core busy. ``is_alone``: no other.
    """
    with ExitStack() as stack:
        directory = Path(tempfile.gettempdir())
        turns = [stack.enter_context((directory / f"benchctl-{kind}-{i}.lock").open("w")) for i in range(2)]
        for turn in turns if is_alone else ():
            fcntl.flock(turn, fcntl.LOCK_EX)
        while not is_alone and not any(map(_is_locked, turns)):
            time.sleep(0.1)
        yield


def _is_locked(turn: IO[str]) -> bool:
    """Lock the file for this process; False when another has it."""
    try:
        fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def served(engine: Any, settings: VariantSettings, directory: Path) -> Iterator[httpx.Client]:
    """A client of a server of these settings, whose files lie in ``directory``; ended with the block."""
    site = LaunchSite(port=choose_port(None), directory=directory)
    launch = Launch(
        argv=engine.argv(settings, site),
        env={**os.environ, **engine.env(settings, site)},
        port=site.port,
        health_path=engine.health_path(settings),
        log=directory / "server.log",
        timeouts=Timeouts(),
        diagnose=engine.diagnose,
    )

    async def wait_ready() -> None:
        async with httpx.AsyncClient(base_url=launch.base_url) as client:
            await process.wait_ready(client)

    with turn_of(engine.kind), ServerProcess(launch) as process:
        asyncio.run(wait_ready())
        with httpx.Client(base_url=launch.base_url, timeout=120) as client:
            yield client
        process.check_alive()


def answer_of(
    client: httpx.Client, engine: Any, settings: VariantSettings, request: PreparedRequest
) -> httpx.Response:
    """The whole answer to a request that is asked as benchctl asks it."""
    call = engine.request_call(request, settings)
    body = json.loads(call.body)
    body.pop("stream_options", None)
    return client.post(call.path, json=body | {"stream": False}, headers=dict(call.headers))


def smoked(kind: str, preset: str, directory: Path, *settings: str) -> LoadedResults:
    """One block of the profile ``ci-smoke``: a small model, few short requests, each run on a fresh server."""
    small = [f"model={tiny_model(directory)}", "workload.output_len=24", "workload.num_prompts=2", *settings]
    return measured("ci-smoke", kind, preset, directory, *small)


def measured(profile: str, kind: str, preset: str, directory: Path, *settings: str) -> LoadedResults:
    """One block of a profile, named or a file in ``directory``, each run on a fresh server.

    Waves of warm-up, which take seconds on each server, are sent where ``settings`` say so.
    """
    settings = ("workload.max_warmup_waves=0", *settings)
    command = [sys.executable, "-m", "benchctl", "run", "--profile", profile, "--engine", preset, "--quiet"]
    with turn_of(kind):
        done = subprocess.run(
            [*command, "--blocks", "1", *(word for setting in settings for word in ("--set", setting))],
            cwd=directory,
            env={**os.environ, "BENCHCTL_DATA_DIR": str(directory / "no-data")},
            capture_output=True,
            text=True,
            timeout=1800,  # ends what hangs; a server starts in seconds, or in minutes on a busy machine
            check=False,
        )
    path = directory / "results" / Path(profile).stem / "latest"
    assert_ended(done, path)
    assert_compared(path)
    return load_results(path)


def assert_ended(done: subprocess.CompletedProcess[str], results: Path) -> None:
    """Every run of an experiment was measured to its end, and its accounts agree.

    A run may be suspect for what the client measured of itself and for nothing else: an engine that takes all cores
    makes the client late, and these tests ask for true accounts, not for a quiet machine.
    """
    said = done.stdout + done.stderr
    records = [run.read() for run in ResultDirectory(results).runs()]
    assert done.returncode == (4 if any(record.state == "suspect" for record in records) else 0), said
    for record in records:
        doubts = {warning.code for warning in record.warnings} & SUSPECT_CODES
        assert record.state == ("suspect" if doubts else "done"), f"{record.run_id}\n{said}"
        assert doubts <= CLIENT_SUSPECT_CODES, said


def assert_compared(results: Path, metric: str = "step_ms") -> None:
    """``benchctl compare`` comes to a verdict on ``metric`` in every cell of every variant of a result directory.

    What the verdict is depends on the machine; that there is one does not, however late the client was.
    """
    loaded = load_results(results)
    baseline = loaded.manifest.baseline
    for variant in {run.record.variant for run in loaded.runs} - {baseline}:
        sides = [f"{results}:{baseline}", f"{results}:{variant}"]
        done = subprocess.run(
            [sys.executable, "-m", "benchctl", "compare", *sides, "--json"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        said = done.stdout + done.stderr
        assert done.returncode in {0, 1, 3}, said
        judged = {found["cell"]: found for found in json.loads(done.stdout)["metrics"] if found["name"] == metric}
        cells = {cell_name(run.record.cell) or variant for run in loaded.runs if run.record.variant == variant}
        assert judged.keys() == cells, said
        for found in judged.values():
            assert found["ratio"] > 0, said
            assert found["verdict"] in {"regression", "improvement", "equivalent", "inconclusive"}, said


def assert_accounts_agree(results: LoadedResults, confirmed: set[str]) -> None:
    """Tokens by steps, usage and client are the same in every run; its steps lie one after another in its load."""
    experiment = experiment_of(results)
    for run in results.runs:
        checks = experiment.checks(run)
        assert [str(check) for check in checks if check.ok is False] == []
        assert confirmed <= {check.name for check in checks if check.ok}, checks
        requests = [request for request in run.requests if not request.is_warmup]
        steps = [step for step in records_of(run) if not step.is_warmup]
        usage = sum(request.completion_tokens for request in requests)
        by_chunk = [choice.chunk_tokens for request in requests for choice in request.choices]
        assert None in by_chunk or usage == sum(map(sum, by_chunk))
        assert usage == sum(step.output_tokens for step in steps)
        assert sum(request.prompt_tokens for request in requests) == sum(step.num_prefill_tokens for step in steps)
        ends = [step.start_ns + step.dur_ns for step in steps]
        assert all(sum(step.sections_ns.values()) <= step.dur_ns > 0 for step in steps)
        assert all(end <= step.start_ns for end, step in zip(ends, steps[1:], strict=False))
        assert run.record.times.first_send_ns < steps[0].start_ns
        assert (
            steps[-1].start_ns < run.record.times.last_token_ns
        )  # some engines send a step's tokens before it ends
        assert run.record.effective_config["server.version"] == run.record.engine_version
