"""Where the time of guided steps goes, by the step timer on the clocks of host and device."""

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from decode import BaseStep
from guided_decode import ARMS, UNTIMED_STEPS, Decode, Point, made_guide, made_scorer
from paired import table

from benchctl.guided.timing import Clock, StepTimer
from benchctl.guided.value_model.value_model import ValueModel
from benchctl.units import NS_PER_MS


def sections_text(model: ValueModel, base: BaseStep, vocabulary: int, point: Point) -> str:
    """Where the time of guided steps goes, on the clocks of host and device."""
    switches = ARMS["everything on"]
    clock: Clock = "device" if model.device.type == "cuda" else "host"
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "steps.jsonl"
        timer = StepTimer(path, clock)
        scorer = made_scorer(model, point, switches, timer=timer)
        decode = Decode(base, vocabulary, point, made_guide(scorer, point, switches, timer))
        decode.begin()
        for _ in range(UNTIMED_STEPS):
            decode.step()
        timer.drop_step()
        applies, steps_ms = timed_steps(decode, timer, point.steps, clock)
        timer.close()
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return sections_table(lines, applies, steps_ms, clock)


def timed_steps(decode: Decode, timer: StepTimer, count: int, clock: Clock) -> tuple[list[float], list[float]]:
    """Milliseconds of guidance by marks that are not the timer's, and of steps on the host's clock."""
    applies: list[Marks] = []
    steps_ms = []

    def section(name: str) -> AbstractContextManager[object]:
        if name != "apply":
            return timer.section(name)
        applies.append(Marks(clock))
        return applies[-1]

    for _ in range(count):
        start = time.perf_counter()
        decode.step(section)
        steps_ms.append((time.perf_counter() - start) * 1e3)
        timer.end_step()
    return [marks.elapsed_ms for marks in applies], steps_ms


class Marks:
    """Two marks around some work, on the device or on the host."""

    def __init__(self, clock: Clock) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if clock == "device" else None
        self._host: list[float] = []

    def _mark(self, number: int) -> None:
        self._host.append(time.perf_counter())
        if self._events is not None:
            self._events[number].record()

    def __enter__(self) -> None:
        self._mark(0)

    def __exit__(self, *_: object) -> None:
        self._mark(1)

    @property
    def elapsed_ms(self) -> float:
        if self._events is None:
            return (self._host[1] - self._host[0]) * 1e3
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1]))


def sections_table(
    lines: Sequence[dict[str, Any]], applies: Sequence[float], steps_ms: Sequence[float], clock: Clock
) -> str:
    medians = {
        name: [median_ms(lines, key, name) for key in ("sections_ns", "host_sections_ns") if key in lines[0]]
        for name in lines[0]["sections_ns"]
    }
    columns = ["section", "device ms", "host ms"] if clock == "device" else ["section", "host ms"]
    rows = [[name, *(f"{value:.3f}" for value in values)] for name, values in medians.items()]
    outer = [line["sections_ns"]["lvm_apply_outer"] / NS_PER_MS for line in lines]
    apart = statistics.median(abs(ours - theirs) / theirs for ours, theirs in zip(outer, applies, strict=True))
    parts = sum(medians[name][0] for name in ("base", "lvm_apply_outer", "sample"))
    return (
        f"{table(columns, rows)}\n\nMedians of {len(lines)} steps of {statistics.median(steps_ms):.3f} ms on the "
        f"host; base, guidance (`lvm_apply_outer`) and sampling on the {clock} add up to {parts:.3f} ms. Guidance "
        f"by marks of its own: {statistics.median(applies):.3f} ms, apart from the step timer's by {apart:.2%} in "
        f"the median."
    )


def median_ms(lines: Sequence[dict[str, Any]], key: str, name: str) -> float:
    return statistics.median(line[key].get(name, 0) for line in lines) / NS_PER_MS
