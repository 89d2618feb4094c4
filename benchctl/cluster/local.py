"""Blocks on the slots of this host, each in a process of its own, with devices and cores that no other one has.

The kernel holds a lock for the processes that have its file open: it ends with the last of them, however that ends.
Processes that measure for us inherit it, so that a device stays locked until its server is gone. Locks are between
processes of one user on one host; programs of others are found by the checks before and after each run.
"""

import ctypes
import fcntl
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, TypeAlias

import platformdirs
import psutil

from benchctl.cluster.blocks import has_ended
from benchctl.cluster.slots import Slot
from benchctl.engines.engine import engine_for
from benchctl.errors import InvalidDataError, RecordError, RunError, UsageError
from benchctl.measure.telemetry.gpus import gpu_inventory, gpus_of_block
from benchctl.measure.telemetry.reading import VARIABLE, names_mig
from benchctl.profile.model import Profile
from benchctl.records.directory import ResultDirectory
from benchctl.records.record import PlannedRun
from benchctl.records.writers import living_owner
from benchctl.untrusted import LOG_BYTES
from benchctl.untrusted.files import entry_names, make_folder, open_to_append, read_file
from benchctl.untrusted.secrets import redacted
from benchctl.untrusted.text import visible_line

STORE_VARIABLE: Final = "BENCHCTL_LOCKS_DIR"
PARENT_VARIABLE: Final = "BENCHCTL_PARENT"
"""Number of the process that hands out blocks, for those that measure them."""
Fate: TypeAlias = Literal["ended", "of others", "refused", "died"]
"""All runs of the block have ended; another process measures it; its process refused it, as others would; that
died, or someone else interrupted it."""
_OF_ERRORS: Final = frozenset(error.exit_code for error in (UsageError, InvalidDataError, RunError))
"""Exit codes of a command that could not go on, of which some are those of failed and suspect runs, too."""
_ODD: Final = re.compile(r"[^A-Za-z0-9._-]+")
_PID: Final = re.compile(r"process (\d{1,9}) ")
_LOG: Final = re.compile(r"b(\d+)-(\d+)\.log")
_HOLDER_BYTES: Final = 1_000
_LAST_LINES: Final = 8
_ENDING_S: Final = 30.0
"""Time for a server to end that was told to because the process which handed out its block was killed."""
_POLL_S: Final = 0.1
_TRIES: Final = 2
_INTERRUPTED: Final = 130
_PR_SET_PDEATHSIG: Final = 1


class HeldError(UsageError):
    """Another process holds a device or a core; the message is its name and that process."""


@contextmanager
def locked(names: Sequence[str]) -> Iterator[tuple[int, ...]]:
    """Hold all of ``names`` inside; yields the open files whose locks say so.

    Where the process that took a lock has ended, those that measured for it are ending, too: they are waited for.
    Raises HeldError where another process has one of them, UsageError where locks cannot be written.
    """
    with ExitStack() as stack:
        handles: list[int] = []
        for name in names:
            path = _lock_path(name)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise UsageError(
                    f"{path}: the lock of a device cannot be taken ({error.strerror}); name a directory for it in "
                    f"{STORE_VARIABLE}"
                ) from error
            stack.callback(os.close, handle)
            if not _is_granted(handle):
                raise HeldError(f"{name} by {_holder(handle)}")
            command = redacted(shlex.join(["benchctl", *sys.argv[1:]]))
            os.truncate(handle, 0)
            os.pwrite(handle, f"process {os.getpid()} ({command})".encode(errors="replace")[:_HOLDER_BYTES], 0)
            handles.append(handle)
        yield tuple(handles)


def _lock_path(name: str) -> Path:
    """A file for this host: the user's directory may be that of many."""
    chosen = os.environ.get(STORE_VARIABLE)
    folder = Path(chosen).expanduser() if chosen else Path(platformdirs.user_state_dir("benchctl")) / "locks"
    return folder / f"{_ODD.sub('_', platform.node())}-{_ODD.sub('_', name)}.lock"


def _is_granted(handle: int) -> bool:
    deadline = time.monotonic() + _ENDING_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = _PID.match(_holder(handle))
            if pid is None or psutil.pid_exists(int(pid[1])) or time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        except OSError:
            return True  # a file system without locks leaves it to the user
        else:
            return True


def _holder(handle: int) -> str:
    return visible_line(os.pread(handle, _HOLDER_BYTES, 0).decode(errors="replace")) or "another process"


@contextmanager
def held_slots(slots: Sequence[Slot], num: int, *, is_virtual: bool) -> Iterator[tuple[Slot, ...]]:
    """The first ``num`` of ``slots`` that no other benchctl has, held inside the context.

    On a virtual clock only devices are held: the times do not depend on who else has the cores. Raises UsageError
    that names the holders where fewer are free.
    """
    with ExitStack() as stack:
        held: list[Slot] = []
        refusals: list[str] = []
        for slot in slots:
            if len(held) == num:
                break
            cores = () if is_virtual else tuple(f"core-{core}" for core in slot.cores)
            try:
                handles = stack.enter_context(locked((*slot.gpus, *cores)))
            except HeldError as error:
                refusals.append(str(error))
            else:
                held.append(replace(slot, handles=handles))
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
    num, names = gpus_of_block(profile, has_gpus=True), list[str]()
    if num and engine_for(profile.engine.kind).clock != "virtual" and not names_mig(os.environ.get(VARIABLE)):
        names = [gpu.uuid or str(gpu.index) for gpu in gpu_inventory()[:num]]
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(names))
        except HeldError as error:
            device, _, holder = str(error).partition(" by ")
            raise UsageError(
                f"{device} is held by {holder}, and two servers on one device disturb each other; wait for its "
                f"end, or name another device in {VARIABLE}"
            ) from error
        except UsageError:
            pass  # what two servers do to each other is still found by the checks around each run
        yield


def end_with_parent() -> None:
    """Let the kernel send SIGTERM when the process ends that handed out the block of this one, however it ends.

    No effect in a process to which nobody handed out a block. Exits where that process has ended already.
    """
    parent = os.environ.pop(PARENT_VARIABLE, "")
    if not parent:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):
        sys.exit(_INTERRUPTED)


class BlockProcess:
    """A process that measures ``block`` of the result directory ``results`` on ``slot``, from its start on.

    It leads a session of its own, so that a key pressed at the terminal reaches it only through us. What it prints
    is in ``log``.
    """

    def __init__(self, results: Path, block: int, slot: Slot, options: Sequence[str] = ()) -> None:
        self.block, self.slot = block, slot
        self.log = _next_log(results, block)
        self._within = results
        words = (sys.executable, "-m", "benchctl", "run", "--block", str(block), "--into", str(results.absolute()))
        ours = os.sched_getaffinity(0)
        os.sched_setaffinity(0, slot.cores or ours)  # of this thread; a new process inherits it
        try:
            with open_to_append(self.log, within=results) as output:
                self._process = subprocess.Popen(
                    (*words, *options),
                    env=os.environ | {VARIABLE: ",".join(slot.gpus), PARENT_VARIABLE: str(os.getpid())},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=slot.handles,
                )
        finally:
            os.sched_setaffinity(0, ours)
        self.poll, self.terminate = self._process.poll, self._process.terminate

    def wait(self, limit_s: float) -> None:
        """Wait for its end; after ``limit_s`` it is killed, and what it started with it."""
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # the guardian of its server ends that one
            self._process.wait()

    def last_lines(self) -> str:
        """The end of what it printed."""
        with suppress(OSError):
            text = read_file(self.log, within=self._within, max_bytes=LOG_BYTES).decode(errors="replace")
            return "\n".join(text.splitlines()[-_LAST_LINES:])
        return ""


def _next_log(results: Path, block: int) -> Path:
    """``logs/b003-1.log``: of each process that measures the block, by its number from 1."""
    folder = results / "logs"
    make_folder(folder, within=results)
    matches = filter(None, map(_LOG.fullmatch, entry_names(folder, within=results)))
    numbers = [int(match[2]) for match in matches if int(match[1]) == block]
    return folder / f"b{block:03d}-{max(numbers, default=0) + 1}.log"


def fate_of(results: ResultDirectory, block: int, code: int) -> Fate:
    """The fate of a block whose process has ended with ``code``, by that and by what is on disk."""
    if code == 0:
        return "ended"
    if code not in _OF_ERRORS:
        return "died"
    if has_ended(results, block):
        return "ended"
    return "refused" if living_owner(results, block) is None else "of others"


@dataclass(frozen=True, slots=True)
class LeftBlock:
    """A block whose process ended without ending it, and that is not tried again."""

    process: BlockProcess
    """Its last process."""
    code: int
    """The exit code of that; negative for a signal."""


class BlocksOnSlots:
    """The blocks of ``pending`` runs on ``slots``: the lowest that is left to the first slot that is free.

    A process that died leaves its block to another one on the same slot, once. One that refused its block ends the
    handing out, because others would be refused as well. A block that was begun goes to the devices that began it:
    its runs are compared with each other. ``options`` are further words of the command of each process.
    """

    def __init__(
        self,
        results: ResultDirectory,
        slots: Sequence[Slot],
        pending: Iterable[PlannedRun],
        options: Sequence[str] = (),
    ) -> None:
        pending = tuple(pending)
        self._results, self._options = results, options
        self._waiting = sorted({planned.block for planned in pending})
        self._free = list(slots)
        ours = {slot.gpus for slot in slots}
        self._home = {block: gpus for block, gpus in devices_begun_on(results, pending).items() if gpus in ours}
        self._running: list[BlockProcess] = []
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
        for process in list(self._running):
            code = process.poll()
            if code is not None:
                self._running.remove(process)
                self._free.append(process.slot)
                self._note_end(process, code)
        for slot in sorted(self._free, key=lambda slot: slot.index):
            own = (block for block in self._waiting if self._home.get(block, slot.gpus) == slot.gpus)
            if self.refused is None and (block := next(own, None)) is not None:
                self._waiting.remove(block)
                self._start(block, slot)

    def end(self, limit_s: float) -> None:
        """Ask all processes to end, and wait for them; after ``limit_s`` they are killed."""
        self._waiting.clear()
        for process in self._running:
            process.terminate()
        deadline = time.monotonic() + limit_s
        for process in self._running:
            process.wait(max(deadline - time.monotonic(), 0.0))
        self._running.clear()

    def _start(self, block: int, slot: Slot) -> None:
        self._free.remove(slot)
        self._starts[block] += 1
        self._running.append(BlockProcess(self._results.path, block, slot, self._options))

    def _note_end(self, process: BlockProcess, code: int) -> None:
        fate = fate_of(self._results, process.block, code)
        if fate == "of others":
            self.of_others.append(process.block)
        elif fate == "refused":
            self.refused = LeftBlock(process, code)
        elif fate == "died" and self._starts[process.block] < _TRIES:
            self._start(process.block, process.slot)
        elif fate == "died":
            self.left.append(LeftBlock(process, code))


def devices_begun_on(results: ResultDirectory, pending: Iterable[PlannedRun]) -> Mapping[int, tuple[str, ...]]:
    """Devices of the runs that are done in blocks with ``pending`` ones, where the numbers depend on them."""
    is_pending = {planned.run_id for planned in pending}
    blocks = {planned.block for planned in results.due_plan().runs if planned.run_id in is_pending}
    devices: dict[int, tuple[str, ...]] = {}
    for planned in results.due_plan().runs:
        if planned.block not in blocks or planned.run_id in is_pending or planned.block in devices:
            continue
        with suppress(RecordError):
            record = results.run(planned.run_id).read()
            if record.clock != "virtual" and record.node is not None:
                devices[planned.block] = tuple(gpu.uuid or str(gpu.index) for gpu in record.node.gpus)
    return devices
