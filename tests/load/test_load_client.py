"""The client against a server whose truth is known, and against one that misbehaves."""

import asyncio
import socket

import pytest
from support.servers.paced_engine import PacedEngine, call, launch, request, send

from benchctl.load.client import StreamClient
from benchctl.measure.server.server import ServerProcess
from benchctl.profile.sections import Timeouts
from benchctl.units import NS_PER_MS


async def ask(base_url, *asked, request_s=20.0):
    """Records of ``asked``, sent one after another."""
    async with StreamClient(base_url, Timeouts(request_s=request_s, connect_s=2.0)) as client:
        return [await (await send(client, call(one), scheduled_ns=1)).record() for one in asked]


async def served(how, *asked, **limits):
    with ServerProcess(how) as server:
        async with StreamClient(how.base_url, how.timeouts) as client:
            await server.wait_ready(client.control)
        return await ask(how.base_url, *asked, **limits)


def test_times_and_counts_agree_with_what_the_server_did(tmp_path):
    how = launch(tmp_path)
    records = asyncio.run(served(how, *(request(i, max_tokens=6, n=2, gap_ms=20) for i in range(3))))
    truths = PacedEngine(truth=tmp_path / "truth.jsonl").truths()
    late_ns: list[list[int]] = [[] for _ in range(6)]  # by position in the stream
    for record in records:
        truth = truths[record.request_id]
        assert record.error is None
        assert (record.prompt_tokens, record.completion_tokens, record.status) == (7, 12, 200)
        assert record.sent_ns <= truth["arrived_ns"]
        assert [c.index for c in record.choices] == [0, 1]
        for choice in record.choices:
            assert choice.chunk_tokens == (1,) * 6
            assert choice.text == "t0 t1 t2 t3 t4 t5 "
            for position, (seen, sent) in enumerate(zip(choice.chunk_ns, truth["sent_ns"], strict=True)):
                late_ns[position].append(seen - sent)
    # A busy machine may delay any arrival, but not one position of every stream by more than half a gap.
    for lateness in late_ns:
        assert 0 <= min(lateness) < 10 * NS_PER_MS


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ({"mode": "truncate"}, "early-close", "the server closed the connection in mid-stream"),
        ({"mode": "hang-up"}, "early-close", "the server closed the connection before it answered"),
        ({"mode": "noise"}, "malformed-http", "the answer is not HTTP"),
        ({"mode": "no-finish"}, "unfinished", "by [DONE] with 0 of 1 choices finished"),
        ({"mode": "error-event"}, "server-error", "engine core died"),
        ({"mode": "garbage"}, "malformed-stream", "an event cannot be read"),
        ({"mode": "plain"}, "malformed-stream", "the answer holds no events"),
        ({"mode": "refuse"}, "http-status", "the engine is tired"),
        ({"tokens": 3}, "wrong-length", "3 output tokens where ignore_eos demands 4"),
    ],
    ids=lambda value: value.get("mode", "short") if isinstance(value, dict) else "",
)
def test_each_way_of_failing_has_its_kind_and_what_arrived_is_kept(tmp_path, how, kind, message):
    (record,) = asyncio.run(served(launch(tmp_path), request(0, max_tokens=4, **how)))
    assert record.error is not None
    assert record.error.kind == kind
    assert message in record.error.message
    assert record.done_ns >= record.sent_ns
    if how.get("mode") == "truncate":
        assert [len(c.chunk_ns) for c in record.choices] == [2]
    if kind == "http-status":
        assert record.error.status == record.status == 500


def test_without_usage_the_ids_of_the_tokens_count(tmp_path):
    (record,) = asyncio.run(served(launch(tmp_path), request(0, max_tokens=4, mode="no-usage")))
    assert record.error is None
    assert record.completion_tokens is None
    assert [choice.output_tokens for choice in record.choices] == [4]


def test_a_stream_that_never_ends_times_out_and_keeps_its_first_half(tmp_path):
    (record,) = asyncio.run(served(launch(tmp_path), request(0, max_tokens=4, mode="stall"), request_s=0.3))
    assert record.error is not None
    assert record.error.kind == "total-timeout"
    assert "0.3 s (timeouts.request_s)" in record.error.message
    assert len(record.choices[0].chunk_ns) == 2


def test_nobody_listening_is_a_connect_error():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        (record,) = asyncio.run(ask(f"http://127.0.0.1:{holder.getsockname()[1]}", request(0)))
    assert record.error is not None
    assert record.error.kind == "connect-refused"
    assert record.status is None


def test_a_large_answer_is_read_in_slices_between_which_others_have_their_turn(tmp_path):
    async def count_turns():
        how, turns = launch(tmp_path), 0
        with ServerProcess(how) as server:
            async with StreamClient(how.base_url, how.timeouts) as client:
                await server.wait_ready(client.control)
                exchange = await send(client, call(request(0, max_tokens=4000, gap_ms=0)), 0)
                reading = asyncio.create_task(exchange.record())
                while not reading.done():
                    turns += 1
                    await asyncio.sleep(0)
                return turns, await reading

    turns, record = asyncio.run(count_turns())
    assert record.error is None
    assert turns > 3
