"""Slots whose devices and cores no other benchctl of this user has."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from benchctl.cluster.device_locks import core_names, locked
from benchctl.cluster.slots import Slot
from benchctl.engines.engine import engine_for
from benchctl.errors import UsageError
from benchctl.measure.limits import gpus_of_block
from benchctl.measure.telemetry.gpu import gpu_inventory
from benchctl.measure.telemetry.visible_devices import VARIABLE, names_mig
from benchctl.profile.model import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSlot:
    """A slot that is ours, and the open files whose locks say so."""

    slot: Slot
    handles: tuple[int, ...] = ()


@contextmanager
def held_slots(slots: Sequence[Slot], num: int, *, is_virtual: bool) -> Iterator[tuple[HeldSlot, ...]]:
    """The first ``num`` of ``slots`` that are free, held inside the context.

    On a virtual clock only devices are held: the times do not depend on who else has the cores. Raises UsageError
    that names the holders where fewer are free.
    """
    with ExitStack() as stack:
        held: list[HeldSlot] = []
        refusals: list[str] = []
        for slot in slots:
            if len(held) == num:
                break
            names = (*slot.gpus, *(() if is_virtual else core_names(slot.cores)))
            locks = stack.enter_context(locked(names))
            if locks.refused is None:
                held.append(HeldSlot(slot=slot, handles=locks.handles))
            else:
                refusals.append(f"{locks.refused} by {locks.holder}")
        if len(held) < num:
            remedy = f"take --parallel {len(held)}" if held else "wait for its end"
            raise UsageError(
                f"--parallel {num}: {len(held)} of {len(slots)} slots are free; held are {', '.join(refusals)}; "
                + remedy
            )
        yield tuple(held)


@contextmanager
def held_devices(profile: Profile) -> Iterator[None]:
    """Hold the devices of an experiment that is measured block after block: the first that its servers see.

    Servers that need no device, attached ones and parts of devices hold none, nor does a user without a directory
    for locks. Raises UsageError that names the process which has one of them.
    """
    with ExitStack() as stack:
        names = _first_devices(profile)
        try:
            locks = stack.enter_context(locked(names))
        except UsageError:
            locks = None  # what two servers do to each other is still found by the checks around each run
        if locks is not None and locks.refused is not None:
            raise UsageError(
                f"{locks.refused} is held by {locks.holder}, and two servers on one device disturb each other; "
                f"wait for its end, or name another device in {VARIABLE}"
            )
        yield


def _first_devices(profile: Profile) -> list[str]:
    num = gpus_of_block(profile, has_gpus=True)
    if not num or engine_for(profile.engine.kind).clock == "virtual" or names_mig(os.environ.get(VARIABLE)):
        return []
    return [gpu.uuid or str(gpu.index) for gpu in gpu_inventory()[:num]]
