"""Blocks on the slots of this host, each in a process of its own, with devices and cores that no other one has.

The kernel holds a lock for the processes that have its file open: it ends with the last of them, however that ends.
Processes that measure for us inherit it, so that a device stays locked until its server is gone. Locks are between
processes of one user on one host; programs of others are found by the checks before and after each run.
"""

import ctypes
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import platformdirs
import psutil

from benchctl.cluster.blocks import has_ended
from benchctl.cluster.slots import Slot
from benchctl.engines.engine import engine_for
from benchctl.errors import INTERRUPTED_CODE, BenchctlError, InvalidDataError, RunError, UsageError
from benchctl.measure.devices import gpus_of_block
from benchctl.measure.measured_run import ignore
from benchctl.measure.server.process import thread_on
from benchctl.measure.telemetry.gpus import gpu_inventory
from benchctl.measure.telemetry.reading import VARIABLE, names_mig
from benchctl.profile.model import Profile
from benchctl.records.directory import ResultDirectory
from benchctl.records.record import PlannedRun
from benchctl.records.writers import is_granted, living_owner
from benchctl.untrusted import LOG_BYTES
from benchctl.untrusted.files import make_folder, open_to_append, read_file
from benchctl.untrusted.secrets import redacted
from benchctl.untrusted.text import visible_line

STORE_VARIABLE: Final = "BENCHCTL_LOCKS_DIR"
PARENT_VARIABLE: Final = "BENCHCTL_PARENT"
"""Number of the process that hands out blocks, for those that measure them."""
_ERRORS: Final[dict[int, type[BenchctlError]]] = {
    error.exit_code: error for error in (UsageError, InvalidDataError, RunError)
}
"""By the exit code of a command that could not go on; some are those of failed and suspect runs, too."""
_ODD: Final = re.compile(r"[^A-Za-z0-9._-]+")
_PID: Final = re.compile(r"process (\d{1,9}) ")
_HOLDER_BYTES: Final = 1_000
_LAST_LINES: Final = 8
_ENDING_S: Final = 30.0
"""Time for a server to end that was told to because the process which handed out its block was killed."""
_TRIES: Final = 2
_PR_SET_PDEATHSIG: Final = 1


class HeldError(UsageError):
    """Another process holds a device or a core; the message names both."""


@contextmanager
def locked(names: Sequence[str]) -> Iterator[tuple[int, ...]]:
    """Hold all of ``names`` inside; yields the open files whose locks say so.

    Where the process that took a lock has ended, those that measured for it are ending, too: they are waited for.
    Raises HeldError where another process has one of them, UsageError where locks cannot be written.
    """
    chosen, host = os.environ.get(STORE_VARIABLE), _ODD.sub("_", platform.node())
    folder = Path(chosen).expanduser() if chosen else Path(platformdirs.user_state_dir("benchctl")) / "locks"
    with ExitStack() as stack:
        handles: list[int] = []
        for name in names:
            path = folder / f"{host}-{_ODD.sub('_', name)}.lock"  # the user's directory may be that of many hosts
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise UsageError(
                    f"{path}: the lock of a device cannot be taken ({error.strerror}); name a directory for it in "
                    f"{STORE_VARIABLE}"
                ) from error
            stack.callback(os.close, handle)
            deadline_s = time.monotonic() + _ENDING_S
            while not is_granted(handle):
                holder = visible_line(os.pread(handle, _HOLDER_BYTES, 0).decode(errors="replace"))
                pid = _PID.match(holder)
                if pid is None or psutil.pid_exists(int(pid[1])) or time.monotonic() >= deadline_s:
                    raise HeldError(f"{name} is held by {holder or 'another process'}")
            command = redacted(shlex.join(["benchctl", *sys.argv[1:]]))
            os.truncate(handle, 0)
            os.pwrite(handle, f"process {os.getpid()} ({command})".encode(errors="replace")[:_HOLDER_BYTES], 0)
            handles.append(handle)
        yield tuple(handles)


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
                f"--parallel {num}: {len(held)} of {len(slots)} slots are free: {', '.join(refusals)}; " + remedy
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
            raise UsageError(
                f"{error}, and two servers on one device disturb each other; wait for its end, or name another "
                f"device in {VARIABLE}"
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
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):
        sys.exit(INTERRUPTED_CODE)


class BlockProcess:
    """A process that measures ``block`` of the result directory ``results`` on ``slot``, from its start on.

    It leads a session of its own, so that a key pressed at the terminal reaches it only through us. What it prints
    is added to ``log``, ``logs/b003.log``.
    """

    def __init__(self, results: Path, block: int, slot: Slot, options: Sequence[str] = ()) -> None:
        self.block, self.slot = block, slot
        self.log = results / "logs" / f"b{block:03d}.log"
        make_folder(self.log.parent, within=results)
        self._within = results
        words = (sys.executable, "-m", "benchctl", "run", "--block", str(block), "--into", str(results.absolute()))
        with thread_on(frozenset(slot.cores) or None), open_to_append(self.log, within=results) as output:
            self._process = subprocess.Popen(
                (*words, *options),
                env=os.environ | {VARIABLE: ",".join(slot.gpus), PARENT_VARIABLE: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=slot.handles,
            )
        self.poll, self.terminate = self._process.poll, self._process.terminate

    def wait(self, limit_s: float) -> None:
        """Wait for its end; after ``limit_s`` it is killed, and what it started with it."""
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # the guardian of its server ends that one
            self._process.wait()

    def refusal(self) -> BenchctlError:
        """The error with which it refused its block, as that of the command that hands out blocks."""
        text = read_file(self.log, within=self._within, max_bytes=LOG_BYTES).decode(errors="replace")
        error = _ERRORS[self._process.returncode](
            f"block {self.block} could not be measured, and no other was begun after it: {self.log}",
            log_tail="\n".join(text.splitlines()[-_LAST_LINES:]),
        )
        error.log_title = "its log ends"
        return error


def devices_begun_on(results: ResultDirectory) -> Mapping[int, tuple[str, ...]]:
    """Devices that each block which was begun could use."""
    return {
        block: tuple(gpu.uuid or str(gpu.index) for gpu in of_block.manifest().gpus)
        for block, of_block in results.begun_blocks().items()
    }


class BlocksOnSlots:
    """The blocks of ``pending`` runs on ``slots``: the lowest that is left to the first slot that is free.

    A process that died leaves its block to another one on the same slot, once. One that refused its block ends the
    handing out, because others would be refused as well. A block that was begun goes to the devices that began it:
    its runs are compared with each other. ``options`` are further words of the command of each process;
    ``on_problem`` is told of each process that died.
    """

    def __init__(
        self,
        results: ResultDirectory,
        slots: Sequence[Slot],
        pending: Iterable[PlannedRun],
        options: Sequence[str] = (),
        *,
        on_problem: Callable[[str], None] = ignore,
    ) -> None:
        self._results, self._options, self._on_problem = results, options, on_problem
        self._waiting = sorted({planned.block for planned in pending})
        self._free = list(slots)
        ours = {slot.gpus for slot in slots}
        self._home = {block: gpus for block, gpus in devices_begun_on(results).items() if gpus in ours}
        self._running: list[BlockProcess] = []
        self._starts = Counter[int]()
        self.given_up: list[BlockProcess] = []
        """The last processes of blocks that are not tried again."""
        self.of_others: list[int] = []
        """Blocks that another process measures."""
        self.refused: BlockProcess | None = None
        """The process that refused its block, such as for a setting that no server takes."""

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
        if code == 0 or (code in _ERRORS and has_ended(self._results, process.block)):
            return
        if code not in _ERRORS:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            self._on_problem(f"block {process.block}: its process {how}; {process.log}")
        if code not in _ERRORS and self._starts[process.block] < _TRIES:
            self._start(process.block, process.slot)
        elif code not in _ERRORS:
            self.given_up.append(process)
        elif living_owner(self._results, process.block) is None:
            self.refused = process
        else:
            self.of_others.append(process.block)
