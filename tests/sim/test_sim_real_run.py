"""A real vLLM run, simulated from measured layers and its settings alone, meets its times."""

import numpy as np
import pytest

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


def test_latencies_are_predicted_within_their_goals(run, prediction):
    rows = rows_of(run.times, prediction[1])
    compared = [row for row in rows if row["goal"] is not None]
    assert len(compared) == len(GOALS)
    assert all(row["holds"] == "yes" for row in compared), compared


def test_the_running_batch_follows_the_real_one_second_by_second(run, prediction):
    running, memory = curve_rows(run.curve, prediction[2])
    assert running["mean distance"] < 0.05 * running["measured mean"]
    assert memory["mean distance"] < 5


def test_every_request_gets_the_tokens_that_it_got_in_reality(run, prediction):
    simulation, times, _ = prediction
    assert np.array_equal(times.output_tokens, run.times.output_tokens)
    assert (simulation.requests.preemptions > 0).any()
    assert not run.remarks
