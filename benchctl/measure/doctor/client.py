"""What the system grants the load client: its turn on the processor first, and a core of its own."""

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
    """Tried and undone in a thread of their own; ``system`` is where the kernel tells of its devices."""
    with ThreadPoolExecutor(max_workers=1) as passing_thread:
        granted = passing_thread.submit(_try_priority).result()
        can_bind = passing_thread.submit(_try_binding).result()
    usable = frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ())
    set_apart = split_cores("auto") if can_bind else None
    return (priority_check(granted), own_core_check(usable, _isolated(system), set_apart, can_bind=can_bind))


def priority_check(granted: Priority) -> Check:
    """Whether the client gets its turn before a server that keeps all cores busy."""
    is_refused = granted.level != "fifo" and "not permitted" in granted.reason
    return Check(
        topic=_TOPIC,
        name="priority",
        finding=f"of the load client: {granted}",
        remedy=_TO_GET_PRIORITY if is_refused else None,
        facts={"level": granted.level, "reason": granted.reason},
    )


def own_core_check(usable: frozenset[int], isolated: str, set_apart: CoreSplit | None, *, can_bind: bool) -> Check:
    """Whether the client can have a core that no server runs on, and whether ``auto`` gives it one."""
    said = f"usable {core_ranges(usable) or 'unknown'}, isolated {isolated or 'none'}; "
    if len(usable) < 2 or not can_bind:
        said += "none can be set apart for the client"
    elif set_apart is not None:
        said += f"client on {core_ranges(set_apart.client)}, servers on the others (client_cores: auto)"
    else:
        said += "none is set apart for the client unasked (client_cores: 1 does)"
    facts = {"num_usable": len(usable), "isolated": isolated or None, "can_bind": can_bind}
    return Check(topic=_TOPIC, name="own core", finding=said, facts=facts)


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
    """Cores that the kernel was told to leave alone (``isolcpus``); empty where there are none."""
    with suppress(OSError):
        return (system / "cpu/isolated").read_text(encoding="ascii").strip()
    return ""
