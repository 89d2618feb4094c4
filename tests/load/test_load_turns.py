"""Conversations at the client: a turn is sent when the answer before it is complete and its user has thought."""

import asyncio
import itertools
import json
from http.server import BaseHTTPRequestHandler

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from support.prepared import prepare
from support.servers.handler_server import handled_by
from support.servers.paced_engine import call, request, running

from benchctl.load.client import StreamClient
from benchctl.load.schedule import Load
from benchctl.load.workers import WorkerLoad, WorkerPlan
from benchctl.profile.arrival import Arrival
from benchctl.profile.sections import Timeouts
from benchctl.records.record import Call
from benchctl.units import NS_PER_MS, NS_PER_S
from benchctl.workload.turns import with_answers_in


@pytest.fixture(name="how", scope="module")
def _how(tmp_path_factory):
    """A paced server that is up."""
    with running(tmp_path_factory.mktemp("server")) as how:
        yield how


def conversations(*turns, think_ms=5, arrival_ms=0, **how):
    """The requests of conversations of so many turns, whose answers take a few milliseconds each."""
    requests = []
    for number, count in enumerate(turns):
        for turn in range(count):
            index = len(requests)
            gap_ms = how.get("gaps_ms", [1])[index % len(how.get("gaps_ms", [1]))]
            mode = how.get("modes", {}).get((number, turn), "good")
            one = request(index, max_tokens=2, arrival_ns=number * arrival_ms * NS_PER_MS, gap_ms=gap_ms, mode=mode)
            think_ns = think_ms * NS_PER_MS if turn else 0
            requests.append(msgspec.structs.replace(one, session=f"c{number}", turn=turn, think_ns=think_ns))
    return requests


CLOSED = {"kind": "closed-loop", "max_concurrency": 2}
POISSON = {"kind": "poisson", "request_rate": 50.0}


def drive(how, arrival, requests, *, workers=1, time_scale=1.0, cancel_after=None):
    """The records by request id, in the order in which they came."""
    records = []

    async def go():
        async with StreamClient(how.base_url, how.timeouts) as client:
            load = Load(client, Arrival(**arrival), records.append, time_scale=time_scale)
            if workers > 1:
                plan = WorkerPlan(
                    base_url=how.base_url, timeouts=how.timeouts, arrival=Arrival(**arrival), count=workers
                )
                load = WorkerLoad(plan, records.append)
            driving = asyncio.create_task(load.drive(call(one) for one in requests))
            while cancel_after is not None and len(records) < cancel_after:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.002)
            if cancel_after is not None:
                driving.cancel()
            await asyncio.wait({driving})
            if cancel_after is None:
                driving.result()

    asyncio.run(go())
    assert len({record.request_id for record in records}) == len(records)
    return {record.request_id: record for record in records}


def require_order(requests, records, *, time_scale=1.0):
    """Turns in order, none before the answer before it and the thinking; returns how many were late."""
    for before, after in itertools.pairwise(requests):
        if after.turn:
            first, then = records[before.request_id], records[after.request_id]
            assert then.scheduled_ns == first.done_ns + round(after.think_ns / time_scale)
            assert then.sent_ns >= then.scheduled_ns
            assert then.slot_free_ns is None
        assert records[after.request_id].turn == after.turn


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("arrival", [CLOSED, POISSON, {"kind": "burst"}], ids=lambda arrival: arrival["kind"])
def test_no_turn_is_sent_before_the_answer_before_it_and_its_think_time(how, arrival, workers):
    requests = conversations(3, 1, 4, 2, 3, think_ms=7, arrival_ms=5, gaps_ms=[1, 6, 3])
    records = drive(how, arrival, requests, workers=workers)
    assert len(records) == len(requests)
    assert all(record.error is None for record in records.values())
    require_order(requests, records)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=6),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.sampled_from([0, 1, 8]),
    st.integers(1, 4),
)
def test_whatever_the_answers_take_turns_do_not_overlap_and_users_keep_to_their_slots(
    how, turns, gaps_ms, think_ms, slots
):
    requests = conversations(*turns, think_ms=think_ms, gaps_ms=gaps_ms)
    records = drive(how, {"kind": "closed-loop", "max_concurrency": slots}, requests)
    require_order(requests, records)
    spans = [
        [records[one.request_id] for one in conversation]
        for _, conversation in itertools.groupby(requests, key=lambda one: one.session)
    ]
    edges = sorted([(span[0].sent_ns, 1) for span in spans] + [(span[-1].done_ns, -1) for span in spans])
    assert max(itertools.accumulate(change for _, change in edges)) <= slots


def test_think_times_are_of_the_servers_clock(how):
    requests = conversations(3, think_ms=40)
    require_order(requests, drive(how, CLOSED, requests, time_scale=4.0), time_scale=4.0)


def test_a_user_goes_on_behind_a_turn_that_failed(how):
    requests = conversations(3, 4, 2, modes={(0, 1): "refuse", (1, 0): "truncate"})
    records = drive(how, {"kind": "closed-loop", "max_concurrency": 1}, requests)
    require_order(requests, records)
    kinds = [records[one.request_id].error for one in requests]
    assert [kind and kind.kind for kind in kinds] == [
        *(None, "http-status", None),
        *("early-close", None, None, None),
        *(None, None),
    ]


def test_a_cancelled_load_leaves_no_record_of_turns_that_were_not_sent(how):
    requests = conversations(2, 2, 2, think_ms=60_000)
    records = drive(how, CLOSED, requests, cancel_after=2)
    assert sorted(records) == ["r0", "r2"]


class Talker(BaseHTTPRequestHandler):
    """Streams the next of its answers, and keeps what it was sent."""

    protocol_version = "HTTP/1.1"
    answers: tuple[str, ...] = ()
    bodies: list[bytes]

    def do_POST(self):
        self.bodies.append(self.rfile.read(int(self.headers["content-length"])))
        text = self.answers[(len(self.bodies) - 1) % len(self.answers)]
        choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
        events = [{"choices": [choice]}, {"choices": [choice | {"delta": {}, "finish_reason": "length"}]}]
        events.append({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}})
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        content = "".join([*lines, "data: [DONE]\n\n"]).encode()
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


def test_the_next_prompt_has_what_the_server_said():
    said = ('"quoted" \\ and\nlines', "emoji \U0001f600", "control \x01\u2028")
    workload = {"dataset": "synthetic", "input_len": 20, "output_len": 5, "turns": {"number": 4, "think_s": 0}}
    requests = prepare(workload | {"num_prompts": 1}, stop="forced").requests
    handler = type("Handler", (Talker,), {"answers": said, "bodies": []})

    def as_call(one):
        messages = [msgspec.structs.asdict(message) for message in with_answers_in(one).messages]
        body = json.dumps({"messages": messages}).encode()
        return Call(request=one, path="/v1/chat/completions", headers={}, body=body)

    async def go(base_url):
        async with StreamClient(base_url, Timeouts()) as client:
            await Load(client, Arrival(**CLOSED), records.append).drive(map(as_call, requests))

    records = []
    with handled_by(handler) as base_url:
        asyncio.run(go(base_url))
    assert [record.error for record in records] == [None] * 4
    sent = [json.loads(body)["messages"] for body in handler.bodies]
    assert [message["content"] for message in sent[-1][1::2]] == list(said)
    for before, after in itertools.pairwise(sent):
        assert after[: len(before)] == before


def test_think_times_of_hours_do_not_hold_up_an_idle_client(how):
    """A user who thinks for long keeps a slot, and others go on."""
    requests = conversations(2, 1, 1, 1)
    requests[1] = msgspec.structs.replace(requests[1], think_ns=3600 * NS_PER_S)
    records = drive(how, CLOSED, requests, cancel_after=4)
    assert sorted(records) == ["r0", "r2", "r3", "r4"]
