"""The worker: answers the requests of the process that started it, one line of JSON each, until its input ends.

    {"op": "measure", "arguments": {...}}
    {"result": {...}}  or  {"failure": {"kind": "memory", "message": "..."}}

Its only argument is a JSON document of settings. Its first line comes unasked: the description of interpreter and
device, or the failure that keeps it from working. Standard output carries the answers alone; what libraries print
goes to standard error. After a failure it can answer the next request, unless the device itself is lost.
"""

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TextIO

from benchctl.micro.inside.failures import WorkerError

Message = Mapping[str, Any]
Operation = Callable[..., dict[str, Any]]


def main() -> None:
    """Serve until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    operations: dict[str, Operation] = {}
    first = answer(partial(_start, operations, json.loads(sys.argv[1])))
    _write(answers, first)
    if "result" in first:
        serve(operations, sys.stdin, answers)


def serve(operations: Mapping[str, Operation], requests: TextIO, answers: TextIO) -> None:
    """Answer each line of ``requests``."""
    for line in requests:
        _write(answers, answer(partial(_run, operations, json.loads(line))))


def answer(operation: Callable[[], dict[str, Any]]) -> Message:
    """The result of an operation as a message; anything that goes wrong is one, too."""
    try:
        return {"result": operation()}
    except WorkerError as error:
        return {"failure": {"kind": error.kind, "message": str(error)}}
    except Exception as error:  # noqa: BLE001 - reported to the one who asked
        traceback.print_exc(file=sys.stderr)
        return {"failure": {"kind": "internal", "message": f"{type(error).__name__}: {error}"}}


def _start(operations: dict[str, Operation], settings: Message) -> dict[str, Any]:
    """Fill ``operations`` with those of this worker's state; returns its description."""
    _check_torch()
    module = importlib.import_module("benchctl.micro.inside.operations")
    state = module.WorkerState(settings)
    operations.update({name: partial(function, state) for name, function in module.OPERATIONS.items()})
    return operations["describe"]()


def _check_torch() -> None:
    try:
        importlib.import_module("torch")
    except Exception as error:
        raise WorkerError(
            "torch",
            f"{sys.executable} cannot import torch ({error}); install it there (pip install 'torch>=2.6'), or "
            "name an interpreter that has it with --python",
        ) from error


def _run(operations: Mapping[str, Operation], request: Message) -> dict[str, Any]:
    name = request["op"]
    if name not in operations:
        raise WorkerError("settings", f"unknown operation {name!r}; known are {', '.join(operations)}")
    return operations[name](**request["arguments"])


def _write(answers: TextIO, message: Message) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()
