"""The server's own counters: read before, during and after the load, and held against usage and prefix caches."""

import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from threading import Event, Timer

import msgspec
import pytest
from support.results.builders import edit_requests, write_results
from support.servers.handler_server import handled_by
from support.servers.simulator import SimServer, sim_server

from benchctl.analysis.experiment.experiment import experiment_of
from benchctl.analysis.metrics.server_counters import COUNTERS, measure_growth
from benchctl.analysis.validity.answers import Check
from benchctl.engines.metrics_page import series_of
from benchctl.measure.run import RunContext, measure_run
from benchctl.measure.telemetry.samplers import prometheus_samples, sampler
from benchctl.profile.load import parse_profile
from benchctl.records.directory import ResultDirectory, RunDirectory
from benchctl.records.files import read_jsonl
from benchctl.records.loaded import LoadedRun, load_results, load_run
from benchctl.records.record import Message, PlannedRun, PreparedRequest, RequestError, RequestRecord
from benchctl.records.schema import PrometheusSample, ResultWarning
from benchctl.workload.tokenizers import count_chat_tokens


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


PROFILE = """\
name: fair
engine: {{kind: sim, options: {{time_scale: 100.0, noise: none, enable_prefix_caching: {caching}}}}}
workload:
  dataset: generated
  arrival: {{kind: closed-loop, max_concurrency: 2}}
  allow_prefix_cache_hits: {hits}
variants: {{baseline: {{}}}}
"""
QUESTION = "A farmer has twelve sheep and sells three of them each week. How many weeks until none is left? " * 2


def measured(path: Path, *, caching: bool, allows_hits: bool = False, n: int = 1) -> LoadedRun:
    """A run whose requests ask one question again and again."""
    messages = (Message(role="user", content=QUESTION),)
    requests = tuple(
        PreparedRequest(
            request_id=f"r{i}",
            index=i,
            arrival_ns=0,
            messages=messages,
            prompt_tokens=count_chat_tokens(messages),
            max_tokens=6,
            ignore_eos=True,
            n=n,
            seed=i,
            source="generated:0",
            sample=i,
        )
        for i in range(4)
    )
    profile = parse_profile(PROFILE.format(caching=str(caching).lower(), hits=str(allows_hits).lower()), "test")
    planned = PlannedRun(index=0, run_id="000", block=0, position=0, variant="baseline")
    measure_run(RunContext(profile=profile, requests=requests), planned, RunDirectory(path / "run"))
    return load_run(RunDirectory(path / "run"))


def codes(run: LoadedRun) -> list[str]:
    return [warning.code for warning in run.record.warnings if warning.code != "sim-lag"]


def test_a_warm_prefix_cache_makes_the_run_invalid_as_soon_as_it_ends_unless_the_profile_wants_it(
    tmp_path: Path,
) -> None:
    run = measured(tmp_path / "unwanted", caching=True)
    assert (run.record.state, codes(run)) == ("suspect", ["check-failed"])
    message = next(warning.message for warning in run.record.warnings if warning.code == "check-failed")
    assert re.match(r"check prefix-cache failed: vllm:prefix_cache_hits_total grew by [1-9]", message)
    assert "prompt tokens of 4 requests came from a cache" in message
    assert "set workload.allow_prefix_cache_hits: true" in message
    wanted = measured(tmp_path / "wanted", caching=True, allows_hits=True)
    assert (wanted.record.state, codes(wanted)) == ("done", [])
    assert sum(request.cached_tokens or 0 for request in wanted.requests) > 0


def test_without_a_cache_the_samples_of_one_prompt_hit_nothing(tmp_path: Path) -> None:
    run = measured(tmp_path, caching=False, n=3)
    assert (run.record.state, codes(run)) == ("done", [])
    grown = measure_growth(run.prometheus, COUNTERS.prefix_hits)
    assert (grown.name, grown.count) == ("vllm:prefix_cache_hits_total", 0)


def test_the_counter_of_each_kind_of_server_is_summed_over_its_series_and_read_twice_at_least() -> None:
    for names in (COUNTERS.generated_tokens, COUNTERS.prefix_hits):
        for name in names:
            samples = [
                PrometheusSample(
                    t_ns=i, values={f'{name}{{a="0"}}': total, f'{name}{{a="1"}}': 5.0, "other": 9.0 * i}
                )
                for i, total in enumerate((10, 25, 31))
            ]
            grown = measure_growth(samples, names)
            assert (grown.name, grown.count) == (name, 21)
            assert measure_growth(samples[:1], names) is None
    others = [PrometheusSample(t_ns=i, values={"vllm:something_else_total": float(i)}) for i in range(2)]
    assert measure_growth(others, COUNTERS.generated_tokens) is None


@contextmanager
def page_of(states: Sequence[tuple[int, int]]) -> Iterator[str]:
    """A metrics page that shows these (tokens, running requests) one after another, and the last for ever."""
    shown = itertools.chain(states, itertools.repeat(states[-1]))

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            tokens, running = next(shown)
            text = f"vllm:generation_tokens_total {tokens}\nvllm:num_requests_running {running}\n".encode()
            self.send_response(200)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with handled_by(Page) as url:
        yield f"{url}/metrics"


def first_and_last(url: str) -> tuple[float, float]:
    stopped = Event()
    stopped.set()
    *_, last = prometheus_samples(url, 1, stopped, settles=True)
    stopped.clear()
    first = next(prometheus_samples(url, 1, stopped, settles=True))
    return first.values["vllm:generation_tokens_total"], last.values["vllm:generation_tokens_total"]


def test_a_server_that_counts_late_is_read_until_it_has_caught_up_and_is_at_rest() -> None:
    for states in ([(10, 1), (40, 1), (64, 0), (64, 0)], [(10, 1), (10, 1), (10, 1), (64, 0), (64, 0)]):
        with page_of(states) as url:
            assert first_and_last(url) == (64, 64)


def test_a_server_that_never_comes_to_rest_is_read_all_the_same() -> None:
    with page_of([(10, 3)]) as url:
        assert first_and_last(url) == (10, 10)
