"""An interpreter that has torch, which tests of forward passes need and benchctl does not."""

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
