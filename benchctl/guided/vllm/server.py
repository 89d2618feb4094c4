"""The guidance of one vLLM server: its value model, checked and loaded, and each step."""

import json
import os
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from benchctl import __version__
from benchctl.guided.guide import Guide, GuideSettings
from benchctl.guided.kernels.check import choose_operations
from benchctl.guided.params import GuidanceError
from benchctl.guided.timing import CLOCKS, StepTimer
from benchctl.guided.value_model.checkpoint import read_config
from benchctl.guided.value_model.scoring import Scorer
from benchctl.guided.value_model.sizes import ValueModelMemory, value_model_memory
from benchctl.guided.value_model.value_model import ValueModel, load_value_model, random_value_model
from benchctl.guided.vllm.requests import Batch, Rows
from benchctl.guided.vllm.settings import (
    CLOCK_VARIABLE,
    DESCRIPTION_VARIABLE,
    MODEL_VARIABLE,
    STEP_LOG_VARIABLE,
    VllmSettings,
    model_directory,
)
from benchctl.guided.vllm.steps import V2_SAMPLER, GuidedStepLog, class_named
from benchctl.units import GIB

_DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "auto": None}


def scorer_maker(
    directory: Path, vllm_config: Any, device: torch.device, settings: VllmSettings, timer: StepTimer | None
) -> Callable[[], Scorer]:
    """A function that loads the value model in ``directory``, once its memory is known to be there.

    Raises GuidanceError, before anything is loaded, where it would not fit.
    """
    config = read_config(directory)
    dtype = _DTYPES[settings.dtype]
    kind = dtype or config.dtype or torch.bfloat16
    max_slots, max_tokens = vllm_config.scheduler_config.max_num_seqs, vllm_config.model_config.max_model_len
    needed = value_model_memory(
        config,
        kind.itemsize,
        max_slots=max_slots,
        max_tokens=max_tokens,
        max_candidates=settings.max_candidates,
    )
    # What the server was told to take for its own cache; where it was told nothing, it takes what is left.
    kv_bytes = getattr(getattr(vllm_config, "cache_config", None), "kv_cache_memory_bytes", None) or 0
    _check_memory(needed, kv_bytes, device, settings.memory_bytes)

    def make_scorer() -> Scorer:
        model = (
            random_value_model(config, device, kind)
            if settings.random_weights
            else load_value_model(directory, device, dtype)
        )
        chosen = choose_operations(model.config, device, model.dtype, kernels=settings.kernels)
        model.operations = chosen.operations
        scorer = Scorer(
            model,
            max_slots,
            max_tokens,
            device,
            max_candidates=settings.max_candidates,
            fused=settings.fused,
            reuse=settings.reuse,
            graphs=settings.graphs and device.type == "cuda",
            record=[settings.record] if settings.record else [],
            timer=timer,
        )
        _describe(model, scorer, chosen.reason)
        return scorer

    return make_scorer


def _check_memory(needed: ValueModelMemory, kv_bytes: int, device: torch.device, allowed: int | None) -> None:
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
    if needed.prefixes + needed.weights + kv_bytes > free:
        fixed = f", the server's KV cache is {kv_bytes / GIB:.2f} GiB" if kv_bytes else ""
        raise GuidanceError(
            f"the value model takes: {needed}{fixed}, and {free / GIB:.2f} GiB of {device} are free; {remedy}, or "
            "choose a smaller value model"
        )


def _describe(model: ValueModel, scorer: Scorer, kernels_reason: str | None) -> None:
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
        **({} if kernels_reason is None else {"kernels_reason": kernels_reason}),
    }
    Path(f"{path}.partial").write_text(json.dumps(description), encoding="utf-8")
    Path(f"{path}.partial").replace(path)


class GuidedServer:
    """Guides the steps of one vLLM worker."""

    def __init__(self, guide: Guide, vocabulary: int, log: GuidedStepLog | None) -> None:
        self._guide, self._vocabulary, self._log = guide, vocabulary, log

    def forget(self, keys: Iterable[Hashable]) -> None:
        self._guide.forget(keys)

    def apply(self, logits: Tensor, rows: Batch | Rows, step: int) -> Tensor:
        """Guide ``rows`` of ``logits`` [B, V] in step number ``step``.

        The temperature of a row is that by which its logits are still to be divided: 1 where vLLM has done so.
        """
        if self._log is not None:
            self._log.begin()
        guided = rows.in_order
        if logits.shape[1] > self._vocabulary:  # padding that the value model does not have
            index = torch.tensor([row.index for row in guided]).to(logits.device, non_blocking=True)
            logits[:, self._vocabulary :].index_fill_(0, index, -torch.inf)
        logits = self._guide.apply(logits, guided)
        if self._log is not None:
            self._log.record(step=step, num_seqs=rows.batch_size, did=self._guide.pending)
        return logits


def make_server(
    vllm_config: Any, device: torch.device, settings: VllmSettings, *, is_v2: bool = False
) -> GuidedServer:
    """Load the value model that the environment names, for a worker with Model Runner V2 or with the one before.

    Raises GuidanceError where it does not fit the server.
    """
    devices = vllm_config.parallel_config.tensor_parallel_size * vllm_config.parallel_config.pipeline_parallel_size
    if devices > 1:
        raise GuidanceError(
            f"a value model guides servers of one device, and this one spreads its model over {devices}; set "
            "tensor_parallel_size and pipeline_parallel_size to 1"
        )
    directory = model_directory()
    assert directory is not None  # noqa: S101
    log = _step_log(is_v2=is_v2)
    vocabulary = _vocabulary(directory, vllm_config)
    guide_settings = GuideSettings(
        max_candidates=settings.max_candidates,
        is_eager=not settings.lazy,
        skips_early=settings.skips_early,
        eos_ids=_eos_ids(vllm_config.model_config),
    )
    make_scorer = scorer_maker(directory, vllm_config, device, settings, log)
    return GuidedServer(Guide(make_scorer, guide_settings, log), vocabulary, log)


def _vocabulary(directory: Path, vllm_config: Any) -> int:
    """Tokens that the value model knows."""
    try:
        num_known = json.loads((directory / "config.json").read_bytes())["vocab_size"]
    except (OSError, ValueError, KeyError) as error:
        raise GuidanceError(
            f"{MODEL_VARIABLE} is {directory}, whose config.json has no vocab_size ({error}); name the directory "
            "of a value model"
        ) from error
    num_served = vllm_config.model_config.get_vocab_size()
    # Vocabularies of one tokenizer differ in what pads them; with less of the base model's, it is another's
    if num_known < 0.99 * num_served:
        raise GuidanceError(
            f"the value model in {directory} knows {num_known} tokens and the base model {num_served}; guidance "
            "needs two models of one tokenizer"
        )
    return int(num_known)


def _eos_ids(model_config: Any) -> frozenset[int]:
    """Tokens that end an answer of the base model."""
    stated = [getattr(model_config.hf_text_config, "eos_token_id", None)]
    with suppress(AttributeError, OSError):
        stated.append(dict(model_config.try_get_generation_config()).get("eos_token_id"))
    ids = (id_ for each in stated for id_ in (each if isinstance(each, list | tuple) else [each]))
    return frozenset(int(id_) for id_ in ids if id_ is not None)


def _step_log(*, is_v2: bool) -> GuidedStepLog | None:
    path = os.environ.get(STEP_LOG_VARIABLE)
    if not path:
        return None
    clock = os.environ.get(CLOCK_VARIABLE) or "host"
    if clock not in CLOCKS:
        raise GuidanceError(f"{CLOCK_VARIABLE} is {clock!r}; take one of {', '.join(CLOCKS)}")
    log = GuidedStepLog(Path(path), clock)
    sampler, method = (V2_SAMPLER, "__call__") if is_v2 else ("vllm.v1.sample.sampler.Sampler", "forward")
    log.watch_sampler(class_named(sampler), method)
    return log
