"""Guidance inside a vLLM server, as a logits processor of either of its model runners.

``--logits-processors benchctl.guided.vllm.plugin:LenvmLogitsProcessor`` loads it, where this package can be
imported in the server's environment. Where it is installed there, its entry point of the group
``vllm.logits_processors`` loads it as well; nothing is guided twice. ``settings`` lists
the variables by which a server gets a value model; a server without one checks this once per step.

* **Position in the step.** It calls itself invariant to the argmax, so the V1 runner asks it after penalties and
  temperature and not at all while every request is greedy. It writes ln p' of the candidates and -inf for all other
  tokens; vLLM's filters are open on guided requests (``requests``), so what vLLM draws from is p' itself, with
  the seed of the request. Model Runner V2 asks before it divides by the temperature T: there it writes T ln p'.
* **Tokens.** V1 shows them on the host. With asynchronous scheduling it knows the last token of each sequence late,
  and waits for it only for processors that are named on the command line. The installed entry point alone is
  therefore refused there. V2 shows them on the device; ``slots`` copies them.
* **Errors.** A request with an unknown key or an invalid value gets HTTP 400 before it reaches the batch. Any error
  in a step ends the engine: answers that silently were not guided would be worse.
"""

import importlib
import logging
import os
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor
from vllm.v1.sample.logits_processor.interface import LogitsProcessor

from benchctl.guided.params import GuidanceError
from benchctl.guided.vllm.requests import Batch, Rows, admit, asks_for_guidance
from benchctl.guided.vllm.settings import (
    MODEL_VARIABLE,
    STEP_LOG_VARIABLE,
    VllmSettings,
    model_directory,
    settings_of,
)
from benchctl.guided.vllm.slots import Slots, check_v2
from benchctl.guided.vllm.steps import V2_SAMPLER, StepCount, class_named

if TYPE_CHECKING:
    import torch

    from benchctl.guided.vllm.server import GuidedServer

_log = logging.getLogger("vllm.benchctl_lenvm")


def _bases() -> tuple[type, ...]:
    """V1's interface, and V2's beside it where this vLLM has one."""
    try:
        later = importlib.import_module("vllm.v1.worker.gpu.sample.logits_processor.interface")
    except ImportError:
        return (LogitsProcessor,)
    return (LogitsProcessor, later.LogitsProcessor)


class LenvmLogitsProcessor(*_bases()):  # type: ignore[misc]
    """Guides the rows of those requests that ask for it."""

    _is_named: bool = True
    """True if this class is loaded because the command line names it."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Check a request and move its filters. Raises ValueError, of which vLLM makes HTTP 400."""
        if not asks_for_guidance(sampling_params):
            return
        if model_directory() is None:
            raise GuidanceError(
                f"this server loads no value model and cannot guide; start it with {MODEL_VARIABLE}, or send no "
                "lenvm_ keys"
            )
        admit(sampling_params, settings_of().max_candidates)

    def __init__(self, vllm_config: Any, *where: Any) -> None:
        """The V1 runner gives (device, is_pin_memory) as ``where``; V2 gives the state of its requests."""
        self._rows: Final = Rows()
        self._slots: Slots | None = None
        self._server: GuidedServer | None = None
        self._steps: Final = StepCount()
        directory = model_directory()
        if directory is None or (not self._is_named and _is_named(vllm_config)):
            return
        if len(where) == 1:
            self._start_v2(vllm_config, where[0])
            return
        if not self._is_named and vllm_config.scheduler_config.async_scheduling:
            raise GuidanceError(
                "with asynchronous scheduling vLLM shows tokens in time only to processors that are named: start "
                f"the server with --logits-processors {__name__}:{LenvmLogitsProcessor.__name__}, or with "
                "--no-async-scheduling"
            )
        self._server = _guided_server(vllm_config, where[0], settings_of(), is_v2=False)

    def _start_v2(self, vllm_config: Any, states: Any) -> None:
        check_v2(vllm_config)
        self._slots = Slots(states)
        self._server = _guided_server(vllm_config, states.device, settings_of(), is_v2=True)
        if os.environ.get(STEP_LOG_VARIABLE):
            worker = class_named(vllm_config.parallel_config.worker_cls)
            self._steps.watch(class_named(V2_SAMPLER), worker)

    def is_argmax_invariant(self) -> bool:
        """Greedy rows are never guided."""
        return True

    def update_state(self, batch_update: Any) -> None:
        """Follow the batch of V1, which calls this once for each step, before the base model."""
        if self._server is None:
            return
        if batch_update:
            gone = self._rows.update(batch_update)
            if gone:
                self._server.forget(gone)
        if self._rows.batch_size:
            self._steps.number += 1

    def add_request(self, slot: int, sampling_params: Any) -> bool:
        """Follow the slots of V2; whether the request that comes into one is guided."""
        if self._slots is None or self._server is None:
            return False
        gone = self._slots.add(slot, sampling_params)
        if gone is not None:
            self._server.forget([gone])
        return self._slots.is_guided(slot)

    def apply_staged_writes(self) -> None:
        """V2 calls this once for each step, before the base model, when the tokens of new requests are in place."""
        if self._slots:
            self._slots.ask_for_tokens()

    def apply(self, logits: Tensor, *step: Any) -> Tensor:
        """Guide rows of ``logits`` [B, V], in place; V1 has divided them by their temperatures, V2 has not.

        ``step`` is what V2 says of its step.
        """
        if self._server is None:
            return logits
        batch: Batch | Rows = self._rows if self._slots is None else self._slots.batch(*step)
        return self._server.apply(logits, batch, self._steps.number) if batch.in_order else logits


class InstalledLenvmLogitsProcessor(LenvmLogitsProcessor):
    """As the entry point loads it: idle where the command line names the processor itself."""

    _is_named = False


def _is_named(vllm_config: Any) -> bool:
    named = vllm_config.model_config.logits_processors or ()
    return any(str(name).endswith(f":{LenvmLogitsProcessor.__name__}") for name in named)


def _guided_server(
    vllm_config: Any, device: "torch.device", settings: VllmSettings, *, is_v2: bool
) -> "GuidedServer":
    """Transformers and the value model are loaded only where there is one."""
    server: GuidedServer = importlib.import_module("benchctl.guided.vllm.server").make_server(
        vllm_config, device, settings, is_v2=is_v2
    )
    return server
