"""A real vLLM run, simulated from measured layers and its settings alone, meets its times."""

import json

import numpy as np
import pytest

from benchctl.errors import UsageError
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


def test_a_run_that_noted_little_is_predicted_with_what_is_known(tmp_path, run):
    folder = tmp_path / "bare"
    folder.mkdir()
    for name in ("config.json", "requests.jsonl"):
        (folder / name).write_bytes((RUN / name).read_bytes())
    meta = json.loads((RUN / "meta.json").read_text())
    noted = {key: meta[key] for key in ("model", "engine_kwargs")}
    (folder / "meta.json").write_text(json.dumps(noted))
    bare = read_run(folder, layer_profile=RUN)
    assert bare.config.num_kv_blocks == run.config.num_kv_blocks  # from the memory beside the weights
    assert bare.curve is None
    assert len(bare.remarks) == 3
    assert np.allclose(np.diff(bare.arrival_ns), np.diff(run.arrival_ns), atol=1e8)


def test_a_run_of_several_engines_is_refused(tmp_path):
    meta = json.loads((RUN / "meta.json").read_text())
    meta["engine_kwargs"]["data_parallel_size"] = 2
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    (tmp_path / "requests.jsonl").write_bytes((RUN / "requests.jsonl").read_bytes())
    with pytest.raises(UsageError, match="a run of 2 engines"):
        read_run(tmp_path)


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
