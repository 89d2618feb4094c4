"""Every combination of the switches of a guided server gives one law of the next token: that of the definition.

The requests of one server come, go, lag, are preempted and have prompts in parts. Values are those of transformers,
which sees the whole text of each candidate, and the tilt is that of the reference in plain Python.
"""

import itertools
import math
import random
from functools import cache

import pytest
from support.guided.guidance_reference import candidates, guided_row, softmax
from support.guided.tensors import torch

from benchctl.guided.guide import Guide, GuideSettings
from benchctl.guided.params import GuidanceParams
from benchctl.guided.rows import GuideRow

pytest.importorskip("transformers", reason="value models are read by transformers, which is not installed here")
from support.guided.plain_values import VOCABULARY, both_models

from benchctl.guided.value_model.scoring import Scorer

EOS = 3
NUM_STEPS, MAX_SEQS, MAX_TOKENS, MAX_CANDIDATES = 9, 8, 48, 6
PREEMPTED_AT, CAME_AT = 5, 4
LONG, SHORT = tuple(range(10, 31)), (40, 41, 42)

REQUESTS = {
    "tilted": (LONG, {"params": GuidanceParams(mode="centered_exp", value_scale=-4.0)}),
    "of the same prompt": (
        LONG,
        {"params": GuidanceParams(mode="mul", value_scale=1.2), "temperature": 0.7, "top_p": 0.9, "min_p": 0.02},
    ),
    "now and then": (SHORT, {"params": GuidanceParams(mode="centered_exp", value_scale=3.0, stride=3)}),
    "if unsure": (
        SHORT[:1],
        {"params": GuidanceParams(mode="exp", value_scale=2.0, value_entropy_threshold=0.9)},
    ),
    "mostly certain": (SHORT[:2], {"params": GuidanceParams(mode="centered_exp", value_scale=9.0), "min_p": 0.5}),
    "in parts": (LONG[::-1], {"params": GuidanceParams(mode="centered_exp", value_scale=2.0)}),
    "late": (LONG[:12], {"params": GuidanceParams(target_value=0.5, value_constraint="eq_soft")}),
    "greedy": (SHORT, {"params": GuidanceParams(mode="centered_exp", value_scale=-4.0), "temperature": 0.0}),
}

PASSES = [
    {"fused": True, "reuse": True},
    {"fused": True, "reuse": False},
    {"fused": False, "reuse": False},
]
GRAPHS = [{"graphs": False}, {"graphs": True}, {"graphs": True, "record": [5]}]
SWITCHES = [
    (passes | graphs, skips) for passes, graphs, skips in itertools.product(PASSES, GRAPHS, (None, False, True))
]


@cache
def models():
    return both_models("qwen3", torch.float64)


@cache
def raw_value(tokens):
    return models()[1].value(tokens)


@cache
def base_logits(tokens):
    """What the base model says after these tokens; sometimes it is nearly certain."""
    draw = random.Random(",".join(map(str, tokens)))
    spread = draw.choice([0.7, 2.0, 4.0])
    return [spread * draw.gauss(0, 1) for _ in range(VOCABULARY)]


def law_of(row):
    """Chances of the next token by the definition, and the candidates that a value model had to be asked for."""
    logits, params = base_logits(tuple(row.tokens)), row.params
    if row.temperature == 0:
        return {max(range(VOCABULARY), key=logits.__getitem__): 1.0}, 0
    before = candidates(softmax(logits, row.temperature), top_k=row.top_k, top_p=row.top_p, min_p=row.min_p)
    threshold = params.value_entropy_threshold
    is_due = (len(row.tokens) - row.num_prompt) % params.stride == 0
    entropy = -math.fsum(share * math.log(share) for share in before.values())
    is_sure = threshold is not None and entropy <= threshold
    if not is_due or is_sure or len(before) == 1:
        return before, 0
    raw = {token: raw_value((*row.tokens, token)) for token in before}
    return guided_row(before, raw, EOS, params, len(row.tokens) - row.num_prompt), len(before)


class Server:
    """The requests of a server with these switches, each with tokens that all combinations draw alike."""

    def __init__(self, scoring, skips):
        scorer = Scorer(models()[0], MAX_SEQS, MAX_TOKENS, max_candidates=MAX_CANDIDATES, **scoring)
        settings = GuideSettings(max_candidates=MAX_CANDIDATES, skips_early=skips, eos_ids=frozenset({EOS}))
        self.guide = Guide(lambda: scorer, settings)
        self.tokens = {name: list(prompt) for name, (prompt, _) in REQUESTS.items()}
        self.keys = {name: name for name in REQUESTS}

    def rows(self, step):
        present = [name for name in REQUESTS if name != "late" or step >= CAME_AT]
        if step == PREEMPTED_AT:
            self.guide.forget([self.keys["tilted"]])
            self.keys["tilted"] = "tilted again"
        for index, name in enumerate(present):
            prompt, asked = REQUESTS[name]
            is_whole = name != "in parts" or step > 1  # vLLM shows the whole prompt from the first part on
            fields = {"top_k": 5, "draws_candidates": True} | asked
            yield (
                GuideRow(
                    index=index, key=self.keys[name], tokens=self.tokens[name], num_prompt=len(prompt), **fields
                ),
                is_whole and name,
            )

    def step(self, step):
        """The largest difference between a chance and that of the law."""
        rows = list(self.rows(step))
        logits = torch.tensor([base_logits(tuple(row.tokens)) for row, _ in rows], dtype=torch.float64)
        logits = self.guide.apply(logits, [row for row, _ in rows])
        largest = num_asked = 0
        for row, name in rows:
            law, asked = law_of(row)
            num_asked += asked
            if row.temperature:
                chances = torch.softmax(logits[row.index] / row.temperature, dim=0).tolist()
                expected = [law.get(token, 0.0) for token in range(VOCABULARY)]
                largest = max(largest, *(abs(a - b) for a, b in zip(chances, expected, strict=True)))
            if name:  # a token that is sampled in the middle of a prompt is thrown away
                draw = random.Random(f"{name} {step}")
                self.tokens[name] += draw.choices(list(law), list(law.values()))
        assert self.guide.pending.step.candidates == num_asked
        return largest


@pytest.mark.parametrize(("scoring", "skips"), SWITCHES)
def test_the_law_of_the_next_token_is_the_same_with_every_switch_on_and_off(scoring, skips):
    server, counted = Server(scoring, skips), []
    for step in range(NUM_STEPS):
        assert server.step(step) < 1e-6, step
        counted.append(server.guide.pending.step)
    assert (sum(step.value_reuse_tokens for step in counted) > 0) is scoring["reuse"]
    assert {step.fused for step in counted} == {scoring["fused"]}
    is_recording = {step.value_recordings is not None for step in counted}
    assert is_recording == {scoring["graphs"]}
