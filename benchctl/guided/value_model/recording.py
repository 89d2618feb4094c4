"""Recorded forward passes: static memory for their input and output, and what repeats the work on it."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

Pass = Callable[[Tensor, Tensor], Tensor]
"""The raw values [T] of one packed input and of candidates [lines, K]."""


class Recorder(Protocol):
    """Records passes."""

    def __call__(self, run: Pass, packed: Tensor, candidates: Tensor, /) -> Callable[[], Tensor]:
        """Return a function that repeats ``run`` on the content that these two tensors have then."""


class CudaGraphs:
    """Records passes as CUDA graphs that share their memory: a result is to be read before the next pass."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Pass, packed: Tensor, candidates: Tensor) -> Callable[[], Tensor]:
        with torch.cuda.device(packed.device):
            run(packed, candidates)  # prepares the libraries for this size, which cannot be done while recording
            torch.cuda.current_stream().synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                raw = run(packed, candidates)

        def replay() -> Tensor:
            graph.replay()
            return raw

        return replay


def run_again(run: Pass, packed: Tensor, candidates: Tensor) -> Callable[[], Tensor]:
    """The recorder of devices without graphs: the pass is padded and its input copied as on a GPU, and it runs."""
    return lambda: run(packed, candidates)


class Recorded:
    """A recorded pass with the memory that it reads."""

    def __init__(self, record: Recorder, run: Pass, packed: Tensor, candidates: Tensor) -> None:
        self._packed, self._candidates = packed, candidates
        self._repeat = record(run, packed, candidates)

    def replay(self, packed: Tensor, candidates: Tensor) -> Tensor:
        """Raw values [T], to be read before the next pass."""
        self._packed.copy_(packed)
        self._candidates[: len(candidates)].copy_(candidates)
        return self._repeat()
