"""The published form of the step-time model, against its worked cases."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchctl.costs.hardware import hardware_for
from benchctl.costs.shapes import shape_for
from benchctl.steptime.features import feature_names, features, latent_flops
from benchctl.steptime.work import Deployment, StepWork

ORACLES = Path(__file__).parents[2] / "../shared/oracles/steptime.json"
ILLUSTRATIVE = (1.5, 1.4, 1.3, 1.2, 4, 50, 200)


def prompts(num: int, tokens: int, context: int = 0) -> StepWork:
    return StepWork(
        num_prefills=num,
        prefill_tokens=num * tokens,
        prefill_context=num * context,
        prefill_positions=num * tokens * (context + tokens / 2),
        num_sampled=num,
    )


def decoding(rows: int, context: int) -> StepWork:
    return StepWork(
        num_decodes=rows,
        decode_tokens=rows,
        decode_context=rows * context,
        decode_positions=rows * (context + 0.5),
        num_sampled=rows,
    )


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


def oracles() -> dict[str, Any]:
    if not ORACLES.is_file():
        pytest.skip(f"{ORACLES} is not on this machine")
    document: dict[str, Any] = json.loads(ORACLES.read_text())
    return document


def deployment_of(model: str, tensor_parallel: int) -> Deployment:
    """The published cases store all weights in bfloat16."""
    return Deployment(
        shape=shape_for(model),
        hardware=hardware_for("h100-sxm"),
        tensor_parallel=tensor_parallel,
        weight_bytes_per_param=2.0,
    )


@pytest.mark.parametrize("case", CASES)
def test_the_published_form_gives_the_worked_features_and_step_times(case: str) -> None:
    expected = next(each for each in oracles()["cases"] if each["name"].split()[0] == case)
    model, tensor_parallel, work = CASES[case]
    deployment = deployment_of(model, tensor_parallel)
    columns = features(work, deployment, "original", "linear")
    without_memory = replace(deployment, hardware=replace(deployment.hardware, bandwidth_bytes_per_s=1e40))
    fast = replace(deployment.hardware, name="fast", peak_flops_per_s=1e40)
    compute = features(work, without_memory, "original", "linear")
    kv = features(work, replace(deployment, hardware=fast), "original", "linear")
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
    for name, value in parts.items():
        assert value == pytest.approx(expected["features_us"][name], abs=1e-4), name
    uniform = features(work, deployment, "original", "uniform")["expert_weights"]
    assert uniform == pytest.approx(expected["F_weight_moe_uniform"], abs=1e-4)
    # Step times are stated with three decimals.
    pure = sum(value for name, value in columns.items() if name not in {"requests", "steps"})
    assert pure == pytest.approx(expected["StepTime_pure_us"], abs=1e-3)
    illustrative = sum(weight * value for weight, value in zip(ILLUSTRATIVE, columns.values(), strict=True))
    assert illustrative == pytest.approx(expected["StepTime_illustr_us"], abs=1e-3)


def test_the_seven_terms_of_a_latent_attention_are_those_of_the_document() -> None:
    published = oracles()["deepseek_v3_layer_GFLOP(T=128,S=0,TP=1)"]
    shape = shape_for("deepseek-v3")
    assert shape.latent is not None
    of_token, of_position = latent_flops(shape, shape.latent, 1)
    tokens, positions = 128, 128 * 64
    gflops = {
        "w_dkv": of_token["down"] * tokens,
        "w_q": of_token["query"] * tokens,
        "q_absorb": of_token["query_absorbed"] * tokens,
        "v_absorb": of_token["value_absorbed"] * tokens,
        "w_o": of_token["output"] * tokens,
        "scores_nope": of_position["nope"] * positions,
        "scores_rope": of_position["rope"] * positions,
    }
    for name, value in gflops.items():
        assert value / 1e9 == pytest.approx(published[name], abs=1e-4), name
    assert sum(gflops.values()) / 1e9 == pytest.approx(published["total"], abs=1e-4)
    assert sum(gflops.values()) / 989e12 * 1e6 == pytest.approx(published["us_at_989"], abs=1e-3)
    assert sum(of_token.values()) / 2 / 1e6 == pytest.approx(oracles()["deepseek_v3_attn_weight_Mparams"], abs=1e-3)
    # The cache of 128 heads of 128 keys and values against one of 512 + 64.
    assert 2 * 128 * 128 / shape.latent.cache_elements() == pytest.approx(oracles()["kv_ratio"], abs=1e-3)


def test_an_empty_step_reads_the_experts_of_one_token() -> None:
    columns = features(StepWork(), deployment_of("deepseek-v3", 8), "original", "linear")
    assert columns["static_weights"] == pytest.approx(1274.6067, abs=1e-4)
    assert columns["expert_weights"] == pytest.approx(1524.9738, abs=1e-4)
    assert columns["prefill"] == columns["decode"] == columns["all_reduce"] == columns["requests"] == 0
    assert tuple(columns) == feature_names("original")
