"""The check of ``doctor`` for blocks that are measured beside each other on this host."""

from functools import partial

from benchctl.cluster.host import this_host
from benchctl.cluster.slots import slots_of_host
from benchctl.errors import UsageError
from benchctl.measure.doctor.check import Check
from benchctl.units import count_of, range_of

_check = partial(Check, topic="cluster", name="slots")


def slots_check() -> Check:
    """Report how many blocks ``--on local`` can measure at the same time, and what each of them gets."""
    try:
        host = this_host()
        num = max(len(host.visible) or len(host.cores), 1)
        slots = slots_of_host(num, host=host)
    except UsageError as error:
        return _check(finding=str(error), facts={"num_slots": 0, "num_gpus": None, "num_cores": None})
    cores = range_of(sorted(len(slot.cores) for slot in slots))
    each = "1 GPU and " if host.visible else ""
    noun = "hardware thread" if host.num_threads > len(host.cores) else "core"
    return _check(
        finding=f"--on local: up to {count_of(len(slots), 'block')} at a time, each with {each}{cores} {noun}"
        + ("" if cores == "1" else "s"),
        facts={"num_slots": len(slots), "num_gpus": len(host.visible), "num_cores": len(host.cores)},
    )
