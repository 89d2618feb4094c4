"""Forward passes of a value model, recorded and replayed where their sizes occur again."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchctl.guided.operations import to_device
from benchctl.guided.value_model.layout import Shape, Work, exact_shape, pack, padded_shape, prompt_shape, unpack
from benchctl.guided.value_model.prefixes import PrefixCache
from benchctl.guided.value_model.sizes import recorded_prompt_sizes, recorded_sizes, spans
from benchctl.guided.value_model.value_model import ValueModel

Pass = Callable[[Tensor, Tensor], Tensor]
"""The raw values [T] of one packed input and of candidates [lines, K]."""
Recorder = Callable[[Pass, Tensor, Tensor], Callable[[], Tensor]]
"""Records a pass: gives a function that repeats it on the content that its two tensors have then."""


@dataclass(slots=True, kw_only=True)
class Counters:
    """Totals of a scorer over all steps, all known from lengths on the host."""

    steps: int = 0
    """Calls that scored."""
    fused: int = 0
    """Of these, calls whose missing output tokens and candidates went through the model together."""
    forwards: int = 0
    prefill_tokens: int = 0
    """Prompt tokens that went through the model."""
    extended_tokens: int = 0
    """Output tokens that did."""
    reused_tokens: int = 0
    """Output tokens whose keys and values were those of the candidate that was drawn."""
    computed_tokens: int = 0
    """All that went through the model, padding included."""
    needed_tokens: int = 0
    """Tokens of passes that scored, without padding."""
    padding_tokens: int = 0
    """What these passes were padded with."""
    shared_tokens: int = 0
    """Prompt tokens whose keys and values were copied from another request."""
    evictions: int = 0
    """Requests that lost their slot to others; if they come again, their prefix is computed again."""
    recordable: int = 0
    """Passes that scored, where passes are recorded."""
    recordings: int = 0
    """Of these, passes that were recorded when they occurred, because nobody had foreseen their sizes."""
    replays: int = 0
    """Of these, passes that repeated one that had been recorded before."""
    slots: int = 0
    """In use now."""


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


class ForwardPass:
    """Runs the model; adds what it runs to ``counters``."""

    def __init__(
        self, model: ValueModel, cache: PrefixCache, recorder: Recorder | None, counters: Counters
    ) -> None:
        self._model, self._cache, self._recorder, self._done = model, cache, recorder, counters
        self._rotations = model.rotations(cache.memory.cells)
        self._recorded: dict[Shape, Recorded] = {}

    @property
    def num_recorded(self) -> int:
        return len(self._recorded)

    def extend(self, work: Work) -> None:
        """Write the missing tokens of all rows into the cache."""
        shape = exact_shape(work)
        padded = prompt_shape(shape.tokens, self._cache.memory.cells)
        fits = shape.rows <= padded.rows and shape.columns <= padded.columns
        recorded = self._recorded.get(padded) if fits else None
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
        self._done.needed_tokens += work.num_tokens
        self._done.padding_tokens += shape.tokens - work.num_tokens
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
        self._done.recordable += 1
        if (recorded := self._recorded.get(shape)) is not None:
            self._done.replays += 1
        # Passes of sizes beyond these run as they are
        elif len(self._recorded) < 1024:
            recorded = self._recorded[shape] = self._record(self._recorder, shape)
            self._done.recordings += 1
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
        self._done.forwards += 1
        self._done.computed_tokens += shape.tokens

    def _packed(self, work: Work, shape: Shape) -> Tensor:
        return to_device(torch.from_numpy(pack(work, shape, self._cache.memory)), self._model.device)
