"""The engine file of the simulator: command line, dialect, announcements, and what it reads back."""

import asyncio
import json
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from support import engine_settings
from support.engine_settings import asked
from support.servers.simulator import VALUE_MODEL, SimServer, events, sim_server

from benchctl.engines.engine import LaunchSite
from benchctl.engines.sim.engine import SimEngine
from benchctl.errors import RecordError, UsageError
from benchctl.profile.model import Guidance, Sampling, VariantSettings
from benchctl.records.record import PreparedRequest
from benchctl.records.warning_codes import CLIENT_SUSPECT_CODES, SUSPECT_CODES
from benchctl.sim.__main__ import parser, read_config
from benchctl.sim.virtual import config_of

if TYPE_CHECKING:
    from benchctl.records.schema import ResultWarning

ENGINE = SimEngine()


settings_of = partial(engine_settings.settings_of, "sim", "qwen2.5-7b", sampling=Sampling(top_k=5, min_p=0.01))
GUIDED = settings_of(guidance=Guidance(), value_model=VALUE_MODEL, time_scale=200.0)


def prepared(num_requests: int, max_tokens: int = 10) -> tuple[PreparedRequest, ...]:
    return tuple(
        asked(chat=True, request_id=f"r{i:03d}", index=i, max_tokens=max_tokens + i % 3, n=2, seed=100 + i)
        for i in range(num_requests)
    )


async def send(client: httpx.AsyncClient, request: PreparedRequest, settings: VariantSettings) -> str:
    call = ENGINE.request_call(request, settings)
    headers = {"Content-Type": "application/json", **call.headers}
    response = await client.post(call.path, content=call.body, headers=headers)
    response.raise_for_status()
    return response.text


async def load(server: SimServer, requests: Sequence[PreparedRequest]) -> None:
    """Announce and send all requests at once."""
    async with httpx.AsyncClient(base_url=server.client.base_url, timeout=20) as client:
        await ENGINE.announce(client, requests, max_concurrency=None, is_warmup=False)
        await asyncio.gather(*(send(client, request, GUIDED) for request in requests))


@pytest.mark.parametrize(
    "options",
    [
        {"overlap_schedule": False, "enable_prefix_caching": True, "revision": "V2", "noise": "published"},
        {"value_model": VALUE_MODEL, "time_scale": 50.0, "max_num_seqs": 3, "hardware": "a100-sxm"},
        {"cost_model": "roofline", "num_kv_blocks": 99, "block_size": 8, "tokens_per_chunk": 4},
        {"num_speculative_tokens": 2, "acceptance": 0.8, "draft_model": "qwen2.5-0.5b", "bonus_token": False},
        {"num_speculative_tokens": 2, "acceptance": (0.9, 0.7), "acceptance_spread": 0.5, "draft_cost": 0.1},
    ],
)
def test_the_server_understands_every_option_of_the_engine(tmp_path: Path, options: dict[str, Any]) -> None:
    settings = settings_of(**options)
    argv = ENGINE.argv(settings, LaunchSite(port=1234, directory=tmp_path, noise_seed=77))
    understood = parser().parse_args(argv[3:])
    assert argv[1:3] == ("-m", "benchctl.sim")
    assert (understood.host, understood.port) == ("127.0.0.1", 1234)
    assert understood.step_log == tmp_path / "steps.raw.jsonl"
    assert read_config(understood.config) == config_of(settings, noise_seed=77)


def test_a_request_is_asked_for_in_the_dialect_of_the_fork() -> None:
    (request,) = prepared(1)
    call = ENGINE.request_call(request, GUIDED)
    assert (call.path, call.headers) == ("/v1/chat/completions", {"X-Request-Id": "r000"})
    assert json.loads(call.body).items() >= {
        "messages": [{"role": "user", "content": "Hello there"}],
        "custom_params": {"mode": "centered_exp", "value_scale": 0.0, "gamma": 0.997},
        "n": 2, "seed": 100, "max_tokens": 10, "ignore_eos": True,
        "top_k": 5, "top_p": 1.0, "min_p": 0.01, "temperature": 1.0,
        "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True,
    }.items()  # fmt: skip
    plain = ENGINE.request_call(asked(), settings_of())
    body = json.loads(plain.body)
    assert (plain.path, body["prompt"], "custom_params" in body) == ("/v1/completions", "Hello there", False)


async def warnings_of(server: SimServer) -> "tuple[ResultWarning, ...]":
    async with httpx.AsyncClient(base_url=server.client.base_url, timeout=20) as client:
        return await ENGINE.after_load_warnings(client)


def test_a_warm_up_is_marked_and_refused_lost_and_torn_things_are_told(tmp_path: Path) -> None:
    first, second, third = prepared(3)

    async def drive(server: SimServer) -> list[str]:
        async with httpx.AsyncClient(base_url=server.client.base_url, timeout=20) as client:
            texts = []
            for is_warmup, request in ((True, first), (False, second)):
                await ENGINE.announce(client, [request], max_concurrency=None, is_warmup=is_warmup)
                texts.append(await send(client, request, GUIDED))
            await ENGINE.announce(client, [first, second], max_concurrency=1, is_warmup=False)
            headers = {"X-Request-Id": first.request_id}
            refused = await client.post("/v1/completions", content=b"{}", headers=headers)
            assert refused.status_code == 400, "a refused request holds no announced phase back"
            texts.append(await send(client, second, settings_of()))
            await ENGINE.announce(client, [first, third], max_concurrency=None, is_warmup=False)
            return [*texts, await send(client, third, GUIDED)]

    with sim_server(tmp_path, value_model=VALUE_MODEL, schedule_patience_s=0.2) as server:
        assert all(map(events, asyncio.run(drive(server))))
        warnings = asyncio.run(warnings_of(server))
    steps = server.steps()
    assert [step.is_warmup for step in steps][:21] == [True] * 10 + [False] * 11
    assert [step.is_warmup for step in steps if "value_model_load" in step.sections_ns] == [True]
    assert "sim-schedule-lost" in [warning.code for warning in warnings]
    assert "announced request r000 did not come within 0.2 s" in server.log.read_text()
    server.step_log.write_bytes(server.step_log.read_bytes()[:-20])
    read = ENGINE.read_steps(server.step_log.parent)
    assert [next(read) for _ in steps[1:]] == steps[:-1]
    with pytest.raises(RecordError, match=rf"steps.raw.jsonl:{len(steps)}: the line is cut off"):
        next(read)


def test_a_simulator_that_was_stopped_or_falls_behind_says_so_and_how_far(tmp_path: Path) -> None:
    async def stopped_meanwhile(server: SimServer) -> None:
        sending = asyncio.create_task(load(server, prepared(2, max_tokens=60)))
        while not sending.done() and server.step_log.read_bytes().count(b"\n") < 3:  # noqa: ASYNC110 - of a file
            await asyncio.sleep(0.01)
        server.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(0.8)
        server.process.send_signal(signal.SIGCONT)
        await sending

    with sim_server(tmp_path / "stopped", value_model=VALUE_MODEL, time_scale=4.0) as server:
        asyncio.run(stopped_meanwhile(server))
        (far_behind,) = asyncio.run(warnings_of(server))
    assert far_behind.code in {"sim-far-behind"} & SUSPECT_CODES & CLIENT_SUSPECT_CODES
    with sim_server(tmp_path / "fast", value_model=VALUE_MODEL, time_scale=1e6) as server:
        asyncio.run(load(server, prepared(4, max_tokens=200)))
        (lag,) = asyncio.run(warnings_of(server))
    assert lag.code == "sim-lag"
    assert "tokens come in bunches; lower time_scale or free the machine" in lag.message


def test_settings_that_the_simulator_cannot_serve_are_refused() -> None:
    for options, message in (
        ({"value_model": "tiny"}, "variant 'v': unknown model 'tiny'"),
        (
            {"cost_model": "layer-profile", "layer_profile": "absent"},
            "absent: tables of one layer profile expected",
        ),
        ({"cost_model": "fitted", "step_time_model": "absent.json"}, "absent.json: cannot be read"),
        ({"hardware": "abacus"}, "variant 'v': unknown hardware 'abacus'"),
    ):
        with pytest.raises(UsageError, match=message):
            ENGINE.check_available(settings_of(**options))
