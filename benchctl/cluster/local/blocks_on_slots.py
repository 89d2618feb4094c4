"""Blocks that are handed out to slots: the lowest that is left to the first slot that is free.

A process that died leaves its block to another one on the same slot, once. One that refused its block ends the
handing out, because others would be refused as well. A block that was begun goes to the devices that began it: its
runs are compared with each other.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from benchctl.cluster.local.block_process import BlockProcess
from benchctl.cluster.local.fate import Fate
from benchctl.cluster.local.held_slots import HeldSlot

_TRIES: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftBlock:
    """A block whose process ended without ending it, and that is not tried again."""

    block: int
    code: int
    """Exit code of its last process; negative for a signal."""
    process: BlockProcess


class BlocksOnSlots:
    """``blocks`` on ``slots``, as many at a time as there are slots.

    ``start`` starts the process of a block on a slot; ``fate_of`` tells what became of the block of one that ended
    with an exit code. ``begun_on`` has the devices of blocks of which a part was measured before.
    """

    def __init__(
        self,
        slots: Sequence[HeldSlot],
        blocks: Iterable[int],
        start: Callable[[int, HeldSlot], BlockProcess],
        fate_of: Callable[[BlockProcess, int], Fate],
        begun_on: Mapping[int, tuple[str, ...]],
    ) -> None:
        self._waiting = sorted(blocks)
        self._free = list(slots)
        ours = {held.slot.gpus for held in slots}
        self._home = {block: gpus for block, gpus in begun_on.items() if gpus in ours}
        self._start = start
        self._fate_of = fate_of
        self._running: dict[HeldSlot, BlockProcess] = {}
        self._starts = Counter[int]()
        self.left: list[LeftBlock] = []
        """Blocks that were given up."""
        self.of_others: list[int] = []
        """Blocks that another process measures."""
        self.refused: LeftBlock | None = None
        """The block whose process refused it, such as for a setting that no server takes."""

    @property
    def is_over(self) -> bool:
        """True when no process is left, and none will be started."""
        return not self._running and (not self._waiting or self.refused is not None)

    def advance(self) -> None:
        """Note which processes have ended, and start others on the free slots."""
        for held, process in list(self._running.items()):
            code = process.poll()
            if code is not None:
                del self._running[held]
                self._free.append(held)
                self._note_end(held, process, code)
        for held in sorted(self._free, key=lambda each: each.slot.index):
            block = next((each for each in self._waiting if self._may_have(held, each)), None)
            if block is not None and self.refused is None:
                self._waiting.remove(block)
                self._measure(block, held)

    def end(self, limit_s: float) -> None:
        """Ask all processes to end, and wait for them; after ``limit_s`` they are killed."""
        self._waiting.clear()
        for process in self._running.values():
            process.terminate()
        deadline = time.monotonic() + limit_s
        for process in self._running.values():
            process.wait(max(deadline - time.monotonic(), 0.0))
        self._running.clear()

    def _may_have(self, held: HeldSlot, block: int) -> bool:
        return self._home.get(block, held.slot.gpus) == held.slot.gpus

    def _measure(self, block: int, held: HeldSlot) -> None:
        self._free.remove(held)
        self._starts[block] += 1
        self._running[held] = self._start(block, held)

    def _note_end(self, held: HeldSlot, process: BlockProcess, code: int) -> None:
        block = process.block
        left = LeftBlock(block=block, code=code, process=process)
        fate = self._fate_of(process, code)
        if fate == "ended":
            return
        if fate == "of others":
            self.of_others.append(block)
        elif fate == "refused":
            self.refused = left
        elif self._starts[block] < _TRIES:
            self._measure(block, held)
        else:
            self.left.append(left)
