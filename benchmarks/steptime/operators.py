"""Operators against measured tables: one half of the shapes is fitted, the other predicted, and vice versa.

    python -m benchmarks.steptime.operators [--data ../shared/data]

Tables: aiconfigurator (vLLM 0.14, H100 and A100) for blocks of experts, latent attention and all-reduces; vidur for
linear layers, whose sums are steps that matrix products bound. The roofline of the same operators stands beside.
"""

import argparse
from pathlib import Path

import numpy as np
import polars as pl

from benchctl.costs.hardware import hardware_for
from benchctl.costs.shapes import shape_for
from benchctl.steptime.calibrate import solve_scales
from benchctl.steptime.features import kernel_name, moved_bytes
from benchmarks.common.table import show
from benchmarks.steptime.operator_models import (
    ExpertBlock,
    Gemm,
    LatentDecode,
    expert_block_columns,
    fit_operator,
    gemm_columns,
    halves,
    latent_decode_columns,
    mape_frac,
)

GOALS = {"experts": 0.15, "latent decode": 0.15, "all-reduce": 0.15, "matrix products, H100 to A100": 0.10}
GPUS = ("h100", "a100")
LATENT = shape_for("deepseek-v3").latent
US_PER_MS = 1e3
FEW = 10
LLAMAS = {"Llama-2-7b-hf": "llama-2-7b", "Llama-2-70b-hf": "llama-2-70b"}
PRODUCTS = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, default=Path(__file__).parents[3] / "shared/data", help="Measured tables."
    )
    show(results(parser.parse_args().data), "Mean error of operators that were not fitted")


def results(data):
    """A row for each operator and device: errors on both halves when the other was fitted, and the goal."""
    rows = []
    for gpu in GPUS:
        rows.append(row("experts", gpu, experts(data, gpu)))
        rows.append(row("experts", gpu, experts(data, gpu, is_divided=False), note="one device holds all experts"))
        rows.append(row("latent decode", gpu, latent_decode(data, gpu, "bfloat16"), note="bfloat16 cache"))
        rows.append(row("all-reduce", gpu, all_reduces(data, gpu)))
    rows.append(row("latent decode", "h100", latent_decode(data, "h100", "fp8"), note="fp8 cache"))
    return [*rows, *carried_products(data)]


def row(operator, gpu, counted, note=""):
    """``counted`` holds the number of calls, the error, and that of the roofline."""
    num, error, roofline = counted
    goal = GOALS[operator]
    return {
        "operator": operator,
        "device": gpu,
        "calls": num,
        "error %": round(100 * error, 1),
        "goal %": round(100 * goal, 1),
        "holds": "yes" if error <= goal else "no",
        "roofline error %": round(100 * roofline, 1),
        "note": note,
    }


def both_halves(columns, measured_us, keys, **options):
    """Mean error of each operator, predicted by a fit to the half of the shapes that it is not in."""
    is_first, predicted = halves(keys), np.empty_like(measured_us)
    for half in (is_first, ~is_first):
        fit = fit_operator(columns[half], measured_us[half], **options)
        predicted[~half] = fit.predict_us(columns[~half])
    return mape_frac(predicted, measured_us)


def table(data, gpu, name):
    return pl.read_parquet(data / f"aiconfigurator/{gpu}_sxm" / name)


def experts(data, gpu, *, is_divided=True):
    frame = table(data, gpu, "moe/0.14.0/moe_perf.parquet").filter(
        (pl.col("moe_dtype") == "bfloat16") & pl.col("distribution").str.starts_with("power_law")
    )
    if not is_divided:
        frame = frame.filter(pl.col("moe_ep_size") == 1)
    hardware, whole = hardware_for(f"{gpu}-sxm"), {name: frame[name].to_numpy() for name in frame.columns}
    block = ExpertBlock(
        tokens=whole["num_tokens"],
        hidden=whole["hidden_size"].astype(float),
        expert_ffn=whole["inter_size"].astype(float),
        experts=whole["num_experts"],
        experts_per_token=whole["topk"],
        tensor_parallel=whole["moe_tp_size"],
        expert_parallel=whole["moe_ep_size"],
        alpha=frame["distribution"].str.strip_prefix("power_law_").cast(pl.Float64).to_numpy(),
    )
    columns, measured_us = expert_block_columns(block, hardware), whole["latency"] * US_PER_MS
    names = ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
    keys = np.stack([whole[name] for name in names], axis=1)
    choices = block.tokens * block.experts_per_token / block.expert_parallel
    params = 3 * block.hidden * block.expert_ffn / block.tensor_parallel
    reached = 1 - (1 - block.experts_per_token / block.experts) ** block.tokens
    read = block.experts / block.expert_parallel * reached * params * 2
    roofline = np.maximum(
        2 * choices * params / hardware.peak_flops_per_s * 1e6, read / hardware.bandwidth_bytes_per_s * 1e6
    )
    return len(frame), both_halves(columns, measured_us, keys), mape_frac(roofline, measured_us)


def latent_decode(data, gpu, cache):
    frame = table(data, gpu, "mla/0.14.0/generation_mla_perf.parquet").filter(pl.col("kv_cache_dtype") == cache)
    hardware = hardware_for(f"{gpu}-sxm")
    keys = frame.select("num_heads", "batch_size", "step").to_numpy().astype(float)
    calls = LatentDecode(rows=keys[:, 1], heads=keys[:, 0], context=keys[:, 2] + 1)
    columns = latent_decode_columns(calls, LATENT, hardware, cache_bytes=2.0 if cache == "bfloat16" else 1.0)
    measured_us = frame["latency"].to_numpy() * US_PER_MS
    roofline = np.maximum(columns[:, 1], columns[:, 2])
    return (
        len(frame),
        both_halves(columns, measured_us, keys, has_launch=True),
        mape_frac(roofline, measured_us),
    )


def all_reduces(data, gpu):
    """Each of the three kernels has its own coefficients; message sizes are the shapes."""
    frame = table(data, gpu, "comm/0.14.0/custom_allreduce_perf.parquet").filter(pl.col("backend") == "vllm_graph")
    hardware = hardware_for(f"{gpu}-sxm")
    devices, sizes = frame["num_gpus"].to_numpy(), 2.0 * frame["message_size"].to_numpy()
    measured_us = frame["latency"].to_numpy() * US_PER_MS
    kernels = np.array([kernel_name(size, num) for size, num in zip(sizes, devices, strict=True)])
    link_us = np.array([moved_bytes(*call) for call in zip(sizes, kernels, devices.tolist(), strict=True)]) / (
        hardware.link_bytes_per_s / 1e6
    )
    errors = []
    for kernel in ("one_shot", "two_shot", "ring"):
        chosen = kernels == kernel
        columns = np.stack([np.ones(chosen.sum()), devices[chosen] - 1.0, link_us[chosen]], axis=1)
        errors.append((chosen.sum(), both_halves(columns, measured_us[chosen], sizes[chosen, None])))
    error = sum(num * each for num, each in errors) / len(frame)
    return len(frame), error, mape_frac(link_us, measured_us)


def carried_products(data):
    """Linear layers of H100 carried to A100 by two scalars from ten steps there."""
    source = products(data, "h100")
    target = products(data, "a100")
    fit = fit_operator(source[0], source[1])
    parts = target[0] * np.array(fit.coefficients)
    measured_us = target[1]
    few = np.argsort(measured_us)[np.linspace(0, len(measured_us) - 1, FEW).astype(int)]
    compute, memory, overhead = (parts[few, index] / measured_us[few] for index in range(3))
    scales = solve_scales(compute, memory, overhead, np.ones(FEW))
    predicted = parts @ np.array([scales.compute, scales.memory, 1.0])
    rest = np.ones(len(measured_us), dtype=bool)
    rest[few] = False
    roofline = target[0][:, 0] + target[0][:, 1]
    bound = rest & (target[0][:, 1] == 0)
    name = "matrix products, H100 to A100"
    rows = []
    for chosen, note in ((bound, "steps bound by arithmetic"), (rest, "all steps from 1 token on")):
        error, least = (mape_frac(times[chosen], measured_us[chosen]) for times in (predicted, roofline))
        rows.append(row(name, "a100", (int(chosen.sum()), error, least), note))
    return rows


def products(data, gpu):
    """Columns and measured microseconds of all linear layers of a step, 1 to 4,096 tokens, on 1 to 8 devices."""
    columns, measured = [], []
    hardware = hardware_for(f"{gpu}-sxm")
    for folder, name in LLAMAS.items():
        shape = shape_for(name)
        frame = pl.read_csv(data / f"vidur/{gpu}/meta-llama/{folder}/mlp.csv")
        tokens = frame["num_tokens"].to_numpy().astype(float)
        tp = frame["num_tensor_parallel_workers"].to_numpy().astype(float)
        query, cache = shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim
        hidden, ffn = np.full_like(tp, shape.hidden), shape.ffn / tp
        sizes = (((query + 2 * cache) / tp, hidden), (hidden, query / tp), (2 * ffn, hidden), (hidden, ffn))
        one_layer = sum(gemm_columns(Gemm(m=tokens, n=n, k=k), hardware) for n, k in sizes)
        columns.append(shape.layers * one_layer)
        times = sum(frame[f"time_stats.{product}.median"].to_numpy() for product in PRODUCTS)
        measured.append(shape.layers * times * US_PER_MS)
    return np.concatenate(columns), np.concatenate(measured)


if __name__ == "__main__":
    main()
