"""Warnings about a LenVM timing directory: errors in its files, which are repaired here, and its limits.

Each warning is given once for the whole directory and names the arms that it concerns.
"""

from collections.abc import Sequence
from typing import Final

from benchctl.interop.lenvm.directory import GPU, SAMPLING, Arm
from benchctl.interop.lenvm.summary import Models
from benchctl.interop.lenvm_log import load_ms, windows_of
from benchctl.records.schema import ResultWarning
from benchctl.records.warning_codes import IMPORT_LIMITS, IMPORT_REPAIRS, WARNING_TABLE
from benchctl.units import MS_PER_S

REPAIRS: Final = tuple(WARNING_TABLE[IMPORT_REPAIRS])
"""Codes of errors in the files that were repaired, or left out."""
_ORDER: Final = (*REPAIRS, *WARNING_TABLE[IMPORT_LIMITS])


def directory_warnings(arms: Sequence[Arm], models: Models) -> tuple[ResultWarning, ...]:
    """The warnings about a directory, errors before limits, each with the arms that it concerns."""
    of_arms = {arm.tag: _repairs(arm) | _limits(arm, arms) | _limits_of_steps(arm) for arm in arms}
    warnings = []
    for code in _ORDER:
        messages = {tag: texts[code] for tag, texts in of_arms.items() if texts.get(code)}
        if messages:
            is_same = len(set(messages.values())) == 1
            listed = "; ".join(f"{tag}: {text}" for tag, text in messages.items())
            message = next(iter(messages.values())) if is_same else listed
            warnings.append(ResultWarning(code=code, message=message, where=", ".join(messages)))
        elif code == "models-assumed" and models.is_assumed:
            assumption = f"no file names the models: FLOPs are those of {models.base} and {models.value}"
            message = f"{assumption}; name them with --model and --value-model"
            warnings.append(ResultWarning(code=code, message=message))
    return tuple(warnings)


def _repairs(arm: Arm) -> dict[str, str]:
    """What was repaired in the files of an arm, by code; empty texts for what does not apply."""
    most = max((each.num_rows for each in arm.answered if each.completion_tokens), default=0)
    num_failed = sum(each.is_failed for each in arm.answered)
    num_missing = max(0, (arm.meta.max_questions or 0) - len(arm.answered))
    cut = " and ".join(arm.paths[name].name for name, each in arm.damage.items() if each.is_cut)
    num_damaged = sum(each.num_lines for each in arm.damage.values())
    num_lives, num_counted = len(arm.all_lives), len(arm.lives)
    counted = "all are needed for the tokens of the answers and count"
    if num_counted < num_lives:
        counted = f"the last {num_counted} of them yielded the answers and count, the rest was left out"
    texts = {
        "usage-duplicated": (
            most > 1,
            (
                f"each choice of a request repeats the usage of the request, up to {most} times: it was counted "
                "once for each request"
            ),
        ),
        "questions-unanswered": (
            num_failed + num_missing > 0,
            f"{num_failed} questions failed and {num_missing} have no line",
        ),
        "line-cut": (bool(cut), f"{cut} ends within a line, which was left out"),
        "lines-damaged": (
            num_damaged > 0,
            f"{num_damaged} lines before the last are damaged and were left out",
        ),
        "log-restarted": (
            num_lives > 1,
            f"the step log has {num_lives} lives of a server, each counting from 1: {counted}",
        ),
    }
    return {code: text for code, (applies, text) in texts.items() if applies}


def _limits(arm: Arm, arms: Sequence[Arm]) -> dict[str, str]:
    """What the files of an arm cannot tell, by code."""
    unrecorded = ", ".join(name for name in SAMPLING if name not in arm.sampling)
    windows = list(windows_of(arm.averages))
    worst_ms = max((window.rounding_ms for window in windows), default=0.0)
    texts = {
        "overlap-differs": (
            arm.guidance is not None and any(other.guidance is None for other in arms),
            (
                "the project's scripts switch overlapped scheduling off on guided servers alone, so a difference "
                "to the baseline includes that; no file records how a server was started"
            ),
        ),
        "wall-holds-client": (
            arm.meta.wall_clock_s is not None,
            (
                "wall_clock_s of the meta file includes the start of the client, its imports and the loading of "
                "the dataset; wall_s here is first send to last answer, and theirs is in lenvm_summary.csv"
            ),
        ),
        "sends-reconstructed": (
            bool(arm.answered),
            (
                "no file records the times of sends: they are reconstructed from durations, which include "
                "retries, and concurrency"
            ),
        ),
        "gpu-unattributed": (
            GPU in arm.paths,
            "GPU samples are of every device of the host, including those that the server did not use",
        ),
        "sampling-unrecorded": (
            bool(unrecorded),
            f"{unrecorded}: recorded in no request and no command line; defaults are assumed",
        ),
        "averages-cumulative": (
            bool(windows),
            (
                "the server printed averages since its start and waited for the device around every section; "
                f"timing_windows.jsonl has the {len(windows)} windows between them, to within {worst_ms:.2g} ms, "
                "of the whole call alone"
            ),
        ),
    }
    return {code: text for code, (applies, text) in texts.items() if applies}


def _limits_of_steps(arm: Arm) -> dict[str, str]:
    """What the step log of an arm cannot tell, by code."""
    records = [record for life in arm.lives for record in life]
    if not records:
        return {"steps-unrecorded": "there is no step log, so single steps are unknown"}
    loads_ms = [load[1] for life in arm.lives if (load := load_ms(life)) is not None]
    num_own, num_greedy = sum(arm.num_start_up), sum(record.is_greedy for record in records)
    texts = {
        "steps-are-samplers": (
            True,
            (
                "the step log times the sampler alone and records neither the time nor the duration of a step: "
                "tables and charts of sections show the sampler, and step_ms is unknown"
            ),
        ),
        "sections-async": (
            any("lvm_forward" in record.sections_ms for record in records),
            (
                "sections are host time without waiting for the device: the first call that blocks is charged "
                "with the work queued before it (in lvm_build_pending the base model's own forward pass), and "
                "none is GPU time"
            ),
        ),
        "value-model-load-measured": (
            bool(loads_ms),
            (
                "the value model was loaded inside the first sampled step "
                f"({max(loads_ms, default=0.0) / MS_PER_S:.1f} s), and so inside the measured load"
            ),
        ),
        "greedy-records": (
            num_greedy > 0,
            (
                f"{num_greedy} of {len(records)} steps are greedy: {num_own} before the load are the server's own "
                f"and count as warm-up, {num_greedy - num_own} count as steps; the project's own columns leave all "
                "of them out"
            ),
        ),
    }
    return {code: text for code, (applies, text) in texts.items() if applies}
