"""The engine file of the simulator: command line, dialect, announcements, and what it reads back."""

import asyncio
import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import httpx
import pytest
from support.servers.simulator import VALUE_MODEL, SimServer, events, sim_server

from benchctl.engines.engine import LaunchSite, engine_for
from benchctl.engines.sim.engine import SimEngine
from benchctl.engines.sim.options import SimOptions
from benchctl.errors import EngineUnavailableError, RecordError, UsageError
from benchctl.profile.model import EngineKind, Guidance, Sampling, VariantSettings
from benchctl.records.record import Message, PreparedRequest
from benchctl.records.warning_codes import CLIENT_SUSPECT_CODES, SUSPECT_CODES
from benchctl.sim.__main__ import parser, read_config
from benchctl.sim.virtual import config_of

if TYPE_CHECKING:
    from benchctl.records.schema import ResultWarning

ENGINE = SimEngine()


def settings_of(*, guidance: Guidance | None = None, **options: Any) -> VariantSettings:
    return VariantSettings(
        variant="v",
        model="qwen2.5-7b",
        server=SimOptions(**options),
        sampling=Sampling(top_k=5, min_p=0.01),
        guidance=guidance,
    )


GUIDED = settings_of(guidance=Guidance(), value_model=VALUE_MODEL, time_scale=200.0)


def prepared(
    num_requests: int, *, gap_ns: int = 0, max_tokens: int = 10, n: int = 2
) -> tuple[PreparedRequest, ...]:
    return tuple(
        PreparedRequest(
            request_id=f"r{i:03d}",
            index=i,
            arrival_ns=i * gap_ns,
            messages=(Message(role="user", content=f"What is {i} + {i}?"),),
            prompt_tokens=15,
            max_tokens=max_tokens + i % 3,
            ignore_eos=True,
            n=n,
            seed=100 + i,
            source=f"generated:{i}",
        )
        for i in range(num_requests)
    )


async def send(client: httpx.AsyncClient, request: PreparedRequest, settings: VariantSettings) -> str:
    call = ENGINE.request_call(request, settings)
    headers = {"Content-Type": "application/json", **call.headers}
    response = await client.post(call.path, content=call.body, headers=headers)
    response.raise_for_status()
    return response.text


async def load(
    server: SimServer,
    requests: Sequence[PreparedRequest],
    *,
    max_concurrency: int | None = None,
    delays_s: Sequence[float] = (),
) -> list[str]:
    """Announce and send all requests, each after its delay, at most ``max_concurrency`` open at a time."""
    limit = asyncio.Semaphore(max_concurrency or len(requests))
    async with httpx.AsyncClient(base_url=server.client.base_url, timeout=20) as client:
        await ENGINE.announce(client, requests, max_concurrency=max_concurrency, is_warmup=False)

        async def one(index: int) -> str:
            if delays_s:
                await asyncio.sleep(delays_s[index])
            async with limit:
                return await send(client, requests[index], GUIDED)

        return await asyncio.gather(*(one(i) for i in range(len(requests))))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap_schedule": False, "enable_prefix_caching": True, "revision": "V2", "noise": "published"},
        {"value_model": VALUE_MODEL, "time_scale": 50.0, "max_num_seqs": 3, "hardware": "a100-sxm"},
        {
            "cost_model": "roofline",
            "num_kv_blocks": 99,
            "block_size": 8,
            "tokens_per_chunk": 4,
            "start_delay_s": 0.5,
        },
        {"num_speculative_tokens": 2, "acceptance": 0.8, "draft_model": "qwen2.5-0.5b", "bonus_token": False},
        {
            "num_speculative_tokens": 3,
            "acceptance": (0.9, 0.7, 0.5),
            "acceptance_spread": 0.5,
            "draft_cost": 0.1,
            "backfill": "expansion",
        },
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
    body = json.loads(call.body)
    assert call.path == "/v1/chat/completions"
    assert call.headers == {"X-Request-Id": "r000"}
    assert body["messages"] == [{"role": "user", "content": "What is 0 + 0?"}]
    assert body["custom_params"] == {"mode": "centered_exp", "value_scale": 0.0, "gamma": 0.997}
    assert (body["n"], body["seed"], body["max_tokens"], body["ignore_eos"]) == (2, 100, 10, True)
    assert (body["top_k"], body["top_p"], body["min_p"], body["temperature"]) == (5, 1.0, 0.01, 1.0)
    assert (body["stream"], body["stream_options"], body["return_token_ids"]) == (
        True,
        {"include_usage": True},
        True,
    )


def test_a_variant_without_guidance_sends_no_custom_params() -> None:
    request = PreparedRequest(
        request_id="p", index=0, arrival_ns=0, prompt="Hi", prompt_tokens=1, max_tokens=4, seed=1, source="s"
    )
    call = ENGINE.request_call(request, settings_of())
    assert call.path == "/v1/completions"
    assert json.loads(call.body)["prompt"] == "Hi"
    assert "custom_params" not in json.loads(call.body)


def test_announced_loads_give_the_same_steps_whatever_the_network_does(tmp_path: Path) -> None:
    requests = prepared(6, gap_ns=30_000_000)
    delays = [[0.0] * 6, [0.09, 0.02, 0.13, 0.0, 0.05, 0.11]]
    logs = []
    for life, delays_s in enumerate(delays):
        with sim_server(tmp_path / str(life), value_model=VALUE_MODEL, time_scale=200.0) as server:
            texts = asyncio.run(load(server, requests, delays_s=delays_s))
        logs.append(server.step_log.read_bytes())
        tokens = sum(events(text)[-1]["usage"]["completion_tokens"] for text in texts)
        assert tokens == sum(request.n * request.max_tokens for request in requests)
        assert sum(step.output_tokens or 0 for step in ENGINE.read_steps(server.step_log.parent)) == tokens
    assert logs[0] == logs[1]


def test_a_closed_loop_gives_the_same_steps_twice(tmp_path: Path) -> None:
    requests = prepared(9, n=1)
    logs = []
    for life in range(2):
        with sim_server(tmp_path / str(life), value_model=VALUE_MODEL, time_scale=100.0) as server:
            asyncio.run(load(server, requests, max_concurrency=3, delays_s=[life * 0.01 * i for i in range(9)]))
        logs.append(server.step_log.read_bytes())
        assert max(step.num_seqs for step in ENGINE.read_steps(server.step_log.parent)) == 3
    assert logs[0] == logs[1]


def test_a_warm_up_is_marked_in_the_steps(tmp_path: Path) -> None:
    async def both(server: SimServer) -> None:
        async with httpx.AsyncClient(base_url=server.client.base_url, timeout=20) as client:
            for is_warmup, request in zip((True, False), prepared(2), strict=True):
                await ENGINE.announce(client, [request], max_concurrency=None, is_warmup=is_warmup)
                await send(client, request, GUIDED)

    with sim_server(tmp_path, value_model=VALUE_MODEL) as server:
        asyncio.run(both(server))
    assert [step.is_warmup for step in server.steps()] == [True] * 10 + [False] * 11
    loads = [step.is_warmup for step in server.steps() if "value_model_load" in step.sections_ns]
    assert loads == [True]


def ask(server: SimServer, what: str) -> Any:
    async def call() -> Any:
        async with httpx.AsyncClient(base_url=server.client.base_url, timeout=20) as client:
            if what == "effective_config":
                return await ENGINE.effective_config(client, GUIDED, LaunchSite(port=1, directory=Path()))
            return await getattr(ENGINE, what)(client)

    return asyncio.run(call())


def test_an_announced_request_that_never_comes_ends_the_schedule_with_a_warning(tmp_path: Path) -> None:
    async def one_of_two(server: SimServer) -> str:
        first, second = prepared(2)
        async with httpx.AsyncClient(base_url=server.client.base_url, timeout=20) as client:
            await ENGINE.announce(client, [first, second], max_concurrency=None, is_warmup=False)
            return await send(client, second, GUIDED)

    with sim_server(tmp_path, value_model=VALUE_MODEL, schedule_patience_s=0.2) as server:
        assert events(asyncio.run(one_of_two(server)))
        warnings: tuple[ResultWarning, ...] = ask(server, "after_load_warnings")
    assert "sim-schedule-lost" in [warning.code for warning in warnings]
    assert "announced request r000 did not come within 0.2 s" in server.log.read_text()


def test_a_simulator_that_falls_behind_says_so(tmp_path: Path) -> None:
    with sim_server(tmp_path, value_model=VALUE_MODEL, time_scale=1e6) as server:
        asyncio.run(load(server, prepared(4, max_tokens=200)))
        (warning,) = ask(server, "after_load_warnings")
    assert warning.code == "sim-lag"
    assert "tokens come in bunches; lower time_scale or free the machine" in warning.message


def test_a_simulator_that_was_stopped_during_the_load_is_far_behind_and_the_run_suspect(tmp_path: Path) -> None:
    async def stopped_meanwhile(server: SimServer) -> None:
        sending = asyncio.create_task(load(server, prepared(2, max_tokens=60)))
        while not sending.done() and server.step_log.read_bytes().count(b"\n") < 3:  # noqa: ASYNC110 - of a file
            await asyncio.sleep(0.01)
        server.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(0.8)
        server.process.send_signal(signal.SIGCONT)
        await sending

    with sim_server(tmp_path, value_model=VALUE_MODEL, time_scale=4.0) as server:
        asyncio.run(stopped_meanwhile(server))
        (warning,) = ask(server, "after_load_warnings")
    assert warning.code == "sim-far-behind"
    assert warning.code in SUSPECT_CODES & CLIENT_SUSPECT_CODES


def test_a_simulator_that_keeps_up_has_no_warnings(tmp_path: Path) -> None:
    def warnings(number: int) -> object:
        with sim_server(tmp_path / str(number), value_model=VALUE_MODEL, time_scale=4.0) as server:
            asyncio.run(load(server, prepared(2, max_tokens=60)))
            return ask(server, "after_load_warnings")

    # A busy machine may hold one of the servers up.
    assert any(warnings(number) == () for number in range(3))


def test_two_servers_of_one_configuration_say_the_same_of_themselves(tmp_path: Path) -> None:
    told = []
    for seed in (1, 2):
        with sim_server(tmp_path / str(seed), noise="published", noise_seed=seed) as server:
            told.append(ask(server, "effective_config"))
    assert told[0] == told[1]
    assert told[0]["noise"] == "published"
    assert all(not isinstance(value, dict | list) for value in told[0].values())


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([], "$.requests"),
        ([{"request_id": "a", "arrival_ns": -1}], "$.requests[0].arrival_ns"),
        ([{"request_id": "a", "arrival_ns": 0}] * 2, "a request_id occurs twice"),
    ],
)
def test_a_bad_announcement_is_refused(tmp_path: Path, requests: list[dict[str, Any]], message: str) -> None:
    with sim_server(tmp_path) as server:
        response = server.client.post("/sim/schedule", json={"requests": requests})
        assert response.status_code == 400
        assert message in response.json()["error"]["message"]


def test_a_refused_request_does_not_hold_an_announced_phase_back(tmp_path: Path) -> None:
    first, second = prepared(2)

    async def drive(server: SimServer) -> tuple[int, str]:
        async with httpx.AsyncClient(base_url=server.client.base_url, timeout=20) as client:
            await ENGINE.announce(client, [first, second], max_concurrency=1, is_warmup=False)
            refused = await client.post(
                "/v1/completions", content=b"{}", headers={"X-Request-Id": first.request_id}
            )
            return refused.status_code, await send(client, second, settings_of())

    with sim_server(tmp_path) as server:
        status, text = asyncio.run(drive(server))
    assert status == 400
    assert events(text)


def test_a_torn_step_log_is_read_up_to_the_tear(tmp_path: Path) -> None:
    with sim_server(tmp_path) as server:
        server.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3, "ignore_eos": True})
    content = server.step_log.read_bytes()
    server.step_log.write_bytes(content[:-20])
    steps = []
    with pytest.raises(RecordError, match=r"steps.raw.jsonl:3: the line is cut off"):
        steps.extend(ENGINE.read_steps(server.step_log.parent))
    assert list(ENGINE.read_steps(tmp_path / "absent")) == []


@pytest.mark.parametrize(
    ("log_tail", "cause"),
    [
        ("ERROR cannot listen on 127.0.0.1 port 1: address already in use", "port-taken"),
        ("ERROR unknown model 'x': Built-in shapes are", "bad-model"),
        ("ERROR unknown hardware 'x': name one of", "bad-model"),
        ("python -m benchctl.sim: error: argument --noise: invalid choice", "bad-flag"),
        ("MemoryError", "out-of-memory"),
    ],
)
def test_the_end_of_a_log_tells_the_cause(log_tail: str, cause: str) -> None:
    known = ENGINE.diagnose(f"INFO something\n{log_tail}\n")
    assert known is not None
    assert known.cause == cause
    assert known.remedy
    assert known.is_profile_error is cause.startswith("bad-")


def test_an_ordinary_log_tells_nothing() -> None:
    assert ENGINE.diagnose("INFO serving qwen2.5-7b on http://127.0.0.1:1") is None


def test_small_facts_of_the_engine() -> None:
    assert ENGINE.clock == "virtual"
    assert ENGINE.health_path(GUIDED) == "/health"
    assert ENGINE.time_scale(GUIDED) == 200.0
    assert ENGINE.env(GUIDED, LaunchSite(port=1, directory=Path())) == {}
    ENGINE.check_available(GUIDED)
    ENGINE.check_available(settings_of(cost_model="llm-mock", hardware="abacus"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"value_model": "tiny"}, "variant 'v': unknown model 'tiny'"),
        (
            {"cost_model": "layer-profile", "layer_profile": "absent"},
            "absent: tables of one layer profile expected",
        ),
        ({"cost_model": "fitted", "step_time_model": "absent.json"}, "absent.json: cannot be read"),
        ({"hardware": "abacus"}, "variant 'v': unknown hardware 'abacus'"),
    ],
)
def test_settings_that_the_simulator_cannot_serve_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ENGINE.check_available(settings_of(**options))


def test_engines_are_found_by_their_kind() -> None:
    assert isinstance(engine_for("sim"), SimEngine)


def test_an_engine_that_nobody_knows_is_refused_by_name() -> None:
    with pytest.raises(EngineUnavailableError, match="unknown engine 'abacus'; choose one of sim"):
        engine_for("abacus")


def test_every_kind_that_a_profile_may_name_is_an_engine() -> None:
    assert {engine_for(kind).kind for kind in get_args(EngineKind)} == set(get_args(EngineKind))
