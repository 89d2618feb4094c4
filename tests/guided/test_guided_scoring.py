"""A scorer gives each candidate the value that a plain forward pass of its whole text has, whatever came before."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.guided.tensors import torch

pytest.importorskip("transformers", reason="value models are read by transformers, which is not installed here")
from support.guided.plain_values import FAMILIES, VOCABULARY, both_models

from benchctl.guided.operations import visible_cells
from benchctl.guided.params import GuidanceError
from benchctl.guided.rows import ScoredRow
from benchctl.guided.value_model.layout import Memory, RowWork, Work, exact_shape, pack, padded_shape, unpack
from benchctl.guided.value_model.scoring import Scorer

ORACLES = Path(__file__).parents[3] / "shared/oracles/guidance.json"
MODELS = {}
RECORDED_OR_NOT = ({"graphs": True, "record": [3]}, {"graphs": False})


def models(family="qwen2", dtype=torch.float32):
    if (family, dtype) not in MODELS:
        MODELS[family, dtype] = both_models(family, dtype)
    return MODELS[family, dtype]


def text(draw, length):
    return [draw.randrange(VOCABULARY) for _ in range(length)]


def row(key, tokens, num_prompt=None):
    return ScoredRow(key, tokens, len(tokens) if num_prompt is None else num_prompt)


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


def test_bfloat16_is_as_far_from_float32_as_transformers_in_bfloat16_is():
    ours, _ = models(dtype=torch.bfloat16)
    _, exact = both_models(dtype=torch.float32)
    _, theirs = models(dtype=torch.bfloat16)
    draw = random.Random(1)
    rows = [row(number, text(draw, 12)) for number in range(6)]
    ids = choices(draw, 6, 4)
    truth = plain(exact, rows, ids)
    rounding = farthest(plain(theirs, rows, ids), truth)
    assert 1e-4 < rounding < 1
    assert farthest(Scorer(ours, 6, 32).score(rows, ids), truth) < 2 * rounding


# A program of steps: for each of five requests, how many tokens it grows by, or None where it is not scored; a
# request may end, and another one of the same prompt or of a new one takes its name.
STEPS = st.lists(
    st.tuples(
        st.lists(st.one_of(st.none(), st.integers(0, 11)), min_size=5, max_size=5),
        st.integers(1, 4),
        st.sets(st.integers(0, 4), max_size=2),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(STEPS, st.booleans(), st.booleans(), st.booleans(), st.integers(4, 6), st.integers(0, 1000))
def test_any_coming_and_going_leaves_the_values_what_they_are(steps, fused, rounds, shares, max_slots, seed):
    """Rows join, leave, lag, change places, are evicted, share prompts: against a scorer that remembers nothing."""
    model, _ = models(dtype=torch.float64)
    scorer = Scorer(model, max_slots, 128, fused=fused, graphs=rounds, share_prompts=shares)
    fresh = Scorer(model, 5, 128, share_prompts=False)
    draw = random.Random(seed)
    prompts = [text(draw, length) for length in (1, 14, 23)]
    live = {name: (0, list(draw.choice(prompts))) for name in range(5)}
    starts = {name: len(tokens) for name, (_, tokens) in live.items()}
    for growth, num_candidates, ended in steps:
        for name in ended:
            generation, _ = live[name]
            scorer.forget([(name, generation)])
            live[name] = (generation + 1, list(draw.choice(prompts)))
            starts[name] = len(live[name][1])
        for name, number in enumerate(growth):
            live[name][1].extend(text(draw, number or 0))
        chosen = [name for name, number in enumerate(growth) if number is not None][:max_slots]
        draw.shuffle(chosen)
        rows = [row((name, live[name][0]), live[name][1], starts[name]) for name in chosen]
        ids = choices(draw, len(rows), num_candidates) if rows else torch.zeros(0, 1).long()
        values = scorer.score(rows, ids)
        fresh.forget([(name, generation) for name in range(5) for generation in range(8)])
        assert values.shape == ids.shape
        if rows:
            assert farthest(values, fresh.score(rows, ids)) < 1e-9
    assert scorer.counters.slots <= max_slots


def decode(scorer, rows, num_steps, num_candidates=3, seed=0):
    """Steady decode: each row grows by one token a step."""
    draw = random.Random(seed)
    for _ in range(num_steps):
        ids = choices(draw, len(rows), num_candidates)
        scorer.score(rows, ids)
        for each in rows:
            each.tokens.append(draw.randrange(VOCABULARY))


@pytest.mark.parametrize("rounds", [False, True])
def test_steady_decode_is_one_forward_a_step_and_counts_every_token_once(rounds):
    draw = random.Random(2)
    rows = [row(number, text(draw, 20)) for number in range(5)]
    scorer = Scorer(models()[0], 5, 64, graphs=rounds)
    decode(scorer, rows, 11)
    done = scorer.counters
    assert done.prefill_tokens == 5 * 20
    assert done.extended_tokens == 5 * 10
    assert (done.steps, done.fused) == (11, 11)
    assert done.forwards == 11 + 1  # the prompts, together
    assert done.slots == 5
    if not rounds:
        assert done.computed_tokens == 5 * 20 + 5 * 10 + 11 * 5 * 3


def test_in_two_phases_a_step_takes_two_forwards_and_the_same_tokens():
    draw = random.Random(2)
    rows = [row(number, text(draw, 20)) for number in range(5)]
    scorer = Scorer(models()[0], 5, 64, fused=False)
    decode(scorer, rows, 11)
    done = scorer.counters
    assert (done.prefill_tokens, done.extended_tokens, done.fused) == (100, 50, 0)
    assert done.forwards == 1 + 11 + 10


def test_a_row_that_lags_takes_fusion_from_nobody():
    draw = random.Random(3)
    rows = [row(number, text(draw, 12)) for number in range(4)]
    scorer = Scorer(models()[0], 4, 64, graphs=False)
    decode(scorer, rows, 1)
    rows[2].tokens.extend(text(draw, 6))
    before = scorer.counters
    decode(scorer, rows, 1)
    done = scorer.counters
    assert done.fused - before.fused == 1
    assert done.forwards - before.forwards == 1
    assert done.extended_tokens - before.extended_tokens == 3 + 7
    # Nobody was padded to the length of the one that lagged.
    assert done.computed_tokens - before.computed_tokens == 3 + 7 + 4 * 3


def test_a_new_request_goes_beside_the_others_in_a_forward_of_its_own():
    draw = random.Random(4)
    rows = [row(number, text(draw, 12)) for number in range(3)]
    scorer = Scorer(models()[0], 4, 256)
    decode(scorer, rows, 2)
    before = scorer.counters
    decode(scorer, [*rows, row("new", text(draw, 100))], 1)
    done = scorer.counters
    assert done.forwards - before.forwards == 2
    assert done.fused - before.fused == 1
    assert done.computed_tokens - before.computed_tokens == 100 + 3 + 4 * 3


@pytest.mark.parametrize("length", [5, 100])
def test_a_prompt_of_many_samples_goes_through_the_model_once(length):
    prompt = text(random.Random(5), length)
    rows = [row(number, list(prompt)) for number in range(6)]
    scorer = Scorer(models()[0], 6, 256)
    decode(scorer, rows, 3)
    done = scorer.counters
    if length == 100:
        assert (done.prefill_tokens, done.shared_tokens) == (100, 5 * 100)
    else:
        # As short as an extension: copying it would bring nothing.
        assert (done.prefill_tokens, done.shared_tokens) == (6 * 5, 0)
    assert done.extended_tokens == 6 * 2


def test_a_few_prompts_go_through_recorded_passes_of_a_quarter_more_tokens_at_most_to_the_same_values(monkeypatch):
    ours, _ = models(dtype=torch.float64)
    # As on a GPU with kernels, whose attention looks at no more cells than there are.
    monkeypatch.setattr(ours, "operations", replace(ours.operations, splits_keys=True))
    recorded, plain_passes = (Scorer(ours, 9, 700, max_candidates=4, **more) for more in RECORDED_OR_NOT)
    draw = random.Random(0)
    for length, num_rows in ((9, 1), (100, 3), (600, 1), (600, 3), (20, 9)):
        rows = [row((length, number), text(draw, length - number)) for number in range(num_rows)]
        ids = choices(draw, num_rows, 3)
        before = recorded.counters.computed_tokens, plain_passes.counters.computed_tokens
        for scorer in (recorded, plain_passes):
            scorer.prepare(rows)
        ours_computed, computed = (
            scorer.counters.computed_tokens - done
            for scorer, done in zip((recorded, plain_passes), before, strict=True)
        )
        assert computed <= ours_computed <= 1.25 * computed
        assert farthest(recorded.score(rows, ids), plain_passes.score(rows, ids)) < 1e-12
        for scorer in (recorded, plain_passes):
            scorer.forget([each.key for each in rows])


def test_a_prompt_is_still_known_after_its_request_ended_unless_sharing_is_off():
    prompt = text(random.Random(6), 40)
    for shares, prefilled in ((True, 40), (False, 80)):
        scorer = Scorer(models()[0], 2, 64, share_prompts=shares)
        for name in ("first", "second"):
            decode(scorer, [row(name, list(prompt))], 2)
            scorer.forget([name])
        assert scorer.counters.prefill_tokens == prefilled
        assert scorer.counters.slots == 0


def test_requests_beyond_the_slots_push_out_the_one_that_was_idle_longest():
    draw = random.Random(7)
    model, theirs = models()
    scorer = Scorer(model, 2, 64)
    a, b, c = (row(name, text(draw, 10)) for name in "abc")
    for pair in ([a, b], [b], [b, c], [a, b]):
        ids = choices(draw, len(pair), 2)
        assert farthest(scorer.score(pair, ids), plain(theirs, pair, ids)) < 2e-5
    assert scorer.counters.evictions == 2  # a by c, then c by a
    assert scorer.counters.prefill_tokens == 4 * 10


def test_a_sequence_that_did_not_simply_grow_is_computed_again():
    draw = random.Random(8)
    model, theirs = models()
    scorer = Scorer(model, 2, 64)
    for tokens in (text(draw, 20), text(draw, 20), text(draw, 5)):
        ids = choices(draw, 1, 2)
        same_name = [row("a", tokens)]
        assert farthest(scorer.score(same_name, ids), plain(theirs, same_name, ids)) < 2e-5


def test_the_memory_is_taken_once_and_said():
    draw = random.Random(9)
    scorer = Scorer(models()[0], 3, 100, max_candidates=4)
    before = scorer.num_bytes
    cells = 3 * 100
    # Keys and values of two layers, two heads of eight, float32; a spare slot and room for candidates beside.
    assert before >= 2 * 2 * 2 * 8 * 4 * cells
    decode(scorer, [row(number, text(draw, 60)) for number in range(3)], 5)
    assert scorer.num_bytes == before


@pytest.mark.parametrize(
    ("rows", "num_candidates", "message"),
    [
        ([row("a", [1] * 21)], 2, "'a' has 21 tokens.*1 to 20.*larger max_tokens"),
        ([row("a", [])], 2, "'a' has 0 tokens"),
        ([row(name, [1]) for name in "abc"], 2, "3 sequences.*2 slots.*'c'.*max_slots of 3"),
        ([row("a", [1]), row("a", [1])], 2, "'a' is given twice"),
        ([row("a", [1])], 9, r"\(1, 9\).*1 to 8.*larger max_candidates"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(rows, num_candidates, message):
    scorer = Scorer(models()[0], 2, 20, max_candidates=8)
    ids = torch.zeros(len(rows), num_candidates, dtype=torch.int64)
    with pytest.raises(GuidanceError, match=message):
        scorer.score(rows, ids)


@pytest.mark.skipif(not ORACLES.is_file(), reason="the oracles are not here")
@pytest.mark.parametrize("rounds", [False, True])
def test_a_tree_is_seen_as_the_oracle_says(rounds):
    oracle = json.loads(ORACLES.read_text())["tree_mask"]
    (prefix,), (cached,), (num_candidates,) = (
        oracle[key] for key in ("prefix_lens", "cached_prefix_lens", "candidate_lens")
    )
    memory = Memory(slots=2, cells=64)
    row = RowWork(slot=0, cached=cached, missing=[5] * (prefix - cached), candidates_of=0)
    work = Work([row], num_candidates)
    shape = exact_shape(work)
    if rounds:
        shape = padded_shape(shape.tokens, num_candidates, memory.cells)
    layout = unpack(torch.from_numpy(pack(work, shape, memory)), torch.zeros(1, num_candidates).long(), shape)
    num_tokens = work.num_tokens
    assert layout.positions.tolist()[:num_tokens] == oracle["positions"]
    assert layout.cells.tolist()[:num_tokens] == list(range(cached, cached + num_tokens))
    visible, size = visible_cells(layout.missing, layout.cached, shape.columns, shape.span), len(oracle["mask"][0])
    assert visible[0, :num_tokens, :size].int().tolist() == oracle["mask"]
    assert not visible[0, :num_tokens, size:].any()


def draw_next(rows, ids, mask, draw):
    """Each row draws one of its candidates."""
    for each, line, present in zip(rows, ids.tolist(), mask.tolist(), strict=True):
        each.tokens.append(draw.choice([token for token, is_there in zip(line, present, strict=True) if is_there]))


def distinct_choices(draw, num_rows, num_candidates):
    ids = torch.tensor([draw.sample(range(VOCABULARY), num_candidates) for _ in range(num_rows)])
    mask = torch.tensor([[draw.random() < 0.7 for _ in range(num_candidates)] for _ in range(num_rows)])
    mask[:, 0] = True
    return ids, mask


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=24),
    st.booleans(),
    st.integers(1, 5),
    st.integers(0, 1000),
)
def test_a_drawn_candidate_is_kept_to_the_same_values(scored_by_step, rounds, num_candidates, seed):
    """Any rows are scored in any step, others wait; a token that was a candidate is never computed again."""
    model, _ = models(dtype=torch.float64)
    keeping = Scorer(model, 4, 128, graphs=rounds)
    forgetting = Scorer(model, 4, 128, reuse=False)
    draw = random.Random(seed)
    rows = [ScoredRow(name, text(draw, length), length, True) for name, length in enumerate((1, 9, 20, 33))]
    num_kept = 0
    for scored in scored_by_step:
        chosen = [each for each, is_scored in zip(rows, scored, strict=True) if is_scored]
        others = [each for each, is_scored in zip(rows, scored, strict=True) if not is_scored]
        if not chosen:
            continue
        ids, mask = distinct_choices(draw, len(chosen), num_candidates)
        values = keeping.score(chosen, ids, others)
        assert farthest(values, forgetting.score(chosen, ids)) < 1e-9
        draw_next(chosen, ids, mask, draw)
        for each in others:
            each.tokens.append(draw.randrange(VOCABULARY))
        num_kept += len(chosen)
    keeping.forget([])
    keeping.forget([])  # the first asks, the second hears
    done, plainly = keeping.counters, forgetting.counters
    assert plainly.reused_tokens == 0
    assert done.reused_tokens >= num_kept - len(rows)
    assert done.extended_tokens + done.reused_tokens >= plainly.extended_tokens


def test_a_token_that_was_no_candidate_is_an_error_and_not_another_value():
    draw = random.Random(9)
    scorer = Scorer(models()[0], 2, 64)
    rows = [ScoredRow("a", text(draw, 12), 12, True)]
    ids = torch.tensor([[3, 4, 5]])
    scorer.score(rows, ids)
    rows[0].tokens.append(6)
    scorer.score(rows, ids)
    scorer.forget([])
    with pytest.raises(GuidanceError, match="none of the candidates"):
        scorer.forget([])
