"""The cluster section: what stands in the header of a job script is checked before there is one."""

import pytest

from benchctl.errors import ProfileError
from benchctl.measure.devices import gpus_of_block
from benchctl.profile.load import dump_profile, load_profile, parse_profile, profile_sha256
from benchctl.profile.sections import ClusterSettings, scheduler_seconds


def with_cluster(**keys):
    return load_profile("ci-smoke", overrides=[f"cluster.{key}={value}" for key, value in keys.items()])


def test_times_have_the_forms_of_slurm_or_are_minutes():
    times = {"90": 5400, "1:30": 90, "01:30:00": 5400, "36:00:00": 129_600}
    times |= {"2-03": 183_600, "2-03:04": 183_840, "2-03:04:05": 183_845}
    times |= dict.fromkeys(("UNLIMITED", "-5", "1h", "1:2:3:4"))
    assert {text: scheduler_seconds(text) for text in times} == times
    assert with_cluster(time="12:00:00").cluster.time_s == 43_200
    assert with_cluster(time=30).cluster.time_s == 1800
    assert ClusterSettings().time_s is None


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("time", "1h", "is '1h'; write HH:MM:SS, D-HH:MM:SS, or minutes, above 0"),
        ("time", "'0:00'", "write HH:MM:SS"),
        ("partition", "'a b'", "must match"),
        ("account", "'x\"#'", "must match"),
        ("mem", "64GB", "must match"),
        ("exclude", "'node1; rm'", "must match"),
        ("gpus_per_block", "-1", "at least 0"),
        ("container_runtime", "docker", "allowed are apptainer, pyxis"),
        ("setup", '["a\\nb"]', "control characters"),
        ("setup", "[export HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz012345]", "looks like a secret"),
        ("nodes", "2", "unknown key"),
    ],
)
def test_what_no_job_script_can_hold_is_refused_with_its_key(key: str, value: str, words: str):
    with pytest.raises(ProfileError) as error:
        with_cluster(**{key: value})
    assert f"cluster.{key}" in str(error.value)
    assert words in str(error.value)


def test_the_jobs_of_a_cluster_do_not_change_the_identity_of_an_experiment():
    here, there = load_profile("topk-sweep"), load_profile("topk-sweep", overrides=["cluster.partition=long"])
    assert profile_sha256(here) == profile_sha256(there)
    assert parse_profile(dump_profile(there), "profile.yaml").cluster.partition == "long"


@pytest.mark.parametrize(
    ("engine", "overrides", "gpus"),
    [
        ("sim", [], 0),
        ("transformers-cpu", [], 0),
        ("vllm", ["engine.options.needs_gpu=true", "engine.options.tensor_parallel_size=4"], 4),
        ("vllm", ["cluster.gpus_per_block=2"], 2),
        ("vllm-cpu", [], None),  # it can do without, so their number is open
    ],
)
def test_a_block_has_the_gpus_that_its_largest_server_is_spread_over(engine, overrides, gpus):
    assert gpus_of_block(load_profile("topk-sweep", engine=engine, overrides=overrides)) == gpus
