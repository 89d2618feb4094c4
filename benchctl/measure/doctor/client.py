"""Checks of what the system grants the load client: a scheduling priority, and a core of its own."""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

from benchctl.load.priority import Priority, load_priority
from benchctl.measure.doctor.check import Check
from benchctl.measure.server.cores import CoreSplit, core_ranges, split_cores

_TOPIC: Final = "machine"
_TO_GET_PRIORITY: Final = (
    "sudo prlimit --pid $$ --rtprio=1 in this shell; docker run --cap-add SYS_NICE; more: docs/engines.md, Priority"
)


def client_checks(system: Path) -> tuple[Check, ...]:
    """Try both in a temporary thread, and undo them; ``system`` is the kernel's directory of devices."""
    with ThreadPoolExecutor(max_workers=1) as temporary_thread:
        granted = temporary_thread.submit(_try_priority).result()
        can_bind = temporary_thread.submit(_try_binding).result()
    usable = frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ())
    split = split_cores("auto") if can_bind else None
    return (priority_check(granted), own_core_check(usable, _isolated(system), split, can_bind=can_bind))


def priority_check(granted: Priority) -> Check:
    """Check that the client can take precedence over a server that keeps all cores busy."""
    is_refused = granted.level != "fifo" and "not permitted" in granted.reason
    return Check(
        topic=_TOPIC,
        name="priority",
        finding=f"of the load client: {granted}",
        remedy=_TO_GET_PRIORITY if is_refused else None,
        facts={"level": granted.level, "reason": granted.reason},
    )


def own_core_check(usable: frozenset[int], isolated: str, split: CoreSplit | None, *, can_bind: bool) -> Check:
    """Check that the client can have a core without a server, and report whether ``auto`` gives it one."""
    detail = f"usable {core_ranges(usable) or 'unknown'}, isolated {isolated or 'none'}; "
    if len(usable) < 2 or not can_bind:
        detail += "none can be reserved for the client"
    elif split is not None:
        detail += f"client on {core_ranges(split.client)}, servers on the others (client_cores: auto)"
    else:
        detail += "none is reserved for the client by default (client_cores: 1 reserves one)"
    facts = {"num_usable": len(usable), "isolated": isolated or None, "can_bind": can_bind}
    return Check(topic=_TOPIC, name="own core", finding=detail, facts=facts)


def _try_priority() -> Priority:
    with load_priority("auto") as granted:
        return granted


def _try_binding() -> bool:
    with suppress(AttributeError, OSError):
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {max(cores)})
        os.sched_setaffinity(0, cores)
        return True
    return False


def _isolated(system: Path) -> str:
    """Cores that the kernel schedules nothing on (``isolcpus``); empty if there are none."""
    with suppress(OSError):
        return (system / "cpu/isolated").read_text(encoding="ascii").strip()
    return ""
