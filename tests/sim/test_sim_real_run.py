"""A real vLLM run, simulated from measured layers and its settings alone, meets its times."""

import numpy as np
import pytest

from benchctl.profile.load import load_profile
from benchctl.profile.planning import variant_settings
from benchctl.sim.core import SimLoad, simulate
from benchctl.sim.virtual import config_of, core_request
from benchctl.workload.datasets.base import DATA_DIRECTORY_VARIABLE
from benchctl.workload.prepare import prepare_requests
from benchmarks.steptime.real_run import GOALS, curve_rows, predict, rows_of
from benchmarks.steptime.run_folder import read_run
from tests.support.datasets import DATA

RUN = DATA / "vllm-rtx4090"
pytestmark = pytest.mark.skipif(not RUN.is_dir(), reason=f"the real vLLM run is not at {RUN}")


@pytest.fixture(scope="module")
def run():
    return read_run(RUN)


@pytest.fixture(scope="module")
def prediction(run):
    return predict(run)


def test_latencies_batch_and_tokens_are_predicted_within_their_goals(run, prediction):
    simulation, times, curve = prediction
    compared = [row for row in rows_of(run.times, times) if row["goal"] is not None]
    assert len(compared) == len(GOALS)
    assert all(row["holds"] == "yes" for row in compared), compared
    running, memory = curve_rows(run.curve, curve)
    assert running["mean distance"] < 0.05 * running["measured mean"]
    assert memory["mean distance"] < 5
    assert np.array_equal(times.output_tokens, run.times.output_tokens)
    assert (simulation.requests.preemptions > 0).any()
    assert not run.remarks


def test_the_profile_of_the_run_has_the_steps_of_the_run(prediction, monkeypatch):
    monkeypatch.setenv(DATA_DIRECTORY_VARIABLE, str(DATA))
    profile = load_profile("rtx4090-replay")
    prepared = prepare_requests(profile, DATA)
    settings = variant_settings(profile, "baseline", {})
    config = config_of(settings)
    load = SimLoad(
        requests=tuple(core_request(request, settings, config) for request in prepared.requests),
        arrival_ns=tuple(request.arrival_ns for request in prepared.requests),
    )
    replayed, direct = simulate(config, [load]).step_columns(), prediction[0].step_columns()
    assert np.array_equal(replayed.dur_ns, direct.dur_ns)
    assert np.array_equal(replayed.num_seqs, direct.num_seqs)
