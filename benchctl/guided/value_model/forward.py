"""Forward passes of a value model, recorded and replayed where their sizes occur again."""

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import Tensor

from benchctl.guided.transfer import to_device
from benchctl.guided.value_model.layout import Shape, Work, exact_shape, pack, padded_shape, prompt_shape, unpack
from benchctl.guided.value_model.prefixes import PrefixCache
from benchctl.guided.value_model.sizes import recorded_prompt_sizes, recorded_sizes, spans
from benchctl.guided.value_model.value_model import ValueModel

Pass = Callable[[Tensor, Tensor], Tensor]
"""The raw values [T] of one packed input and of candidates [lines, K]."""
Recorder = Callable[[Pass, Tensor, Tensor], Callable[[], Tensor]]
"""Records a pass: gives a function that repeats it on the content that its two tensors have then."""


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


MAX_RECORDINGS: Final = 1024
"""Passes of sizes beyond these run as they are."""


class ForwardPass:
    """Runs the model; counts what it runs."""

    def __init__(self, model: ValueModel, cache: PrefixCache, recorder: Recorder | None) -> None:
        self._model, self._cache, self._recorder = model, cache, recorder
        self._rotations = model.rotations(cache.memory.cells)
        self._recorded: dict[Shape, Recorded] = {}
        self.num_forwards = self.num_tokens = self.num_recordable = self.num_replays = 0
        self.num_recordings = 0
        """Passes that were recorded when they occurred, because ``record`` had not foreseen them."""
        self.num_needed = self.num_padding = 0
        """Tokens of passes that scored, without padding, and what padding added."""

    @property
    def num_recorded(self) -> int:
        return len(self._recorded)

    def extend(self, work: Work) -> None:
        """Write the missing tokens of all rows into the cache."""
        shape = exact_shape(work)
        padded = prompt_shape(shape.tokens, self._cache.memory.cells)
        recorded = self._recorded.get(padded)
        if shape.rows > padded.rows or shape.columns > padded.columns:
            recorded = None
        if recorded is not None:
            shape = padded
        self._count(shape)
        packed = self._packed(work, shape)
        nothing = torch.zeros((0, 0), dtype=torch.int64, device=self._model.device)
        if recorded is None:
            self._run(shape, packed, nothing)
        else:
            recorded.replay(packed, nothing)

    def score(self, work: Work, candidates: Tensor) -> Tensor:
        """The same, and raw values [lines, K] of ``candidates`` [lines, K], each as if it came next in its row."""
        shape = self._shape(work)
        self._count(shape)
        self.num_needed += work.num_tokens
        self.num_padding += shape.tokens - work.num_tokens
        packed = self._packed(work, shape)
        recorded = self._recorded_pass(shape)
        raw = self._run(shape, packed, candidates) if recorded is None else recorded.replay(packed, candidates)
        return raw[: candidates.numel()].view(candidates.shape)

    def record(self, max_rows: int, candidates: int) -> None:
        """Record the passes of all sizes that steady decode of up to ``max_rows`` rows has, and of prompts."""
        if self._recorder is None:
            return
        sizes = recorded_sizes(max_rows, candidates)
        shapes = [padded_shape(tokens, candidates, span) for tokens in sizes for span in self._spans()]
        if self._model.operations.splits_keys:
            shapes += [prompt_shape(tokens, self._cache.memory.cells) for tokens in recorded_prompt_sizes()]
        # The largest first: what it needs of memory is enough for all others.
        for shape in sorted(shapes, key=lambda shape: (shape.tokens, shape.span), reverse=True):
            if shape not in self._recorded:
                self._recorded[shape] = self._record(self._recorder, shape)

    def _shape(self, work: Work) -> Shape:
        shape = exact_shape(work)
        if self._recorder is None:
            return shape
        span = next(span for span in self._spans() if span >= shape.span)
        return padded_shape(shape.tokens, work.candidates, span)

    def _spans(self) -> list[int]:
        """Spans that shapes are rounded to; kernels look at no more cells than there are, so that one is enough."""
        cells = self._cache.memory.cells
        return [cells] if self._model.operations.splits_keys else spans(cells)

    def _recorded_pass(self, shape: Shape) -> Recorded | None:
        if self._recorder is None:
            return None
        self.num_recordable += 1
        if (recorded := self._recorded.get(shape)) is not None:
            self.num_replays += 1
        elif len(self._recorded) < MAX_RECORDINGS:
            recorded = self._recorded[shape] = self._record(self._recorder, shape)
            self.num_recordings += 1
        return recorded

    def _record(self, recorder: Recorder, shape: Shape) -> Recorded:
        """Record the pass of a size on input that is padding alone."""
        padding = self._packed(Work((), shape.candidates), shape)
        candidates = torch.zeros((shape.rows, shape.candidates), dtype=torch.int64, device=self._model.device)
        return Recorded(recorder, partial(self._run, shape), padding, candidates)

    def _run(self, shape: Shape, packed: Tensor, candidates: Tensor) -> Tensor:
        """Raw values [T]: those of the caller's candidates in the caller's order, then anything."""
        layout = unpack(packed, candidates, shape)
        self._cache.keep_drawn(layout)
        raw = self._model.forward(layout, shape, self._rotations, self._cache)
        self._cache.remember(layout)
        return raw.index_select(0, layout.order)

    def _count(self, shape: Shape) -> None:
        self.num_forwards += 1
        self.num_tokens += shape.tokens

    def _packed(self, work: Work, shape: Shape) -> Tensor:
        return to_device(torch.from_numpy(pack(work, shape, self._cache.memory)), self._model.device)
