"""The measurement of one GPU, tried on a CPU: it runs from a bare checkout, and its rounds begin alike."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from support.gpu_scripts import SCRIPTS, importable
from support.guided.tensors import torch

ROOT = Path(__file__).parents[2]
ABSENT = (
    "transformers", "safetensors", "pydantic", "msgspec", "typer", "httpx", "aiohttp", "scipy", "psutil", "pynvml",
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


@pytest.fixture
def gpu_scripts(monkeypatch):
    with importable(monkeypatch):
        yield


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
    assert done.returncode == 0, done.stderr + (tmp_path / "out/gpu.md").read_text()
    page = (tmp_path / "out/gpu.md").read_text()
    for arm in ("everything on", "without reuse", "without kernels", "without graphs", "two passes"):
        assert f"| {arm} | 4 | 5 |" in page
    assert "kernels need a GPU" in page
    numbers = json.loads((tmp_path / "out/parts/goal.numbers.json").read_text())
    for line in numbers["lines"]:
        pairs = zip(line["paired"]["guided_ms"], line["paired"]["base_ms"], strict=True)
        ratios = [guided / base for guided, base in pairs]
        assert line["ratio"] == pytest.approx(statistics.median(ratios))
        assert line["interval"] == pytest.approx([min(ratios), max(ratios)]), "of six rounds"


@pytest.mark.parametrize("reuse", [True, False])
def test_each_round_begins_at_the_same_prompts_and_a_drawn_candidate_is_reused_unless_that_is_off(
    gpu_scripts, reuse
):
    import decode as models
    import guided_decode

    cpu = torch.device("cpu")
    point = guided_decode.Point(batch=3, candidates=4, context=12, steps=5, max_tokens=40)
    base = models.BaseModel(models.TINY_BASE, 3, point.mean_context, cpu, torch.float32).step(3, point.mean_context)
    value = models.random_value_model(models.config_of(models.TINY_VALUE), cpu, torch.float32)
    chosen = guided_decode.Switches(reuse=reuse)
    scorer = guided_decode.made_scorer(value, point, chosen)
    guided = guided_decode.Decode(
        base, models.TINY_VALUE.vocab, point, guided_decode.made_guide(scorer, point, chosen)
    )
    guided.round_ms()
    prompts, computed = [row.tokens[:12] for row in guided.rows], scorer.counters
    guided.round_ms()
    assert [row.tokens[:12] for row in guided.rows] == prompts
    assert [len(row.tokens) for row in guided.rows] == [12 + 7] * 3
    assert scorer.counters.prefill_tokens == computed.prefill_tokens == 3 * 12
    assert scorer.counters.steps == computed.steps + 7
    guided.begin()  # would raise where a token that was drawn is no candidate
    used, unused = scorer.counters.reused_tokens, scorer.counters.extended_tokens
    assert (used, unused) == ((2 * 3 * 6, 0) if reuse else (0, 2 * 3 * 6))
