"""Peaks of accelerators: the names they go by, and the device whose work they are compared with."""

import pytest
from support.results.builders import edit_manifest, write_results

from benchctl.analysis.experiment.experiment import experiment_of, load_experiment
from benchctl.costs.flops import utilization_frac
from benchctl.costs.hardware import HARDWARE, hardware_for, hardware_or_none
from benchctl.engines.sim.options import SimOptions
from benchctl.errors import UsageError
from benchctl.records.loaded import load_results
from benchctl.records.schema import GpuInfo


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("h100-sxm", "h100-sxm"),
        ("H100", "h100-sxm"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA B200", "b200"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_a_device_is_known_by_its_table_name_and_by_its_drivers_name(name: str, device: str) -> None:
    assert hardware_for(name) is HARDWARE[device]


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GH200 480GB",
        "NVIDIA GB200",
        "NVIDIA L40",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "Tesla V100-SXM2-16GB",
        "",
    ],
)
def test_a_slice_or_a_relative_of_a_known_device_is_unknown(name: str) -> None:
    assert hardware_or_none(name) is None
    with pytest.raises(UsageError, match=r"unknown hardware .*: name one of h100-sxm, .*mi300x"):
        hardware_for(name)


@pytest.mark.parametrize(
    ("name", "flops", "bandwidth"),
    [("h100-sxm", 989.4e12, 3.35e12), ("a100-sxm", 312e12, 2.039e12), ("my-cpu:1.5:80", 1.5e12, 80e9)],
)
def test_the_peaks_that_published_utilisations_refer_to_and_those_that_a_user_states(name, flops, bandwidth):
    device = hardware_for(name)
    assert (device.name, device.peak_flops_per_s, device.bandwidth_bytes_per_s) == (name, flops, bandwidth)


def test_peaks_that_the_user_states_are_a_device():
    device, with_memory = hardware_for("my-cpu:1.5:80"), hardware_for("my-cpu:1.5:80:64")
    assert (device.memory_bytes, with_memory.memory_bytes) == (None, 64e9)
    assert device.source == "stated by the user"


@pytest.mark.parametrize("text", ["cpu:fast:80", "cpu:0:80", "cpu:1.5:-1", ":1:1", "cpu:1:2:3:4", "cpu:nan:1"])
def test_stated_peaks_that_are_not_positive_numbers_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"give a name and two positive numbers, .*such as cpu:1\.5:80"):
        hardware_for(text)


def test_a_precision_without_faster_products_has_the_peak_of_bfloat16():
    a100, b200 = hardware_for("a100-sxm"), hardware_for("b200")
    assert a100.peak_of("fp8") == a100.peak_of("bfloat16") == 312e12
    assert a100.peak_of("int8") == 624e12
    assert hardware_for("h100-sxm").peak_of("fp4") == hardware_for("h100-sxm").peak_of("fp8") == 1978.9e12
    assert b200.peak_of("fp4") == 9000e12
    assert hardware_for("NVIDIA RTX PRO 6000 Blackwell Workstation Edition").name == "rtx-pro-6000"


def test_devices_that_share_layers_have_the_sum_of_their_peaks():
    four = hardware_for("h100-sxm").times(4)
    assert (four.name, four.peak_of("fp8")) == ("4 x h100-sxm", 4 * 1978.9e12)
    assert four.bandwidth_bytes_per_s == 4 * 3350e9


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
