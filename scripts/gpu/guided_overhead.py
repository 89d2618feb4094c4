"""What guidance of a value model adds to a decode step, beside what the hardware allows at best.

A base model and value models of random weights are made on the device; nothing is fetched. For each batch size and
number of candidates, steps of the base model (with a static cache, as a CUDA graph) and of guidance are timed: by
the host over many steps that it waits for at their end only, and by events of the device around each. Before that,
the same steps are run once untimed, so that all CUDA graphs are there.

    base        one decode step of the base model: a token for each row, logits
    extend      value model: the tokens of the last step alone; two passes less the one for candidates
    score       value model: candidates alone
    fused       both in one forward pass
    two-phase   both in two passes
    guidance    candidates from logits, tilt, new logits; with a value model that costs nothing
    step        base and guidance with the fused pass inside, one after the other, as a server runs them
    unskipped   the same with ``skips_early=False``: nothing waits for the base model, no row is spared
    ratio       step / base, of the host's times. Sampling is in neither, which makes it a little larger than a
                server's. With one candidate there is nothing to guide, and the value model is not asked
    floor       that ratio if base and value model ran at the peaks of the data sheet: the larger of bytes over
                bandwidth and FLOPs over peak, for weights and prefixes read once. Beside it, what fraction of
                those peaks the base step reached: a slow base would make guidance look cheap

One command on a machine with one GPU of 48 GB or more (only torch, transformers and this checkout are needed):

    PYTHONPATH=. python scripts/gpu/guided_overhead.py --json guided-overhead.json

``--tiny --device cpu`` tries the script itself anywhere, in seconds; its numbers say nothing.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from timed_steps import BaseModel, Repeated, Times, config_of, timed
from torch import Tensor

from benchctl.costs.built_in import BUILT_IN_SHAPES
from benchctl.costs.hardware import Hardware, hardware_or_none
from benchctl.costs.model_shape import ModelShape
from benchctl.guided.guide import Guide, GuideRow, GuideSettings
from benchctl.guided.params import GuidanceParams
from benchctl.guided.value_model.scoring import ScoredRow, Scorer
from benchctl.guided.value_model.value_model import ValueModel, random_value_model

PUBLISHED_RATIO = 4.03
PUBLISHED = (
    f"published: {PUBLISHED_RATIO} for 7B + 1.5B, 5 candidates, a run of 800 answers (SGLang fork, optimised)"
)
GOAL_RATIO = 1.35
GOAL_POINT = ("qwen2.5-7b", "qwen2.5-1.5b", 64, 5)
"""Base, value model, batch, candidates; on an H200."""
GOAL = f"goal: at most {GOAL_RATIO} on an H200 for 7B + 1.5B, 5 candidates, batch 64"
TINY = ModelShape(
    name="tiny-base", layers=2, hidden=64, q_heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=512, qkv_bias=True
)


@dataclass(frozen=True, kw_only=True)
class Floor:
    """Milliseconds at the peaks of the data sheet."""

    base_ms: float
    value_ms: float

    @property
    def ratio(self) -> float:
        return (self.base_ms + self.value_ms) / self.base_ms


@dataclass(frozen=True, kw_only=True)
class Line:
    """One batch size, number of candidates and value model."""

    value_model: str
    batch: int
    candidates: int
    base: Times
    extend: Times
    score: Times
    fused: Times
    two_phase: Times
    guidance: Times
    step: Times
    unskipped: Times
    floor: Floor | None

    @property
    def ratio(self) -> float:
        return self.step.host_ms / self.base.host_ms


def main() -> None:
    options = parse()
    device = torch.device(options.device)
    dtype = torch.float32 if options.tiny else torch.bfloat16
    base_shape = TINY if options.tiny else BUILT_IN_SHAPES[options.base]
    value_shapes = (
        [replace(TINY, name="tiny-value", layers=1)]
        if options.tiny
        else [BUILT_IN_SHAPES[name] for name in options.value_models]
    )
    hardware = hardware_or_none(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    about = describe(device, hardware, options, base_shape)
    print("\n".join(f"# {name}: {value}" for name, value in about.items()))
    print(f"# {PUBLISHED}\n# {GOAL}\n{HEADER}")
    lines = []
    base = BaseModel(base_shape, max(options.batch), options.context + options.steps, device, dtype)
    for shape in value_shapes:
        model = random_value_model(config_of(shape), device, dtype)
        for batch in options.batch:
            base_step = base.step(batch, options.context)
            base_times = timed(Repeated(base_step), options.steps, device)
            for candidates in options.candidates:
                line = measure(
                    model, shape, base_shape, base_step, base_times, batch, candidates, options, hardware
                )
                lines.append(line)
                print(row(line), flush=True)
    print("\n".join(verdicts(base_shape, lines)))
    if options.json:
        document = about | {"lines": [asdict(line) | {"ratio": line.ratio} for line in lines]}
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers: dict[str, Any] = {"type": int, "nargs": "+", "metavar": "N"}
    parser.add_argument("--base", default="qwen2.5-7b", choices=BUILT_IN_SHAPES)
    parser.add_argument(
        "--value-models", nargs="+", default=["qwen2.5-1.5b", "qwen2.5-0.5b"], choices=BUILT_IN_SHAPES
    )
    parser.add_argument("--batch", **numbers, help="rows (1 8 32 64 128 256)")
    parser.add_argument("--candidates", **numbers, help="candidates of each row (1 2 3 4 5)")
    parser.add_argument("--context", type=int, help="tokens of each prefix when the timing starts (300)")
    parser.add_argument("--steps", type=int, help="timed steps (50)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="models of a toy's size, few steps: tries the script")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all times there as well")
    options = parser.parse_args()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit("guided_overhead: no CUDA device is here; '--tiny --device cpu' tries the script without")
    options.batch = options.batch or ([1, 3] if options.tiny else [1, 8, 32, 64, 128, 256])
    options.candidates = options.candidates or ([1, 5] if options.tiny else [1, 2, 3, 4, 5])
    options.context = options.context or (20 if options.tiny else 300)
    options.steps = options.steps or (3 if options.tiny else 50)
    return options


def describe(
    device: torch.device, hardware: Hardware | None, options: argparse.Namespace, base: ModelShape
) -> dict[str, object]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {
        "device": name,
        "peaks": "unknown" if hardware is None else f"those of {hardware.name}, {hardware.source}",
        "torch": torch.__version__,
        "base": base.name,
        "context": options.context,
        "steps": options.steps,
    }


class FreeScorer:
    """A value model that costs nothing: what is left is the guidance itself."""

    def __init__(self, scorer: Scorer) -> None:
        self.model, self.counters = scorer.model, scorer.counters
        self._raw = torch.linspace(-1, 1, 64, device=scorer.model.device)

    def score(self, _rows: Sequence[object], ids: Tensor, _waiting: Sequence[object] = ()) -> Tensor:
        return self._raw[: ids.shape[1]].expand(ids.shape)

    def keep_up(self, _waiting: Sequence[object]) -> None:
        """No prefix is kept."""

    def forget(self, _keys: object) -> None:
        """Nothing is kept."""


def measure(
    model: ValueModel,
    shape: ModelShape,
    base_shape: ModelShape,
    base_step: Callable[[], Tensor],
    base: Times,
    batch: int,
    candidates: int,
    options: argparse.Namespace,
    hardware: Hardware | None,
) -> Line:
    device = model.device
    longest = options.context + options.steps + 16
    fused, two_phase = (
        # Nothing is drawn here, so there is no candidate to reuse.
        Scorer(model, batch, longest, max_candidates=candidates, fused=is_fused, reuse=False)
        for is_fused in (True, False)
    )
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(shape.vocab, (batch, options.context), generator=generator).tolist()
    vocabulary = min(shape.vocab, base_shape.vocab)
    logits = torch.randn(batch, vocabulary, generator=generator).to(device)
    ids = logits.topk(candidates).indices

    def scoring(scorer: Scorer, growth: int) -> Times:
        rows = [ScoredRow(number, list(tokens), len(tokens)) for number, tokens in enumerate(drawn)]

        def step() -> None:
            scorer.score(rows, ids)
            for each in rows:
                each.tokens.extend([7] * growth)

        return timed(Repeated(step, lambda: shorten(rows, options.context)), options.steps, device)

    def guiding(scorer: Any, source: Callable[[], Tensor], *, skips_early: bool = True) -> Times:
        guide = Guide(lambda: scorer, GuideSettings(max_candidates=candidates, skips_early=skips_early))
        rows = [
            GuideRow(
                index=number, key=("guided", number), params=GuidanceParams(value_scale=1.0), tokens=list(tokens),
                num_prompt=len(tokens), top_k=candidates, is_server_filtering=False,
            )
            for number, tokens in enumerate(drawn)
        ]  # fmt: skip

        def step() -> None:
            guide.apply(source(), rows)
            for each in rows:
                each.tokens.append(7)

        return timed(Repeated(step, lambda: shorten(rows, options.context)), options.steps, device)

    def base_logits() -> Tensor:
        return base_step()[:, :vocabulary].float()

    two, alone = scoring(two_phase, 1), scoring(two_phase, 0)
    return Line(
        value_model=shape.name,
        batch=batch,
        candidates=candidates,
        base=base,
        extend=two.less(alone),
        score=alone,
        fused=scoring(fused, 1),
        two_phase=two,
        guidance=guiding(FreeScorer(fused), logits.clone),
        step=guiding(fused, base_logits),
        unskipped=guiding(fused, base_logits, skips_early=False),
        floor=None if hardware is None else floor(hardware, base_shape, shape, batch, candidates, options.context),
    )


def shorten(rows: Sequence[Any], length: int) -> None:
    for each in rows:
        del each.tokens[length:]


def floor(
    hardware: Hardware, base: ModelShape, value: ModelShape, batch: int, candidates: int, context: int
) -> Floor:
    """The shortest times that the peaks allow."""
    base_s = shortest_s(hardware, base, batch, batch, context, base.lm_head_flops())
    value_s = shortest_s(hardware, value, batch, batch * (1 + candidates), context, value.value_head_flops())
    return Floor(base_ms=base_s * 1e3, value_ms=value_s * 1e3)


def shortest_s(
    hardware: Hardware, shape: ModelShape, rows: int, tokens: int, context: int, head_flops: int
) -> float:
    """The longer of moving weights and prefixes once, and computing; the embedding is hardly read."""
    linear = shape.linear_flops_per_token() + head_flops
    # A weight of bfloat16 has two bytes and takes part in two FLOPs of each token.
    num_bytes = linear + rows * context * shape.kv_bytes_per_token()
    flops = tokens * (linear + context * shape.attention_flops_per_position())
    return max(num_bytes / hardware.bandwidth_bytes_per_s, flops / hardware.peak_flops_per_s)


COLUMNS = ("base", "extend", "score", "fused", "two-phase", "guidance", "step", "unskipped")
HEADER = (
    f"{'value model':14} {'batch':>5} {'k':>3} "
    + "".join(f"{f'{name} ms':>18}" for name in COLUMNS)
    + (f"{'ratio':>7}{'floor':>7}{'base/peak':>10}   (host / device)")
)


def row(line: Line) -> str:
    times = (
        line.base, line.extend, line.score, line.fused, line.two_phase, line.guidance, line.step, line.unskipped
    )  # fmt: skip
    cells = "".join(f"{time_text(each):>18}" for each in times)
    lowest = "-" if line.floor is None else f"{line.floor.ratio:.2f}"
    reached = "-" if line.floor is None else f"{line.floor.base_ms / line.base.host_ms:.0%}"
    start = f"{line.value_model:14} {line.batch:>5} {line.candidates:>3} "
    return f"{start}{cells}{line.ratio:>7.2f}{lowest:>7}{reached:>10}"


def verdicts(base: ModelShape, lines: Sequence[Line]) -> list[str]:
    """What became of the goal, where it was measured."""
    return [
        f"# ratio {line.ratio:.2f} ({line.unskipped.host_ms / line.base.host_ms:.2f} unskipped) where the goal is "
        f"{GOAL_RATIO}: {'met' if line.ratio <= GOAL_RATIO else 'missed'}; {PUBLISHED_RATIO} was published"
        for line in lines
        if (base.name, line.value_model, line.batch, line.candidates) == GOAL_POINT
    ]


def time_text(times: Times) -> str:
    return f"{times.host_ms:.3f} / " + ("-" if times.device_ms is None else f"{times.device_ms:.3f}")


if __name__ == "__main__":
    main()
