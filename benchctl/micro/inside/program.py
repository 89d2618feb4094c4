"""The worker: ``python program.py SETTINGS`` in an interpreter that has torch; answers lines of JSON to their end.

SETTINGS is a JSON object with the fields of ``benchctl.micro.worker.WorkerSettings``. The first answer comes
unasked: the description of interpreter and device, or the failure that keeps it from working. With a model, each
line asks for one run, the replays of one pass; without one, for the peaks of the device.

    {"point": {...}, "mode": "eager", "warmups": 3, "replays": 25}
    {"result": {...}}  or  {"failure": {"kind": "memory", "message": "..."}}

Standard output carries the answers alone; what libraries print goes to standard error. After a failure it can
answer the next line, unless the device itself is lost. It ends with the one who started it.

The other modules are imported under their own names, from this folder and from nowhere else of benchctl: the
packages above it are stood in for by empty ones, because what they import is not installed where torch is.
"""

import ctypes
import json
import os
import platform
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

sys.path = [entry for entry in sys.path if Path(entry) != Path(__file__).parent]  # its names would hide others
_ROOT = Path(__file__).resolve().parents[2]
for _name, _directory in (("benchctl", _ROOT), ("benchctl.micro", _ROOT / "micro")):
    _package = ModuleType(_name)
    _package.__path__ = [str(_directory)]
    sys.modules.setdefault(_name, _package)

from benchctl.micro.inside import WorkerError, first_line, is_out_of_memory  # noqa: E402 - findable from here on

_PR_SET_PDEATHSIG = 1
Message = Mapping[str, Any]
Answer = Callable[..., dict[str, Any]]


def main() -> None:
    """Answer until standard input ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        torch = _torch()
        with torch.inference_mode():  # as engines compute
            description, answer = started(torch, json.loads(sys.argv[1]))
            _write(answers, {"result": description})
            serve(answer, sys.stdin, answers)
    except Exception as error:  # noqa: BLE001 - reported to the one who started it
        _write(answers, failure_of(error))


def serve(answer: Answer, requests: TextIO, answers: TextIO) -> None:
    """Answer each line of ``requests``, a JSON object of arguments."""
    for line in requests:
        try:
            message = {"result": answer(**json.loads(line))}
        except Exception as error:  # noqa: BLE001 - reported to the one who asked
            message = failure_of(error)
        _write(answers, message)


def failure_of(error: Exception) -> Message:
    """The message on an error; of one that was not foreseen, the traceback goes to the log."""
    kind, message = getattr(error, "kind", "internal"), str(error)
    if is_out_of_memory(error):
        kind = "memory"
        message = (
            f"memory ran out ({first_line(error)}); choose a smaller batch size, fewer tokens, a smaller model or "
            "a dtype of 2 bytes, or end the programs that hold memory of the device"
        )
    elif not isinstance(error, WorkerError):
        traceback.print_exception(error)
        message = f"{type(error).__name__}: {error}"
    return {"failure": {"kind": kind, "message": message}}


def started(torch: ModuleType, settings: Message) -> tuple[dict[str, Any], Answer]:
    """The description of a worker with its device and model, and the function that answers its lines.

    The largest of its passes is prepared at once, so that none is measured where memory lacks. Raises WorkerError
    for a device that is not there.
    """
    inside = "benchctl.micro.inside"
    if settings["threads"] is not None:
        torch.set_num_threads(settings["threads"])
    device = import_module(f"{inside}.replays").open_device(settings["device"])
    description = {
        "python": sys.executable,
        "python_version": platform.python_version(),
        "torch_version": torch.__version__,
        "device": str(device.torch_device),
        "num_threads": torch.get_num_threads(),
        "float32_precision": torch.get_float32_matmul_precision(),
        **device.describe(),
    }
    if settings["shape"] is None:
        return description, partial(import_module(f"{inside}.peaks").measure_peaks, device)
    model = import_module(f"{inside}.model")
    passes = import_module(f"{inside}.passes").Passes(device, model.Model(settings, device.torch_device))
    points = [model.PassPoint(**point) for point in settings["points"]]
    if points:
        passes.prepared(max(points, key=lambda point: point.batch_size * point.total_tokens))
    return description, lambda point, **how: passes.measure(model.PassPoint(**point), **how)


def _torch() -> ModuleType:
    if sys.version_info < (3, 10):  # noqa: UP036 - the interpreter of an engine is not benchctl's
        raise WorkerError(
            "torch",
            f"{sys.executable} is Python {platform.python_version()}; name one of 3.10 or later with --python",
        )
    try:
        return import_module("torch")
    except Exception as error:
        raise WorkerError(
            "torch",
            f"{sys.executable} cannot import torch ({error}); install it there (pip install 'torch>=2.6'), or "
            "name an interpreter that has it with --python",
        ) from error


def _write(answers: TextIO, message: Message) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
