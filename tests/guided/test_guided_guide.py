"""One decode step of a batch: who is guided, what is sampled then, and that nobody else notices."""

import itertools
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings, strategies as st
from support.guided.guidance_reference import candidates, guided_row, softmax
from support.guided.tensors import torch

from benchctl.guided.guide import Guide, GuideSettings
from benchctl.guided.operations import PLAIN
from benchctl.guided.params import MODES, GuidanceError, GuidanceParams, GuideStep
from benchctl.guided.rows import GuideRow

pytest.importorskip("transformers", reason="value models are read by transformers, which is not installed here")
from benchctl.guided.value_model.forward import Counters

VOCABULARY = 8
EOS = 3
LOGITS = [1.0, 0.8, 0.5, 0.4, 0.0, -0.5, -1.0, -6.0]
TILTED = GuidanceParams(mode="centered_exp", value_scale=-4.0)
EARLY_AND_LATE = [GuideSettings(skips_early=True), GuideSettings(skips_early=False)]


def known_raw(token: int, num_tokens: int) -> float:
    """What the value model of these tests says of a candidate after a prefix."""
    return math.sin(3.0 * token + 1) * 2 + 0.01 * num_tokens


@dataclass
class KnownScorer:
    """A value model whose outputs are known, which notes what it is asked."""

    model: Any = field(default_factory=lambda: SimpleNamespace(eos_ids=frozenset({EOS}), operations=PLAIN))
    counters: Counters = field(default_factory=Counters)
    asked: list[list[Hashable]] = field(default_factory=list)

    def score(self, rows: Sequence[GuideRow], ids: Any, _waiting: Sequence[GuideRow]) -> Any:
        self.asked.append([row.key for row in rows])
        raw = [
            [known_raw(token, len(row.tokens)) for token in line]
            for row, line in zip(rows, ids.tolist(), strict=True)
        ]
        return torch.tensor(raw, dtype=torch.float64)

    def keep_up(self, waiting: Sequence[GuideRow]) -> None:
        """Rows that wait have nothing to be kept here."""

    def forget(self, keys: Iterable[Hashable]) -> None:
        """Nor of rows that are gone."""


def row_of(index: int = 0, params: GuidanceParams = TILTED, **fields: Any) -> GuideRow:
    defaults = {"key": f"r{index}", "tokens": [5, 6, 7, 1], "num_prompt": 3, "top_k": 5}
    return GuideRow(index=index, params=params, **{**defaults, **fields})


def guide_of(settings: GuideSettings | None = None, scorer: KnownScorer | None = None) -> Guide:
    return Guide(lambda: scorer or KnownScorer(), settings)


def expected_of(logits: Sequence[float], row: GuideRow) -> list[float]:
    """Probability of each token under guidance, by the reference."""
    before = candidates(softmax(logits, row.temperature), top_k=row.top_k, top_p=row.top_p, min_p=row.min_p)
    raw = {token: known_raw(token, len(row.tokens)) for token in before}
    after = guided_row(before, raw, EOS, row.params, len(row.tokens) - row.num_prompt)
    return [after.get(token, 0.0) for token in range(len(logits))]


def sampled(logits: Any, temperature: float = 1.0, index: int = 0) -> list[float]:
    """What a sampler draws from that divides by the temperature, takes the softmax, and does nothing else."""
    return torch.softmax(logits[index] / temperature, dim=0).tolist()


def batch_of(count: int = 1, dtype: Any = torch.float64) -> Any:
    return torch.tensor([LOGITS] * count, dtype=dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-5)])
def test_a_sampler_that_only_takes_the_softmax_draws_from_the_guided_distribution(
    dtype: Any, tolerance: float
) -> None:
    for params, temperature in itertools.product(ALL_KINDS, (0.1, 1.0, 2.0)):
        row = row_of(params=params, temperature=temperature, top_k=6, top_p=0.97, min_p=0.005)
        logits = guide_of().apply(batch_of(dtype=dtype), [row])
        expected = pytest.approx(expected_of(LOGITS, row), abs=tolerance)
        assert sampled(logits, temperature) == expected, (params, temperature)


ALL_KINDS = [
    *(GuidanceParams(mode=mode, value_scale=1.7) for mode in MODES),
    GuidanceParams(mode="centered_exp", value_scale=-100.0),
    GuidanceParams(target_length=200, gamma=0.99),
    GuidanceParams(target_value=0.4, value_constraint="eq_soft"),
    GuidanceParams(target_value=0.5, value_constraint="ge"),
]


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_a_batch_of_any_rows_is_guided_row_by_row_as_the_reference_says(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 5))
    numbers = st.lists(st.floats(-4, 4), min_size=VOCABULARY, max_size=VOCABULARY, unique_by=lambda x: round(x, 3))
    lines = [data.draw(numbers) for _ in range(count)]
    rows = [
        row_of(
            index,
            GuidanceParams(
                mode=data.draw(st.sampled_from(MODES)),
                value_scale=data.draw(st.sampled_from([-2.0, 0.5, 1.5, 3.0])),
                value_min=data.draw(st.sampled_from([None, 0.5])),
            ),
            temperature=data.draw(st.sampled_from([0.1, 1.0, 2.0])),
            top_k=data.draw(st.integers(1, VOCABULARY)),
            draws_candidates=True,
        )
        for index in data.draw(st.permutations(range(count)))
    ]
    original = torch.tensor(lines, dtype=torch.float64)
    for how in EARLY_AND_LATE:
        logits = guide_of(how).apply(original.clone(), rows)
        for row in rows:
            found = sampled(logits, row.temperature, row.index)
            assert found == pytest.approx(expected_of(lines[row.index], row), abs=1e-6)


UNGUIDED_HERE = {
    "greedy": {"temperature": 0.0},
    "without effect": {"params": GuidanceParams(value_scale=0.0)},
    "left with one candidate": {"min_p": 1.0},
    "below its entropy": {"params": GuidanceParams(value_scale=-4.0, value_entropy_threshold=1.7)},
}


@pytest.mark.parametrize("how", EARLY_AND_LATE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_that_are_not_guided_keep_their_logits_bit_for_bit_beside_rows_that_are(
    how: GuideSettings, dtype: Any
) -> None:
    rows = [row_of(0), *(row_of(index, **asked) for index, asked in enumerate(UNGUIDED_HERE.values(), start=2))]
    before = torch.randn(len(rows) + 2, VOCABULARY, generator=torch.Generator().manual_seed(1), dtype=dtype)
    before[2:] += torch.tensor(LOGITS, dtype=dtype)
    guide = guide_of(how)
    after = guide.apply(before.clone(), rows)
    assert guide.pending.step.guided_rows == 1
    assert after[0].tolist() != before[0].tolist()
    untouched = [index for index in range(len(before)) if index != 0]
    assert torch.equal(after[untouched], before[untouched])


def test_a_row_that_the_server_leaves_unfiltered_is_filtered_here_when_it_is_not_guided() -> None:
    for (name, asked), how in itertools.product(UNGUIDED_HERE.items(), EARLY_AND_LATE):
        row = row_of(**{"temperature": 0.8, "draws_candidates": True, **asked})
        logits = guide_of(how).apply(batch_of(), [row])
        if name == "greedy":
            assert torch.equal(logits, batch_of())
            continue
        remaining = candidates(softmax(LOGITS, 0.8), top_k=row.top_k, min_p=row.min_p)
        expected = [remaining.get(token, 0.0) for token in range(VOCABULARY)]
        assert sampled(logits, 0.8) == pytest.approx(expected, abs=1e-6), name


STRIDE = GuidanceParams(value_scale=-4.0, stride=3)


def with_output(row: GuideRow, number: int) -> GuideRow:
    """The row after it has got so many tokens of its answer."""
    return replace(row, tokens=[*row.tokens[: row.num_prompt], *range(number)])


def who_is_guided(guide: Guide, *rows: GuideRow) -> list[Hashable]:
    after = guide.apply(batch_of(4), rows)
    return [row.key for row in rows if not torch.equal(after[row.index], batch_of()[0])]


def test_a_stride_guides_the_first_token_of_each_request_and_every_nth_after_it() -> None:
    guide = guide_of()
    first, second = (row_of(index, STRIDE, num_prompt=2) for index in (0, 1))
    prefilled = with_output(first, 0)
    for _ in range(4):  # what is sampled before the prompt is whole is thrown away, and no token follows
        assert who_is_guided(guide, prefilled) == ["r0"]
    guided = [who_is_guided(guide, with_output(first, n), with_output(second, n - 2)) for n in range(2, 7)]
    assert guided == [["r1"], ["r0"], [], ["r1"], ["r0"]]
    # A row that is skipped for its entropy keeps its stride.
    unsure = row_of(2, replace(STRIDE, value_entropy_threshold=0.5))
    sure = torch.tensor([[9.0] + [0.0] * (VOCABULARY - 1)] * 3, dtype=torch.float64)
    for number in (0, 1, 2):
        assert torch.equal(guide.apply(sure.clone(), [with_output(unsure, number)]), sure)
    assert who_is_guided(guide, with_output(unsure, 3)) == ["r2"]


def test_a_preempted_request_comes_back_where_its_stride_was() -> None:
    expected = [True, False, False] * 3
    for at in range(1, 5):
        row, guide, seen = row_of(0, STRIDE, num_prompt=2), guide_of(), []
        for number in range(9):
            if number == at:
                guide.forget([row.key])
                row = replace(row, key="again", index=2)
                # Its prompt and answer are computed again first, in two steps that yield no token.
                for _ in range(2):
                    who_is_guided(guide, with_output(row, number))
            seen.append(bool(who_is_guided(guide, with_output(row, number))))
        assert seen == expected


def test_a_skipped_row_costs_the_value_model_nothing_and_when_all_are_skipped_it_is_not_asked() -> None:
    scorer = KnownScorer()
    guide = guide_of(GuideSettings(skips_early=True), scorer)
    guide.apply(batch_of(6), [row_of(1), *(row_of(i, **case) for i, case in enumerate(UNGUIDED_HERE.values(), 2))])
    assert scorer.asked == [["r1"]]
    guide.apply(batch_of(6), [row_of(i, **case) for i, case in enumerate(UNGUIDED_HERE.values(), 2)])
    assert scorer.asked == [["r1"]]
    assert guide.pending.step == GuideStep()


def test_guidance_that_changes_nothing_is_computed_where_a_request_insists() -> None:
    scorer = KnownScorer()
    row = row_of(params=GuidanceParams(value_scale=0.0, skip_noop=False))
    logits = batch_of()
    assert guide_of(scorer=scorer).apply(logits, [row]) is logits, "logits are guided in place"
    assert scorer.asked == [["r0"]]
    assert sampled(logits) == pytest.approx(expected_of(LOGITS, row), abs=1e-9)


def test_tokens_that_the_server_forbids_stay_forbidden_and_too_many_candidates_are_refused() -> None:
    logits = batch_of()
    logits[0, [0, 2]] = -math.inf
    after = sampled(guide_of().apply(logits, [row_of(params=GuidanceParams(value_scale=50.0))]))
    assert after[0] == after[2] == 0
    assert math.fsum(after) == pytest.approx(1)
    for top_k in (-1, 0, 5):
        with pytest.raises(GuidanceError, match=rf"request 'r0' has top_k {top_k}, .* 4 or less"):
            guide_of(GuideSettings(max_candidates=4)).apply(batch_of(), [row_of(top_k=top_k)])
    whole = row_of(top_k=-1)
    logits = guide_of(GuideSettings(max_candidates=VOCABULARY)).apply(batch_of(), [whole])
    assert sampled(logits) == pytest.approx(expected_of(LOGITS, whole), abs=1e-6)


def test_tokens_that_end_the_answer_are_those_of_the_value_model_and_of_the_settings() -> None:
    strong = row_of(params=GuidanceParams(value_scale=-1e4))
    assert sampled(guide_of().apply(batch_of(), [strong]))[EOS] == pytest.approx(1)
    both = guide_of(GuideSettings(eos_ids=frozenset({0}))).apply(batch_of(), [strong])
    before = softmax(LOGITS)
    assert sampled(both)[0] == pytest.approx(before[0] / (before[0] + before[EOS]))


def test_a_value_model_is_loaded_at_once_or_when_it_is_first_needed_and_only_once() -> None:
    loads = Mock(side_effect=KnownScorer)
    Guide(loads)
    assert loads.call_count == 1
    lazy = Guide(loads, GuideSettings(is_eager=False, skips_early=True))
    lazy.apply(batch_of(), [row_of(temperature=0.0), row_of(min_p=1.0)])
    lazy.forget(["r0"])
    assert loads.call_count == 1, "nothing was guided"
    for _ in range(2):
        lazy.apply(batch_of(), [row_of()])
    assert loads.call_count == 2
