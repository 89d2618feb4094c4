"""Devices: their peaks, what a run was measured on, and the floor of a guided step."""

from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st
from support.results.builders import edit_manifest, write_results

from benchctl.analysis.experiment.experiment import experiment_of, load_experiment
from benchctl.costs.flops import utilization_frac
from benchctl.costs.hardware import HARDWARE, hardware_for, hardware_or_none
from benchctl.costs.roofline import LAYER_OPERATIONS, SECOND_PASS_OPERATIONS, STEP_OPERATIONS, guided_floor
from benchctl.costs.shapes import shape_for
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
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
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
    ("name", "flops", "bandwidth", "memory"),
    [
        ("h100-sxm", 989.4e12, 3.35e12, 80e9),
        ("a100-sxm", 312e12, 2.039e12, 80e9),
        ("my-cpu:1.5:80", 1.5e12, 80e9, None),
        ("my-cpu:1.5:80:64", 1.5e12, 80e9, 64e9),
    ],
)
def test_the_peaks_that_published_utilisations_refer_to_and_those_that_a_user_states(
    name, flops, bandwidth, memory
):
    device = hardware_for(name)
    peaks = device.peak_flops_per_s, device.bandwidth_bytes_per_s, device.memory_bytes
    assert peaks == (flops, bandwidth, memory)
    assert (device.source == "stated by the user") == (":" in name)


@pytest.mark.parametrize("text", ["cpu:fast:80", "cpu:0:80", "cpu:1.5:-1", ":1:1", "cpu:1:2:3:4", "cpu:nan:1"])
def test_stated_peaks_that_are_not_positive_numbers_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"give a name and two positive numbers, .*such as cpu:1\.5:80"):
        hardware_for(text)


def test_a_precision_without_faster_products_has_the_peak_of_bfloat16():
    precisions = {"a100-sxm": ("bfloat16", "fp8", "int8"), "h100-sxm": ("fp8", "fp4"), "b200": ("fp4",)}
    peaks = {name: [hardware_for(name).peak_of(each) / 1e12 for each in of] for name, of in precisions.items()}
    assert peaks == {"a100-sxm": [312, 312, 624], "h100-sxm": [1978.9, 1978.9], "b200": [9000]}


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
    (h100, *of_h100), (a100, *of_a100) = (
        hardware_of(tmp_path / name, "sim", options=f"{{hardware: {name}}}") for name in ("h100-sxm", "a100-sxm")
    )
    assert (h100.name, a100.name) == ("h100-sxm", "a100-sxm")
    assert of_a100 == [[], pytest.approx(of_h100[1] * 989.4 / 312)]
    assert SimOptions(cost_model="llm-mock", hardware="a100-sxm").simulated_hardware is None


def test_each_variant_that_simulates_another_device_is_compared_with_the_peaks_of_its_own(tmp_path):
    results = write_results(tmp_path / "r", block_factors=({"baseline": 1.0, "guided": 1.0},))
    server = "{value_model: qwen2.5-1.5b, hardware: a100-sxm}"
    results.write_profile(results.profile_yaml().replace("{value_model: qwen2.5-1.5b}", server))
    experiment = load_experiment(results.path)
    devices = [experiment.hardware_of(run.record).name for run in experiment.results.runs]
    assert devices == ["h100-sxm", "a100-sxm"]
    assert [experiment.run_time(run).floor.hardware for run in experiment.results.runs] == devices


@pytest.mark.parametrize(
    ("names", "hardware", "codes"),
    [
        ((), None, []),
        (("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"), "h100-sxm", []),
        (("NVIDIA H200",), None, ["hardware-differs"]),
        (("NVIDIA H100 80GB HBM3", "NVIDIA H200"), None, ["hardware-differs"]),
        (("NVIDIA H100 80GB HBM3 MIG 1g.10gb",), "h100-sxm", ["hardware-unknown"]),  # at the profile's word
    ],
    ids=["no GPU", "that of the profile", "another", "one of them", "unknown"],
)
def test_a_real_server_is_compared_with_the_peak_of_the_profiles_gpu_and_with_no_others(
    tmp_path, names, hardware, codes
):
    device, warnings, share = hardware_of(tmp_path, "vllm", *names)
    assert (device and device.name, warnings, share is None) == (hardware, codes, hardware is None)


BASE, VALUE, H200 = shape_for("qwen2.5-7b"), shape_for("qwen2.5-1.5b"), HARDWARE["h200-sxm"]
BASE_WEIGHTS = 28 * (2 * 3584 * 128 * (28 + 4) + 3 * 3584 * 18944) + 3584 * 152064
VALUE_WEIGHTS = 28 * (2 * 1536 * 128 * (12 + 2) + 3 * 1536 * 8960) + 1536 * 1536 + 1536
"""Without the embedding, which is a gather of a few rows, and with the head."""


def floor(batch=64, candidates=5, context=300, *, base=BASE, value=VALUE, device=H200, **options):
    return guided_floor(base, value, device, batch=batch, candidates=candidates, context=context, **options)


def test_the_base_step_of_64_rows_reads_its_weights_and_prefixes():
    prefixes = 64 * (301 + 1) * 28 * 2 * 4 * 128 * 2
    assert floor().base_s == pytest.approx((2 * BASE_WEIGHTS + prefixes) / 4.8e12)


@pytest.mark.parametrize(
    ("scoring", "tokens", "ratio"), [("reuse", 5 * 64, 1.278), ("recompute", 6 * 64, 1.332)], ids=["reuse", "all"]
)
def test_the_value_model_computes_longer_than_it_reads_at_64_rows_of_five(scoring, tokens, ratio):
    value_head, attention = 2 * 1536 * 1536 + 2 * 1536, 28 * 4 * 12 * 128
    flops = tokens * (2 * VALUE_WEIGHTS - value_head + 301 * attention) + 320 * value_head
    of_step = floor(scoring=scoring)
    assert (of_step.value_tokens, of_step.value_s) == pytest.approx((tokens, flops / 989.4e12))
    assert of_step.ratio == pytest.approx(ratio, abs=1e-3)


def test_two_phases_read_the_weights_twice_and_each_prefix_twice():
    once, twice = floor(batch=1), floor(batch=1, scoring="two-phase")
    assert once.value_s == pytest.approx((2 * VALUE_WEIGHTS + (301 + 5) * 28672) / 4.8e12)
    assert twice.value_s == pytest.approx((4 * VALUE_WEIGHTS + (2 * 301 + 6) * 28672) / 4.8e12)


def test_rows_without_scores_bring_one_missing_token_and_one_candidate_leaves_nothing_to_guide():
    assert floor(unscored_frac=0.25).value_tokens == 48 * 5 + 16
    assert floor(unscored_frac=0.25, scoring="recompute").value_tokens == 48 * 5 + 64
    assert floor(candidates=1, scoring="two-phase", launch_s=1.0).ratio == 1
    assert floor().sampling_s == pytest.approx(64 * 152064 * 4 * 2 / 4.8e12)  # logits are read and written once


def test_launches_add_what_the_host_needs_beyond_the_device():
    num_operations = 28 * LAYER_OPERATIONS + STEP_OPERATIONS
    eager = floor(batch=1, launch_s=5e-6)
    assert eager.launches_s == pytest.approx(num_operations * 5e-6 - eager.value_s - eager.sampling_s)
    assert floor(batch=1).launches_s == 0
    assert floor(batch=256, launch_s=5e-6).launches_s == 0, "256 rows keep the device busy for longer"
    second_pass = 28 * LAYER_OPERATIONS + SECOND_PASS_OPERATIONS
    assert floor(scoring="two-phase").num_operations == num_operations + second_pass


def test_a_row_is_bound_by_the_weights_of_both_models_and_many_without_prefixes_by_their_arithmetic():
    one, many = floor(batch=1, candidates=2, context=0), floor(batch=1_000_000, context=0)
    assert one.ratio == pytest.approx(1 + VALUE_WEIGHTS / BASE_WEIGHTS, rel=1e-3)
    attention = (28 * 4 * 12 * 128, 28 * 4 * 28 * 128)
    ratio = 5 * (2 * VALUE_WEIGHTS + attention[0]) / (2 * BASE_WEIGHTS + attention[1])
    assert many.ratio - many.parts["sampling"] == pytest.approx(1 + ratio, rel=1e-6)


def test_weights_of_eight_bits_are_read_in_half_the_time_and_multiplied_at_the_faster_peak():
    half = floor(batch=1, context=0, value=shape_for("Qwen2.5-1.5B-FP8")).value[0]
    head = 2 * (1536 * 1536 + 1536)
    assert half.weights_s == pytest.approx(((VALUE_WEIGHTS - head // 2) * (1 + 4 / 128**2) + head) / 4.8e12)
    assert half.compute_s == pytest.approx(floor(batch=1, context=0).value[0].compute_s * 989.4 / 1978.9)


def never_falls(*steps):
    """Each step costs at least what the one before does, but for rounding."""
    ratios = [floor(**step).ratio for step in steps]
    return all(after >= before * (1 - 1e-12) for before, after in pairwise(ratios))


VALUE_MODELS = [shape_for(f"qwen2.5-{size}") for size in ("0.5b", "1.5b", "3b", "7b")]
steps = st.fixed_dictionaries(
    {
        "value": st.sampled_from(VALUE_MODELS),
        "batch": st.integers(1, 1024),
        "candidates": st.integers(2, 64),
        "context": st.floats(0, 1e5),
        "scoring": st.sampled_from(["reuse", "recompute", "two-phase"]),
        "unscored_frac": st.floats(0, 1),
        "launch_s": st.none() | st.floats(0, 1e-4),
    }
)


@settings(max_examples=50)
@given(step=steps, device=st.sampled_from(list(HARDWARE.values())))
def test_guidance_costs_something_and_its_parts_add_up(step, device):
    of_step = floor(device=device, **step)
    assert of_step.ratio > 1
    assert min(of_step.parts.values()) >= 0
    assert 1 + sum(of_step.parts.values()) == pytest.approx(of_step.ratio)


@settings(max_examples=50)
@given(step=steps)
def test_more_work_never_costs_less(step):
    """One candidate more; and without launches, as 3B has more layers than 7B: a larger value model, rows that need
    scores, one pass over everything instead of reuse, and two instead of one.
    """
    assert never_falls(step, step | {"candidates": step["candidates"] + 1})
    alone = step | {"launch_s": None}
    assert never_falls(*(alone | {"value": value} for value in VALUE_MODELS))
    assert never_falls(alone, alone | {"unscored_frac": 0.0})
    assert never_falls(*(alone | {"scoring": scoring} for scoring in ("reuse", "recompute", "two-phase")))


@settings(max_examples=50)
@given(step=steps, factor=st.floats(0.1, 10))
def test_a_device_that_is_faster_at_everything_changes_no_ratio(step, factor):
    devices = [hardware_for(f"one:{500 * scale:.17g}:{2000 * scale:.17g}") for scale in (1.0, factor)]
    ratios = [floor(**step | {"launch_s": None, "device": device}).ratio for device in devices]
    assert ratios[0] == pytest.approx(ratios[1])
