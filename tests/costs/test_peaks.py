"""FLOP/s are compared with peaks of the device that did the work, or with none."""

import pytest
from support.results.builders import edit_manifest, write_results

from benchctl.analysis.experiment.experiment import experiment_of, load_experiment
from benchctl.costs.flops import utilization_frac
from benchctl.engines.sim.options import SimOptions
from benchctl.records.loaded import load_results
from benchctl.records.schema import GpuInfo


def hardware_of(tmp_path, engine, *names, options="{}"):
    results = write_results(tmp_path / "r", block_factors=({"baseline": 1.0, "guided": 1.0},))
    results.write_profile(results.profile_yaml().replace("{kind: sim}", f"{{kind: sim, options: {options}}}"))
    gpus = tuple(GpuInfo(index=i, name=name) for i, name in enumerate(names))
    edit_manifest(results, engine=engine, gpus=gpus)
    loaded = load_results(results.path)
    experiment = experiment_of(loaded)
    run = loaded.runs[0]
    total, wall_s = experiment.flops(run).published.total, experiment.metrics(run)["wall_s"]
    share = utilization_frac(total, wall_s, experiment.hardware_of(run.record))
    return experiment.hardware, [warning.code for warning in experiment.warnings], share


def test_a_simulated_server_has_the_device_whose_step_times_it_has_else_that_of_the_profile(tmp_path):
    hardware, codes, on_h100 = hardware_of(tmp_path / "h100", "sim")
    assert (hardware.name, codes) == ("h100-sxm", [])
    hardware, codes, on_a100 = hardware_of(tmp_path / "a100", "sim", options="{hardware: a100-sxm}")
    assert (hardware.name, codes) == ("a100-sxm", [])
    assert on_a100 == pytest.approx(on_h100 * 989.4 / 312)
    assert SimOptions(cost_model="llm-mock", hardware="a100-sxm").simulated_hardware is None


def test_each_variant_that_simulates_another_device_is_compared_with_the_peaks_of_its_own(tmp_path):
    results = write_results(tmp_path / "r", block_factors=({"baseline": 1.0, "guided": 1.0},))
    server = "{value_model: qwen2.5-1.5b, hardware: a100-sxm}"
    results.write_profile(results.profile_yaml().replace("{value_model: qwen2.5-1.5b}", server))
    experiment = load_experiment(results.path)
    devices = [experiment.hardware_of(run.record).name for run in experiment.results.runs]
    assert devices == ["h100-sxm", "a100-sxm"]
    assert [experiment.run_time(run).floor.hardware for run in experiment.results.runs] == devices


def test_a_real_server_on_a_machine_without_a_gpu_is_compared_with_no_peak(tmp_path):
    assert hardware_of(tmp_path, "vllm") == (None, [], None)


def test_the_gpu_of_the_profile_is_compared_with_its_own_peak(tmp_path):
    hardware, codes, share = hardware_of(tmp_path, "vllm", "NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3")
    assert (hardware.name, codes) == ("h100-sxm", [])
    assert share > 0


@pytest.mark.parametrize("names", [("NVIDIA H200",), ("NVIDIA H100 80GB HBM3", "NVIDIA H200")])
def test_another_gpu_than_the_profiles_leaves_the_comparison_out_and_says_so(tmp_path, names):
    assert hardware_of(tmp_path, "vllm", *names) == (None, ["hardware-differs"], None)


def test_a_gpu_that_nobody_knows_is_taken_at_the_profiles_word(tmp_path):
    hardware, codes, _ = hardware_of(tmp_path, "vllm", "NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    assert (hardware.name, codes) == ("h100-sxm", ["hardware-unknown"])
