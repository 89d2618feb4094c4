"""Whatever a server does from step to step, a scorer gives the values of one that remembers nothing.

Random steps: rows without a choice, tokens that are thrown away, prompts that others had, requests that are
dropped and come again, more requests than slots, numbers of candidates that change, and all switches of the scorer.
"""

import random

import pytest
from support.guided.tensors import torch

pytest.importorskip("transformers", reason="value models are read by transformers, which is not installed here")
from support.guided.plain_values import VOCABULARY, random_tensors, tiny_config

from benchctl.guided.rows import ScoredRow
from benchctl.guided.value_model.checkpoint import Checkpoint
from benchctl.guided.value_model.scoring import Scorer
from benchctl.guided.value_model.value_model import ValueModel

NUM_STEPS = 40


class Server:
    """Requests of a server whose steps are drawn at random."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        config = tiny_config(self.draw.choice(["qwen2", "qwen3", "llama"]))
        self.model = ValueModel(Checkpoint(config, random_tensors(config, torch.float64), frozenset({2})))
        self.slots, self.candidates = self.draw.randint(1, 6), self.draw.randint(1, 6)
        self.length = self.draw.choice([40, 80, 200])
        self.scorer = self.made_scorer()
        self.prompts = [self.some_tokens(self.draw.randint(1, 30)) for _ in range(3)]
        self.rows, self.num_requests = [], 0
        self.last = {}

    def made_scorer(self):
        def is_on():
            return self.draw.random() < 0.7

        return Scorer(
            self.model, self.slots, self.length, max_candidates=self.candidates, fused=is_on(), reuse=is_on(),
            graphs=is_on(), record=[self.candidates] * is_on(), share_prompts=is_on(),
        )  # fmt: skip

    def some_tokens(self, number):
        return [self.draw.randrange(3, VOCABULARY) for _ in range(number)]

    def fill(self):
        """New requests, now and then one more than there are slots."""
        for _ in range(self.draw.randint(1, self.slots + (self.draw.random() < 0.1)) - len(self.rows)):
            prompt = list(self.draw.choice(self.prompts))
            self.rows.append(ScoredRow(self.num_requests, prompt, len(prompt), draws_candidates=True))
            self.num_requests += 1
            if self.draw.random() < 0.3:
                self.scorer.prepare(self.rows[-1:])

    def score(self):
        """Raw values and those of a scorer that was made for this step; None where no row has a choice."""
        share = self.draw.choice([0, 0.3, 0.7, 1])
        chosen = [row for row in self.rows if self.draw.random() >= share][: self.slots]
        waiting = [row for row in self.rows if row not in chosen]
        self.last = {}
        if not chosen:
            self.scorer.keep_up(waiting)
            return None
        num_candidates = self.draw.randint(1, self.candidates)
        lines = [self.draw.sample(range(VOCABULARY), num_candidates) for _ in chosen]
        self.last = {row.key: line for row, line in zip(chosen, lines, strict=True)}
        fresh = Scorer(
            self.model, len(chosen), self.length, max_candidates=num_candidates, fused=False, graphs=False
        )
        ids = torch.tensor(lines)
        return self.scorer.score(chosen, ids, waiting), fresh.score(chosen, ids)

    def sample(self):
        """A token for most rows: a candidate where there were some."""
        for row in list(self.rows):
            fate = self.draw.random()
            if fate < 0.05 or len(row.tokens) >= self.length - 1:
                self.scorer.forget([row.key])
                self.rows.remove(row)
            elif fate < 0.1:
                continue  # what was drawn is thrown away
            else:
                if fate < 0.13:
                    self.scorer.forget([row.key])  # dropped, and taken up again
                row.tokens.append(self.draw.choice(self.last.get(row.key) or range(VOCABULARY)))


@pytest.mark.parametrize("seed", range(14))
def test_values_are_those_of_a_scorer_that_remembers_nothing(seed):
    server = Server(seed)
    largest = num_scored = 0
    for _ in range(NUM_STEPS):
        server.fill()
        if (both := server.score()) is not None:
            largest = max(largest, float((both[0] - both[1]).abs().max()))
            num_scored += 1
        server.sample()
    assert num_scored > NUM_STEPS / 4
    assert largest < 1e-9
