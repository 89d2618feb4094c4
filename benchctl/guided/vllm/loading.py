"""The value model of one vLLM server: checked against the server's limits, then loaded and described."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from benchctl import __version__
from benchctl.guided.errors import GuidanceError
from benchctl.guided.kernels.check import choose_operations
from benchctl.guided.timing import Timer
from benchctl.guided.value_model.checkpoint import read_config
from benchctl.guided.value_model.float8 import ChosenProduct, choose_product
from benchctl.guided.value_model.memory import ValueModelMemory, value_model_memory
from benchctl.guided.value_model.scoring import Scorer
from benchctl.guided.value_model.value_model import ValueModel, dimensions, load_value_model, random_value_model
from benchctl.guided.vllm.settings import DESCRIPTION_VARIABLE, VllmSettings
from benchctl.units import GIB

_DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "auto": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """The limits of a server that a value model has to fit."""

    max_num_seqs: int
    max_model_len: int
    kv_cache_bytes: int = 0
    """What the server was told to take for its own KV cache; 0 where it takes what is left."""

    @classmethod
    def of(cls, vllm_config: Any) -> "ServerLimits":
        return cls(
            max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
            max_model_len=vllm_config.model_config.max_model_len,
            kv_cache_bytes=getattr(getattr(vllm_config, "cache_config", None), "kv_cache_memory_bytes", None) or 0,
        )


def scorer_maker(
    directory: Path, limits: ServerLimits, device: torch.device, settings: VllmSettings, timer: Timer | None
) -> Callable[[], Scorer]:
    """A function that loads the value model in ``directory``, once its memory is known to be there.

    Raises GuidanceError, before anything is loaded, where it would not fit.
    """
    config = read_config(directory)
    dtype = _DTYPES[settings.dtype]
    needed = value_model_memory(
        config,
        (dtype or config.dtype or torch.bfloat16).itemsize,
        max_slots=limits.max_num_seqs,
        max_tokens=limits.max_model_len,
        max_candidates=settings.max_candidates,
        quantization=settings.quantization,
    )
    _check_memory(needed, limits, device, settings.memory_bytes)

    def make_scorer() -> Scorer:
        kind = dtype or config.dtype or torch.bfloat16
        quantized = None if settings.quantization == "none" else choose_product(dimensions(config), device, kind)
        product = None if quantized is None else quantized.product
        if settings.random_weights:
            model = random_value_model(config, device, kind, product=product)
        else:
            model = load_value_model(directory, device, dtype, product=product)
        chosen = choose_operations(model.config, device, model.dtype, kernels=settings.kernels)
        model.operations = chosen.operations
        scorer = Scorer(
            model,
            limits.max_num_seqs,
            limits.max_model_len,
            device,
            max_candidates=settings.max_candidates,
            fused=settings.fused,
            reuse=settings.reuse,
            graphs=settings.graphs and device.type == "cuda",
            record=[settings.record] if settings.record else [],
            stream=settings.stream,
            timer=timer,
        )
        _describe(model, scorer, chosen.reason, quantized)
        return scorer

    return make_scorer


def _check_memory(
    needed: ValueModelMemory, limits: ServerLimits, device: torch.device, allowed: int | None
) -> None:
    """Raises GuidanceError where prefixes take more than was allowed, or all together more than is free."""
    remedy = "lower max_num_seqs or max_model_len"
    if allowed is not None and needed.prefixes > allowed:
        raise GuidanceError(
            f"the value model takes: {needed}; its prefixes are {needed.prefixes} bytes, and {allowed} bytes are "
            f"allowed; {remedy}, or allow more"
        )
    if device.type != "cuda":
        return
    free, _ = torch.cuda.mem_get_info(device)
    if needed.prefixes + needed.weights + limits.kv_cache_bytes > free:
        fixed = f", the server's KV cache is {limits.kv_cache_bytes / GIB:.2f} GiB" if limits.kv_cache_bytes else ""
        raise GuidanceError(
            f"the value model takes: {needed}{fixed}, and {free / GIB:.2f} GiB of {device} are free; {remedy}, or "
            "choose a smaller value model"
        )


def _describe(
    model: ValueModel, scorer: Scorer, kernels_reason: str | None, quantized: ChosenProduct | None
) -> None:
    path = os.environ.get(DESCRIPTION_VARIABLE)
    if not path:
        return
    description = {
        "revision": f"benchctl {__version__}",
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "layers": model.config.layers,
        "hidden": model.config.hidden,
        "num_bytes": model.num_bytes,
        "prefix_bytes": scorer.num_bytes,
        "has_kernels": model.operations.splits_keys,
        "recorded_passes": scorer.num_recorded,
    }
    if quantized is not None:
        description |= {"quantization": "fp8", "products": quantized.name}
        if quantized.reason is not None:
            description["products_reason"] = quantized.reason
    if kernels_reason is not None:
        description["kernels_reason"] = kernels_reason
    Path(f"{path}.partial").write_text(json.dumps(description), encoding="utf-8")
    Path(f"{path}.partial").replace(path)
