"""Which tokens may be sampled, before guidance chooses among them."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.guided.guidance_reference import candidates as reference
from support.guided.guidance_reference import softmax
from support.guided.tensors import torch

from benchctl.guided.rows import Candidates, limit_numbers, select_candidates

laws = settings(deadline=None, max_examples=50)


def limits(rows: Sequence[Mapping[str, Any]]) -> Any:
    """[B, 7]: limits of each row."""
    return torch.tensor([limit_numbers(**row) for row in rows], dtype=torch.float64)


def select(
    logits: list[list[float]],
    *,
    temperature: float = 1.0,
    top_k: int = -1,
    top_p: float = 1.0,
    min_p: float = 0.0,
    dtype: Any = torch.float64,
    rest: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> Candidates:
    """Candidates of rows that all have the same parameters."""
    count = len(logits)
    return select_candidates(
        torch.tensor(logits, dtype=dtype),
        limits([{"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p} | rest] * count),
        options.pop("max_candidates", len(logits[0])),
        **options,
    )


def of_row(found: Candidates, row: int = 0) -> dict[int, float]:
    """Candidates of one row by id."""
    columns = zip(found.ids[row].tolist(), found.probs[row].tolist(), found.mask[row].tolist(), strict=True)
    return {token: prob for token, prob, is_there in columns if is_there}


def logs(probs: list[float]) -> list[float]:
    return [math.log(prob) if prob else -math.inf for prob in probs]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("probs", "filters", "expected"),
    [
        ([0.4, 0.25, 0.2, 0.1, 0.05, 0, 0, 0], {"top_k": 5, "top_p": 0.75}, [0, 1, 2]),
        ([0.35, 0.25, 0.2, 0.11, 0.09, 0, 0, 0], {"top_k": 5, "top_p": 0.8}, [0, 1, 2, 3]),
        ([0.9, 0.08, 0.0089, 0.0011], {"top_k": 4, "min_p": 0.01}, [0, 1]),
        ([0.995, 0.004, 0.001], {"top_k": 5, "min_p": 0.01}, [0]),
    ],
)
def test_the_known_sets_of_candidates_are_selected(
    probs: list[float], filters: dict[str, Any], expected: list[int], dtype: Any
) -> None:
    found = select([logs(probs)], dtype=dtype, **filters)
    assert sorted(of_row(found)) == expected
    assert found.mask.sum(dim=1).tolist() == [len(expected)]
    assert found.counts.tolist() == [len(expected) if len(expected) > 1 else 0]
    total = sum(probs[token] for token in expected)
    assert of_row(found) == pytest.approx({token: probs[token] / total for token in expected}, abs=1e-6)


@laws
@given(
    st.lists(st.floats(-8, 8), min_size=1, max_size=12, unique_by=lambda x: round(x, 3)),
    st.sampled_from([0.1, 0.7, 1.0, 2.0]),
    st.integers(-1, 12),
    st.floats(0.05, 1),
    st.floats(0, 1),
)
def test_candidates_agree_with_the_reference(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    filters = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    expected = reference(softmax(logits, temperature), **filters)
    found = of_row(select([logits], temperature=temperature, **filters))
    near = _at_a_bound(softmax(logits, temperature), top_p, min_p)
    assert found == pytest.approx(expected, abs=1e-6) or near


def _at_a_bound(probs: list[float], top_p: float, min_p: float) -> bool:
    """Whether some token lies so near to a bound that the last digit decides; the parameters are float32."""
    mass = 0.0
    for prob in sorted(probs, reverse=True):
        if abs(mass - top_p) < 1e-6 or abs(prob - min_p * max(probs)) < 1e-6 * max(probs):
            return True
        mass += prob
    return False


def test_each_row_has_filters_of_its_own() -> None:
    logits = torch.tensor([logs([0.4, 0.3, 0.2, 0.1])] * 4, dtype=torch.float64)
    found = select_candidates(
        logits,
        limits(
            [
                {"temperature": 1.0, "top_k": 2, "top_p": 1.0, "min_p": 0.0},
                {"temperature": 1.0, "top_k": -1, "top_p": 0.75, "min_p": 0.0},
                {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.3},
                {"temperature": 0.01, "top_k": -1, "top_p": 1.0, "min_p": 0.0},
            ]
        ),
        4,
    )
    assert [sorted(of_row(found, row)) for row in range(4)] == [[0, 1], [0, 1, 2], [0, 1, 2], [0, 1, 2, 3]]
    assert of_row(found, 3)[0] == pytest.approx(1, abs=1e-9)


@laws
@given(
    st.lists(st.sampled_from([-3e38, -1e30, -5.0, 0.0, 5.0, 1e30, 3e38]), min_size=1, max_size=6),
    st.sampled_from([1e-30, 0.1, 1.0, 100.0]),
    st.integers(-1, 6),
    st.floats(0, 1),
    st.floats(0, 1),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_finite_logits_of_any_size_give_candidates(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, dtype: Any
) -> None:
    found = select([logits], temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, dtype=dtype)
    probs = found.probs[0].tolist()
    assert all(math.isfinite(prob) for prob in probs)
    assert math.fsum(probs) == pytest.approx(1, abs=1e-6)
    assert [prob > 0 for prob in probs] == found.mask[0].tolist()
    kept = found.mask.sum().item()
    assert kept >= 1
    if top_k > 0:
        assert kept <= top_k
    assert found.counts.tolist() == [kept if kept > 1 else 0]


def test_forbidden_tokens_are_no_candidates_the_likeliest_stays_and_equal_ones_stay_together() -> None:
    assert sorted(of_row(select([[-math.inf, 1.0, -math.inf, 0.5]], top_k=4))) == [1, 3]
    for filters in ({"top_p": 0.0}, {"min_p": 1.0}):
        assert list(of_row(select([logs([0.4, 0.35, 0.25])], **filters))) == [0]
    assert sorted(of_row(select([[2.0, 2.0, 2.0, -1.0]], min_p=1.0))) == [0, 1, 2]
    found = select([logs([0.4, 0.3, 0.2, 0.1])], min_p=0.6)  # absent columns hold valid ids that occur once
    assert sorted(found.ids[0].tolist()) == [0, 1, 2, 3]
    assert found.probs[0, ~found.mask[0]].tolist() == [0.0, 0.0]


def test_a_row_of_little_entropy_among_its_candidates_or_that_is_not_due_is_filtered_and_not_guided() -> None:
    for threshold, count in ((math.log(4) - 0.01, 4), (math.log(4) + 0.01, 0)):
        assert select([[0.0] * 100], top_k=4, rest={"threshold": threshold}).counts.tolist() == [count]
    found = select([[1.0, 0.5, 0.0]], top_k=2, rest={"is_due": False})
    assert (found.counts.tolist(), sorted(of_row(found))) == ([0], [0, 1])


def test_without_top_p_the_sum_over_the_vocabulary_changes_nothing() -> None:
    logits = [[0.3, 2.0, -1.0, 1.5, 0.0]]
    closed = select(logits, top_k=3, min_p=0.05)
    opened = select(logits, top_k=3, min_p=0.05, max_candidates=3, is_top_p_open=True)
    assert opened.ids.tolist() == [closed.ids[0, :3].tolist()]
    assert opened.probs.tolist() == [closed.probs[0, :3].tolist()]
