"""The server's own counters: read before, during and after the load, and held against usage."""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Event, Timer

import msgspec
import pytest
from support.results.builders import edit_requests, write_results
from support.servers.simulator import SimServer, sim_server

from benchctl.analysis.experiment.experiment import experiment_of
from benchctl.analysis.metrics.server_counters import COUNTERS
from benchctl.analysis.validity.answers import Check
from benchctl.engines.metrics_page import series_of
from benchctl.measure.telemetry.samplers import prometheus_samples, sampler
from benchctl.records.directory import ResultDirectory
from benchctl.records.files import read_jsonl
from benchctl.records.loaded import load_results
from benchctl.records.record import RequestError, RequestRecord
from benchctl.records.schema import PrometheusSample, ResultWarning


@pytest.fixture(name="server", scope="module")
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimServer]:
    with sim_server(tmp_path_factory.mktemp("server")) as server:
        yield server


VLLM_TOKENS = COUNTERS.generated_tokens[0]
PAGE = """\
# HELP vllm:generation_tokens_total Tokens.
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{model_name="m",engine="0"} 7.0
vllm:generation_tokens_created{model_name="m",engine="0"} 1.7e9
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running 2
# TYPE vllm:itl_seconds histogram
vllm:itl_seconds_bucket{le="0.1"} 3
vllm:itl_seconds_bucket{le="+Inf"} 4
vllm:itl_seconds_count 4
vllm:itl_seconds_sum 0.5
"""


def test_series_are_named_as_the_server_writes_them_and_buckets_are_left_out() -> None:
    assert series_of(PAGE) == {
        'vllm:generation_tokens_total{engine="0",model_name="m"}': 7.0,
        "vllm:num_requests_running": 2.0,
        "vllm:itl_seconds_count": 4.0,
        "vllm:itl_seconds_sum": 0.5,
    }
    unknown = "# TYPE a gauge\na NaN\n# TYPE b gauge\nb +Inf\n# TYPE c gauge\nc 3\n"
    assert series_of(unknown) == {"c": 3.0}, "SGLang states its occupancy as NaN until it has measured one"


def test_the_counter_grows_by_what_was_generated_between_the_first_and_the_last_reading(
    server: SimServer, tmp_path: Path
) -> None:
    body = {"prompt": "one two three", "max_tokens": 9, "ignore_eos": True, "n": 2}
    samples = partial(prometheus_samples, str(server.client.base_url.join("/metrics")), 5)
    assert server.client.post("/v1/completions", json=body).status_code == 200
    with sampler("prometheus", tmp_path / "prometheus.jsonl", samples, []):
        assert server.client.post("/v1/completions", json=body).status_code == 200
    read = list(read_jsonl(tmp_path / "prometheus.jsonl", PrometheusSample))
    assert len(read) >= 2
    totals = [sum(v for k, v in s.values.items() if k.startswith(VLLM_TOKENS)) for s in read]
    assert totals[-1] - totals[0] == 18
    assert [s.t_ns for s in read] == sorted(s.t_ns for s in read)


def test_a_page_that_cannot_be_had_or_read_ends_the_sampler_with_a_warning(
    server: SimServer, tmp_path: Path
) -> None:
    for path in ("/no/metrics", "/v1/models"):
        warnings: list[ResultWarning] = []
        samples = partial(prometheus_samples, str(server.client.base_url.join(path)), 5)
        with sampler("prometheus", tmp_path / "prometheus.jsonl", samples, warnings):
            pass
        assert [warning.code for warning in warnings] == ["prometheus-sampler-failed"]
        assert "do not cover the whole load" in warnings[0].message
        if path == "/no/metrics":
            assert re.search(
                r"answered 404 Not Found; start .* telemetry\.prometheus_hz to 0", warnings[0].message
            ), "it says what to do"


def test_readings_end_soon_after_they_are_told_to(server: SimServer) -> None:
    stopped = Event()
    samples = prometheus_samples(str(server.client.base_url.join("/metrics")), 0.01, stopped)
    assert next(samples) is not None
    Timer(0.1, stopped.set).start()
    assert len(list(samples)) == 1


@pytest.fixture(name="results")
def _results(tmp_path: Path) -> ResultDirectory:
    return write_results(tmp_path / "r", block_factors=({"baseline": 1.0, "guided": 1.0},))


def counted(results: ResultDirectory, *totals: float) -> Check:
    """The check of the first run, whose usage is 64 tokens, with these readings of the counter."""
    (results.runs()[0].path / "prometheus.jsonl").unlink()
    with results.runs()[0].append("prometheus") as writer:
        for number, total in enumerate(totals):
            series = {f'{VLLM_TOKENS}{{engine="0"}}': total, f'{VLLM_TOKENS}{{engine="1"}}': 1.0}
            writer.write(PrometheusSample(t_ns=number, values=series))
    loaded = load_results(results.path)
    run = loaded.runs[0]
    checks = experiment_of(loaded).checks(run)
    return next(check for check in checks if check.name == "counters")


def test_a_counter_that_differs_from_usage_makes_the_run_invalid(results: ResultDirectory) -> None:
    assert counted(results, 100, 130, 164).ok is True
    assert counted(results, 100).ok is None, "one reading says nothing"
    check = counted(results, 100, 165)
    assert (check.ok, check.is_fatal) == (False, True)
    assert check.detail == f"{VLLM_TOKENS} grew by 65, usage 64"
    error = RequestError(kind="timeout", message="no end")

    def fail_first(request: RequestRecord) -> RequestRecord:
        return msgspec.structs.replace(request, error=error) if request.index == 0 else request

    edit_requests(results, results.runs()[0].path.name, fail_first)
    assert counted(results, 100, 164).ok is None, "a failed request leaves the counter without a counterpart"
