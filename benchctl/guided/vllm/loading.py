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
from benchctl.guided.value_model.memory import prefix_bytes, weight_bytes
from benchctl.guided.value_model.scoring import Scorer
from benchctl.guided.value_model.value_model import ValueModel, dimensions, load_value_model, random_value_model
from benchctl.guided.vllm.settings import DESCRIPTION_VARIABLE, VllmSettings

_DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "auto": None}
_GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """The limits of a server that a value model has to fit."""

    max_num_seqs: int
    max_model_len: int

    @classmethod
    def of(cls, vllm_config: Any) -> "ServerLimits":
        return cls(
            max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
            max_model_len=vllm_config.model_config.max_model_len,
        )


def scorer_maker(
    directory: Path, limits: ServerLimits, device: torch.device, settings: VllmSettings, timer: Timer | None
) -> Callable[[], Scorer]:
    """A function that loads the value model in ``directory``, once its memory is known to be there.

    Raises GuidanceError, before anything is loaded, where it would not fit.
    """
    config = read_config(directory)
    dtype = _DTYPES[settings.dtype]
    needed = _needed_bytes(config, dtype or config.dtype or torch.bfloat16, limits, settings)
    _check_memory(needed, limits, device, settings.memory_bytes)

    def make_scorer() -> Scorer:
        if settings.random_weights:
            model = random_value_model(config, device, dtype or config.dtype or torch.bfloat16)
        else:
            model = load_value_model(directory, device, dtype)
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
        _describe(model, scorer, chosen.reason)
        return scorer

    return make_scorer


@dataclass(frozen=True, slots=True)
class _Needed:
    """Bytes of a value model."""

    weights: int
    prefixes: int


def _needed_bytes(config: Any, dtype: torch.dtype, limits: ServerLimits, settings: VllmSettings) -> _Needed:
    sizes = dimensions(config)
    prefixes = prefix_bytes(
        max_slots=limits.max_num_seqs,
        max_tokens=limits.max_model_len,
        max_candidates=settings.max_candidates,
        layers=sizes.layers,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        itemsize=dtype.itemsize,
    )
    return _Needed(weight_bytes(config, dtype.itemsize), prefixes)


def _check_memory(needed: _Needed, limits: ServerLimits, device: torch.device, allowed: int | None) -> None:
    """Raises GuidanceError where prefixes take more than was allowed, or all together more than is free."""
    taken = (
        f"the prefixes of {limits.max_num_seqs} sequences of {limits.max_model_len} tokens take "
        f"{needed.prefixes / _GIB:.2f} GiB ({needed.prefixes} bytes) in this value model"
    )
    remedy = "lower max_num_seqs or max_model_len"
    if allowed is not None and needed.prefixes > allowed:
        raise GuidanceError(f"{taken}, and {allowed} bytes are allowed; {remedy}, or allow more")
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if needed.prefixes + needed.weights > free:
            raise GuidanceError(
                f"{taken}, its weights {needed.weights / _GIB:.2f} GiB, and {free / _GIB:.2f} GiB of {device} are "
                f"free; {remedy}"
            )


def _describe(model: ValueModel, scorer: Scorer, kernels_reason: str | None) -> None:
    path = os.environ.get(DESCRIPTION_VARIABLE)
    if not path:
        return
    description = {
        "revision": f"benchctl {__version__}",
        "dtype": str(model.dtype).removeprefix("torch."),
        "layers": model.config.layers,
        "hidden": model.config.hidden,
        "num_bytes": model.num_bytes,
        "prefix_bytes": scorer.num_bytes,
        "has_kernels": model.operations.splits_keys,
        "recorded_passes": scorer.num_recorded,
    }
    if kernels_reason is not None:
        description["kernels_reason"] = kernels_reason
    Path(f"{path}.partial").write_text(json.dumps(description), encoding="utf-8")
    Path(f"{path}.partial").replace(path)
