"""The worker as its parent sees it: a process with torch that measures what it is asked to, one request at a time.

Torch, the model and its buffers live in an interpreter of their own (``inside``), so that benchctl needs no torch,
and so that a device that fails takes nothing of benchctl with it.
"""

import contextlib
import json
import os
import selectors
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import msgspec
import psutil

from benchctl.costs.model_shape import ModelShape
from benchctl.errors import BenchctlError, EngineUnavailableError, RunError, UsageError
from benchctl.measure.server.health import ServerLog, Shortage, describe_end
from benchctl.measure.server.process import Supervised, descendants
from benchctl.measure.server.supervise import Launched
from benchctl.micro.forward_times import ForwardTimes
from benchctl.micro.interpreter import find_torch_python
from benchctl.profile.choices import DataType, ForwardPoint, KvLayout, Mode
from benchctl.untrusted.secrets import environment_redactor

__all__ = ["Worker", "WorkerInfo", "WorkerSettings", "find_torch_python", "started_worker"]

_PROGRAM: Final = Path(__file__).parent / "inside" / "launch.py"
_STOP_GRACE_S: Final = 2.0
_UNINHERITED: Final = frozenset({"PYTHONPATH", "PYTHONHOME"})
"""Variables that would lead the worker's interpreter to the packages of this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """A worker, fixed from its start to its end."""

    python: Path
    """An interpreter that has torch: see ``find_torch_python``."""
    shape: ModelShape | None = None
    """The model whose passes are measured; None for a worker that measures none."""
    device: str = "cpu"
    """``cpu``, ``cuda`` or ``cuda:N``."""
    dtype: DataType = "float32"
    kv_layout: KvLayout = "contiguous"
    page_tokens: int = 16
    """Tokens of one page of a paged cache."""
    seed: int = 0
    """Of weights, tokens, contents of the cache and the order of its pages."""
    threads: int | None = None
    """Threads of one operator on the CPU; None for torch's own choice, one for each core that may be used."""
    start_limit_s: float = 600.0
    answer_limit_s: float = 3600.0
    """Time for one answer at most, after which the worker counts as stuck."""


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
    """Free memory of the device beside the weights."""
    total_bytes: int
    num_params: int | None = None
    """Parameters of the model, counted in its tensors."""
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


class Worker:
    """A running worker; made by ``started_worker``."""

    def __init__(
        self,
        settings: WorkerSettings,
        process: Supervised,
        to_worker: IO[bytes],
        from_worker: IO[bytes],
        log: ServerLog,
    ) -> None:
        self._settings, self._process, self._log = settings, process, log
        self._to_worker, self._from_worker = to_worker, from_worker
        self._shortage = Shortage(Path(tempfile.gettempdir()))
        self._unread = bytearray()
        self.info = msgspec.convert(self._answer(settings.start_limit_s), WorkerInfo)

    @property
    def pid(self) -> int:
        return self._process.pid

    def processes(self) -> list[psutil.Process]:
        """The living processes of the worker."""
        return descendants(self._process.supervisor_pid)

    def check_fits(self, points: Sequence[ForwardPoint]) -> None:
        """Raises UsageError for a point that does not fit into memory by itself; nothing is allocated."""
        self.ask("check_fits", points=[msgspec.to_builtins(point) for point in points])

    def measure(self, point: ForwardPoint, mode: Mode, *, warmups: int, replays: int) -> ForwardTimes:
        """Times of ``replays`` passes after ``warmups``.

        Raises UsageError for a pass that does not fit into memory, a mode that the device does not have and a
        capture that fails, after which the worker can be asked again; RunError for outputs that are not finite or
        differ between the modes, and when the worker dies.
        """
        answer = self.ask("measure", point=msgspec.to_builtins(point), mode=mode, warmups=warmups, replays=replays)
        return msgspec.convert(answer, ForwardTimes)

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """The answer of operation ``op`` (see ``inside/operations.py``). Raises as ``measure`` does."""
        request = json.dumps({"op": op, "arguments": arguments}) + "\n"
        with contextlib.suppress(BrokenPipeError):  # it has ended: its answer will say so
            self._to_worker.write(request.encode())
        return self._answer(self._settings.answer_limit_s)

    def _answer(self, limit_s: float) -> dict[str, Any]:
        line = self._line(limit_s)
        try:
            message = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise EngineUnavailableError(
                f"--python {self._settings.python} answers {line[:60]!r}, which no worker says; name a Python "
                "interpreter that has torch"
            ) from error
        if "failure" in message:
            raise _error_of(**message["failure"], log_tail=self._log.tail())
        result: dict[str, Any] = message["result"]
        return result

    def _line(self, limit_s: float) -> bytes:
        """The next line of its output."""
        deadline, descriptor = time.monotonic() + limit_s, self._from_worker.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise RunError(
                        f"the worker of {self._settings.python} has not answered for {limit_s:.0f} s; look at its "
                        "device, and measure fewer replays or a smaller pass",
                        cause="stuck",
                        log_tail=self._log.tail(),
                    )
                piece = os.read(descriptor, 1 << 16)
                if not piece:
                    raise self._death()
                self._unread += piece
        line, _, rest = self._unread.partition(b"\n")
        self._unread = rest
        return bytes(line)

    def _death(self) -> BenchctlError:
        code = self._process.wait()
        end = describe_end(f"the worker of {self._settings.python}", code)
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
    document = json.dumps(_document(settings))
    env = {name: value for name, value in os.environ.items() if name not in _UNINHERITED}
    with tempfile.TemporaryDirectory(prefix="benchctl-worker-") as directory:
        log = Path(directory) / "worker.log"
        source, to_worker = os.pipe()
        from_worker, output = os.pipe()
        try:
            launched = Launched(
                argv=[str(settings.python), str(_PROGRAM), document],
                env=env,
                raw_log=str(log),
                pipes=(source, output),
            )
            process = Supervised(launched)
        except OSError as error:
            raise EngineUnavailableError(
                f"--python {settings.python} cannot be started: {error}; name an interpreter that has torch"
            ) from error
        finally:
            os.close(source)
            os.close(output)
        server_log = ServerLog(log, environment_redactor())
        try:
            with (
                os.fdopen(to_worker, "wb", buffering=0) as asked,
                os.fdopen(from_worker, "rb", buffering=0) as answers,
            ):
                yield Worker(settings, process, asked, answers, server_log)
        finally:
            process.stop(_STOP_GRACE_S)
            server_log.close()


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


def _document(settings: WorkerSettings) -> dict[str, Any]:
    """The settings as the worker reads them."""
    model = None
    if settings.shape is not None:
        check_measurable(settings.shape)
        model = msgspec.to_builtins(settings.shape)
    names = ("device", "dtype", "kv_layout", "page_tokens", "seed", "threads")
    return {"model": model, **{name: getattr(settings, name) for name in names}}


def _error_of(kind: str, message: str, log_tail: str) -> BenchctlError:
    """The error of the tree for a failure that the worker reported."""
    if kind == "torch":
        return EngineUnavailableError(message)
    if kind in {"settings", "device", "memory", "capture"}:
        return UsageError(message)
    return RunError(message, cause=f"worker-{kind}", log_tail=log_tail)
