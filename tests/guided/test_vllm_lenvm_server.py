"""Guidance as it runs in a worker of vLLM, with a real value model: what becomes of the logits of a step."""

import json
import time
from types import SimpleNamespace

import pytest
from support.guided.slotted_worker import Worker
from support.guided.tensors import torch
from support.servers.programs.vllm_worker import worker_configuration
from support.servers.real_engines import SMALL
from test_guided_device import noted_reads
from test_vllm_lenvm_rows import Asked, asked, update

from benchctl.engines.tiny_models.make import make_value_pair
from benchctl.guided.params import CheckpointError, GuidanceError
from benchctl.guided.value_model.checkpoint import read_config
from benchctl.guided.value_model.sizes import value_model_memory
from benchctl.guided.vllm.requests import Rows, admit
from benchctl.guided.vllm.server import GuidedServer, make_server, scorer_maker
from benchctl.guided.vllm.settings import VllmSettings
from benchctl.guided.vllm.steps import GuidedStepLog, StepCount

VOCABULARY = 512
EOS = 2
CPU = torch.device("cpu")


@pytest.fixture(name="pair", scope="module")
def _pair(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pair")
    make_value_pair(directory, SMALL, SMALL, constant=0.5)
    return directory


@pytest.fixture(name="told")
def _told(pair, tmp_path, monkeypatch):
    """A worker's environment."""
    monkeypatch.setenv("BENCHCTL_LENVM_MODEL", str(pair / "value"))
    monkeypatch.setenv("BENCHCTL_LENVM_DESCRIPTION", str(tmp_path / "value_model.json"))
    return tmp_path


def config(*, vocabulary=VOCABULARY, max_num_seqs=4, devices=1, kv_cache_memory_bytes=None):
    made = worker_configuration(
        vocabulary=vocabulary, num_tokens=64, max_num_seqs=max_num_seqs, eos=EOS,
        cache_config=SimpleNamespace(kv_cache_memory_bytes=kv_cache_memory_bytes),
    )  # fmt: skip
    made.parallel_config.tensor_parallel_size = devices
    return made


def rows_of(*asked):
    """A batch of requests with prompts and outputs of a few tokens."""
    rows = Rows()
    for each in asked:
        admit(each, 64)
    rows.update(update(len(asked), added=[(i, each, [5, 6, 7 + i], [9]) for i, each in enumerate(asked)]))
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


def test_the_tokens_of_all_requests_are_asked_for_before_the_model_and_read_at_once_after_it(monkeypatch):
    worker = Worker(slots=8)
    order = [worker.add(asked(guided=number != 2), [number] * (number + 1)) for number in range(6)]
    worker.step(order, dict.fromkeys(order, 7))
    said, reads = worker.forward(order), noted_reads(monkeypatch)
    worker.slots.ask_for_tokens()
    assert reads == []
    rows = worker.slots.batch(said).in_order
    assert reads == ["tolist"]
    assert [row.tokens[-1] for row in rows] == [7] * 5


@pytest.fixture(name="server", scope="module")
def _server(tmp_path_factory):
    pair = tmp_path_factory.mktemp("pair")
    make_value_pair(pair, SMALL, SMALL)  # values differ from place to place
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BENCHCTL_LENVM_MODEL", str(pair / "value"))
        return make_server(config(max_num_seqs=8), CPU, VllmSettings(), is_v2=True)


def guided_by_v2(server, requests, logits, chunk=1000):
    """Logits of the first step of these requests, their prompts as in ``rows_of``."""
    worker = Worker(slots=8)
    order = []
    for number, request in enumerate(requests):
        admit(request, 64)
        order.append(worker.add(request, [5, 6, 7 + number], output=[9]))
    worker.slots.ask_for_tokens()
    batch = worker.slots.batch(worker.forward(order, chunk))
    return server.apply(logits.clone(), batch, 0)


def test_what_is_drawn_after_the_temperature_of_the_server_is_what_the_other_runner_draws(server):
    scales, logits = (-4.0, 0.0, 3.0), batch_logits(3)
    for temperature in (0.3, 1.0, 1.9):
        filters = {"top_k": 6, "top_p": 0.97, "min_p": 0.01, "temperature": temperature}
        after = guided_by_v2(server, [tilted(scale, **filters) for scale in scales], logits)
        rows = rows_of(*(tilted(scale, **filters) for scale in scales))
        drawn = probabilities(after / temperature)
        expected = probabilities(server.apply(logits / temperature, rows, 0))
        assert torch.equal(drawn > 0, expected > 0)
        assert torch.allclose(drawn, expected, atol=1e-6)
        assert (drawn[0] - drawn[1]).abs().max() > 0.05, "guidance did nothing"


def test_rows_of_other_requests_and_of_prompts_in_chunks_keep_every_bit(server):
    logits = batch_logits(4)
    others = [Asked(top_k=3, temperature=0.5), tilted(0.0, temperature=0.0), Asked()]
    guided = guided_by_v2(server, [tilted(-5.0, temperature=0.5), *others], logits)
    assert torch.equal(guided[1:], logits[1:])
    assert not torch.equal(guided[0], logits[0])
    assert torch.equal(guided_by_v2(server, [tilted(-5.0), Asked()], logits[:2], chunk=2), logits[:2])


def test_tokens_that_a_grammar_has_masked_stay_masked(server):
    logits = torch.full((2, VOCABULARY), -torch.inf)
    logits[:, EOS], logits[:, 40] = 1.0, 1.5
    guided = guided_by_v2(server, [tilted(-5.0, temperature=0.8), tilted(5.0, temperature=0.8)], logits)
    assert torch.equal(guided > -torch.inf, logits > -torch.inf)
    drawn = probabilities(guided / 0.8)
    assert drawn[0, EOS] > probabilities(logits / 0.8)[0, EOS] > drawn[1, EOS] > 0


def test_steps_are_counted_from_the_end_of_the_warm_up():
    class Sampler:
        def __call__(self, seen):
            seen.append(count.number)
            return "drawn"

    class Worker:
        def compile_or_warm_up_model(self):
            sampler([])
            sampler([])
            return "warm"

    count, seen = StepCount(), []
    count.watch(Sampler, Worker)
    sampler = Sampler()
    assert Worker().compile_or_warm_up_model() == "warm"
    assert [sampler(seen) for _ in range(3)] == ["drawn"] * 3
    assert seen == [0, 1, 2]
