"""Requests against an objective: each as a whole, by one rule for loads, runs and experiments."""

import json
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st
from support.cli import benchctl, document, printed, refusal
from support.closed_loops import closed
from support.servers.simulator import sim_server
from test_client_guard import run_of, samples_of

from benchctl.analysis.metrics.latency import smallest_sample
from benchctl.analysis.metrics.run import load_figures, run_metrics
from benchctl.analysis.metrics.slo import request_ratios, slo_metrics
from benchctl.analysis.metrics.table import OF_SLO
from benchctl.profile.objective import Slo
from benchctl.records.record import ChoiceRecord, RequestError, RequestRecord
from benchctl.units import NS_PER_MS

HELD_UP = samples_of(400, lag_ms=45.0)


def request_of(index, arrivals_ns, sent_ns=0, late_ns=None):
    """An answer of one choice with a token at each of these times."""
    late = None if late_ns is None else (late_ns,) * len(arrivals_ns)
    return RequestRecord(
        request_id=f"r{index}",
        index=index,
        scheduled_ns=sent_ns,
        sent_ns=sent_ns,
        done_ns=arrivals_ns[-1] + 1,
        stamps="loop" if late is None else "kernel",
        choices=(ChoiceRecord(index=0, chunk_ns=tuple(arrivals_ns), chunk_late_ns=late),),
        completion_tokens=len(arrivals_ns),
    )


def answer(index, ttft_ms, tpot_ms, num_tokens=5, sent_ms=0):
    """A request with a first token after ``ttft_ms`` and more, ``tpot_ms`` apart."""
    stamps = [round((sent_ms + ttft_ms + i * tpot_ms) * NS_PER_MS) for i in range(num_tokens)]
    return request_of(index, stamps, sent_ns=round(sent_ms * NS_PER_MS))


def failed(record):
    return msgspec.structs.replace(record, error=RequestError(kind="http-status", message="500"))


def ratios(records, factor=1.0, **limits_ms):
    return request_ratios(records, limits_ms, factor).tolist()


def test_a_request_is_within_the_objective_only_if_it_keeps_every_limit():
    both = [answer(0, 100, 10), answer(1, 100, 30), answer(2, 300, 10), answer(3, 300, 30)]
    assert ratios(both, ttft=200, tpot=20) == pytest.approx([0.5, 1.5, 1.5, 1.5])
    assert ratios(both, ttft=300, tpot=30, e2el=420) == pytest.approx([140 / 420, 1, 1, 1])
    metrics = slo_metrics(request_ratios(both, {"ttft": 200, "tpot": 20}, 1.0), 0.5, 2.0)
    assert metrics == {"goodput": 0.5, "slo_attained_frac": 0.25, "slo_ratio": pytest.approx(1.5)}


def test_an_answer_of_one_token_keeps_a_limit_per_token_and_the_slowest_choice_counts():
    assert ratios([answer(0, 50, 0, num_tokens=1)], tpot=1e-6) == [0]
    one, other = answer(0, 50, 10), answer(0, 50, 40)
    counted = [msgspec.structs.replace(each.choices[0], output_tokens=5) for each in (one, other)]
    assert ratios([msgspec.structs.replace(one, choices=tuple(counted))], tpot=20) == pytest.approx([2])


def test_a_failed_request_counts_against_the_share_and_one_without_a_time_keeps_no_limit_on_it():
    silent = msgspec.structs.replace(answer(0, 1, 1), choices=())
    assert ratios([failed(answer(0, 1, 1)), silent], ttft=100) == [math.inf, math.inf]
    assert ratios([silent], tpot=100) == [0]
    metrics = slo_metrics(np.array([0.5, 0.5, 0.5, math.inf]), 0.75, 1.0)
    assert metrics == {"goodput": 3, "slo_attained_frac": 0.75, "slo_ratio": None}
    enough = np.array([0.5] * 99 + [math.inf])
    assert slo_metrics(enough, 0.95, 1.0)["slo_ratio"] == 0.5
    assert slo_metrics(enough[:0], 0.95, 1.0) == {"goodput": None, "slo_attained_frac": None, "slo_ratio": None}


@given(
    st.lists(st.one_of(st.floats(0, 3), st.just(1.0), st.just(math.inf)), min_size=1, max_size=120),
    st.integers(500, 999),
)
def test_the_ratio_is_at_most_one_exactly_where_the_share_is_kept(values, thousandths):
    share = thousandths / 1000
    metrics = slo_metrics(np.array(values), share, 1.0)
    num_kept = sum(value <= 1 for value in values)
    assert metrics["slo_attained_frac"] == num_kept / len(values)
    if len(values) < smallest_sample(100 * share):
        assert metrics["slo_ratio"] is None
    else:
        ratio = metrics["slo_ratio"]
        is_kept = 1000 * num_kept >= thousandths * len(values)
        assert (ratio is not None and ratio <= 1) == is_kept


def test_limits_are_in_the_time_of_the_server_on_a_virtual_clock():
    records = [answer(i, 10, 1, sent_ms=20 * i) for i in range(300)]
    assert ratios(records[:1], factor=20.0, ttft=100) == pytest.approx([2])
    real, scaled = (run_of(records, clock="virtual", time_scale=scale) for scale in (1.0, 20.0))
    slo = Slo(ttft_ms=100, share=0.9)
    assert load_figures(real, closed(4), slo).num_good == 300
    assert load_figures(scaled, closed(4), slo).num_good == 0
    assert run_metrics(scaled, closed(4), Slo(ttft_ms=200, share=0.9))["steady_slo_ratio"] == pytest.approx(1)


def test_the_window_counts_its_requests_whatever_became_of_them_and_those_that_never_left():
    records = [answer(i, 10 if i % 4 else 500, 1, sent_ms=20 * i) for i in range(400)]
    slo = Slo(ttft_ms=100, share=0.9)
    metrics = run_metrics(run_of(records), closed(4), slo)
    assert metrics["steady_slo_attained_frac"] == pytest.approx(0.75, abs=0.01)
    assert metrics["steady_goodput"] == pytest.approx(0.75 * 50, rel=0.01)
    broken = [failed(record) if i % 2 else record for i, record in enumerate(records)]
    assert run_metrics(run_of(broken), closed(4), slo)["steady_slo_attained_frac"] == pytest.approx(0.25, abs=0.01)
    unsent = [msgspec.structs.replace(failed(answer(i, 10, 1)), sent_ns=None, choices=()) for i in range(400, 800)]
    assert run_metrics(run_of(records + unsent), closed(4), slo)["steady_slo_attained_frac"] < 0.4


def test_late_reads_that_leave_a_limited_latency_open_leave_the_share_open():
    records = [answer(i, 10, 0, sent_ms=20 * i) for i in range(100)]
    exact = run_metrics(run_of(records, HELD_UP), closed(4), Slo(ttft_ms=100))
    assert exact["slo_attained_frac"] == 1
    late = [
        request_of(i, [(20 * i + 60) * NS_PER_MS] * 3, late_ns=1, sent_ns=20 * i * NS_PER_MS) for i in range(100)
    ]
    limits = {"ttft_ms": Slo(ttft_ms=100), "e2el_ms": Slo(e2el_ms=100)}
    metrics = {name: run_metrics(run_of(late, HELD_UP), closed(4), slo) for name, slo in limits.items()}
    assert metrics["ttft_ms"]["ttft_ms"] is None
    assert {metrics["ttft_ms"][name] for name in OF_SLO} == {None}
    assert metrics["e2el_ms"]["slo_attained_frac"] == 1


SLO_YAML = """\
name: with-slo
seed: 3
blocks: 6
engine: {kind: sim, options: {cost_model: roofline, hardware: h100-sxm, noise: published, time_scale: 20}}
slo: {ttft_ms: 20, tpot_ms: 8, share: 0.9}
workload:
  dataset: synthetic
  num_prompts: 220
  input_len: 40
  output_len: 10
  arrival: {max_concurrency: 8}
variants: {baseline: {}, narrow: {server: {max_num_seqs: 6}}}
primary_metrics: [goodput]
"""


def simulated(cwd, text, name):
    """The experiment of a profile in virtual time, and what ``show`` says of it."""
    (cwd / "p.yaml").write_text(text)
    benchctl("simulate", "--profile", "p.yaml", "-o", name, cwd=cwd)
    return document("show", name, cwd=cwd)


def test_goodput_decides_and_is_in_every_output_of_an_experiment_with_an_objective_alone(tmp_path):
    shown = simulated(tmp_path, SLO_YAML, "out")
    compared = document("compare", "out:baseline", "out:narrow", cwd=tmp_path, code=1)
    of_metrics = {metric["name"]: metric for metric in compared["metrics"]}
    assert [name for name, metric in of_metrics.items() if metric["role"] == "deciding"] == ["steady_goodput"]
    assert of_metrics["steady_goodput"]["verdict"] == "regression"
    assert shown["runs"][0].keys() & of_metrics.keys() & shown["definitions"].keys() >= OF_SLO
    assert "within SLO" in printed("show", "out", cwd=tmp_path)
    assert "steady_slo_ratio" in (tmp_path / "out" / "summary.csv").read_text().partition("\n")[0]
    assert "steady_goodput" in (tmp_path / "out" / "report.html").read_text()
    plain = SLO_YAML.replace("slo: {ttft_ms: 20, tpot_ms: 8, share: 0.9}", "").replace("goodput", "tpot_ms")
    simulated(tmp_path, plain.replace("220", "24"), "plain")
    written = [
        path.read_text() for path in (tmp_path / "plain").iterdir() if path.suffix in {".csv", ".json", ".html"}
    ]
    assert len(written) > 5
    assert not any(name in text for text in written for name in ('"goodput"', "steady_goodput", "slo_ratio"))


def test_objectives_that_differ_or_that_no_request_keeps_give_no_verdict(tmp_path):
    short = SLO_YAML.replace("num_prompts: 220", "num_prompts: 24")
    simulated(tmp_path, short, "one")
    simulated(tmp_path, short.replace("ttft_ms: 20", "ttft_ms: 0.001"), "other")
    told = refusal("compare", "one:baseline", "other:baseline", cwd=tmp_path, code=4)
    assert 'slo: {"ttft_ms":20.0,"tpot_ms":8.0,"share":0.9} against' in told
    told = printed("compare", "other:baseline", "other:narrow", cwd=tmp_path, code=3)
    assert "no request of any run keeps all limits of slo" in told


def test_a_load_and_its_directory_have_the_same_goodput(tmp_path):
    """Limits that all requests keep or none does, by a wide margin."""
    with sim_server(tmp_path / "server", noise="none") as server:
        sizes = ("--num-prompts", "12", "--max-concurrency", "4", "--input-len", "20", "--output-len", "6")
        limits = ("--goodput", "tpot:100000", "--goodput", "ttft:100000")
        output = printed("load", server.client.base_url, *sizes, *limits, "-o", "kept", cwd=tmp_path)
    assert "goodput        12 of 12 requests (100.0%): TTFT <= 100000 ms and TPOT <= 100000 ms" in output
    shown = document("show", "kept", cwd=tmp_path)["runs"][0]
    result = json.loads(next((tmp_path / "kept").glob("runs/*/result.json")).read_text())
    assert (shown["slo_attained_frac"], shown["goodput"]) == (1, pytest.approx(result["request_goodput"]))
    assert result["goodput"] == {"limits_ms": {"ttft": 100000, "tpot": 100000}, "num_good": 12, "share": 1}


def test_a_run_at_twenty_times_the_speed_has_the_share_of_its_simulation(tmp_path):
    """An answer takes 160 ms of the server and 8 of the client, whose clock might keep the limit."""
    text = SLO_YAML.replace("num_prompts: 220", "num_prompts: 16").replace("ttft_ms: 20, tpot_ms: 8", "e2el_ms: 60")
    text = text.replace("blocks: 6", "blocks: 1").replace(", narrow: {server: {max_num_seqs: 6}}", "")
    text = text.replace("cost_model: roofline, hardware: h100-sxm, ", "")
    simulation = simulated(tmp_path, text, "simulated")["runs"][0]
    printed("run", "p.yaml", "--quiet", "-o", "run", cwd=tmp_path)
    run = document("show", "run", cwd=tmp_path)["runs"][0]
    assert run["e2el_ms"] > 120
    assert (run["slo_attained_frac"], simulation["slo_attained_frac"]) == (0, 0)
