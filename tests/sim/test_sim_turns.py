"""Conversations on the simulator: the same in virtual time and over HTTP, in order, and found in its cache."""

import itertools

import pytest
from hypothesis import given, settings, strategies as st
from support.servers.simulator import request_of

from benchctl.measure.run import RunContext, measure_run
from benchctl.measure.virtual import simulate_run
from benchctl.profile.load import parse_profile
from benchctl.records.directory import RequestSets, RunDirectory
from benchctl.records.loaded import load_run
from benchctl.records.record import PlannedRun
from benchctl.sim.config import SimConfig
from benchctl.sim.core import Core, Phase, SimLoad
from benchctl.sim.engine import SimulatedEngine
from benchctl.sim.requests import Prompt, Request
from benchctl.sim.simulation import simulate
from benchctl.units import NS_PER_MS
from benchctl.workload.prepare import prepare_requests

PROFILE = """\
name: chat
seed: 5
engine: {{kind: sim, options: {{time_scale: 50.0, noise: published, enable_prefix_caching: {caching}}}}}
model: qwen2.5-7b
stop: {stop}
workload:
  dataset: synthetic
  num_prompts: 6
  input_len: 30
  {output}
  turns: {{number: [3, 1, 4], think_s: 0.5, think_cv: 1.0, max_tokens: {max_tokens}}}
  arrival: {arrival}
  num_warmups: 2
variants:
  baseline: {{}}
"""
CLOSED = "{kind: closed-loop, max_concurrency: 2}"
POISSON = "{kind: poisson, request_rate: 3}"


def profile_of(arrival=CLOSED, *, caching="true", stop="forced", output="output_len: 20", max_tokens=4096, **more):
    text = PROFILE.format(arrival=arrival, caching=caching, stop=stop, output=output, max_tokens=max_tokens)
    return parse_profile(text + "".join(f"{key}: {value}\n" for key, value in more.items()), "test")


def run(path, profile, by=simulate_run):
    planned = PlannedRun(index=0, run_id="run", block=0, position=0, variant="baseline")
    directory = RunDirectory(path)
    requests = prepare_requests(profile).requests
    by(RunContext(profile=profile, requests=RequestSets.single(requests)), planned, directory)
    return load_run(directory), directory, requests


def untimed(record):
    (choice,) = record.choices or (None,)
    return choice and (
        choice.text,
        record.prompt_tokens,
        record.completion_tokens,
        record.cached_tokens,
        record.turn,
    )


@pytest.mark.parametrize(
    ("arrival", "how"),
    [
        pytest.param(CLOSED, {}, id="closed loop"),
        pytest.param(POISSON, {"stop": "natural", "output": "max_tokens: 40"}, id="open loop, natural ends"),
    ],
)
def test_conversations_take_the_same_steps_in_virtual_time_and_over_http(tmp_path, arrival, how):
    profile = profile_of(arrival, **how)
    over_http, http_directory, _ = run(tmp_path / "http", profile, by=measure_run)
    simulated, directory, requests = run(tmp_path / "virtual", profile)
    assert directory.step_log.read_bytes() == http_directory.step_log.read_bytes()
    by_id = {record.request_id: untimed(record) for record in over_http.requests}
    assert {record.request_id: untimed(record) for record in simulated.requests} == by_id
    assert simulated.record.state == "done", simulated.record
    # a busy machine may hold the client up, which changes no step
    codes = {warning.code for warning in over_http.record.warnings}
    assert not codes & {"check-failed", "failed-requests", "sim-schedule-lost"}, over_http.record.warnings
    assert len(by_id) == len(requests) + 2


def test_turns_of_a_simulated_run_follow_each_other_exactly(tmp_path):
    simulated, _, requests = run(tmp_path, profile_of())
    records = {record.request_id: record for record in simulated.requests}
    for before, after in itertools.pairwise(requests):
        if after.turn:
            first, then = records[before.request_id], records[after.request_id]
            assert then.sent_ns == then.scheduled_ns == first.done_ns + after.think_ns
            assert then.prompt_tokens == after.prompt_tokens  # answers of full length, one word each


def test_the_next_turn_finds_the_prompt_before_it_and_its_answer_in_whole_blocks(tmp_path):
    simulated, _, requests = run(tmp_path, profile_of())
    records = {record.request_id: record for record in simulated.requests}
    assert sum(bool(each.turn) for each in requests) == 10
    for each in requests:
        # the last token of an answer was never computed
        known = max(each.shared_tokens - 1, 0)
        assert records[each.request_id].cached_tokens == known // 16 * 16


def test_without_a_cache_nothing_is_found(tmp_path):
    simulated, _, _ = run(tmp_path, profile_of(caching="false"))
    assert {record.cached_tokens for record in simulated.requests} == {None}


@pytest.mark.parametrize("by", [simulate_run, measure_run])
def test_turns_that_the_server_refuses_are_those_of_long_conversations(tmp_path, by):
    """The memory holds two turns: the third is refused as it comes in, and the fourth."""
    profile = profile_of()
    options = profile.engine.options | {"num_kv_blocks": 8}
    profile = profile.model_copy(update={"engine": profile.engine.model_copy(update={"options": options})})
    simulated, _, requests = run(tmp_path, profile, by=by)
    measured = [record for record in simulated.requests if not record.is_warmup]
    kinds = {record.request_id: record.error and record.error.kind for record in measured}
    assert kinds.keys() == {each.request_id for each in requests}
    by_turn = {each.turn: kinds[each.request_id] for each in requests if each.session in long_ones(requests)}
    assert by_turn == {0: None, 1: None, 2: "http-status", 3: "http-status"}
    assert [kinds[each.request_id] for each in requests if each.turn in {0, 1}] == [None] * 10


def long_ones(requests):
    return {each.session for each in requests if each.turn == 3}


sizes = st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(0, 60))


@settings(max_examples=40)
@given(
    st.lists(st.lists(sizes, min_size=1, max_size=4), min_size=1, max_size=6),
    st.sampled_from([None, 1, 2, 3]),
    st.integers(0, 50),
    st.integers(6, 40),
)
def test_any_conversations_leap_as_they_step_and_lose_no_block(conversations, limit, gap_ms, num_kv_blocks):
    requests, offsets, thinks = [], [], {}
    for number, turns in enumerate(conversations):
        for turn, (prompt_tokens, max_tokens, think_ms) in enumerate(turns):
            if turn:
                thinks[len(requests)] = think_ms * NS_PER_MS
            name = f"c{number}t{turn}"
            requests.append(request_of(name, prompt_tokens=prompt_tokens, max_tokens=max_tokens))
            offsets.append(number * gap_ms * NS_PER_MS)
    config = SimConfig(num_kv_blocks=num_kv_blocks, enable_prefix_caching=True, max_model_len=90)
    load = SimLoad(requests=requests, arrival_ns=offsets, max_concurrency=limit, thinks_ns=thinks)
    core = Core(SimulatedEngine(config))
    phase = Phase(load)
    core.announce(phase)
    ends, starts, steps = {}, {}, []
    while (output := core.next_step()) is not None:
        steps.append(output.record)
        for seq in output.finished:
            ends[seq.request.request_id] = seq.last_token_ns
            starts[seq.request.request_id] = seq.arrival_ns
    blocks = core.engine.block_manager
    assert blocks.num_used == 0
    assert len(ends) == len(requests)
    assert (phase.is_over, phase.progress) == (True, 1.0)
    for index, think_ns in thinks.items():
        before, after = requests[index - 1].request_id, requests[index].request_id
        assert starts[after] >= ends[before] + think_ns
    whole = [(starts[f"c{i}t0"], ends[f"c{i}t{len(turns) - 1}"]) for i, turns in enumerate(conversations)]
    most = max(sum(start < end_of and start >= begin for begin, end_of in whole) for start, _ in whole)
    assert limit is None or most <= limit
    assert [*simulate(config, [load]).steps] == steps


def test_hashes_of_an_answer_continue_those_of_its_prompt():
    pieces = [f"p{i}" for i in range(70)]
    whole = Prompt.of(pieces, 16, salt="x")
    for split in (0, 5, 16, 33, 70):
        begun = Prompt.of(pieces[:split], 16, salt="x")
        further = begun.further_hashes(pieces[split:])
        assert (*begun.block_hashes, *further) == whole.block_hashes


def test_an_abandoned_phase_waits_for_no_later_turn():
    core = Core(SimulatedEngine(SimConfig()))
    load = SimLoad(announced=["a", "b", "c"], thinks_ns={1: NS_PER_MS})
    core.announce(Phase(load))
    core.submit(request_of("a"))
    assert core.next_step() is None
    assert core.missing() == "c"
    core.abandon_phase()
    while core.next_step() is not None:
        pass
    assert core.missing() is None
    assert core.phase.is_over
    core.submit(request_of("b"))
    assert core.next_step() is not None


def test_behind_a_turn_that_is_dropped_the_next_is_due():
    core = Core(SimulatedEngine(SimConfig()))
    core.announce(Phase(SimLoad(announced=["a", "b", "c", "d"], thinks_ns={1: 0, 2: 0}, max_concurrency=1)))
    core.submit(request_of("a", max_tokens=1000))
    core.next_step()
    core.abort("a")
    for name in ("b", "c", "d"):
        assert core.missing() == name
        core.submit(Request(request_id=name, prompt=request_of(name).prompt, max_tokens=3))
        while core.next_step() is not None:
            pass
    assert (core.phase.is_over, core.phase.progress) == (True, 1.0)
