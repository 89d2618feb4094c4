"""Operators of a pass are counted without torch's compiler, whose import would take a second of every worker."""

import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="forward passes run where torch is")

COUNT = """
import sys
import torch
from benchctl.micro.inside.passes import count_operators

a, b = torch.ones(2, 3), torch.ones(3, 2)
out = torch.empty(2, 2)
print(count_operators(lambda: torch.mm(a, b, out=out).view(4).add_(1)), "torch._dynamo" in sys.modules)
"""


def test_operators_that_compute_are_counted_and_the_compiler_is_not_imported():
    done = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False"]
