"""Steps of a guided vLLM server: vLLM's own record of each step, joined with what guidance did in it.

Both logs are written by different processes and count the steps of the server alike, so the number joins them; the
size of the batch, which both know, proves that it is the same step. A step without a line of guidance had no row to
guide.

The duration of a step is vLLM's, on the clock of the host, and so is ``clock`` of every record. Parts of it are
times of the host alone. Where guidance was timed on the clock of the device as well, those times carry its name,
``device.lvm_forward``: they are listed beside the step and are no parts of it, because a device may still be busy
with one step when the host has gone on to the next.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

import msgspec

from benchctl.engines.vllm.steps import read_numbered_steps
from benchctl.errors import RecordError
from benchctl.records.files import read_jsonl
from benchctl.records.schema import StepRecord

DEVICE_PREFIX: Final = "device."
"""Prefix of sections that are device times in a step of the host."""


class GuidedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the log of guidance; see ``guided/vllm/step_log.py``."""

    step: int
    num_seqs: int
    guided_rows: int = 0
    candidates: int = 0
    value_prefill_tokens: int = 0
    value_extend_tokens: int = 0
    value_reuse_tokens: int = 0
    value_replayed: bool | None = None
    value_recordings: int | None = None
    fused: bool | None = None
    clock: Literal["host", "device"] = "host"
    """Of ``sections_ns``."""
    sections_ns: dict[str, int] = {}
    host_sections_ns: dict[str, int] = {}
    """Times of the host, where ``sections_ns`` are those of the device."""

    @property
    def named_sections_ns(self) -> dict[str, int]:
        """Times of the host by their names, those of the device by names that say so."""
        if self.clock == "host":
            return self.sections_ns
        return self.host_sections_ns | {DEVICE_PREFIX + name: time for name, time in self.sections_ns.items()}


def guided_step_log(directory: Path) -> Path:
    """The log of guidance in the directory of a run."""
    return directory / "steps.guided.jsonl"


def read_vllm_lenvm_steps(directory: Path) -> Iterator[StepRecord]:
    """The steps of a run on a server that has a value model.

    Raises RecordError at the first damaged line of either log, and where the two describe different steps.
    """
    path = guided_step_log(directory)
    lines = iter(read_jsonl(path, GuidedStep)) if path.exists() else iter(())
    line = next(lines, None)
    for number, step in read_numbered_steps(directory):
        if line is None or number is None or number < line.step:
            yield msgspec.structs.replace(step, guided_rows=0, candidates=0)
            continue
        if number > line.step or step.num_seqs != line.num_seqs:
            raise RecordError(
                f"{path}: step {line.step} with {line.num_seqs} sequences is not the server's step {number} with "
                f"{step.num_seqs}; the two logs are of different servers, or one is incomplete: measure again"
            )
        yield msgspec.structs.replace(
            step,
            guided_rows=line.guided_rows,
            candidates=line.candidates,
            value_prefill_tokens=line.value_prefill_tokens,
            value_extend_tokens=line.value_extend_tokens,
            value_reuse_tokens=line.value_reuse_tokens,
            value_replayed=line.value_replayed,
            value_recordings=line.value_recordings,
            fused=line.fused,
            sections_ns=line.named_sections_ns,
        )
        line = next(lines, None)
