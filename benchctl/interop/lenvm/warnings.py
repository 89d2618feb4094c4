"""Warnings about a LenVM timing directory: errors in its files, which are repaired here, and its limits.

Each warning is given once for the whole directory and names the arms that it concerns.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from benchctl.interop.lenvm.directory import GPU, RESPONSES, SAMPLING, STEPS, Arm
from benchctl.interop.lenvm.summary import Models
from benchctl.interop.lenvm_log import load_ms, windows_of
from benchctl.records.schema import ResultWarning
from benchctl.records.warning_codes import IMPORT_LIMITS, IMPORT_REPAIRS, WARNING_TABLE
from benchctl.units import MS_PER_S

REPAIRS: Final = tuple(WARNING_TABLE[IMPORT_REPAIRS])
"""Codes of errors in the files that were repaired, or left out."""
_ORDER: Final = (*REPAIRS, *WARNING_TABLE[IMPORT_LIMITS])
_TEXTS: Final = {
    "overlap-differs": (
        "the project's scripts switch overlapped scheduling off on guided servers alone, so a difference to "
        "the baseline includes that; no file records how a server was started"
    ),
    "wall-holds-client": (
        "wall_clock_s of the meta file includes the start of the client, its imports and the loading of the "
        "dataset; wall_s here is first send to last answer, and theirs is in lenvm_summary.csv"
    ),
    "sends-reconstructed": (
        "no file records the times of sends: they are reconstructed from durations, which include retries, and "
        "concurrency"
    ),
    "gpu-unattributed": (
        "GPU samples are of every device of the host, including those that the server did not use"
    ),
    "averages-cumulative": (
        "the server printed averages since its start and waited for the device around every section"
    ),
    "steps-are-samplers": (
        "the step log times the sampler alone and records neither the time nor the duration of a step: tables and "
        "charts of sections show the sampler, and step_ms is unknown"
    ),
    "sections-async": (
        "sections are host time without waiting for the device: the first call that blocks is charged with the "
        "work queued before it (in lvm_build_pending the base model's own forward pass), and none is GPU time"
    ),
}


def directory_warnings(arms: Sequence[Arm], models: Models) -> tuple[ResultWarning, ...]:
    """The warnings about a directory, errors before limits, each with the arms that it concerns."""
    notices: dict[str, dict[str, str]] = {}
    for arm in arms:
        for code, message in (*_repairs(arm), *_limits(arm, arms), *_steps(arm)):
            notices.setdefault(code, {})[arm.tag] = message
    warnings = [_of_arms(code, messages) for code, messages in notices.items()]
    if models.is_assumed:
        assumption = f"no file names the models: FLOPs are those of {models.base} and {models.value}"
        message = f"{assumption}; name them with --model and --value-model"
        warnings.append(ResultWarning(code="models-assumed", message=message))
    return tuple(sorted(warnings, key=lambda warning: _ORDER.index(warning.code)))


def _of_arms(code: str, messages: Mapping[str, str]) -> ResultWarning:
    """One warning from the messages of several arms."""
    if len(set(messages.values())) == 1:
        message = next(iter(messages.values()))
    else:
        message = "; ".join(f"{tag}: {text}" for tag, text in messages.items())
    return ResultWarning(code=code, message=message, where=", ".join(messages))


def _repairs(arm: Arm) -> Iterator[tuple[str, str]]:
    answered = arm.responses.answered
    most = max((each.num_rows for each in answered if each.completion_tokens), default=0)
    if most > 1:
        message = f"each choice of a request repeats the usage of the request, up to {most} times"
        yield "usage-duplicated", f"{message}: it was counted once for each request"
    num_failed = sum(each.is_failed for each in answered)
    num_missing = max(0, (arm.meta.max_questions or 0) - len(answered))
    if num_failed or num_missing:
        yield "questions-unanswered", f"{num_failed} questions failed and {num_missing} have no line"
    damage = {RESPONSES: arm.responses.damage, STEPS: arm.timing.damage}
    if cut := [arm.paths[name].name for name, each in damage.items() if each.is_cut]:
        yield "line-cut", f"{' and '.join(cut)} ends within a line, which was left out"
    if num_damaged := sum(each.num_lines for each in damage.values()):
        yield "lines-damaged", f"{num_damaged} lines before the last are damaged and were left out"
    num_lives, num_counted = len(arm.timing.lives), len(arm.lives)
    if num_lives > 1:
        counted = "all are needed for the tokens of the answers and count"
        if num_counted < num_lives:
            counted = f"the last {num_counted} of them yielded the answers and count, the rest was left out"
        yield "log-restarted", f"the step log has {num_lives} lives of a server, each counting from 1: {counted}"


def _limits(arm: Arm, arms: Sequence[Arm]) -> Iterator[tuple[str, str]]:
    is_limited = {
        "overlap-differs": arm.guidance is not None and any(other.guidance is None for other in arms),
        "wall-holds-client": arm.meta.wall_clock_s is not None,
        "sends-reconstructed": bool(arm.responses.answered),
        "gpu-unattributed": GPU in arm.paths,
    }
    yield from ((code, _TEXTS[code]) for code, applies in is_limited.items() if applies)
    if names := ", ".join(name for name in SAMPLING if name not in arm.sampling):
        yield "sampling-unrecorded", f"{names}: recorded in no request and no command line; defaults are assumed"
    windows = list(windows_of(arm.averages))
    if windows:
        worst_ms = max(window.rounding_ms for window in windows)
        between = f"the {len(windows)} windows between them, to within {worst_ms:.2g} ms, of the whole call alone"
        yield "averages-cumulative", f"{_TEXTS['averages-cumulative']}; timing_windows.jsonl has {between}"


def _steps(arm: Arm) -> Iterator[tuple[str, str]]:
    records = [record for life in arm.lives for record in life]
    if not records:
        yield "steps-unrecorded", "there is no step log, so single steps are unknown"
        return
    yield "steps-are-samplers", _TEXTS["steps-are-samplers"]
    if any("lvm_forward" in record.sections_ms for record in records):
        yield "sections-async", _TEXTS["sections-async"]
    loads_ms = [load[1] for life in arm.lives if (load := load_ms(life)) is not None]
    if loads_ms:
        message = f"the value model was loaded inside the first sampled step ({max(loads_ms) / MS_PER_S:.1f} s)"
        yield "value-model-load-measured", f"{message}, and so inside the measured load"
    num_own = sum(arm.num_start_up)
    if num_greedy := sum(record.is_greedy for record in records):
        own = f"{num_own} before the load are the server's own and count as warm-up"
        counted = f"{own}, {num_greedy - num_own} count as steps; the project's own columns leave all of them out"
        yield "greedy-records", f"{num_greedy} of {len(records)} steps are greedy: {counted}"
