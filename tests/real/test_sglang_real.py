"""SGLang itself, started and measured through the command line, with a model of random weights.

SGLang has no packages for machines without a GPU; an environment that was put together by hand serves there too.
"""

import shutil
from typing import Any

import pytest
from support.servers.real_engines import needs, smoked
from support.steps import records_of

from benchctl.analysis.experiment.experiment import experiment_of
from benchctl.records.loaded import LoadedRun

pytestmark = [pytest.mark.real_engine, pytest.mark.slow, needs("sglang")]

ON_A_CPU = [
    "engine.options.device=cpu",
    "engine.options.attention_backend=torch_native",
    "engine.options.mem_fraction_static=0.1",
    'engine.options.env.OMP_NUM_THREADS="1"',
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A baseline whose scheduler does not overlap, and one cell of a sweep, each on a fresh server."""
    directory = tmp_path_factory.mktemp("sglang")
    on_this_machine = [] if shutil.which("nvidia-smi") else ON_A_CPU
    return smoked("sglang", "sglang", directory, "engine.options.overlap_schedule=false", *on_this_machine)


def test_every_account_of_every_run_agrees(results):
    experiment = experiment_of(results)
    for run in results.runs:
        checks = experiment.checks(run)
        assert [str(check) for check in checks if check.ok is False] == []
        confirmed = {check.name for check in checks if check.ok}
        assert {"client-tokens", "step-tokens", "counters", "prefix-cache", "step-time"} <= confirmed, checks


def test_steps_hold_every_token_and_lie_one_after_another(results):
    for run in results.runs:
        steps = measured_steps(run)
        requests = [request for request in run.requests if not request.is_warmup]
        assert sum(step.output_tokens for step in steps) == 2 * 4 * 24
        assert sum(step.num_prefill_tokens for step in steps) == sum(request.prompt_tokens for request in requests)
        ends = [step.start_ns + step.dur_ns for step in steps]
        assert all(step.dur_ns > 0 for step in steps)
        assert all(end <= step.start_ns for end, step in zip(ends, steps[1:], strict=False))
        assert run.record.times.first_send_ns < steps[0].start_ns
        assert all(sum(step.sections_ns.values()) <= step.dur_ns for step in steps)


def test_the_server_says_how_it_is_configured_and_no_more_differs_than_was_declared(results):
    baseline, cell = (run.record.effective_config for run in results.runs)
    assert baseline["server.enable_prefix_caching"] is False
    assert baseline["server.overlap_schedule"] is False
    assert baseline["server.version"]
    assert {key for key in baseline.keys() | cell.keys() if baseline.get(key) != cell.get(key)} == {
        "sampling.top_k"
    }


def measured_steps(run: LoadedRun) -> list[Any]:
    return [step for step in records_of(run) if not step.is_warmup]
