"""The client against a server whose truth is known."""

import asyncio

from support.servers.paced_engine import PacedEngine, call, request, running, send

from benchctl.load.client import StreamClient
from benchctl.units import NS_PER_MS


def served(how, *requests):
    """Records of ``requests``, sent one after another."""

    async def go():
        async with StreamClient(how.base_url, how.timeouts) as client:
            return [await (await send(client, call(one), scheduled_ns=1)).record() for one in requests]

    return asyncio.run(go())


def test_times_and_counts_agree_with_what_the_server_did(tmp_path):
    with running(tmp_path) as how:
        records = served(how, *(request(i, max_tokens=6, n=2, gap_ms=20) for i in range(3)))
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


def test_a_large_answer_is_read_in_slices_between_which_others_have_their_turn(tmp_path):
    async def count_turns(how):
        turns = 0
        async with StreamClient(how.base_url, how.timeouts) as client:
            exchange = await send(client, call(request(0, max_tokens=4000, gap_ms=0)), 0)
            reading = asyncio.create_task(exchange.record())
            while not reading.done():
                turns += 1
                await asyncio.sleep(0)
            return turns, await reading

    with running(tmp_path) as how:
        turns, record = asyncio.run(count_turns(how))
    assert record.error is None
    assert turns > 3
