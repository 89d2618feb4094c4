"""Guidance as it runs in a worker of vLLM, with a real value model: what becomes of the logits of a step."""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.guided.tensors import torch
from support.guided.value_models import write_pair
from test_vllm_lenvm_requests import Asked
from test_vllm_lenvm_rows import Update

from benchctl.guided.params import CheckpointError, GuidanceError
from benchctl.guided.value_model.checkpoint import read_config
from benchctl.guided.value_model.sizes import value_model_memory
from benchctl.guided.vllm.requests import Rows, admit
from benchctl.guided.vllm.server import GuidedServer, make_server, scorer_maker
from benchctl.guided.vllm.settings import VllmSettings
from benchctl.guided.vllm.steps import GuidedStepLog

VOCABULARY = 512
EOS = 2
CPU = torch.device("cpu")


@pytest.fixture(name="pair", scope="module")
def _pair(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("pair"), constant=0.5)


@pytest.fixture(name="told")
def _told(pair, tmp_path, monkeypatch):
    """A worker's environment."""
    monkeypatch.setenv("BENCHCTL_LENVM_MODEL", str(pair / "value"))
    monkeypatch.setenv("BENCHCTL_LENVM_DESCRIPTION", str(tmp_path / "value_model.json"))
    return tmp_path


def config(*, vocabulary=VOCABULARY, max_num_seqs=4, devices=1, kv_cache_memory_bytes=None):
    model = SimpleNamespace(
        max_model_len=64,
        hf_text_config=SimpleNamespace(eos_token_id=EOS),
        try_get_generation_config=lambda: {"eos_token_id": [EOS]},
        get_vocab_size=lambda: vocabulary,
    )
    parallel = SimpleNamespace(tensor_parallel_size=devices, pipeline_parallel_size=1)
    scheduler = SimpleNamespace(max_num_seqs=max_num_seqs)
    cache = SimpleNamespace(kv_cache_memory_bytes=kv_cache_memory_bytes)
    return SimpleNamespace(
        model_config=model, parallel_config=parallel, scheduler_config=scheduler, cache_config=cache
    )


def rows_of(*asked):
    """A batch of requests with prompts and outputs of a few tokens."""
    rows = Rows()
    for each in asked:
        admit(each, 64)
    rows.update(Update(len(asked), added=[(i, each, [5, 6, 7 + i], [9]) for i, each in enumerate(asked)]))
    return rows


def tilted(scale, top_k=4, **told):
    extra = {"lenvm_mode": "centered_exp", "lenvm_value_scale": scale, "lenvm_skip_noop": 0}
    return Asked(top_k=top_k, extra_args=extra, **told)


def batch_logits(rows=2, vocabulary=VOCABULARY):
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(1))
    logits[:, EOS] = 4.0
    return logits


def probabilities(logits):
    return torch.softmax(logits.double(), dim=-1)


@pytest.mark.parametrize("scale", [-5.0, 0.0, 5.0])
def test_the_end_of_an_answer_is_as_likely_as_its_value_and_the_scale_say(told, scale):
    server, logits = make_server(config(), CPU, VllmSettings()), batch_logits()
    top, ids = torch.topk(probabilities(logits), 4)
    # Every token has the value 0.5 and the end has 0, so the odds of the end change by exp(-scale / 2).
    weights = top * torch.where(ids == EOS, 1.0, torch.tensor(scale / 2).exp())
    expected = torch.zeros(2, VOCABULARY, dtype=torch.float64).scatter(
        1, ids, weights / weights.sum(1, keepdim=True)
    )
    guided = server.apply(logits.clone(), rows_of(tilted(scale), tilted(scale)), 0)
    assert torch.allclose(probabilities(guided), expected, atol=1e-5)


def test_rows_of_other_requests_keep_every_bit(told):
    server, logits = make_server(config(), CPU, VllmSettings()), batch_logits(3)
    guided = server.apply(logits.clone(), rows_of(Asked(top_k=3), tilted(-5.0), tilted(0.0, temperature=0.0)), 0)
    assert torch.equal(guided[[0, 2]], logits[[0, 2]])
    assert not torch.equal(guided[1], logits[1])


def test_tokens_that_only_the_base_model_has_are_not_sampled_where_guidance_is(told):
    wide = 516
    server, logits = make_server(config(vocabulary=wide), CPU, VllmSettings()), batch_logits(2, wide)
    logits[:, -1] = 9.0
    guided = server.apply(logits.clone(), rows_of(tilted(-1.0), Asked()), 0)
    assert probabilities(guided)[0, VOCABULARY:].sum() == 0
    assert torch.equal(guided[1], logits[1])


def logged(told, settings=None, *, fails=False):
    """A server whose sampler is timed: what asks it for a step, and what reads its log."""
    log = GuidedStepLog(told / "steps.jsonl")
    guide = make_server(config(), CPU, settings or VllmSettings())._guide
    guide._timer = log
    server = GuidedServer(guide, VOCABULARY, log)

    class Sampler:
        def forward(self, number=None):
            if number is None:
                return batch_logits()
            if fails:
                raise ValueError("no")
            return server.apply(batch_logits(), rows_of(tilted(-5.0), Asked()), number)

    log.watch_sampler(Sampler)
    return Sampler().forward, lambda: [json.loads(each) for each in (told / "steps.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("settings", [VllmSettings(), VllmSettings(skips_early=False)], ids=["skipping", "whole"])
def test_every_step_with_a_row_to_guide_is_one_line_with_the_number_of_the_step(told, settings):
    step, read = logged(told, settings)
    step(7)
    lines = read()
    assert len(lines) == 1
    assert lines[0]["clock"] == "host"
    assert lines[0]["start_ns"] <= lines[0]["end_ns"]
    assert (lines[0]["step"], lines[0]["num_seqs"], lines[0]["guided_rows"], lines[0]["candidates"]) == (7, 2, 1, 4)
    assert (lines[0]["value_prefill_tokens"], lines[0]["value_extend_tokens"]) == (3, 1)
    sections = lines[0]["sections_ns"]
    assert sections["sampler_total"] >= sections["lvm_apply_outer"] >= sections["lvm_forward"] > 0
    parts = sections["pre_lvm"] + sections["lvm_apply_outer"] + sections["sample"]
    assert 0 < parts <= sections["sampler_total"]
    assert "value_model_load" not in sections, "it was loaded before the first step"


def test_a_call_of_the_sampler_that_guided_nothing_leaves_no_line_and_no_time_to_the_next(told):
    step, read = logged(told)
    step()
    assert read() == []
    before_ns = time.monotonic_ns()
    step(3)
    (line,) = read()
    assert line["step"] == 3
    assert line["start_ns"] >= before_ns


def test_an_error_in_the_sampler_goes_on_as_it_was_and_leaves_no_line(told):
    step, read = logged(told, fails=True)
    with pytest.raises(ValueError, match="no"):
        step(0)
    assert read() == []


@pytest.mark.parametrize(
    ("clock", "said"),
    [("wall", "BENCHCTL_LENVM_CLOCK is 'wall'; take one of host, device"), ("device", "no CUDA device here")],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_clock_that_is_not_there_is_refused_at_the_start(told, monkeypatch, clock, said):
    monkeypatch.setenv("BENCHCTL_LENVM_STEP_LOG", str(told / "steps.jsonl"))
    monkeypatch.setenv("BENCHCTL_LENVM_CLOCK", clock)
    with pytest.raises(GuidanceError, match=said):
        make_server(config(), CPU, VllmSettings())


LAST_WORDS = """
from multiprocessing import get_context
from benchctl.guided.params import GuideStep
from benchctl.guided.timing import PendingStep
from benchctl.guided.vllm.steps import GuidedStepLog
import sys
from support.guided.fake_events import Event
from pathlib import Path

def work(path):
    log = GuidedStepLog(path, "device", make_event=Event)
    with log.section("lvm_forward"):
        pass
    log.record(step=5, num_seqs=1, did=PendingStep(GuideStep(guided_rows=1)))
    assert path.read_text() == "", "the device is not there yet"
    sys.exit(0)

if __name__ == "__main__":
    process = get_context(sys.argv[2]).Process(target=work, args=(Path(sys.argv[1]),))
    process.start()
    process.join()
    assert process.exitcode == 0
"""


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_a_worker_that_ends_in_order_writes_what_waited_for_the_device(tmp_path, how):
    (tmp_path / "last_words.py").write_text(LAST_WORDS)
    path = tmp_path / "steps.jsonl"
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, str(tmp_path / "last_words.py"), str(path), how],
        capture_output=True, text=True, check=False, timeout=120,
        env={"PYTHONPATH": f"{root}:{root / 'tests'}", "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = map(json.loads, path.read_text().splitlines())
    assert (line["step"], line["guided_rows"], line["sections_ns"]) == (5, 1, {"lvm_forward": 1_000_000})


def test_a_server_describes_the_value_model_that_it_loaded(told):
    make_server(config(), CPU, VllmSettings(lazy=True))
    assert not (told / "value_model.json").exists()
    make_server(config(), CPU, VllmSettings(dtype="float32"))
    described = json.loads((told / "value_model.json").read_text())
    assert (described["dtype"], described["layers"]) == ("float32", 2)
    assert described["revision"].startswith("benchctl ")


def test_a_size_can_be_priced_without_weights(told, pair, tmp_path, monkeypatch):
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((pair / "value" / "config.json").read_bytes())
    monkeypatch.setenv("BENCHCTL_LENVM_MODEL", str(bare))
    server = make_server(config(), CPU, VllmSettings(random_weights=True))
    guided = server.apply(batch_logits(), rows_of(tilted(-5.0), tilted(5.0)), 0)
    assert torch.isfinite(probabilities(guided)).all()
    assert (guided > -torch.inf).sum(1).tolist() == [4, 4]
    described = json.loads((told / "value_model.json").read_text())
    assert (described["dtype"], described["layers"]) == ("bfloat16", 2)
    with pytest.raises(CheckpointError, match="complete directory with its weights"):
        make_server(config(), CPU, VllmSettings())


@pytest.mark.parametrize(
    ("changes", "settings", "said"),
    [
        ({"devices": 2}, VllmSettings(), "spreads its model over 2"),
        ({"vocabulary": 1024}, VllmSettings(), "two models of one tokenizer"),
        ({}, VllmSettings(memory_bytes=1000), "and 1000 bytes are allowed; lower max_num_seqs"),
    ],
)
def test_a_value_model_that_does_not_fit_the_server_is_refused_at_the_start(told, changes, settings, said):
    with pytest.raises(GuidanceError, match=said):
        make_server(config(**changes), CPU, settings)


@pytest.mark.parametrize(("kv_bytes", "fits"), [(None, True), (300_000, True), (400_000, False)])
def test_a_value_model_that_does_not_fit_beside_the_cache_that_was_asked_for_is_refused_before_it_is_loaded(
    told, pair, monkeypatch, kv_bytes, fits
):
    needed = value_model_memory(
        read_config(pair / "value"), 4, max_slots=4, max_tokens=64, max_candidates=64
    )  # as the server counts it
    free = needed.weights + needed.prefixes + 350_000
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 2 * free))
    limits = config(kv_cache_memory_bytes=kv_bytes)
    settings = VllmSettings(dtype="float32")
    if fits:
        scorer_maker(pair / "value", limits, torch.device("cuda"), settings, None)
        return
    with pytest.raises(GuidanceError, match="for 4 sequences of 64 tokens, the server's KV cache"):
        scorer_maker(pair / "value", limits, torch.device("cuda"), settings, None)


def test_a_directory_that_is_no_value_model_is_refused_at_the_start(told, pair, monkeypatch):
    monkeypatch.setenv("BENCHCTL_LENVM_MODEL", str(pair / "base"))
    with pytest.raises(CheckpointError):
        make_server(config(), CPU, VllmSettings())
    monkeypatch.setenv("BENCHCTL_LENVM_MODEL", str(pair / "nowhere"))
    with pytest.raises(GuidanceError, match="no vocab_size"):
        make_server(config(), CPU, VllmSettings())
