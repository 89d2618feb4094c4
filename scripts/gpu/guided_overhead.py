"""What guidance of a value model adds to a decode step, beside what the hardware allows at best.

A base model and value models of random weights are made on the device; nothing is fetched. For each batch size and
number of candidates, steps of the base model (with a static cache, as a CUDA graph) and of guidance are timed: once
by events of the device, once by the host over many steps that it waits for at their end only.

    base        one decode step of the base model: a token for each row, logits
    fused       value model: the tokens of the last step and all candidates in one forward pass
    two-phase   the same in two passes
    candidates  value model: candidates alone
    guidance    candidates from logits, tilt, new logits; with a value model that costs nothing
    guided      all of it, as a server runs it: guidance with the fused pass inside
    ratio       (base + guided) / base, of the host's times
    floor       the ratio if base and value model ran at the peaks of the data sheet: the larger of bytes over
                bandwidth and FLOPs over peak, for weights and prefixes read once

One command on a machine with one GPU of 48 GB or more (only torch, transformers and this checkout are needed):

    PYTHONPATH=. python scripts/gpu/guided_overhead.py --json guided-overhead.json

``--tiny --device cpu`` tries the script itself anywhere, in seconds; its numbers say nothing.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from benchctl.costs.hardware import Hardware, hardware_or_none
from benchctl.costs.shapes import BUILT_IN_SHAPES, ModelShape
from benchctl.guided.guide import Guide, GuideRow, GuideSettings
from benchctl.guided.layout import Memory, Shape, Work, pack, plan_shape, unpack
from benchctl.guided.params import GuidanceParams
from benchctl.guided.prefix_cache import PrefixCache, TreeAttention
from benchctl.guided.scoring import ScoredRow, Scorer
from benchctl.guided.value_model import ValueModel, random_value_model

PUBLISHED = "published: 4.03 for 7B + 1.5B, 5 candidates, a whole run of 800 answers (SGLang fork, optimised)"
GOAL = "goal: at most 1.35 for 7B + 1.5B, 5 candidates, batch 64"
TINY = ModelShape(
    name="tiny-base", layers=2, hidden=64, q_heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=512, qkv_bias=True
)


@dataclass(frozen=True, kw_only=True)
class Times:
    """Milliseconds of one step; by the device's events None where there are none."""

    host_ms: float
    device_ms: float | None


@dataclass(frozen=True, kw_only=True)
class Line:
    """One batch size, number of candidates and value model."""

    value_model: str
    batch: int
    candidates: int
    base: Times
    fused: Times
    two_phase: Times
    candidates_only: Times
    guidance: Times
    guided: Times
    floor: float | None

    @property
    def ratio(self) -> float:
        return (self.base.host_ms + self.guided.host_ms) / self.base.host_ms


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
            base_times = timed(base.step(batch, options.context), options.steps, device)
            for candidates in options.candidates:
                line = measure(model, shape, base_shape, base_times, batch, candidates, options, hardware)
                lines.append(line)
                print(row(line), flush=True)
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


def config_of(shape: ModelShape) -> Any:
    """The configuration of a Qwen2 of this shape."""
    return AutoConfig.for_model(
        "qwen2",
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.q_heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.ffn,
        vocab_size=shape.vocab,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )


class BaseModel:
    """Decode steps of a causal language model: the same backbone code, with a projection on the vocabulary."""

    def __init__(self, shape: ModelShape, rows: int, tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        self._model = random_value_model(config_of(shape), device, dtype)
        self._memory = Memory(slots=rows + 1, cells=-(-(tokens + 1) // 64) * 64)
        self._cache = PrefixCache(self._model.config, self._memory, device, dtype)
        self._rotations = self._model.rotations(self._memory.cells)
        drawn = torch.empty(shape.vocab, shape.hidden, device=device, dtype=dtype)
        self._projection = drawn.normal_(0, 0.02)
        self._device = device

    def step(self, batch: int, context: int) -> Callable[[], Tensor]:
        """A function that runs one step for ``batch`` rows of ``context`` tokens; a graph where there is CUDA."""
        work = Work(list(range(batch)), [context] * batch, [[1]] * batch, 0)
        shape = plan_shape(work, self._memory, is_padded=False)
        packed = torch.from_numpy(pack(work, shape, self._memory)).to(self._device)
        if self._device.type != "cuda":
            return lambda: self._run(packed, shape)
        self._run(packed, shape)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self._run(packed, shape)

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay

    @torch.no_grad()
    def _run(self, packed: Tensor, shape: Shape) -> Tensor:
        layout = unpack(packed, torch.zeros((shape.rows, 0), dtype=torch.int64, device=self._device), shape)
        attention = TreeAttention(self._cache, layout, shape)
        hidden = self._model.hidden(layout.tokens, self._rotations[layout.positions], attention, slice(None))
        return hidden @ self._projection.T


def timed(step: Callable[[], object], count: int, device: torch.device, *, warm_up: int = 4) -> Times:
    """The mean by the host over ``count`` steps, and the median by events around each."""
    for _ in range(warm_up):
        step()
    is_cuda = device.type == "cuda"
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count * is_cuda)
    ]
    wait(device)
    start = time.perf_counter()
    for _ in range(count):
        step()
    wait(device)
    host_ms = (time.perf_counter() - start) / count * 1e3
    for before, after in events:
        before.record()
        step()
        after.record()
    wait(device)
    return Times(
        host_ms=host_ms,
        device_ms=statistics.median(before.elapsed_time(after) for before, after in events) if events else None,
    )


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class FreeScorer:
    """A value model that costs nothing: what is left is the guidance itself."""

    def __init__(self, scorer: Scorer) -> None:
        self.model, self.counters = scorer.model, scorer.counters
        self._raw = torch.linspace(-1, 1, 64, device=scorer.model.device)

    def score(self, _rows: Sequence[object], ids: Tensor, _mask: Tensor) -> Tensor:
        return self._raw[: ids.shape[1]].expand(ids.shape)

    def forget(self, _keys: object) -> None:
        """Nothing is kept."""


def measure(
    model: ValueModel,
    shape: ModelShape,
    base_shape: ModelShape,
    base: Times,
    batch: int,
    candidates: int,
    options: argparse.Namespace,
    hardware: Hardware | None,
) -> Line:
    device = model.device
    # Each of the timings below lengthens every row by a token a step, by the host and by events, warm-up included.
    longest = options.context + 4 * (2 * options.steps + 8)
    scorers = [Scorer(model, batch, longest, max_candidates=candidates, fused=fused) for fused in (True, False)]
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(shape.vocab, (batch, options.context), generator=generator).tolist()
    logits = torch.randn(batch, min(shape.vocab, base_shape.vocab), generator=generator).to(device)
    ids = logits.topk(candidates).indices
    mask = torch.ones_like(ids, dtype=torch.bool)

    def steady(scorer: Scorer, growth: int) -> Callable[[], object]:
        rows = [ScoredRow(number, list(tokens), len(tokens)) for number, tokens in enumerate(drawn)]

        def step() -> None:
            scorer.score(rows, ids, mask)
            for each in rows:
                each.tokens.extend([7] * growth)

        return step

    def guided(scorer: Any) -> Callable[[], object]:
        guide = Guide(lambda: scorer, GuideSettings(max_candidates=candidates))
        rows = [
            GuideRow(
                index=number, key=("guided", number), params=GuidanceParams(scale=1.0), tokens=list(tokens),
                num_prompt=len(tokens), top_k=candidates,
            )
            for number, tokens in enumerate(drawn)
        ]  # fmt: skip

        def step() -> None:
            guide.apply(logits.clone(), rows)
            for each in rows:
                each.tokens.append(7)

        return step

    return Line(
        value_model=shape.name,
        batch=batch,
        candidates=candidates,
        base=base,
        fused=timed(steady(scorers[0], 1), options.steps, device),
        two_phase=timed(steady(scorers[1], 1), options.steps, device),
        candidates_only=timed(steady(scorers[1], 0), options.steps, device),
        guidance=timed(guided(FreeScorer(scorers[0])), options.steps, device),
        guided=timed(guided(scorers[0]), options.steps, device),
        floor=None if hardware is None else floor(hardware, base_shape, shape, batch, candidates, options.context),
    )


def floor(
    hardware: Hardware, base: ModelShape, value: ModelShape, batch: int, candidates: int, context: int
) -> float:
    """(base + value model) / base of the shortest times that the peaks allow."""
    base_s = shortest_s(hardware, base, batch, batch, context, base.lm_head_flops())
    value_s = shortest_s(hardware, value, batch, batch * (1 + candidates), context, value.value_head_flops())
    return (base_s + value_s) / base_s


def shortest_s(
    hardware: Hardware, shape: ModelShape, rows: int, tokens: int, context: int, head_flops: int
) -> float:
    """The longer of moving weights and prefixes once, and computing; the embedding is hardly read."""
    linear = shape.linear_flops_per_token() + head_flops
    # A weight of bfloat16 has two bytes and takes part in two FLOPs of each token.
    num_bytes = linear + rows * context * shape.kv_bytes_per_token()
    flops = tokens * (linear + context * shape.attention_flops_per_position())
    return max(num_bytes / hardware.bandwidth_bytes_per_s, flops / hardware.peak_flops_per_s)


COLUMNS = ("base", "fused", "two-phase", "candidates", "guidance", "guided")
HEADER = (
    f"{'value model':14} {'batch':>5} {'k':>3} "
    + "".join(f"{f'{name} ms':>20}" for name in COLUMNS)
    + (f"{'ratio':>8}{'floor':>8}   (host / device)")
)


def row(line: Line) -> str:
    times = (line.base, line.fused, line.two_phase, line.candidates_only, line.guidance, line.guided)
    cells = "".join(f"{time_text(each):>20}" for each in times)
    lowest = "-" if line.floor is None else f"{line.floor:.2f}"
    return f"{line.value_model:14} {line.batch:>5} {line.candidates:>3} {cells}{line.ratio:>8.2f}{lowest:>8}"


def time_text(times: Times) -> str:
    return f"{times.host_ms:.3f} / " + ("-" if times.device_ms is None else f"{times.device_ms:.3f}")


if __name__ == "__main__":
    main()
