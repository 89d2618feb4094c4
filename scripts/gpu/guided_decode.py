"""Guided decode: a base model's step, guidance with a value model, sampling, and the tokens on the host.

That is the loop of a server that schedules a step when it has the tokens of the last one. Without guidance it is
the same loop, which is the baseline.
"""

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from decode import BaseStep, sample, wait
from torch import Tensor

from benchctl.guided.guide import Guide, GuideSettings
from benchctl.guided.operations import PLAIN, Operations
from benchctl.guided.params import GuidanceParams
from benchctl.guided.rows import GuideRow
from benchctl.guided.timing import StepTimer
from benchctl.guided.value_model.scoring import Scorer
from benchctl.guided.value_model.value_model import ValueModel

UNTIMED_STEPS = 2
"""At the beginning of each round: only later steps have a drawn candidate to move."""


@dataclass(frozen=True, kw_only=True)
class Switches:
    """How guidance is computed; the defaults are a server's own."""

    kernels: bool = True
    graphs: bool = True
    reuse: bool = True
    fused: bool = True
    has_values: bool = True
    """False: the value model costs nothing, and what is left is the guidance around it."""


ARMS = {
    "everything on": Switches(),
    "without reuse": Switches(reuse=False),
    "without kernels": Switches(kernels=False),
    "without graphs": Switches(graphs=False),
    "two passes": Switches(fused=False),
    "everything off": Switches(kernels=False, graphs=False, reuse=False, fused=False),
    "no value model": Switches(has_values=False),
}


@dataclass(frozen=True, kw_only=True)
class Point:
    """Sizes of a measurement."""

    batch: int
    candidates: int
    context: int
    steps: int
    """Timed in each round."""
    max_tokens: int
    """Longest prefix that there is room for."""

    @property
    def mean_context(self) -> int:
        """Tokens of a row in the middle of a round; the base model's rows always have so many."""
        return self.context + UNTIMED_STEPS + self.steps // 2


class FreeScorer:
    """A value model that costs nothing."""

    def __init__(self, scorer: Scorer) -> None:
        self.model, self.counters = scorer.model, scorer.counters
        self._raw = torch.linspace(-1, 1, 64, device=scorer.model.device)

    def score(self, _rows: Sequence[object], ids: Tensor, _waiting: Sequence[object] = ()) -> Tensor:
        return self._raw[: ids.shape[1]].expand(ids.shape).contiguous()

    def keep_up(self, _waiting: Sequence[object]) -> None:
        """No prefix is kept."""

    def prepare(self, _rows: Sequence[object]) -> None:
        """No prefix is kept."""

    def forget(self, _keys: Iterable[object]) -> None:
        """No prefix is kept."""


class Decode:
    """Rounds of decode from the same prompts, with guidance where there is a guide."""

    def __init__(self, base: BaseStep, vocabulary: int, point: Point, guide: Guide | None = None) -> None:
        self._base, self._vocabulary, self._point, self._guide = base, vocabulary, point, guide
        drawn = torch.randint(
            vocabulary, (point.batch, point.context), generator=torch.Generator().manual_seed(0)
        ).tolist()
        self.rows = [
            GuideRow(
                index=number, key=("guided", number), params=GuidanceParams(value_scale=-1.0), tokens=tokens,
                num_prompt=len(tokens), top_k=point.candidates, draws_candidates=True,
            )
            for number, tokens in enumerate(drawn)
        ]  # fmt: skip

    def begin(self) -> None:
        """Take all rows back to their prompts, whose keys and values stay."""
        if self._guide is not None:
            self._guide.forget([row.key for row in self.rows])
        for row in self.rows:
            del row.tokens[self._point.context :]  # type: ignore[attr-defined]

    def step(self, section: Callable[[str], AbstractContextManager[object]] | None = None) -> None:
        """One step; ``section`` takes the time of its parts."""
        section = section or _NO_TIMER.section
        with section("base"):
            logits = self._base.run()[:, : self._vocabulary].float()
        if self._guide is not None:
            with section("apply"):
                self._guide.apply(logits, self.rows)
        with section("sample"):
            ids = sample(logits)
            self._base.tokens.copy_(ids)
        for row, token in zip(self.rows, ids.tolist(), strict=True):
            row.tokens.append(token)  # type: ignore[attr-defined]

    def round_ms(self) -> float:
        """Milliseconds of a step on the host's clock: the mean of a round."""
        self.begin()
        for _ in range(UNTIMED_STEPS):
            self.step()
        wait(self._base.tokens.device)
        start = time.perf_counter()
        for _ in range(self._point.steps):
            self.step()
        return (time.perf_counter() - start) / self._point.steps * 1e3


_NO_TIMER = StepTimer(None)


@contextmanager
def no_collection():
    """Python's garbage collector does not run inside."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def computed_with(model: ValueModel, operations: Operations):
    """The value model computes with other operations inside."""
    before = model.operations
    model.operations = operations
    try:
        yield
    finally:
        model.operations = before


def operations_of(model: ValueModel, switches: Switches) -> Operations:
    return model.operations if switches.kernels else PLAIN


def made_scorer(model: ValueModel, point: Point, switches: Switches, **more: Any) -> Scorer:
    """A scorer as a server makes it, with the passes of all sizes recorded at the start."""
    is_cuda = model.device.type == "cuda"
    return Scorer(
        model,
        point.batch if switches.has_values else 1,
        point.max_tokens,
        max_candidates=point.candidates,
        fused=switches.fused,
        reuse=switches.reuse,
        graphs=switches.graphs and is_cuda,
        record=[point.candidates],
        **more,
    )


def made_guide(scorer: Scorer, point: Point, switches: Switches, timer: StepTimer | None = None) -> Guide:
    used: Any = scorer if switches.has_values else FreeScorer(scorer)
    return Guide(lambda: used, GuideSettings(max_candidates=point.candidates), timer)
