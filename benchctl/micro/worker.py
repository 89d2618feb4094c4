"""The worker as its parent sees it: a process with torch that answers one line of JSON for each run.

Torch, the model and its buffers live in an interpreter of their own (``inside/program.py``), so that benchctl needs
no torch, and so that a device that fails takes nothing of benchctl with it. It lives for a block of runs: a start
with torch takes seconds.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import psutil

from benchctl.costs.model_shape import ModelShape
from benchctl.engines.environment import engines_directory, installed_versions, interpreter_problem
from benchctl.errors import BenchctlError, EngineUnavailableError, RunError, UsageError
from benchctl.measure.machine import cpu_model
from benchctl.measure.server.health import ServerLog, Shortage, describe_end
from benchctl.measure.server.process import is_alive
from benchctl.profile.choices import DataType, ForwardPoint, KvLayout, Mode
from benchctl.units import GIB, MS_PER_S
from benchctl.untrusted.secrets import environment_redactor

_PROGRAM: Final = Path(__file__).parent / "inside" / "program.py"
_TORCH: Final = ("torch",)
_CORES: Final = Path("/sys/devices/system/cpu")
ELEMENT_BYTES: Final[dict[DataType, int]] = {"float32": 4, "bfloat16": 2, "float16": 2}


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A worker, fixed from its start to its end."""

    python: str
    """An interpreter that has torch: see ``find_torch_python``."""
    shape: ModelShape | None = None
    """The model whose passes are measured; None for a worker that measures the peaks of its device."""
    points: tuple[ForwardPoint, ...] = ()
    """Passes that must fit into memory, one at a time."""
    device: str = "cpu"
    """``cpu``, ``cuda`` or ``cuda:N``."""
    dtype: DataType = "float32"
    kv_layout: KvLayout = "contiguous"
    seed: int = 0
    """Of weights, tokens, contents of the cache and the order of its pages."""
    threads: int | None = None
    """Threads of one operator on the CPU; None for torch's own choice, one for each core that may be used."""
    start_limit_s: float = 600.0


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's description of itself when it has started."""

    python: str
    python_version: str
    torch_version: str
    device: str
    """``cpu`` or ``cuda:N``."""
    device_name: str
    num_threads: int
    float32_precision: str
    """Arithmetic of float32 products on a GPU: ``highest`` is float32 itself, ``high`` TF32."""
    free_bytes: int
    """Free memory of the device before the worker takes any."""
    total_bytes: int
    device_uuid: str | None = None
    """That of a GPU, as NVML spells it."""
    compute_capability: str | None = None
    num_processors: int | None = None
    """Streaming multiprocessors of a GPU."""
    cache_bytes: int | None = None
    """Last cache before the device's memory; on a CPU that of all cores which may be used."""
    cuda_version: str | None = None
    """The CUDA that torch was built for."""
    cpu_capability: str | None = None
    """The vector instructions that torch uses on a CPU."""


class ForwardTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The replays of one point in one mode, one value each, in the order in which they ran."""

    clock: Literal["host", "device"]
    """``device``: pairs of events on the stream of the replay; ``host``: the monotonic clock around each."""
    start_ns: tuple[int, ...]
    """Start of each replay on the host's monotonic clock."""
    duration_ns: tuple[int, ...]
    """Duration of each replay on ``clock``."""
    wall_ns: int
    """Time of all replays together on the host's monotonic clock, up to the last synchronisation."""
    num_allocations: int = 0
    """Pieces of memory that the device handed out during the replays; 0 where buffers hold everything."""
    num_operators: int | None = None
    """Operators that one pass calls: in mode ``eager`` about as many launches."""


class Worker:
    """A running worker; made by ``started_worker``."""

    def __init__(self, settings: WorkerSettings, process: subprocess.Popen[bytes], log: ServerLog) -> None:
        self._python, self._process, self._log = settings.python, process, log
        self._shortage = Shortage(Path(tempfile.gettempdir()))
        about = _about_this_cpu() if settings.device == "cpu" else {}
        self.info = msgspec.convert(about | self._answer(settings.start_limit_s), WorkerInfo)

    @property
    def pid(self) -> int:
        return self._process.pid

    def processes(self) -> list[psutil.Process]:
        """The living processes of the worker."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            return [each for each in (process, *process.children(recursive=True)) if is_alive(each)]
        return []

    def measure(self, point: ForwardPoint, mode: Mode, *, warmups: int, replays: int) -> ForwardTimes:
        """Times of ``replays`` passes after ``warmups``.

        Raises UsageError for a pass that does not fit into memory, a mode that the device does not have and a
        capture that fails, after which the worker can be asked again; RunError for outputs that are not finite or
        differ between the modes, and when the worker dies.
        """
        return msgspec.convert(self.ask(point=point, mode=mode, warmups=warmups, replays=replays), ForwardTimes)

    def ask(self, **arguments: Any) -> dict[str, Any]:
        """The answer to a line of these arguments. Raises as ``measure`` does."""
        assert self._process.stdin is not None  # noqa: S101 - for the type checker, as below
        with contextlib.suppress(BrokenPipeError):  # it has ended: its answer will say so
            self._process.stdin.write(msgspec.json.encode(arguments) + b"\n")
        # Time for one answer at most, after which the worker counts as stuck
        return self._answer(3600.0)

    def _answer(self, limit_s: float) -> dict[str, Any]:
        answers, poll = self._process.stdout, select.poll()
        assert answers is not None  # noqa: S101
        poll.register(answers, select.POLLIN)
        if not poll.poll(limit_s * MS_PER_S):
            raise RunError(
                f"the worker of {self._python} has not answered for {limit_s:.0f} s; look at its device, and "
                "measure fewer replays or a smaller pass",
                cause="stuck",
                log_tail=self._log.tail(),
            )
        line = answers.readline()
        if not line.endswith(b"\n"):
            raise self._death()
        try:
            message = msgspec.json.decode(line, type=dict[str, dict[str, Any]])
        except msgspec.MsgspecError as error:
            raise EngineUnavailableError(
                f"--python {self._python} answers {line[:60].rstrip()!r}, which no worker says; name a Python "
                "interpreter that has torch"
            ) from error
        if "failure" in message:
            raise _error_of(**message["failure"], log_tail=self._log.tail())
        return message["result"]

    def _death(self) -> BenchctlError:
        code = self._process.wait()
        end = describe_end(f"the worker of {self._python}", code)
        shortage = self._shortage.diagnosis()
        if shortage is not None and shortage.cause == "out-of-memory":
            return UsageError(f"{end}: {shortage.remedy}")
        return RunError(
            f"{end}; the end of its log says more: {self._log.last_line() or '(empty)'}",
            cause="worker-died",
            log_tail=self._log.tail(),
        )


@contextlib.contextmanager
def started_worker(settings: WorkerSettings) -> Iterator[Worker]:
    """A worker that has loaded its model; nothing of it is left afterwards, also if benchctl is killed.

    Raises UsageError for a model that cannot be measured or does not fit into memory, for a device that is not
    there and for an interpreter without torch.
    """
    if settings.shape is not None:
        check_measurable(settings.shape)
        _check_memory(settings, settings.shape)
    # Variables that would lead the worker's interpreter to the packages of this one
    env = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}
    argv = [settings.python, str(_PROGRAM), msgspec.json.encode(settings).decode()]
    with tempfile.TemporaryDirectory(prefix="benchctl-worker-") as directory:
        path = Path(directory) / "worker.log"
        with path.open("wb") as output, contextlib.closing(ServerLog(path, environment_redactor())) as log:
            try:
                process = subprocess.Popen(
                    argv,
                    bufsize=0,
                    env=env,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    start_new_session=True,
                )
            except OSError as error:
                raise EngineUnavailableError(
                    f"--python {settings.python} cannot be started: {error}; name an interpreter that has torch"
                ) from error
            with process:
                try:
                    yield Worker(settings, process, log)
                finally:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)  # it has nothing to keep


def _check_memory(settings: WorkerSettings, shape: ModelShape) -> None:
    """Raises UsageError where the weights, and keys and values of a pass, are more than this machine has free.

    Its system would not refuse them, but end programs; a GPU refuses what it cannot hold.
    """
    element = ELEMENT_BYTES[settings.dtype]
    weights, free = shape.num_params() * element, psutil.virtual_memory().available
    tokens = max((each.batch_size * (each.context_tokens + each.new_tokens) for each in settings.points), default=0)
    cache = tokens * shape.kv_bytes_per_token(element)
    if settings.device == "cpu" and weights + cache > free:
        raise UsageError(
            f"the weights of {shape.name!r} in {settings.dtype} need {weights / GIB:.2f} GiB, keys and values up "
            f"to {cache / GIB:.2f} GiB, and {free / GIB:.2f} GiB are free; choose a smaller model, a smaller batch "
            "size, fewer tokens or a dtype of 2 bytes, or end the programs that hold memory"
        )


def _about_this_cpu() -> dict[str, Any]:
    """The description of this CPU, for which torch is not needed."""
    memory = psutil.virtual_memory()
    return {
        "device_name": cpu_model() or "cpu",
        "free_bytes": memory.available,
        "total_bytes": memory.total,
        "cache_bytes": cpu_cache_bytes(os.sched_getaffinity(0)),
    }


def cpu_cache_bytes(cores: Iterable[int], directory: Path = _CORES) -> int | None:
    """The last cache of these cores, one that several share counted once; None where the system does not say."""
    sizes: dict[str, int] = {}
    for core in cores:
        last = max((directory / f"cpu{core}" / "cache").glob("index[0-9]"), default=None)
        if last is None:
            return None
        try:
            shared, size = ((last / name).read_text().strip() for name in ("shared_cpu_list", "size"))
            sizes[shared] = int(size.removesuffix("K")) * 1024
        except (OSError, ValueError):
            return None
    return sum(sizes.values())


def check_measurable(shape: ModelShape) -> None:
    """Raises UsageError for a model whose layers the forward pass does not have."""
    problems: Mapping[str, bool] = {
        "has experts": shape.moe is not None,
        "has latent attention": shape.latent is not None,
        "has a value head": shape.head != "lm_head",
        f"stores its weights as {shape.weight_format}": shape.weight_format != "bfloat16",
        f"has heads of odd width {shape.head_dim}": shape.head_dim % 2 != 0,
    }
    for problem, applies in problems.items():
        if applies:
            raise UsageError(
                f"model {shape.name!r} {problem}; forward passes are measured of dense models in 16 or 32 bits, "
                "such as llama-68m, qwen2.5-0.5b or qwen3-0.6b"
            )


def _error_of(kind: str, message: str, log_tail: str) -> BenchctlError:
    """The error of the tree for a failure that the worker reported."""
    if kind == "torch":
        return EngineUnavailableError(message)
    if kind in {"settings", "device", "memory", "capture"}:
        return UsageError(message)
    return RunError(message, cause=f"worker-{kind}", log_tail=log_tail)


def find_torch_python(named: Path | None) -> Path:
    """The named interpreter, else benchctl's own if it has torch, else that of an installed engine.

    Among engines one whose torch was built for a GPU comes first. Raises EngineUnavailableError where none has it.
    """
    if named is not None:
        python = named.expanduser()
        if problem := interpreter_problem(python, _TORCH, f"run {python} -m pip install 'torch>=2.6'"):
            raise EngineUnavailableError(f"--python {python} {problem}")
        return python
    if installed_versions(Path(sys.executable), _TORCH):
        return Path(sys.executable)
    directory = engines_directory()
    candidates = [python for python in sorted(directory.glob("*/bin/python")) if os.access(python, os.X_OK)]
    versions = {python: installed_versions(python, _TORCH).get("torch") for python in candidates}
    having = sorted((version.endswith("+cpu"), python) for python, version in versions.items() if version)
    if having:
        return having[0][1]
    raise EngineUnavailableError(
        f"torch is not installed: neither {sys.executable} nor an engine's environment in {directory} has it; run "
        "'benchctl engines install transformers', or name an interpreter that has it with "
        "--python /path/to/venv/bin/python"
    )
