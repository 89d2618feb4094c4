"""Signs of a saturated run, and that two of them keep it out of a fit."""

from pathlib import Path

import msgspec
import pytest
from support.results.builders import edit_requests, edit_steps, write_results

from benchctl.analysis.experiment.experiment import load_experiment
from benchctl.analysis.experiment.observed import read_sources, saturation, saturation_signs
from benchctl.records.directory import ResultDirectory
from benchctl.records.loaded import LoadedRun
from benchctl.records.record import RequestError, RequestRecord


@pytest.fixture
def results(tmp_path: Path) -> ResultDirectory:
    return write_results(tmp_path / "r", num_requests=40, n=1)


def first_run(results: ResultDirectory) -> LoadedRun:
    return load_experiment(results.path).results.runs[0]


def delay_requests(results: ResultDirectory, delay_ns: int) -> None:
    """Let each request of the first run be sent, and wait for its first token, later than the one before it."""

    def later(request: RequestRecord) -> RequestRecord:
        sent = (request.sent_ns or 0) + request.index * 10_000_000
        first, *rest = (at + request.index * (10_000_000 + delay_ns) for at in request.choices[0].chunk_ns)
        choice = msgspec.structs.replace(request.choices[0], chunk_ns=(first, *rest))
        return msgspec.structs.replace(
            request, scheduled_ns=sent, sent_ns=sent, done_ns=rest[-1], choices=(choice,)
        )

    edit_requests(results, first_run(results).record.run_id, later)


def fail_every(results: ResultDirectory, nth: int) -> None:
    def fail(request: RequestRecord) -> RequestRecord:
        if request.index % nth:
            return request
        return msgspec.structs.replace(request, error=RequestError(kind="reset", message="gone"))

    edit_requests(results, first_run(results).record.run_id, fail)


def test_a_run_that_keeps_up_shows_no_sign(results: ResultDirectory) -> None:
    assert list(saturation_signs(first_run(results))) == []
    assert saturation(first_run(results)) is None


def test_first_tokens_that_come_later_and_later_are_two_signs(results: ResultDirectory) -> None:
    delay_requests(results, 5_000_000)
    signs = list(saturation_signs(first_run(results)))
    assert signs[0] == "first tokens come later and later"
    assert signs[1].startswith("the last fifth waits ")
    assert saturation(first_run(results)) == f"saturated: {', '.join(signs)}"


def test_one_sign_alone_does_not_condemn_a_run(results: ResultDirectory) -> None:
    fail_every(results, 10)
    assert list(saturation_signs(first_run(results))) == ["10% of the requests failed"]
    assert saturation(first_run(results)) is None


def test_failures_and_preemptions_together_do(results: ResultDirectory) -> None:
    fail_every(results, 10)
    edit_steps(
        results,
        first_run(results).record.run_id,
        lambda step: msgspec.structs.replace(step, preempted=2) if step.step > 3 else step,
    )
    assert saturation(first_run(results)) == "saturated: 10% of the requests failed, 0.25 preemptions a request"


def test_few_requests_have_no_trend(tmp_path: Path) -> None:
    results = write_results(tmp_path / "few", num_requests=6, n=1)
    delay_requests(results, 50_000_000)
    assert list(saturation_signs(first_run(results))) == []


def test_the_steps_of_a_saturated_run_are_no_input_of_a_fit(results: ResultDirectory) -> None:
    delay_requests(results, 5_000_000)
    sources = read_sources([results.path])
    assert len(sources.observed) == 5
    (skipped,) = sources.skipped
    assert "000-b0-baseline: saturated: first tokens come later and later" in skipped
