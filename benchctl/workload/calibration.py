"""The workloads that a step-time model is calibrated with: W1 to W5, and V1 for models that the fit has not seen.

Each determines some of the coefficients: W1 prompts alone, W2 single decoding rows after contexts of many lengths,
W3 batches of many sizes, W4 both phases at once, W5 several devices. The profiles ``steptime-w1`` and so on ask for
requests of these sizes; the writer of inference-perf takes them from here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from benchctl.errors import UsageError

SEED: Final = 42
_WAVES: Final = 4
"""Times that every open request is replaced, so that a batch is full for most of its stage."""
_FEWEST: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationStage:
    """Requests of one size at one concurrency."""

    prompt_tokens: int
    output_tokens: int
    concurrency: int
    num_requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationWorkload:
    """One workload: its stages, and the terms of a step that it tells apart from others."""

    name: str
    profile: str
    purpose: str
    stages: tuple[CalibrationStage, ...]
    remark: str = ""

    def by_size(self) -> Iterator[tuple[tuple[int, int], tuple[CalibrationStage, ...]]]:
        """Stages of equal lengths together: tools with one length in a file need a file for each."""
        for size, stages in groupby(self.stages, key=lambda stage: (stage.prompt_tokens, stage.output_tokens)):
            yield size, tuple(stages)


def _stages(sizes: Sequence[tuple[int, int]], batches: Sequence[int]) -> tuple[CalibrationStage, ...]:
    return tuple(
        CalibrationStage(
            prompt_tokens=prompt,
            output_tokens=output,
            concurrency=batch,
            num_requests=max(_FEWEST, _WAVES * batch),
        )
        for prompt, output in sizes
        for batch in batches
    )


_PROMPTS: Final = (128, 512, 1024, 2048, 4096, 8192)
_BATCHES: Final = (1, 8, 32, 64, 128)

WORKLOADS: Final[dict[str, CalibrationWorkload]] = {
    workload.name: workload
    for workload in (
        CalibrationWorkload(
            name="W1",
            profile="steptime-w1",
            purpose="time of a prompt by its length, and of a step with nothing else in it",
            stages=_stages([(prompt, 1) for prompt in _PROMPTS], [1]),
        ),
        CalibrationWorkload(
            name="W2",
            profile="steptime-w2",
            purpose="time of one decoding row by its context",
            stages=_stages([(prompt, 512) for prompt in _PROMPTS], [1]),
        ),
        CalibrationWorkload(
            name="W3",
            profile="steptime-w3",
            purpose="time by the number of rows, and experts read in a batch",
            stages=_stages([(256, 256)], _BATCHES),
        ),
        CalibrationWorkload(
            name="W4",
            profile="steptime-w4",
            purpose="prompts beside decoding rows",
            stages=_stages([(1024, 4), (64, 1024)], [32]),
        ),
        CalibrationWorkload(
            name="W5",
            profile="steptime-w5",
            purpose="communication between devices: W3 on 1, 2 and 4 of them",
            stages=_stages([(256, 256)], _BATCHES),
            remark="run it against a server of each tensor-parallel size",
        ),
        CalibrationWorkload(
            name="V1",
            profile="steptime-v1",
            purpose="validation on a model that the fit has not seen",
            stages=(*_stages([(1024, 512)], [1, 64]), *_stages([(256, 256)], [1, 64])),
            remark="never fit to these runs",
        ),
    )
}


def calibration_workload(name: str) -> CalibrationWorkload:
    """The workload of a name. Raises UsageError for an unknown one."""
    if (workload := WORKLOADS.get(name.upper())) is None:
        raise UsageError(f"unknown workload {name!r}; name one of {', '.join(WORKLOADS)}")
    return workload
