"""Warnings about a LenVM timing directory: errors in its files, which are repaired here, and its limits.

Each warning is given once for the whole directory and names the arms that it concerns.
"""

from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

from benchctl.interop.lenvm.directory import GPU, RESPONSES, SAMPLING, STEPS, Arm
from benchctl.interop.lenvm.summary import Models
from benchctl.interop.lenvm_log import load_ms, windows_of
from benchctl.records.schema import ResultWarning
from benchctl.records.warning_codes import IMPORT_LIMITS, IMPORT_REPAIRS, WARNING_TABLE
from benchctl.units import MS_PER_S

REPAIRS: Final = tuple(WARNING_TABLE[IMPORT_REPAIRS])
"""Codes of errors in the files that were repaired, or left out."""
_ORDER: Final = {code: i for i, code in enumerate((*REPAIRS, *WARNING_TABLE[IMPORT_LIMITS]))}

_OVERLAP: Final = (
    "the project's scripts switch overlapped scheduling off on guided servers alone, so a difference to the "
    "baseline includes that; no file records how a server was started"
)
_WALL: Final = (
    "wall_clock_s of the meta file includes the start of the client, its imports and the loading of the dataset; "
    "wall_s here is first send to last answer, and theirs is in lenvm_summary.csv"
)
_SENDS: Final = (
    "no file records the times of sends: they are reconstructed from durations, which include retries, and "
    "concurrency"
)
_SAMPLERS: Final = (
    "the step log times the sampler alone and records neither the time nor the duration of a step: tables and "
    "charts of sections show the sampler, and step_ms is unknown"
)
_ASYNC: Final = (
    "sections are host time without waiting for the device: the first call that blocks is charged with the work "
    "queued before it (in lvm_build_pending the base model's own forward pass), and none is GPU time"
)
_AVERAGES: Final = "the server printed averages since its start and waited for the device around every section"
_GPU: Final = "GPU samples are of every device of the host, including those that the server did not use"

_Notice: TypeAlias = tuple[str, str]
"""Code and message."""


def directory_warnings(arms: Sequence[Arm], models: Models) -> tuple[ResultWarning, ...]:
    """The warnings about a directory, errors before limits, each with the arms that it concerns."""
    notices: dict[str, list[_Notice]] = {}
    for arm in arms:
        for code, message in (*_repairs(arm), *_limits(arm, arms), *_steps(arm)):
            notices.setdefault(code, []).append((arm.tag, message))
    if models.is_assumed:
        assumption = f"no file names the models: FLOPs are those of {models.base} and {models.value}"
        notices["models-assumed"] = [("", f"{assumption}; name them with --model and --value-model")]
    return tuple(_warning(code, notices[code]) for code in sorted(notices, key=_ORDER.__getitem__))


def _warning(code: str, notices: Sequence[_Notice]) -> ResultWarning:
    """One warning from the notices of several arms."""
    messages = dict.fromkeys(message for _, message in notices)
    tags = ", ".join(tag for tag, _ in notices if tag)
    message = next(iter(messages)) if len(messages) == 1 else "; ".join(f"{tag}: {text}" for tag, text in notices)
    return ResultWarning(code=code, message=message, where=tags or None)


def _repairs(arm: Arm) -> Iterator[_Notice]:
    answered = arm.responses.answered
    most = max((each.num_rows for each in answered if each.completion_tokens), default=0)
    if most > 1:
        message = f"each choice of a request repeats the usage of the request, up to {most} times"
        yield "usage-duplicated", f"{message}: it was counted once for each request"
    num_failed = sum(each.is_failed for each in answered)
    num_missing = max(0, (arm.meta.max_questions or 0) - len(answered))
    if num_failed or num_missing:
        yield "questions-unanswered", f"{num_failed} questions failed and {num_missing} have no line"
    files = ((arm.paths.get(RESPONSES), arm.responses), (arm.paths.get(STEPS), arm.timing))
    if cut := [path.name for path, content in files if path is not None and content.is_cut]:
        yield "line-cut", f"{' and '.join(cut)} ends within a line, which was left out"
    if num_damaged := sum(content.num_damaged for _, content in files):
        yield "lines-damaged", f"{num_damaged} lines before the last are damaged and were left out"
    num_lives, num_counted = len(arm.timing.lives), len(arm.lives)
    if num_lives > 1:
        counted = "all are needed for the tokens of the answers and count"
        if num_counted < num_lives:
            counted = f"the last {num_counted} of them yielded the answers and count, the rest was left out"
        yield "log-restarted", f"the step log has {num_lives} lives of a server, each counting from 1: {counted}"


def _limits(arm: Arm, arms: Sequence[Arm]) -> Iterator[_Notice]:
    if arm.guidance is not None and any(other.guidance is None for other in arms):
        yield "overlap-differs", _OVERLAP
    if arm.meta.wall_clock_s is not None:
        yield "wall-holds-client", _WALL
    if arm.responses.answered:
        yield "sends-reconstructed", _SENDS
    if GPU in arm.paths:
        yield "gpu-unattributed", _GPU
    if names := ", ".join(name for name in SAMPLING if name not in arm.sampling):
        yield "sampling-unrecorded", f"{names}: recorded in no request and no command line; defaults are assumed"
    windows = list(windows_of(arm.averages))
    if windows:
        worst_ms = max(window.rounding_ms for window in windows)
        between = f"the {len(windows)} windows between them, to within {worst_ms:.2g} ms"
        yield "averages-cumulative", f"{_AVERAGES}; timing_windows.jsonl has {between}, of the whole call alone"


def _steps(arm: Arm) -> Iterator[_Notice]:
    records = [record for life in arm.lives for record in life]
    if not records:
        yield "steps-unrecorded", "there is no step log, so single steps are unknown"
        return
    yield "steps-are-samplers", _SAMPLERS
    if any("lvm_forward" in record.sections_ms for record in records):
        yield "sections-async", _ASYNC
    loads_ms = [load[1] for life in arm.lives if (load := load_ms(life)) is not None]
    if loads_ms:
        message = f"the value model was loaded inside the first sampled step ({max(loads_ms) / MS_PER_S:.1f} s)"
        yield "value-model-load-measured", f"{message}, and so inside the measured load"
    num_own = sum(arm.num_start_up)
    if num_greedy := sum(record.is_greedy for record in records):
        own = f"{num_own} before the load are the server's own and count as warm-up"
        counted = f"{own}, {num_greedy - num_own} count as steps; the project's own columns leave all of them out"
        yield "greedy-records", f"{num_greedy} of {len(records)} steps are greedy: {counted}"
