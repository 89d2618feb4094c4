"""Whatever the rows of a batch ask for from step to step, guidance is what it is without memory and switches.

Random batches: modes, strides, thresholds, greedy rows and rows whose server filters, requests that come, end, are
dropped and taken up again, and steps in the middle of a prompt, whose token is thrown away.
"""

import random
import zlib

import pytest
from support.guided.tensors import torch

pytest.importorskip("transformers", reason="value models are read by transformers, which is not installed here")
from support.guided.plain_values import VOCABULARY, random_tensors, tiny_config

from benchctl.guided.guide import Guide, GuideSettings
from benchctl.guided.operations import FUSED, PLAIN
from benchctl.guided.params import GuidanceParams
from benchctl.guided.rows import GuideRow
from benchctl.guided.value_model.checkpoint import Checkpoint
from benchctl.guided.value_model.scoring import Scorer
from benchctl.guided.value_model.value_model import ValueModel

NUM_STEPS, SLOTS, CANDIDATES, LENGTH = 40, 6, 6, 120


class Batch:
    """Requests of a server whose steps are drawn at random."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        config = tiny_config(self.draw.choice(["qwen2", "qwen3", "llama"]))
        operations = self.draw.choice([PLAIN, FUSED])
        checkpoint = Checkpoint(config, random_tensors(config, torch.float64), frozenset({2}))
        self.model = ValueModel(checkpoint, operations)
        self.guide = self.switched_guide()
        self.prompts = [self.some_tokens(self.draw.randint(1, 30)) for _ in range(3)]
        self.sharpness = self.draw.choice([1, 4, 12])
        self.rows, self.num_requests = {}, 0

    def switched_guide(self):
        def is_on():
            return self.draw.random() < 0.7

        scorer = Scorer(
            self.model, SLOTS, LENGTH, max_candidates=CANDIDATES, fused=is_on(), reuse=is_on(), graphs=is_on(),
            record=[5] * is_on(), share_prompts=is_on(),
        )  # fmt: skip
        skips = self.draw.choice([True, False, None])
        return Guide(lambda: scorer, GuideSettings(max_candidates=CANDIDATES, skips_early=skips))

    def plain_guide(self):
        return Guide(
            lambda: Scorer(
                self.model, SLOTS, LENGTH, max_candidates=CANDIDATES, fused=False, reuse=False, graphs=False
            ),
            GuideSettings(max_candidates=CANDIDATES, skips_early=False),
        )

    def some_tokens(self, number):
        return [self.draw.randrange(3, VOCABULARY) for _ in range(number)]

    def fill(self):
        while len(self.rows) < self.draw.randint(1, SLOTS):
            index = next(index for index in range(SLOTS) if index not in self.rows)
            prompt = list(self.draw.choice(self.prompts))
            self.rows[index] = GuideRow(
                index=index, key=self.num_requests, params=self.some_params(),
                tokens=prompt, num_prompt=len(prompt),
                temperature=self.draw.choice([0, 0.7, 1.0, 1.0, 1.5]), top_k=self.draw.randint(1, CANDIDATES),
                top_p=self.draw.choice([1.0, 0.9, 0.5]), min_p=self.draw.choice([0.0, 0.05]),
                draws_candidates=self.draw.random() >= 0.15,
            )  # fmt: skip
            self.num_requests += 1

    def some_params(self):
        kind = self.draw.random()
        if kind < 0.2:
            return GuidanceParams(target_length=self.draw.randint(1, 60))
        if kind < 0.3:
            return GuidanceParams(target_value=self.draw.random())
        return GuidanceParams(
            mode=self.draw.choice(["centered_exp", "mul"]), value_scale=self.draw.choice([-3.0, 0.0, 1.7]),
            stride=self.draw.choice([1, 1, 1, 2, 3]), skip_noop=self.draw.random() < 0.3,
            value_entropy_threshold=self.draw.choice([None, None, 0.5, 1.0]),
        )  # fmt: skip

    def logits(self, part_of_prompt):
        """The same for the same text; other ones in the middle of a prompt."""
        logits = torch.zeros(SLOTS, VOCABULARY, dtype=torch.float64)
        for index, row in self.rows.items():
            seed = zlib.crc32(repr((row.key, row.tokens, part_of_prompt[index])).encode())
            drawn = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            logits[index] = self.sharpness * drawn
        return logits

    def step(self):
        """What a server would sample from, and what it would without memory and switches; and both counts."""
        self.fill()
        part_of_prompt = {index: self.draw.choice([0] * 9 + [1, 2]) for index in self.rows}
        logits = self.logits(part_of_prompt)
        rows = self.draw.sample(list(self.rows.values()), len(self.rows))
        plain = self.plain_guide()
        guided, wanted = self.guide.apply(logits.clone(), rows), plain.apply(logits.clone(), rows)
        self.sample(guided, part_of_prompt)
        return torch.softmax(guided, 1), torch.softmax(wanted, 1), self.guide.pending.step, plain.pending.step

    def sample(self, guided, part_of_prompt):
        for index, row in list(self.rows.items()):
            if len(row.tokens) >= LENGTH - 2 or self.draw.random() < 0.04:
                self.guide.forget([row.key])
                del self.rows[index]
            elif not part_of_prompt[index]:
                if self.draw.random() < 0.03:
                    self.guide.forget([row.key])  # dropped, and taken up again
                probs = torch.softmax(guided[index] / max(row.temperature, 1e-9), 0).tolist()
                row.tokens.append(self.draw.choices(range(VOCABULARY), probs)[0])


@pytest.mark.parametrize("seed", range(12))
def test_what_is_sampled_from_does_not_depend_on_memory_and_switches(seed):
    batch = Batch(seed)
    num_guided = 0
    for _ in range(NUM_STEPS):
        guided, wanted, counted, counted_plainly = batch.step()
        assert float((guided - wanted).abs().max()) < 1e-9
        assert counted.guided_rows == counted_plainly.guided_rows
        assert counted.candidates == counted_plainly.candidates
        num_guided += counted.guided_rows
    assert num_guided > 0
