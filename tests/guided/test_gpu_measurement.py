"""The measurement of one GPU, tried on a CPU: it runs from a bare checkout."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from support.gpu_scripts import SCRIPTS
from support.guided.tensors import torch  # noqa: F401 - skips this test where there is none

ROOT = Path(__file__).parents[2]
ABSENT = (
    "transformers", "safetensors", "pydantic", "msgspec", "typer", "httpx", "uvicorn", "scipy", "psutil", "pynvml",
    "yaml", "rich", "tokenizers", "huggingface_hub", "jinja2",
)  # fmt: skip
BLOCKER = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_the_quick_measurement_runs_whole_with_nothing_but_torch_and_numpy(tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "sitecustomize.py").write_text(BLOCKER)
    options = ("--tiny", "--device", "cpu", "--quick", "--only", "goal,kernels")
    done = subprocess.run(
        [sys.executable, SCRIPTS / "measure_all.py", *options, tmp_path / "out"],
        capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(bare)},
    )  # fmt: skip
    page = (tmp_path / "out/gpu.md").read_text()
    assert done.returncode == 0, done.stderr + page
    arms = ("everything on", "without reuse", "without kernels", "without graphs", "two passes")
    for words in ("kernels need a GPU", *(f"| {arm} | 4 | 5 |" for arm in arms)):
        assert words in page
    numbers = json.loads((tmp_path / "out/parts/goal.numbers.json").read_text())
    for line in numbers["lines"]:
        pairs = zip(line["paired"]["guided_ms"], line["paired"]["base_ms"], strict=True)
        ratios = [guided / base for guided, base in pairs]
        assert line["ratio"] == pytest.approx(statistics.median(ratios))
        assert line["interval"] == pytest.approx([min(ratios), max(ratios)]), "of six rounds"
