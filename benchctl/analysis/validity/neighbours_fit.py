"""Warnings about neighbours on the same host: blocks that disturb each other, and those that were never checked."""

import datetime as dt
from typing import Final

from benchctl.analysis.statistics.disturbance import Finding
from benchctl.analysis.validity.noise_floor_fit import FRESH_DAYS
from benchctl.formats import change_of_ratio, count_of, four_digits, in_a_row, percentage
from benchctl.records.neighbours import NeighbourCheck, NeighbourEffect
from benchctl.records.record import ResultWarning
from benchctl.units import HZ_PER_MHZ

_REASONS: Final = {
    "sw-power-cap": "the power limit",
    "hw-power-brake": "the power brake of the board",
    "hw-thermal": "heat",
    "sw-thermal": "heat",
    "hw-slowdown": "the slow-down of the hardware",
}
"""Reasons for a lowered clock in words, by NVIDIA's name."""
_NOTABLE_SHARE: Final = 0.1
"""A reason counts as one where it is given in so much more of the readings beside neighbours."""


def neighbour_warnings(check: NeighbourCheck, begins_at: str, command: str) -> tuple[ResultWarning, ...]:
    """Warnings about the check on file for an experiment that begins at ``begins_at``.

    ``command`` checks again.
    """
    warnings = []
    if (text := disturbance_text(check)) is not None:
        message = (
            f"blocks that run at the same time disturb each other: {text} ({_origin(check)}); absolute numbers are "
            "those of a busy host, and their scatter is larger. Fewer blocks at a time disturb less (--parallel)"
        )
        warnings.append(ResultWarning(code="neighbours-disturb", message=message))
    elif overall_finding(check) == "undecided":
        message = (
            "whether blocks that run at the same time disturb each other is open: "
            f"{_effects(check, 'undecided')} ({_origin(check)}); "
            f"{more_blocks_text(check)}"
        )
        warnings.append(ResultWarning(code="neighbours-undecided", message=message))
    days = (dt.datetime.fromisoformat(begins_at) - dt.datetime.fromisoformat(check.measured_at)).days
    if days > FRESH_DAYS:
        message = f"the check of neighbours is {days} days older than this experiment; measure it again: {command}"
        warnings.append(ResultWarning(code="neighbours-unchecked", message=message))
    return tuple(warnings)


def unchecked_warning(parallel: int, command: str) -> ResultWarning:
    """The warning that no check is on file for an experiment with so many blocks at a time."""
    message = (
        f"{parallel} blocks run at the same time on this host, and nobody has measured whether they disturb each "
        f"other; measure it: {command}"
    )
    return ResultWarning(code="neighbours-unchecked", message=message)


def overall_finding(check: NeighbourCheck) -> Finding:
    """``disturbed`` where anything is, ``undecided`` where anything is open, else ``undisturbed``."""
    findings = {effect.finding for effect in check.metrics.values()}
    if check.loses_runs or "disturbed" in findings:
        return "disturbed"
    return "undecided" if "undecided" in findings else "undisturbed"


def finding_text(check: NeighbourCheck) -> str:
    """The result of a check in one sentence."""
    beside, finding = f"beside {count_of(check.parallel - 1, 'neighbour')}", overall_finding(check)
    if finding == "disturbed":
        return f"disturbed {beside}: {disturbance_text(check)}"
    if finding == "undecided":
        return f"undecided {beside}: {more_blocks_text(check)}"
    return f"not disturbed {beside}: all intervals are inside the threshold"


def disturbance_text(check: NeighbourCheck) -> str | None:
    """The disturbances that a check found, with their likely cause; None where it found none."""
    effects = _effects(check, "disturbed")
    lost = ""
    if check.loses_runs:
        lost = (
            f"{check.lost_beside[0]} of {check.lost_beside[1]} runs beside neighbours do not count, and "
            f"{check.lost_alone[0]} of {check.lost_alone[1]} alone"
        )
    if not effects and not lost:
        return None
    cause = cause_text(check)
    return "; ".join(filter(None, (effects, lost, cause and f"likely cause: {cause}")))


def cause_text(check: NeighbourCheck) -> str | None:
    """The cause of a disturbance, as far as clocks and processor time tell it; None where they do not."""
    causes = []
    clock = check.readings.get("sm_clock_hz")
    if clock is not None and clock.is_beyond_chance and clock.beside < clock.alone:
        fall = percentage(1 - clock.beside / clock.alone, 2)
        reasons = dict.fromkeys(
            words
            for name, words in _REASONS.items()
            if name in check.throttled and check.throttled[name][1] - check.throttled[name][0] > _NOTABLE_SHARE
        )
        held = f", held down by {in_a_row(list(reasons))}" if reasons else ""
        causes.append(
            f"the clock of the GPU fell by {fall} ({four_digits(clock.alone / HZ_PER_MHZ)} to "
            f"{four_digits(clock.beside / HZ_PER_MHZ)} MHz){held}"
        )
    cores = check.readings.get("server_cpu_cores")
    if cores is not None and cores.is_beyond_chance and cores.beside < cores.alone:
        causes.append(
            f"the server got {percentage(1 - cores.beside / cores.alone, 2)} less processor time "
            f"({four_digits(cores.alone)} to {four_digits(cores.beside)} cores)"
        )
    return " and ".join(causes) or None


def more_blocks_text(check: NeighbourCheck) -> str:
    """The number of blocks that would decide what a check left open."""
    open_effects = [effect for effect in check.metrics.values() if effect.finding == "undecided"]
    needed = [effect.blocks_needed for effect in open_effects]
    have = max((effect.num_blocks for effect in open_effects), default=0)
    numbers = [number for number in needed if number is not None]
    if not numbers or len(numbers) < len(needed):
        return "no number of blocks would tell: the change is below the noise floor, or it scatters too much"
    return (
        f"about {count_of(max(numbers) - have, 'more block')} would tell: benchctl noise neighbours "
        f"--resume {check.source} --blocks {max(numbers)}"
    )


def effect_text(name: str, effect: NeighbourEffect) -> str:
    """``tpot_ms +12.1% [+10.2%, +14.0%]``."""
    if effect.ci_low is None or effect.ci_high is None:
        return f"{name} {change_of_ratio(effect.ratio)}"
    ends = f"{change_of_ratio(effect.ci_low)}, {change_of_ratio(effect.ci_high)}"
    return f"{name} {change_of_ratio(effect.ratio)} [{ends}]"


def _effects(check: NeighbourCheck, finding: str) -> str:
    texts = [effect_text(name, effect) for name, effect in check.metrics.items() if effect.finding == finding]
    return " and ".join(texts)


def _origin(check: NeighbourCheck) -> str:
    blocks = max((effect.num_blocks for effect in check.metrics.values()), default=check.lost_beside[1])
    beside = count_of(check.parallel - 1, "neighbour")
    return (
        f"beside {beside}, {percentage(check.confidence, 3)} interval of {count_of(blocks, 'block')}, check of "
        f"{check.measured_at[:10]}"
    )
