"""The passes of one dense model: what of ``PassMaker`` needs torch."""

from dataclasses import dataclass
from typing import Literal

import torch

from benchctl.micro.inside.devices import CpuDevice, CudaDevice
from benchctl.micro.inside.dimensions import (
    MARGIN_FRAC,
    Dimensions,
    KvPlan,
    PassPoint,
    kv_plan,
    pass_bytes,
    weight_bytes,
)
from benchctl.micro.inside.failures import WorkerError
from benchctl.micro.inside.forward import ForwardPass
from benchctl.micro.inside.kv_cache import KvCache
from benchctl.micro.inside.model import random_weights
from benchctl.micro.inside.operators import count_operators
from benchctl.micro.inside.passes import GIB, MemoryNeed

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ROUNDINGS = 16
"""Units of rounding by which the largest outputs of two orders of the same sums may differ."""


@dataclass(frozen=True)
class ModelSettings:
    """A model and how it is laid out."""

    name: str
    dimensions: Dimensions
    dtype: Literal["float32", "bfloat16", "float16"]
    kv_layout: Literal["contiguous", "paged"]
    page_tokens: int
    seed: int

    def plan(self, point: PassPoint) -> KvPlan:
        return kv_plan(self.kv_layout, point.batch_size, point.total_tokens, self.page_tokens)


class DensePass:
    """A forward pass as ``passes.PreparedPass``."""

    def __init__(self, forward: ForwardPass) -> None:
        self._forward = forward
        self.run = forward.run
        self.num_operators = count_operators(forward.run)
        self.tolerance = _ROUNDINGS * torch.finfo(forward.logits.dtype).eps

    def outputs(self) -> torch.Tensor:
        return self._forward.logits.clone()

    def difference(self, outputs: torch.Tensor) -> float:
        now, before = self._forward.logits.float(), outputs.float()
        return ((now - before).abs().max() / now.abs().max()).item()


class DenseModel:
    """Weights on a device, and the passes that use them."""

    def __init__(self, settings: ModelSettings, device: CpuDevice | CudaDevice) -> None:
        """Draws the weights; raises WorkerError when they do not fit into memory."""
        self.settings, self._device = settings, device
        self.name = f"{settings.name} in {settings.dtype} on {device.torch_device}"
        self._check_weights_fit()
        self.weights = random_weights(
            settings.dimensions, dtype=_DTYPES[settings.dtype], device=device.torch_device, seed=settings.seed
        )

    def free_bytes(self) -> int:
        return self._device.free_bytes()

    def need(self, point: PassPoint) -> MemoryNeed:
        plan = self.settings.plan(point)
        cache, buffers = pass_bytes(self.settings.dimensions, point, plan, self.settings.dtype)
        return MemoryNeed(cache, round(buffers + MARGIN_FRAC * (cache + buffers)))

    def make(self, point: PassPoint) -> DensePass:
        seed, weights = self.settings.seed, self.weights
        cache = KvCache(
            weights.dimensions, self.settings.plan(point), dtype=weights.dtype, device=weights.device, seed=seed
        )
        generator = torch.Generator().manual_seed(seed)
        sizes = (point.batch_size, point.new_tokens)
        tokens = torch.randint(weights.dimensions.vocab, sizes, generator=generator).to(weights.device)
        return DensePass(ForwardPass(weights, cache, point, tokens))

    def _check_weights_fit(self) -> None:
        need, free = weight_bytes(self.settings.dimensions, self.settings.dtype), self._device.free_bytes()
        if need * (1 + MARGIN_FRAC) > free:
            raise WorkerError(
                "memory",
                f"the weights of {self.name} need {need / GIB:.2f} GiB, and {free / GIB:.2f} GiB are free; choose "
                "a smaller model or a dtype of 2 bytes, or end the programs that hold memory",
            )
