"""An interpreter that has torch, which tests of forward passes need and benchctl does not."""

import json
import subprocess
from pathlib import Path

import pytest

from benchctl.errors import EngineUnavailableError
from benchctl.micro.worker import find_torch_python


@pytest.fixture(scope="session")
def torch_python() -> Path:
    try:
        return find_torch_python(None)
    except EngineUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def ask_passes(torch_python):
    """Asks ``programs/passes.py``, one process for all tests; its failures are those of the test."""
    program = Path(__file__).parent / "programs" / "passes.py"
    argv = [torch_python, program]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def ask(op, *, is_failing=False, **arguments):
            process.stdin.write(json.dumps({"op": op, "arguments": arguments}) + "\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
            if "No module named 'transformers'" in str(answer.get("failure")):
                pytest.skip(f"{torch_python} has torch and not transformers")
            assert "failure" not in answer or is_failing, answer["failure"]
            return answer["failure" if is_failing else "result"]

        yield ask
        process.stdin.close()
