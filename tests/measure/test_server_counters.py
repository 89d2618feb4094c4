"""The server's own counters: read before, during and after the load, and held against usage and prefix caches."""

import itertools
import re
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from threading import Event, Timer

import msgspec
import pytest
from support.results.builders import BASELINE, ONE_BLOCK, change_requests, write_results
from support.servers.handler_server import handled_by
from support.servers.paced_engine import planned, request
from support.servers.programs.preloaded_benchctl import OF_A_BUSY_MACHINE
from support.servers.simulator import SimServer, sim_server

from benchctl.analysis.experiment.experiment import experiment_of
from benchctl.analysis.metrics.server_counters import COUNTERS, measure_growth
from benchctl.analysis.validity.answers import Check
from benchctl.engines.metrics_page import series_of
from benchctl.measure.run import RunContext, measure_run
from benchctl.measure.telemetry.samplers import prometheus_samples, sampler
from benchctl.profile.load import parse_profile
from benchctl.records.directory import RequestSets, ResultDirectory, RunDirectory
from benchctl.records.files import read_jsonl
from benchctl.records.loaded import LoadedRun, load_results, load_run
from benchctl.records.record import Message, RequestError
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


def samples_of(server: SimServer, path: str = "/metrics") -> Callable[..., Iterator[PrometheusSample]]:
    return partial(prometheus_samples, str(server.client.base_url.join(path)), 5)


def test_the_counter_grows_by_what_was_generated_between_the_first_and_the_last_reading(
    server: SimServer, tmp_path: Path
) -> None:
    body = {"prompt": "one two three", "max_tokens": 9, "ignore_eos": True, "n": 2}
    assert server.client.post("/v1/completions", json=body).status_code == 200
    with sampler("prometheus", tmp_path / "prometheus.jsonl", samples_of(server), []):
        assert server.client.post("/v1/completions", json=body).status_code == 200
    readings = list(read_jsonl(tmp_path / "prometheus.jsonl", PrometheusSample))
    grown = measure_growth(readings, [VLLM_TOKENS])
    assert (len(readings) >= 2, grown.count) == (True, 18)
    assert [reading.t_ns for reading in readings] == sorted(reading.t_ns for reading in readings)


def test_a_page_that_cannot_be_had_or_read_ends_the_sampler_with_a_warning(
    server: SimServer, tmp_path: Path
) -> None:
    for path, says in (
        ("/no/metrics", r"answered 404 Not Found; start .* telemetry\.prometheus_hz to 0"),
        ("/v1/models", "do not cover the whole load"),
    ):
        warnings: list[ResultWarning] = []
        with sampler("prometheus", tmp_path / "prometheus.jsonl", samples_of(server, path), warnings):
            pass
        assert [warning.code for warning in warnings] == ["prometheus-sampler-failed"]
        assert re.search(says, warnings[0].message)


def test_readings_end_soon_after_they_are_told_to(server: SimServer) -> None:
    stopped = Event()
    samples = prometheus_samples(str(server.client.base_url.join("/metrics")), 0.01, stopped)
    assert next(samples) is not None
    Timer(0.1, stopped.set).start()
    assert len(list(samples)) == 1


def counted(results: ResultDirectory, *totals: float) -> Check:
    """The check of the first run, whose usage is 64 tokens, with these readings of the counter."""
    directory = results.runs()[0]
    (directory.path / "prometheus.jsonl").unlink()
    with directory.append("prometheus") as writer:
        for number, total in enumerate(totals):
            series = {f'{VLLM_TOKENS}{{engine="0"}}': total, f'{VLLM_TOKENS}{{engine="1"}}': 1.0}
            writer.write(PrometheusSample(t_ns=number, values=series))
    loaded = load_results(results.path)
    checks = experiment_of(loaded).checks(loaded.runs[0])
    return next(check for check in checks if check.name == "counters")


def test_a_counter_that_differs_from_usage_makes_the_run_invalid(tmp_path: Path) -> None:
    results = write_results(tmp_path / "r", block_factors=ONE_BLOCK)
    assert counted(results, 100, 130, 164).ok is True
    assert counted(results, 100).ok is None, "one reading says nothing"
    check = counted(results, 100, 165)
    assert (check.ok, check.is_fatal) == (False, True)
    assert check.detail == f"{VLLM_TOKENS} grew by 65, usage 64"
    change_requests(results, BASELINE, 0, error=RequestError(kind="timeout", message="no end"))
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


QUESTION = Message(
    role="user",
    content="A farmer has twelve sheep and sells three of them each week. How many weeks until none is left? " * 2,
)


def measured(path: Path, *, caching: str = "true", hits: str = "false", n: int = 1) -> tuple[LoadedRun, list[str]]:
    """A run whose requests ask one question again and again, and the codes of its warnings."""
    asked = {"messages": (QUESTION,), "prompt": None, "prompt_tokens": count_chat_tokens((QUESTION,))}
    requests = tuple(msgspec.structs.replace(request(i, max_tokens=6, n=n), **asked) for i in range(4))
    directory = RunDirectory(path / "run")
    context = RunContext(
        profile=parse_profile(PROFILE.format(caching=caching, hits=hits), "test"),
        requests=RequestSets.single(requests),
    )
    measure_run(context, planned(), directory)
    run = load_run(directory)
    return run, [w.code for w in run.record.warnings if w.code not in OF_A_BUSY_MACHINE | {"sim-lag"}]


def test_a_warm_prefix_cache_makes_the_run_invalid_as_soon_as_it_ends_unless_the_profile_wants_it(
    tmp_path: Path,
) -> None:
    run, codes = measured(tmp_path / "unwanted")
    assert (run.record.state, codes) == ("suspect", ["check-failed"])
    (message,) = (warning.message for warning in run.record.warnings if warning.code == "check-failed")
    for text in (
        r"check prefix-cache failed: vllm:prefix_cache_hits_total grew by [1-9]",
        "prompt tokens of 4 requests came from a cache",
        "set workload.allow_prefix_cache_hits: true",
    ):
        assert re.search(text, message)
    run, codes = measured(tmp_path / "wanted", hits="true")
    assert (run.record.state, codes) == ("done", [])
    assert sum(each.cached_tokens or 0 for each in run.requests) > 0


def test_without_a_cache_the_samples_of_one_prompt_hit_nothing(tmp_path: Path) -> None:
    run, codes = measured(tmp_path, caching="false", n=3)
    grown = measure_growth(run.prometheus, COUNTERS.prefix_hits)
    assert (run.record.state, codes, grown.count) == ("done", [], 0)


def test_the_counter_of_each_kind_of_server_is_summed_over_its_series_and_read_twice_at_least() -> None:
    def readings(name: str) -> list[PrometheusSample]:
        pages = (
            {f'{name}{{a="0"}}': total, f'{name}{{a="1"}}': 5.0, "other": 9.0 * total} for total in (10, 25, 31)
        )
        return [PrometheusSample(t_ns=i, values=values) for i, values in enumerate(pages)]

    for names in (COUNTERS.generated_tokens, COUNTERS.prefix_hits):
        for name in names:
            grown = measure_growth(readings(name), names)
            assert (grown.name, grown.count) == (name, 21)
            assert measure_growth(readings(name)[:1], names) is None
    assert measure_growth(readings("vllm:something_else_total"), COUNTERS.generated_tokens) is None


def first_and_last(*states: tuple[int, int]) -> list[float]:
    """The first and the last reading of a page that shows these (tokens, running requests), the last for ever."""
    shown = itertools.chain(states, itertools.repeat(states[-1]))

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            tokens, running = next(shown)
            self.send_response(200)
            self.end_headers()
            page = f"vllm:generation_tokens_total {tokens}\nvllm:num_requests_running {running}\n"
            self.wfile.write(page.encode())

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    stopped = Event()
    stopped.set()
    with handled_by(Page) as url:
        *_, last = prometheus_samples(f"{url}/metrics", 1, stopped, settles=True)
        stopped.clear()
        first = next(prometheus_samples(f"{url}/metrics", 1, stopped, settles=True))
    return [reading.values["vllm:generation_tokens_total"] for reading in (first, last)]


def test_a_server_that_counts_late_is_read_until_it_has_caught_up_and_one_that_never_rests_all_the_same() -> None:
    assert first_and_last((10, 1), (40, 1), (64, 0), (64, 0)) == [64, 64]
    assert first_and_last((10, 1), (10, 1), (10, 1), (64, 0), (64, 0)) == [64, 64]
    assert first_and_last((10, 3)) == [10, 10]
