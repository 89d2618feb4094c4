"""A server made by a stranger can neither exhaust nor crash the load: each attack is one failed request."""

import asyncio
import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.servers.paced_engine import call, request, send

from benchctl.load.client import StreamClient
from benchctl.load.schedule import Load
from benchctl.profile.arrival import Arrival
from benchctl.profile.sections import Timeouts
from benchctl.records.files import encode
from benchctl.records.record import RequestRecord
from benchctl.untrusted import LINE_BYTES, MESSAGE_CHARS

SERVER = Path(__file__).parent.parent / "support" / "servers" / "programs" / "hostile_server.py"


@pytest.fixture(scope="module", name="hostile")
def _hostile() -> Iterator[str]:
    with subprocess.Popen([sys.executable, str(SERVER)], stdout=subprocess.PIPE, text=True) as server:
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.kill()


def asked(url: str, **limits: float) -> RequestRecord:
    """The record of one request of two tokens."""

    async def ask() -> RequestRecord:
        async with StreamClient(url, Timeouts(**{"request_s": 60.0, **limits})) as client:
            return await (await send(client, call(request(0, max_tokens=2)), 1)).record()

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("attack", "kind", "message"),
    [
        ("line", "oversized-line", "no end within 16 MiB"),
        ("line-until-close", "oversized-line", "no end within 16 MiB"),
        ("data-lines", "oversized-line", "no end within 16 MiB"),
        ("values", "oversized-line", "more than 262144 values"),
        ("choices", "unrequested-choice", "a choice 1 where choices 0 to 0 were requested"),
        ("choice-201", "unrequested-choice", "a choice 200 where"),
        ("far-choice", "malformed-stream", "cannot be read"),
        ("tokens", "oversized-answer", "no end within 32 MiB"),
        ("after-done", "oversized-answer", "after [DONE]"),
        ("comments", "oversized-line", "no end within 16 MiB"),
        ("head", "oversized-head", "64 KiB"),
        ("headers", "oversized-head", "256 headers"),
        ("many-headers", "oversized-head", "256 headers"),
        ("interim", "oversized-head", "64 KiB"),
        ("extension", "oversized-answer", "no end within 32 MiB"),
        ("trailers", "oversized-answer", "no end within 32 MiB"),
        ("error-body", "http-status", "xxxx"),
        ("error-length", "http-status", "xxxx"),
        ("gzip", "malformed-http", "compressed (gzip), which was not requested"),
        ("negative-length", "malformed-http", "not HTTP"),
        ("huge-length", "malformed-http", "not HTTP"),
        ("chunk-size", "malformed-http", "breaks in the framing"),
        ("nested", "malformed-stream", "nested too deeply"),
        ("nested-error", "malformed-stream", "nested too deeply"),
        ("nested-call", "malformed-stream", "nested too deeply"),
        ("number-token", "malformed-stream", "$.choices[0].text"),
        ("list-token", "malformed-stream", "$.choices[0].text"),
        ("word-ids", "malformed-stream", "$.choices[0].token_ids[0]"),
        ("broken-text", "malformed-stream", "not UTF-8"),
        ("surrogate", "malformed-stream", "cannot be read"),
        ("bare-nul", "malformed-stream", "invalid character"),
        ("minus-usage", "malformed-stream", "$.usage.completion_tokens"),
        ("huge-usage", "malformed-stream", "$.usage.completion_tokens"),
        ("true-usage", "malformed-stream", "$.usage.completion_tokens"),
        ("float-usage", "malformed-stream", "$.usage.completion_tokens"),
        ("text-usage", "malformed-stream", "$.usage.completion_tokens"),
        ("null-usage", "malformed-stream", "tokens cannot be counted"),
    ],
)
def test_each_attack_is_one_failed_request_of_its_class(hostile, attack, kind, message):
    record = asked(f"{hostile}/{attack}")
    assert (record.error.kind, message in record.error.message) == (kind, True), record.error
    assert len(record.error.message) <= MESSAGE_CHARS
    assert len(encode(record)) < LINE_BYTES


def test_a_byte_per_second_ends_with_the_time_of_the_request_and_an_endless_finish_reason_is_cut(hostile):
    record = asked(f"{hostile}/drip", request_s=1.0)
    assert (record.error and record.error.kind) == "total-timeout"
    record = asked(f"{hostile}/long-reason")
    assert record.error is None
    assert record.choices[0].finish_reason == "x" * 64


def test_the_load_goes_on_among_attacks(hostile):
    kept: list[RequestRecord] = []
    paths = ["good", "choices", "good", "tokens", "head", "good", "after-done", "nested", "good"]

    async def go() -> None:
        async with StreamClient(hostile, Timeouts(request_s=60.0)) as client:
            load = Load(client, Arrival(kind="closed-loop", max_concurrency=2), kept.append)
            await load.drive(
                replace(call(request(i, max_tokens=2)), path=f"/{path}/v1") for i, path in enumerate(paths)
            )

    asyncio.run(go())
    fine = {record.index for record in kept if record.error is None}
    assert (len(kept), fine) == (len(paths), {i for i, path in enumerate(paths) if path == "good"})


MEASURED = textwrap.dedent(
    """
    import asyncio, json, re, sys
    from pathlib import Path
    from support.servers.paced_engine import call, request, send
    from benchctl.load.client import StreamClient
    from benchctl.profile.sections import Timeouts

    async def go(url, num_streams):
        async with StreamClient(url, Timeouts(request_s=60.0)) as client:
            asked = [send(client, call(request(i, max_tokens=2)), 1) for i in range(num_streams)]
            return [(await exchange.record()).error.kind for exchange in await asyncio.gather(*asked)]

    def peak_mb():
        return int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024

    url, attack, num_streams = sys.argv[1:]
    asyncio.run(go(url + "/choice-201", 1))
    before_mb = peak_mb()
    kinds = asyncio.run(go(f"{url}/{attack}", int(num_streams)))
    print(json.dumps([kinds, peak_mb() - before_mb]))
    """
)


@pytest.mark.slow
def test_lines_of_200_megabytes_at_several_streams_take_little_memory(hostile):
    for attack, kind in (("line", "oversized-line"), ("tokens", "oversized-answer"), ("values", "oversized-line")):
        arguments = [sys.executable, "-c", MEASURED, hostile, attack, "4"]
        path = {"PYTHONPATH": ":".join(filter(None, sys.path))}
        told = subprocess.run(arguments, capture_output=True, text=True, check=True, env=path, timeout=120)
        kinds, grown_mb = json.loads(told.stdout)
        assert kinds == [kind] * 4
        assert grown_mb < 4 * 2 * LINE_BYTES / (1 << 20), attack
