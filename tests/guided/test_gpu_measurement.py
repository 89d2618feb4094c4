"""The measurement of one GPU, tried on a CPU: it runs from a bare checkout, and a call that broke off goes on."""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

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


def environment(**more):
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **more}


def measure(directory, *options, **env):
    return subprocess.run(
        [sys.executable, SCRIPTS / "measure_all.py", "--tiny", "--device", "cpu", *options, directory],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=environment(**env),
    )


@pytest.mark.slow
def test_the_quick_measurement_runs_whole_with_nothing_but_torch_and_numpy(tmp_path):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "sitecustomize.py").write_text(BLOCKER)
    done = measure(tmp_path / "out", "--quick", PYTHONPATH=str(tmp_path / "bare"))
    assert done.returncode == 0, done.stderr + (tmp_path / "out/gpu.md").read_text()
    page = (tmp_path / "out/gpu.md").read_text()
    assert page.count("\n## ") == 4
    for arm in ("everything on", "without reuse", "without kernels", "without graphs", "two passes"):
        assert f"| {arm} | 4 | 5 |" in page
    assert "kernels need a GPU" in page
    assert "| 70% | 2 | 100.0% | 0 | 0.0% |" in page
    numbers = json.loads((tmp_path / "out/parts/goal.numbers.json").read_text())
    for line in numbers["lines"]:
        pairs = zip(line["paired"]["guided_ms"], line["paired"]["base_ms"], strict=True)
        ratios = [guided / base for guided, base in pairs]
        assert line["ratio"] == pytest.approx(statistics.median(ratios))
        assert line["interval"] == pytest.approx([min(ratios), max(ratios)]), "of six rounds"


def until(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)])
def test_a_call_that_is_interrupted_goes_on_with_the_part_that_it_was_in(tmp_path, ending):
    options = ("--quick", "--only", "kernels,graphs")
    argv = [sys.executable, SCRIPTS / "measure_all.py", "--tiny", "--device", "cpu", *options, tmp_path]
    began = subprocess.Popen(argv, env=environment(), stderr=subprocess.PIPE, text=True)
    until((tmp_path / "parts/graphs.md").exists)
    began.send_signal(ending)
    _, said = began.communicate(timeout=60)
    assert began.returncode == 130
    assert "the same call goes on from there" in said
    assert "## CUDA graphs: share, time and memory\n\nNot measured yet." in (tmp_path / "gpu.md").read_text()
    measured = (tmp_path / "parts/kernels.json").stat().st_mtime_ns
    again = measure(tmp_path, *options)
    assert again.returncode == 0, again.stderr
    assert "1/2 kernels: done in an earlier call, skipped" in again.stderr
    assert "2/2 graphs: up to" in again.stderr
    assert (tmp_path / "parts/kernels.json").stat().st_mtime_ns == measured
    assert "Not measured yet" not in (tmp_path / "gpu.md").read_text()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_gpu_is_demanded_before_anything_is_measured(tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPTS / "measure_all.py", "--quick", tmp_path / "out"],
        capture_output=True, text=True, check=False, timeout=120, env=environment(),
    )  # fmt: skip
    assert done.returncode == 2
    assert "sees no GPU; '--quick --tiny --device cpu' tries the script without one" in done.stderr


def test_attention_of_rows_of_one_length_is_that_of_a_tree_of_one_token(gpu_scripts):
    from decode import attention_of_equal_rows

    from benchctl.guided.operations import tree_attention

    generator = torch.Generator().manual_seed(0)
    rows, cells, context = 3, 16, 9
    query = torch.randn(rows, 4, 8, generator=generator)
    cache = torch.randn((rows + 1) * cells, 2, 2, 8, generator=generator)
    ones, number = torch.ones(rows, dtype=torch.int64), torch.arange(rows)
    given = (number, ones, ones, number, ones * context, number, cells, 1, context + 1)
    ours, theirs = (attend(query, cache, *given) for attend in (attention_of_equal_rows, tree_attention))
    torch.testing.assert_close(ours, theirs)


@pytest.fixture
def decode(gpu_scripts):
    """A guided decode of toys, and its scorer."""
    import decode as models
    import guided_decode

    def made(**switches):
        cpu, dtype = torch.device("cpu"), torch.float32
        point = guided_decode.Point(batch=3, candidates=4, context=12, steps=5, max_tokens=40)
        base = models.BaseModel(models.TINY_BASE, 3, point.mean_context, cpu, dtype).step(3, point.mean_context)
        value = models.random_value_model(models.config_of(models.TINY_VALUE), cpu, dtype)
        chosen = guided_decode.Switches(**switches)
        scorer = guided_decode.made_scorer(value, point, chosen)
        guide = guided_decode.made_guide(scorer, point, chosen)
        return guided_decode.Decode(base, models.TINY_VALUE.vocab, point, guide), scorer

    return made


def test_each_round_begins_at_the_same_prompts_without_computing_them_again(decode):
    guided, scorer = decode()
    guided.round_ms()
    prompts = [row.tokens[:12] for row in guided.rows]
    computed = scorer.counters
    guided.round_ms()
    assert [row.tokens[:12] for row in guided.rows] == prompts
    assert [len(row.tokens) for row in guided.rows] == [12 + 7] * 3
    assert scorer.counters.prefill_tokens == computed.prefill_tokens == 3 * 12
    assert scorer.counters.steps == computed.steps + 7


def test_a_drawn_candidate_is_reused_unless_that_is_switched_off(decode):
    counters = {}
    for reuse in (True, False):
        guided, scorer = decode(reuse=reuse)
        guided.round_ms()
        guided.begin()  # would raise where a token that was drawn is no candidate
        counters[reuse] = scorer.counters
    assert (counters[True].reused_tokens, counters[True].extended_tokens) == (3 * 6, 0)
    assert (counters[False].reused_tokens, counters[False].extended_tokens) == (0, 3 * 6)


def test_guidance_without_a_value_model_still_leaves_candidates_alone(decode):
    guided, scorer = decode(has_values=False)
    guided.round_ms()
    assert scorer.counters.steps == 0
    assert len(guided.rows[0].tokens) == 12 + 7


def test_beside_a_ratio_stand_the_floor_of_the_device_and_what_became_of_the_marks(gpu_scripts):
    import guided_step
    from paired import Paired

    from benchctl.costs.hardware import hardware_or_none
    from benchctl.costs.roofline import guided_floor

    options = SimpleNamespace(device="cpu", tiny=True, context=20, steps=3, rounds=6, max_tokens=64)
    bench = guided_step.Bench(options, [4])
    bench.hardware = hardware_or_none("NVIDIA H200")
    point = bench.point(4, 5)
    floor = guided_floor(
        bench.base_shape, bench.value_shape, bench.hardware, batch=4, candidates=5, context=point.mean_context
    )
    paired = Paired(base_ms=(2.0,) * 6, guided_ms=(2.6, 2.7, 2.8, 2.8, 2.8, 3.0))
    line = guided_step.Measured(
        arm="everything on", point=point, paired=paired, num_recorded=3, num_late=1, setup_s=0.5
    )
    cells = guided_step.table_row(bench, line).split(" | ")
    assert cells[3:8] == ["2.000", "2.800", "1.400", "[1.300, 1.500]", f"{floor.ratio:.2f}"]
    assert cells[8:10] == [f"{floor.base_s * 1e3 / 2.0:.0%}", "3 + 1"]
    said = guided_step.verdicts(bench, line)
    assert "1.400 [1.300, 1.500]** at batch 4 with 5 candidates" in said
    assert "First mark 1.6: met. Goal 1.45: undecided." in said
