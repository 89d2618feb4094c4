"""Slots whose devices and cores no other benchctl of this user has."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from benchctl.cluster.device_locks import core_names, locked
from benchctl.cluster.slots import Slot
from benchctl.errors import UsageError


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
