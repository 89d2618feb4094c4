"""What makes a run unfair is found when it ends: planted leaks on the simulator, late counters on a real page."""

import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from threading import Event

from support.servers.handler_server import handled_by

from benchctl.analysis.metrics.server_counters import COUNTERS, measure_growth
from benchctl.measure.run import RunContext, measure_run
from benchctl.measure.telemetry.samplers import prometheus_samples
from benchctl.profile.load import parse_profile
from benchctl.records.directory import RunDirectory
from benchctl.records.loaded import LoadedRun, load_run
from benchctl.records.record import Message, PlannedRun, PreparedRequest
from benchctl.records.schema import PrometheusSample
from benchctl.workload.tokenizers import count_chat_tokens

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
