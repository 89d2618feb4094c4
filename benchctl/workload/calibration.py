"""The workloads that a step-time model is calibrated with: W1 to W5, and V1 for models that the fit has not seen.

Each determines some of the coefficients: W1 prompts alone, W2 single decoding rows after contexts of many lengths,
W3 batches of many sizes, W4 both phases at once, W5 several devices. What each sends is that of its profile,
``steptime-w1`` and so on; the writer of inference-perf takes it from here.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from benchctl.errors import UsageError
from benchctl.profile.load import load_profile
from benchctl.profile.planning import arms
from benchctl.workload.prepare import prepare_requests

SEED: Final = 42


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationStage:
    """Requests of one size at one concurrency."""

    prompt_tokens: int
    output_tokens: int
    concurrency: int
    num_requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationWorkload:
    """One workload: its profile, and the terms of a step that it tells apart from others."""

    name: str
    profile: str
    purpose: str
    remark: str = ""

    @property
    def num_requests(self) -> int:
        """Requests that the profile sends in a block, without warm-up."""
        profile = load_profile(self.profile)
        return len(arms(profile)) * len(prepare_requests(profile).requests)

    @property
    def stages(self) -> tuple[CalibrationStage, ...]:
        """Requests that the profile sends to one server: those of each length, once for each size of the batch."""
        profile = load_profile(self.profile)
        lengths = [(request.prompt_tokens, request.max_tokens) for request in prepare_requests(profile).requests]
        batches = {profile.workload.arrival.max_concurrency, *profile.sweep.get("max_num_seqs", ())}
        return tuple(
            CalibrationStage(
                prompt_tokens=prompt, output_tokens=output, concurrency=batch, num_requests=num_requests
            )
            for (prompt, output), num_requests in Counter(lengths).items()
            for batch in sorted(int(batch) for batch in batches if batch is not None)
        )

    def by_size(self) -> Iterator[tuple[tuple[int, int], tuple[CalibrationStage, ...]]]:
        """Stages of equal lengths together: tools with one length in a file need a file for each."""
        for size, stages in groupby(self.stages, key=lambda stage: (stage.prompt_tokens, stage.output_tokens)):
            yield size, tuple(stages)


WORKLOADS: Final[dict[str, CalibrationWorkload]] = {
    workload.name: workload
    for workload in (
        CalibrationWorkload(
            name="W1",
            profile="steptime-w1",
            purpose="time of a prompt by its length, and of a step with nothing else in it",
        ),
        CalibrationWorkload(
            name="W2",
            profile="steptime-w2",
            purpose="time of one decoding row by its context",
        ),
        CalibrationWorkload(
            name="W3",
            profile="steptime-w3",
            purpose="time by the number of rows, and experts read in a batch",
        ),
        CalibrationWorkload(
            name="W4",
            profile="steptime-w4",
            purpose="prompts beside decoding rows",
        ),
        CalibrationWorkload(
            name="W5",
            profile="steptime-w5",
            purpose="communication between devices: W3 on 1, 2 and 4 of them",
            remark="run it against a server of each tensor-parallel size",
        ),
        CalibrationWorkload(
            name="V1",
            profile="steptime-v1",
            purpose="validation on a model that the fit has not seen",
            remark="never fit to these runs",
        ),
    )
}


def calibration_workload(name: str) -> CalibrationWorkload:
    """The workload of a name. Raises UsageError for an unknown one."""
    if (workload := WORKLOADS.get(name.upper())) is None:
        raise UsageError(f"unknown workload {name!r}; name one of {', '.join(WORKLOADS)}")
    return workload
