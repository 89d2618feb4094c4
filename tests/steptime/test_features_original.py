"""The published form of the step-time model, against its worked cases."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.step_time import decoding, prompts

from benchctl.costs.hardware import hardware_for
from benchctl.costs.shapes import shape_for
from benchctl.steptime.features import feature_names, features, latent_flops
from benchctl.steptime.work import Deployment, StepWork

ORACLES = Path(__file__).parents[2] / "../shared/oracles/steptime.json"
ILLUSTRATIVE = (1.5, 1.4, 1.3, 1.2, 4, 50, 200)
CASES = {
    "C1": ("llama-2-7b", 1, prompts(1, 512)),
    "C2": ("llama-3.1-8b", 1, prompts(1, 128)),
    "C3": ("llama-3.1-8b", 1, decoding(1, 1024)),
    "C5": ("llama-3.1-70b", 4, decoding(64, 300)),
    "C6": ("mixtral-8x7b", 2, decoding(1, 1024)),
    "C7": ("mixtral-8x7b", 2, decoding(4, 1024)),
    "C8": ("mixtral-8x22b", 4, prompts(1, 1024)),
    "C10": ("deepseek-v3", 1, prompts(1, 128)),
    "C11": ("deepseek-v3", 8, decoding(32, 4096)),
    "C12": ("deepseek-v3", 8, StepWork()),
}


@pytest.fixture(scope="module")
def oracles():
    if not ORACLES.is_file():
        pytest.skip(f"{ORACLES} is not on this machine")
    return json.loads(ORACLES.read_text())


def deployment_of(model, tensor_parallel):
    """The published cases store all weights in bfloat16."""
    placed = {"hardware": hardware_for("h100-sxm"), "tensor_parallel": tensor_parallel}
    return Deployment(shape=shape_for(model), weight_bytes_per_param=2.0, **placed)


@pytest.mark.parametrize("case", CASES)
def test_the_published_form_gives_the_worked_features_and_step_times(case, oracles):
    expected = next(each for each in oracles["cases"] if each["name"].split()[0] == case)
    model, tensor_parallel, work = CASES[case]
    deployment = deployment_of(model, tensor_parallel)
    h100 = deployment.hardware
    columns = features(work, deployment, "original", "linear")
    free = replace(h100, bandwidth_bytes_per_s=1e40), replace(h100, name="fast", peak_flops_per_s=1e40)
    compute, kv = (features(work, replace(deployment, hardware=each), "original", "linear") for each in free)
    parts = {
        "F_pf_compute": compute["prefill"],
        "F_pf_kv": kv["prefill"],
        "F_dc_compute": compute["decode"],
        "F_dc_kv": kv["decode"],
        "F_weight_static": columns["static_weights"],
        "F_weight_moe": columns["expert_weights"],
        "F_tp": columns["all_reduce"],
        "num_requests_per_step": columns["requests"],
    }
    assert parts == pytest.approx({name: expected["features_us"][name] for name in parts}, abs=1e-4)
    uniform = features(work, deployment, "original", "uniform")["expert_weights"]
    assert uniform == pytest.approx(expected["F_weight_moe_uniform"], abs=1e-4)
    # Step times are stated with three decimals.
    pure = sum(value for name, value in columns.items() if name not in {"requests", "steps"})
    assert pure == pytest.approx(expected["StepTime_pure_us"], abs=1e-3)
    illustrative = sum(weight * value for weight, value in zip(ILLUSTRATIVE, columns.values(), strict=True))
    assert illustrative == pytest.approx(expected["StepTime_illustr_us"], abs=1e-3)


def test_the_seven_terms_of_a_latent_attention_are_those_of_the_document(oracles):
    published = oracles["deepseek_v3_layer_GFLOP(T=128,S=0,TP=1)"]
    shape = shape_for("deepseek-v3")
    of_token, of_position = latent_flops(shape, shape.latent, 1)
    gflops = {
        "w_dkv": of_token["down"] * 128e-9,
        "w_q": of_token["query"] * 128e-9,
        "q_absorb": of_token["query_absorbed"] * 128e-9,
        "v_absorb": of_token["value_absorbed"] * 128e-9,
        "w_o": of_token["output"] * 128e-9,
        "scores_nope": of_position["nope"] * 128 * 64e-9,
        "scores_rope": of_position["rope"] * 128 * 64e-9,
    }
    gflops["total"] = sum(gflops.values())
    assert gflops == pytest.approx({name: published[name] for name in gflops}, abs=1e-4)
    assert gflops["total"] / 989e3 * 1e6 == pytest.approx(published["us_at_989"], abs=1e-3)
    assert sum(of_token.values()) / 2e6 == pytest.approx(oracles["deepseek_v3_attn_weight_Mparams"], abs=1e-3)
    # The cache of 128 heads of 128 keys and values against one of 512 + 64.
    assert 2 * 128 * 128 / shape.latent.cache_elements() == pytest.approx(oracles["kv_ratio"], abs=1e-3)


def test_an_empty_step_reads_the_experts_of_one_token():
    columns = features(StepWork(), deployment_of("deepseek-v3", 8), "original", "linear")
    read = {"static_weights": 1274.6067, "expert_weights": 1524.9738, "steps": 1}
    assert columns == pytest.approx(dict.fromkeys(feature_names("original"), 0) | read, abs=1e-4)
