"""A guided step reads nothing from the device that it computes on, apart from one copy where it may skip rows."""

import itertools

import pytest
from support.guided.tensors import torch

pytest.importorskip("transformers", reason="value models are read by transformers, which is not installed here")
from support.guided.plain_values import VOCABULARY, random_tensors, tiny_config

from benchctl.guided.guide import Guide, GuideSettings
from benchctl.guided.params import CONSTRAINTS, MODES, GuidanceParams
from benchctl.guided.rows import GuideRow
from benchctl.guided.timing import StepTimer
from benchctl.guided.value_model.checkpoint import Checkpoint
from benchctl.guided.value_model.scoring import Scorer
from benchctl.guided.value_model.value_model import ValueModel

RULES = (
    *(GuidanceParams(mode=mode, value_scale=1.7, value_min=0.01, value_entropy_threshold=0.1) for mode in MODES),
    *(GuidanceParams(target_length=30, value_constraint=constraint) for constraint in CONSTRAINTS),
    GuidanceParams(value_scale=-3.0, stride=2),
)


def value_model(device):
    config = tiny_config("qwen2")
    tensors = {name: tensor.to(device) for name, tensor in random_tensors(config, torch.float32).items()}
    return ValueModel(Checkpoint(config, tensors, frozenset({2})))


def steps_of(device, *, skips_early, scorer=None, timer=None, **filtering):
    """Guided steps of a batch of all rules, without end: the first computes the prompts, then it is steady."""
    made = Scorer(value_model(device), len(RULES), 64, timer=timer, **(scorer or {}))
    guide = Guide(lambda: made, GuideSettings(skips_early=skips_early), timer)
    rows = [
        GuideRow(
            index=index, key=index, params=params, tokens=[index + 3] * 12, num_prompt=12, temperature=0.9,
            top_k=2 + index % 5, top_p=0.95, min_p=0.001, **filtering,
        )
        for index, params in enumerate(RULES)
    ]  # fmt: skip
    # The very same logits each time: drawn here, so that the step itself has nothing but guidance in it.
    logits = torch.randn(len(rows) + 1, VOCABULARY, generator=torch.Generator().manual_seed(1)).to(device)
    while True:
        guide.apply(logits.clone(), rows)
        for row in rows:
            row.tokens.append(7)
        yield guide.pending


@pytest.mark.parametrize("scorer", [{}, {"fused": False}, {"graphs": True}], ids=["fused", "two-phase", "rounded"])
@pytest.mark.parametrize("draws_candidates", [True, False])
def test_steps_need_nothing_of_what_the_device_computes(scorer, draws_candidates, tmp_path):
    """The device is torch's ``meta``: it knows shapes and has no numbers, so that to ask it for one is an error."""
    options = {"scorer": scorer, "draws_candidates": draws_candidates, "timer": StepTimer(tmp_path / "steps.jsonl")}
    for pending in itertools.islice(steps_of("meta", skips_early=False, **options), 3):
        with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
            _ = pending.step
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        next(steps_of("meta", skips_early=True, **options))


READING = (
    "item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__contains__",
    "nonzero", "masked_select", "unique", "equal", "allclose",
)  # fmt: skip


def noted_reads(monkeypatch):
    """A list that gets the name of whatever gives numbers of a tensor to Python."""
    seen = []
    for name in READING:
        original = getattr(torch.Tensor, name)

        def noted(*arguments, original=original, name=name, **options):
            seen.append(name)
            return original(*arguments, **options)

        monkeypatch.setattr(torch.Tensor, name, noted)
    return seen


@pytest.mark.parametrize("scorer", [{}, {"fused": False}], ids=["fused", "two-phase"])
@pytest.mark.parametrize(("skips_early", "reads"), [(True, ["tolist"]), (False, [])])
def test_a_steady_step_that_may_skip_rows_reads_once_and_any_other_never(monkeypatch, scorer, skips_early, reads):
    steps = steps_of("cpu", skips_early=skips_early, scorer=scorer, draws_candidates=True)
    next(steps)
    seen = noted_reads(monkeypatch)
    for number in range(1, 4):
        next(steps)
        assert seen == number * reads
