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


def test_the_end_of_an_answer_is_as_likely_as_its_value_and_the_scale_say(told):
    server, logits = make_server(config(), CPU, VllmSettings()), batch_logits()
    top, ids = torch.topk(probabilities(logits), 4)
    for scale in (-5.0, 0.0, 5.0):
        # Every token has the value 0.5 and the end has 0, so the odds of the end change by exp(-scale / 2).
        weights = top * torch.where(ids == EOS, 1.0, torch.tensor(scale / 2).exp())
        shares = weights / weights.sum(1, keepdim=True)
        expected = torch.zeros(2, VOCABULARY, dtype=torch.float64).scatter(1, ids, shares)
        guided = server.apply(logits.clone(), rows_of(tilted(scale), tilted(scale)), 0)
        assert torch.allclose(probabilities(guided), expected, atol=1e-5)


def test_rows_of_others_keep_every_bit_and_tokens_that_only_the_base_model_has_are_not_sampled(told):
    wide = VOCABULARY + 4
    server, logits = make_server(config(vocabulary=wide), CPU, VllmSettings()), batch_logits(3, wide)
    logits[:, -1] = 9.0
    guided = server.apply(logits.clone(), rows_of(Asked(top_k=3), tilted(-5.0), tilted(0.0, temperature=0.0)), 0)
    assert torch.equal(guided[[0, 2]], logits[[0, 2]])
    assert not torch.equal(guided[1], logits[1])
    assert probabilities(guided)[1, VOCABULARY:].sum() == 0


def logged(told, settings):
    """A server whose sampler is timed: what asks it for a step, and what reads its log."""
    log = GuidedStepLog(told / "steps.jsonl")
    guide = make_server(config(), CPU, settings)._guide
    guide._timer = log
    server = GuidedServer(guide, VOCABULARY, log)

    class Sampler:
        def forward(self, number=None):
            if number is None:
                return batch_logits()
            return server.apply(batch_logits(), rows_of(tilted(-5.0), Asked()), number)

    log.watch_sampler(Sampler)
    return Sampler().forward, lambda: [json.loads(each) for each in (told / "steps.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("settings", [VllmSettings(), VllmSettings(skips_early=False)], ids=["skipping", "whole"])
def test_every_step_with_a_row_to_guide_is_one_line_with_the_number_of_the_step(told, settings):
    step, read = logged(told, settings)
    step()  # that guided nothing leaves no line, and no time to the next
    assert read() == []
    before_ns = time.monotonic_ns()
    step(7)
    (line,) = read()
    assert line["clock"] == "host"
    assert before_ns <= line["start_ns"] <= line["end_ns"]
    assert (line["step"], line["num_seqs"], line["guided_rows"], line["candidates"]) == (7, 2, 1, 4)
    assert (line["value_prefill_tokens"], line["value_extend_tokens"]) == (3, 1)
    sections = line["sections_ns"]
    assert sections["sampler_total"] >= sections["lvm_apply_outer"] >= sections["lvm_forward"] > 0
    assert 0 < sections["pre_lvm"] + sections["lvm_apply_outer"] + sections["sample"] <= sections["sampler_total"]
    assert "value_model_load" not in sections, "it was loaded before the first step"


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
    process = get_context("fork").Process(target=work, args=(Path(sys.argv[1]),))
    process.start()
    process.join()
    assert process.exitcode == 0
"""


def test_a_worker_that_ends_in_order_writes_what_waited_for_the_device(tmp_path):
    (tmp_path / "last_words.py").write_text(LAST_WORDS)
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, str(tmp_path / "last_words.py"), str(tmp_path / "steps")],
        capture_output=True, text=True, check=False, timeout=120,
        env={"PYTHONPATH": f"{root}:{root / 'tests'}", "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = map(json.loads, (tmp_path / "steps").read_text().splitlines())
    assert (line["step"], line["guided_rows"], line["sections_ns"]) == (5, 1, {"lvm_forward": 1_000_000})


def test_a_server_describes_the_value_model_that_it_loaded_and_prices_a_size_without_weights(
    told, pair, tmp_path, monkeypatch
):
    def described():
        return json.loads((told / "value_model.json").read_text())

    make_server(config(), CPU, VllmSettings(lazy=True))
    assert not (told / "value_model.json").exists()
    make_server(config(), CPU, VllmSettings(dtype="float32"))
    assert (described()["dtype"], described()["layers"]) == ("float32", 2)
    assert described()["revision"].startswith("benchctl ")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((pair / "value" / "config.json").read_bytes())
    monkeypatch.setenv("BENCHCTL_LENVM_MODEL", str(bare))
    server = make_server(config(), CPU, VllmSettings(random_weights=True))
    guided = server.apply(batch_logits(), rows_of(tilted(-5.0), tilted(5.0)), 0)
    assert torch.isfinite(probabilities(guided)).all()
    assert (guided > -torch.inf).sum(1).tolist() == [4, 4]
    assert (described()["dtype"], described()["layers"]) == ("bfloat16", 2)


@pytest.mark.parametrize(
    ("changes", "settings", "env", "said"),
    [
        ({"devices": 2}, VllmSettings(), {}, "spreads its model over 2"),
        ({"vocabulary": 1024}, VllmSettings(), {}, "two models of one tokenizer"),
        ({}, VllmSettings(memory_bytes=1000), {}, "and 1000 bytes are allowed; lower max_num_seqs"),
        (
            {},
            VllmSettings(),
            {"CLOCK": "wall", "STEP_LOG": "/steps.jsonl"},
            "BENCHCTL_LENVM_CLOCK is 'wall'; take one of host, device",
        ),
        ({}, VllmSettings(), {"MODEL": "../base"}, "has no"),
        ({}, VllmSettings(), {"MODEL": "../nowhere"}, "no vocab_size"),
    ],
)
def test_a_value_model_that_does_not_fit_the_server_is_refused_at_the_start(
    told, pair, monkeypatch, changes, settings, env, said
):
    for name, value in env.items():
        path = str((pair / "value" / value).resolve()) if name == "MODEL" else value
        monkeypatch.setenv(f"BENCHCTL_LENVM_{name}", path)
    with pytest.raises((GuidanceError, CheckpointError), match=said):
        make_server(config(**changes), CPU, settings)


def test_a_value_model_that_does_not_fit_beside_the_cache_that_was_asked_for_is_refused_before_it_is_loaded(
    told, pair, monkeypatch
):
    needed = value_model_memory(read_config(pair / "value"), 4, max_slots=4, max_tokens=64, max_candidates=64)
    free = needed.weights + needed.prefixes + 350_000
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 2 * free))

    def make(kv_bytes):
        limits, settings = config(kv_cache_memory_bytes=kv_bytes), VllmSettings(dtype="float32")
        return scorer_maker(pair / "value", limits, torch.device("cuda"), settings, None)

    make(None)
    make(300_000)
    with pytest.raises(GuidanceError, match="for 4 sequences of 64 tokens, the server's KV cache"):
        make(400_000)
