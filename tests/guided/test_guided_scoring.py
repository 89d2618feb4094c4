"""A scorer gives each candidate the value that a plain forward pass of its whole text has, whatever came before.

Also at random steps: rows without a choice, tokens that are thrown away, prompts that others had, requests that are
dropped and come again, more requests than slots, numbers of candidates that change, and all switches of the scorer.
"""

import random
from dataclasses import asdict, replace
from functools import cache

import pytest
from support.guided.tensors import torch

pytest.importorskip("transformers", reason="value models are read by transformers, which is not installed here")
from support.guided.plain_values import FAMILIES, VOCABULARY, both_models

from benchctl.guided.params import GuidanceError
from benchctl.guided.rows import ScoredRow
from benchctl.guided.value_model.scoring import Scorer


@cache
def models(family="qwen2", dtype=torch.float32):
    return both_models(family, dtype)


def text(draw, length):
    return [draw.randrange(VOCABULARY) for _ in range(length)]


def row(key, tokens, **more):
    return ScoredRow(key, tokens, len(tokens), **more)


def choices(draw, num_rows, num_candidates):
    return torch.tensor([text(draw, num_candidates) for _ in range(num_rows)])


def plain(model, rows, ids):
    values = [
        [model.value([*row.tokens, token]) for token in line] for row, line in zip(rows, ids.tolist(), strict=True)
    ]
    return torch.tensor(values, dtype=torch.float64)


def farthest(a, b):
    return float((a.double() - b.double()).abs().max())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [{}, {"graphs": True}, {"fused": False}], ids=["fused", "rounded", "two-phase"])
def test_values_are_those_of_the_whole_text_through_transformers(family, options):
    ours, theirs = models(family)
    scorer = Scorer(ours, 4, 64, **options)
    draw = random.Random(family)
    tokens = {key: text(draw, length) for key, length in {"a": 1, "b": 9, "c": 30}.items()}
    for _ in range(3):
        rows = [row(key, tokens[key]) for key in draw.sample(list(tokens), 3)]
        ids = choices(draw, 3, 3)
        assert farthest(scorer.score(rows, ids), plain(theirs, rows, ids)) < 2e-5
        for key, lag in (("a", 1), ("b", 0), ("c", 7)):
            tokens[key].extend(text(draw, lag))
    rows = [row("b", text(draw, 5))]  # a sequence that did not simply grow is computed again
    ids = choices(draw, 1, 2)
    assert farthest(scorer.score(rows, ids), plain(theirs, rows, ids)) < 2e-5


def test_bfloat16_is_as_far_from_float32_as_transformers_in_bfloat16_is():
    (ours, theirs), (_, exact) = models(dtype=torch.bfloat16), models()
    draw = random.Random(1)
    rows = [row(number, text(draw, 12)) for number in range(6)]
    ids = choices(draw, 6, 4)
    truth = plain(exact, rows, ids)
    rounding = farthest(plain(theirs, rows, ids), truth)
    assert 1e-4 < rounding < 1
    assert farthest(Scorer(ours, 6, 32).score(rows, ids), truth) < 2 * rounding


def decode(scorer, rows, num_steps, num_candidates=3, seed=0):
    """Steady decode: each row grows by one token a step."""
    draw = random.Random(seed)
    for _ in range(num_steps):
        ids = choices(draw, len(rows), num_candidates)
        scorer.score(rows, ids)
        for each in rows:
            each.tokens.append(draw.randrange(VOCABULARY))


def counted(scorer, rows, num_steps):
    """What so many steps of these rows add to each counter."""
    before = asdict(scorer.counters)
    decode(scorer, rows, num_steps)
    return {name: number - before[name] for name, number in asdict(scorer.counters).items()}


@pytest.mark.parametrize(
    ("options", "forwards"),
    [({"graphs": False}, 1 + 11), ({"graphs": True}, 1 + 11), ({"fused": False}, 1 + 11 + 10)],
)
def test_steady_decode_is_one_forward_a_step_and_counts_every_token_once(options, forwards):
    draw = random.Random(2)
    rows = [row(number, text(draw, 20)) for number in range(5)]
    scorer = Scorer(models()[0], 5, 64, **options)
    num_bytes, done = scorer.num_bytes, counted(scorer, rows, 11)
    assert done.items() >= {
        "prefill_tokens": 100, "extended_tokens": 50, "steps": 11, "fused": 11 * options.get("fused", True),
        "forwards": forwards, "slots": 5,
    }.items()  # fmt: skip
    assert done["computed_tokens"] == 5 * 20 + 5 * 10 + 11 * 5 * 3 or options != {"graphs": False}
    assert scorer.num_bytes == num_bytes, "memory is taken once"


def test_a_row_that_lags_takes_fusion_from_nobody_and_a_new_one_has_a_forward_of_its_own():
    draw = random.Random(3)
    rows = [row(number, text(draw, 12)) for number in range(4)]
    scorer = Scorer(models()[0], 5, 256, graphs=False)
    decode(scorer, rows, 1)
    rows[2].tokens.extend(text(draw, 6))
    done = counted(scorer, rows, 1)
    # Nobody is padded to the length of the one that lagged.
    expected = {"fused": 1, "forwards": 1, "extended_tokens": 3 + 7, "computed_tokens": 3 + 7 + 4 * 3}
    assert done.items() >= expected.items()
    done = counted(scorer, [*rows, row("new", text(draw, 100))], 1)
    assert done.items() >= {"fused": 1, "forwards": 2, "computed_tokens": 100 + 4 + 5 * 3}.items()


def test_a_prompt_of_many_samples_goes_through_the_model_once_and_is_known_after_its_end_unless_sharing_is_off():
    # As short as an extension, copying it would bring nothing.
    for length, prefilled, shared in ((100, 100, 5 * 100), (5, 6 * 5, 0)):
        prompt = text(random.Random(5), length)
        scorer = Scorer(models()[0], 6, 256)
        done = counted(scorer, [row(number, list(prompt)) for number in range(6)], 3)
        expected = {"prefill_tokens": prefilled, "shared_tokens": shared, "extended_tokens": 6 * 2}
        assert done.items() >= expected.items()
    for shares, prefilled in ((True, 40), (False, 80)):
        scorer = Scorer(models()[0], 2, 64, share_prompts=shares)
        for name in ("first", "second"):
            decode(scorer, [row(name, text(random.Random(6), 40))], 2)
            scorer.forget([name])
        assert (scorer.counters.prefill_tokens, scorer.counters.slots) == (prefilled, 0)


def test_a_few_prompts_go_through_recorded_passes_of_a_quarter_more_tokens_at_most(monkeypatch):
    ours, _ = models(dtype=torch.float64)
    # As on a GPU with kernels, whose attention looks at no more cells than there are.
    monkeypatch.setattr(ours, "operations", replace(ours.operations, splits_keys=True))
    for length, num_rows in ((9, 1), (100, 3), (600, 1), (600, 3), (20, 9)):
        recorded = Scorer(ours, 9, 700, max_candidates=4, graphs=True, record=[3])
        rows = [row(number, text(random.Random(number), length)) for number in range(num_rows)]
        recorded.prepare(rows)
        assert num_rows * length <= recorded.counters.computed_tokens <= 1.25 * num_rows * length


def test_what_does_not_fit_is_refused_by_name():
    scorer = Scorer(models()[0], 2, 20, max_candidates=8)
    for rows, num_candidates, message in (
        ([row("a", [1] * 21)], 2, "'a' has 21 tokens.*1 to 20.*larger max_tokens"),
        ([row(name, [1]) for name in "abc"], 2, "3 sequences.*2 slots.*'c'.*max_slots of 3"),
        ([row("a", [1]), row("a", [1])], 2, "'a' is given twice"),
        ([row("a", [1])], 9, r"\(1, 9\).*1 to 8.*larger max_candidates"),
    ):
        with pytest.raises(GuidanceError, match=message):
            scorer.score(rows, torch.zeros(len(rows), num_candidates, dtype=torch.int64))


def test_a_token_that_was_no_candidate_is_an_error_and_not_another_value():
    scorer, rows = Scorer(models()[0], 2, 64), [row("a", [7] * 12, draws_candidates=True)]
    for _ in range(2):
        scorer.score(rows, torch.tensor([[3, 4, 5]]))
        rows[0].tokens.append(6)
    scorer.forget([])
    with pytest.raises(GuidanceError, match="none of the candidates"):
        scorer.forget([])


NUM_STEPS = 40


class Server:
    """Requests of a server whose steps are drawn at random."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.model, _ = models(self.draw.choice(FAMILIES), torch.float64)
        self.slots, self.candidates = self.draw.randint(1, 6), self.draw.randint(1, 6)
        self.length = self.draw.choice([40, 80, 200])
        fused, reuse, graphs, records, shares = (self.draw.random() < 0.7 for _ in range(5))
        self.scorer = Scorer(
            self.model, self.slots, self.length, max_candidates=self.candidates, fused=fused, reuse=reuse,
            graphs=graphs, record=[self.candidates] * records, share_prompts=shares,
        )  # fmt: skip
        self.prompts = [text(self.draw, self.draw.randint(1, 30)) for _ in range(3)]
        self.rows, self.num_requests, self.last = [], 0, {}

    def fill(self):
        """New requests, now and then one more than there are slots."""
        for _ in range(self.draw.randint(1, self.slots + (self.draw.random() < 0.1)) - len(self.rows)):
            self.rows.append(row(self.num_requests, list(self.draw.choice(self.prompts)), draws_candidates=True))
            self.num_requests += 1
            if self.draw.random() < 0.3:
                self.scorer.prepare(self.rows[-1:])

    def score(self):
        """Raw values and those of a scorer that was made for this step; None where no row has a choice."""
        share = self.draw.choice([0, 0.3, 0.7, 1])
        chosen = [row for row in self.rows if self.draw.random() >= share][: self.slots]
        waiting = [row for row in self.rows if row not in chosen]
        if not chosen:
            self.last = {}
            self.scorer.keep_up(waiting)
            return None
        num_candidates = self.draw.randint(1, self.candidates)
        self.last = {row.key: self.draw.sample(range(VOCABULARY), num_candidates) for row in chosen}
        limits = {"max_candidates": num_candidates, "fused": False, "graphs": False}
        fresh, ids = Scorer(self.model, len(chosen), self.length, **limits), torch.tensor(list(self.last.values()))
        return self.scorer.score(chosen, ids, waiting), fresh.score(chosen, ids)

    def sample(self):
        """A token for most rows: a candidate where there were some."""
        for row in list(self.rows):
            fate = self.draw.random()
            is_over = fate < 0.05 or len(row.tokens) >= self.length - 1
            if is_over or fate > 0.97:  # the latter are dropped, and taken up again
                self.scorer.forget([row.key])
            if is_over:
                self.rows.remove(row)
            elif fate > 0.1:  # below, what was drawn is thrown away
                row.tokens.append(self.draw.choice(self.last.get(row.key) or range(VOCABULARY)))


@pytest.mark.parametrize("seed", range(14))
def test_values_are_those_of_a_scorer_that_remembers_nothing(seed):
    server = Server(seed)
    largest = num_scored = 0
    for _ in range(NUM_STEPS):
        server.fill()
        if (both := server.score()) is not None:
            largest = max(largest, farthest(*both))
            num_scored += 1
        server.sample()
    assert num_scored > NUM_STEPS / 4
    assert largest < 1e-9
