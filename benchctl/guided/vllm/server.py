"""The value model of one vLLM server: loaded to fit the server's limits, then asked step by step."""

import json
import os
from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from benchctl.guided.errors import GuidanceError
from benchctl.guided.guide import Guide, GuideRow, GuideSettings
from benchctl.guided.timing import CLOCKS
from benchctl.guided.vllm.loading import ServerLimits, scorer_maker
from benchctl.guided.vllm.rows import Batch
from benchctl.guided.vllm.settings import (
    CLOCK_VARIABLE,
    MODEL_VARIABLE,
    STEP_LOG_VARIABLE,
    VllmSettings,
    model_directory,
)
from benchctl.guided.vllm.step_count import V2_SAMPLER, class_named
from benchctl.guided.vllm.step_log import GuidedStepLog

_LEAST_VOCABULARY: Final = 0.99
"""Vocabularies of one tokenizer differ in what pads them; with less of the base model's, it is another's."""


class GuidedServer:
    """Guides the steps of one vLLM worker."""

    def __init__(self, guide: Guide, vocabulary: int, log: GuidedStepLog | None) -> None:
        self._guide, self._vocabulary, self._log = guide, vocabulary, log

    def forget(self, keys: Iterable[Hashable]) -> None:
        self._guide.forget(keys)

    def prepare(self, rows: Sequence[GuideRow]) -> None:
        """Compute the prompts of new rows; to be called before the base model."""
        self._guide.prepare(rows)

    def apply(self, logits: Tensor, rows: Batch, step: int) -> Tensor:
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
    _check_layout(vllm_config)
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

    make_scorer = scorer_maker(directory, ServerLimits.of(vllm_config), device, settings, log)
    return GuidedServer(Guide(make_scorer, guide_settings, log), vocabulary, log)


def _check_layout(vllm_config: Any) -> None:
    devices = vllm_config.parallel_config.tensor_parallel_size * vllm_config.parallel_config.pipeline_parallel_size
    if devices > 1:
        raise GuidanceError(
            f"a value model guides servers of one device, and this one spreads its model over {devices}; set "
            "tensor_parallel_size and pipeline_parallel_size to 1"
        )


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
    if num_known < _LEAST_VOCABULARY * num_served:
        raise GuidanceError(
            f"the value model in {directory} knows {num_known} tokens and the base model {num_served}; guidance "
            "needs two models of one tokenizer"
        )
    return int(num_known)


def _eos_ids(model_config: Any) -> frozenset[int]:
    """Tokens that end an answer of the base model."""
    eos_ids: set[int] = set()
    for source in (model_config.hf_text_config, _generation_config(model_config)):
        ids = source.get("eos_token_id") if isinstance(source, dict) else getattr(source, "eos_token_id", None)
        eos_ids |= {int(id_) for id_ in (ids if isinstance(ids, list | tuple) else [ids]) if id_ is not None}
    return frozenset(eos_ids)


def _generation_config(model_config: Any) -> dict[str, Any]:
    with suppress(AttributeError, OSError):
        return dict(model_config.try_get_generation_config())
    return {}


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
