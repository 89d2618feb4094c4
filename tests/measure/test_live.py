"""Numbers of a load while it is sent: near those of its result, of this load alone, bounded however fast it is."""

import random
from statistics import median

import msgspec
import pytest
from support.cli import printed
from support.servers.simulator import sim_server

from benchctl.analysis.metrics.chunks import latencies_ns
from benchctl.analysis.metrics.latency import measured
from benchctl.analysis.metrics.slo import request_ratios
from benchctl.cli.screen import fitting
from benchctl.load.exchange import LoadSummary
from benchctl.measure.live import LiveNumbers
from benchctl.profile.objective import Slo
from benchctl.records.loaded import load_results
from benchctl.records.record import ChoiceRecord, RequestError, RequestRecord
from benchctl.records.schema import ClientSample
from benchctl.units import NS_PER_MS, NS_PER_S

START_NS = 5 * NS_PER_S


def answer(index, at_s, ttft_ms=10.0, tpot_ms=2.0, num_tokens=11, **changes):
    """A request that was sent so many seconds into the load."""
    sent_ns = START_NS + round(at_s * NS_PER_S)
    chunk_ns = tuple(sent_ns + round((ttft_ms + i * tpot_ms) * NS_PER_MS) for i in range(num_tokens))
    record = RequestRecord(
        request_id=str(index),
        index=index,
        scheduled_ns=sent_ns,
        sent_ns=sent_ns,
        done_ns=chunk_ns[-1],
        choices=(ChoiceRecord(index=0, chunk_ns=chunk_ns),),
        completion_tokens=num_tokens,
    )
    return msgspec.structs.replace(record, **changes)


class Load:
    """A load whose requests are counted before its live numbers take them, as those of every load are."""

    def __init__(self, limits_ms, clock_factor=1.0):
        self.counts = LoadSummary(opening=LoadSummary())
        self.live = LiveNumbers(self.counts, limits_ms, clock_factor)
        self.parts = self.live.parts

    def take(self, record):
        self.counts.count(record)
        self.live.take(record)


def sample(at_s, num_open=4, worker=0):
    t_ns = START_NS + round(at_s * NS_PER_S)
    return ClientSample(t_ns=t_ns, worker=worker, loop_lag_ns=0, cpu_ns=0, num_open=num_open)


def test_live_numbers_of_a_load_are_those_of_its_result(tmp_path):
    """Two processes send to a real server; records and samples are taken in the order of their times."""
    sizes = ("--num-prompts", "60", "--max-concurrency", "2", "--input-len", "20", "--output-len", "16")
    with sim_server(tmp_path / "server", time_scale=2.0) as server:
        printed("load", server.client.base_url, *sizes, "--workers", "2", "-o", tmp_path / "r", cwd=tmp_path)
    (run,) = load_results(tmp_path / "r").runs
    events = sorted([(record.done_ns, 0, record) for record in run.requests] + [(s.t_ns, 1, s) for s in run.client],
                    key=lambda event: event[:2])  # fmt: skip
    limit_ms = median(latencies_ns(measured(run.requests))["ttft"]) / NS_PER_MS
    live, taken, words = Load({"ttft": limit_ms, "tpot": 1000}), [], ()
    for _, _, event in events:
        if isinstance(event, RequestRecord):
            live.take(event)
            taken.append(event)
        elif (parts := live.parts(event)) is not None:
            words, counted = parts, measured(taken)
    assert len(counted) > 20
    throughput, num_open, objective, ttft, tpot = words
    seconds = (max(r.done_ns for r in counted) - min(r.sent_ns for r in counted)) / NS_PER_S
    num_tokens = sum(record.completion_tokens for record in counted)
    assert float(throughput.split()[0].replace(",", "")) == pytest.approx(num_tokens / seconds, rel=0.1)
    assert 0 <= int(num_open.removesuffix(" open")) <= 2
    is_within = request_ratios(counted, {"ttft": limit_ms, "tpot": 1000}, 1.0) <= 1
    assert float(objective.removesuffix("% within the objective")) == pytest.approx(100 * is_within.mean(), abs=3)
    for text, name in ((ttft, "ttft"), (tpot, "tpot")):
        middle_ms = float(text.split("p50 ")[1].split(",")[0])
        assert middle_ms == pytest.approx(median(latencies_ns(counted)[name]) / NS_PER_MS, rel=0.05)


def test_the_objective_counts_failed_requests_and_times_are_on_the_clock_of_the_server():
    live = Load({"ttft": 150, "tpot": 25}, 10.0)
    error = RequestError(kind="reset", message="x")
    records = [
        answer(0, 0.1),
        answer(1, 0.2, ttft_ms=20),
        answer(2, 0.3, error=error),
        answer(3, 0.4, num_tokens=1),
    ]
    for record in (*records, answer(4, 0.0, ttft_ms=900, is_warmup=True)):
        live.take(record)
    assert live.parts(sample(1.2)) == [
        "2 tokens/s",
        "4 open",
        "1 failed",
        "50% within the objective",
        "TTFT p50 100 ms",
        "TPOT p50 20.0 ms",
    ]


def test_numbers_come_once_a_second_and_once_something_has_ended_and_throughput_is_that_of_all_answers():
    live = Load({})
    assert live.parts(sample(0.5)) is None
    live.take(answer(0, 0.0))
    assert live.parts(sample(1.0, num_open=3))[:2] == ["11 tokens/s", "3 open"]
    assert live.parts(sample(1.9, num_open=2, worker=1)) is None
    assert live.parts(sample(2.0, num_open=1, worker=1))[:2] == ["6 tokens/s", "4 open"]
    live.take(answer(1, 2.5, num_tokens=39))
    assert live.parts(sample(4.0))[0] == "12 tokens/s"


def test_of_a_server_that_counts_no_tokens_their_throughput_is_left_out():
    live = Load({})
    live.take(answer(0, 0.0, completion_tokens=None))
    assert live.parts(sample(1.0)) == ["4 open", "TTFT p50 10.0 ms"]


@pytest.mark.parametrize("num_slots", [1, 64, 96])
def test_of_many_answers_a_sample_stands_for_all_and_every_slot_is_in_it(num_slots):
    """The answers of all slots end in waves, in the order of the slots, and the first of a wave are the fastest."""
    stream = random.Random(3)
    times = [stream.lognormvariate(3, 0.5) for _ in range(num_slots * (20_000 // num_slots))]
    waves = [sorted(times[i : i + num_slots]) for i in range(0, len(times), num_slots)]
    live = Load({"ttft": 20.0})
    for index, ttft_ms in enumerate(time for wave in waves for time in wave):
        live.take(answer(index, index / 2_000, ttft_ms=ttft_ms))
    words, ordered = live.parts(sample(10.0)), sorted(times)
    assert float(words[0].split()[0].replace(",", "")) == pytest.approx(11 * len(times) / 10, rel=0.001)
    assert float(words[2].removesuffix("% within the objective")) == pytest.approx(50, abs=10)
    middle_ms, tail_ms = (float(part.split()[-1]) for part in words[3].removesuffix(" ms").split(", "))
    assert middle_ms == pytest.approx(ordered[len(times) // 2], rel=0.1)
    assert ordered[int(0.97 * len(times))] < tail_ms < ordered[int(0.999 * len(times))]


def test_a_narrow_terminal_leaves_numbers_out_and_cuts_none():
    parts = ("1,702 tokens/s", "64 open", "TTFT p50 41.0, p99 96.0 ms")
    assert fitting(parts, 80) == "1,702 tokens/s; 64 open; TTFT p50 41.0, p99 96.0 ms"
    assert fitting(parts, 30) == "1,702 tokens/s; 64 open"
    assert fitting(parts, 14) == "1,702 tokens/s"
    assert fitting(parts, 13) == fitting((), 80) == ""


@pytest.mark.parametrize("limits_ms", [{"ttft": 12.0}, {"tpot": 2.0}, {"e2el": 30.0}, {"ttft": 9.9, "tpot": 9.0}])
def test_live_numbers_and_results_keep_one_rule(limits_ms):
    records = [answer(0, 0, 12.0, 2.0), answer(1, 0, 12.1, 1.9), answer(2, 0, 9.0, 5.0), answer(3, 0, 1, 1, 1)]
    records += [answer(4, 0, 1, 1, choices=()), answer(5, 0, 1, 1, error=RequestError(kind="reset", message="x"))]
    share = (request_ratios(records, limits_ms, 1.0) <= 1).mean()
    live = Load(limits_ms)
    for record in records:
        live.take(record)
    assert f"{float(f'{100 * share:.3g}'):g}% within the objective" in live.parts(sample(2.0))
    assert Slo(**{f"{name}_ms": limit for name, limit in limits_ms.items()}).limits_ms == limits_ms
