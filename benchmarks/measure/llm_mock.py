"""llm-mock's published experiments, repeated: cache of 0 to 5,000 tokens, batch of 10 and of 20.

    python -m benchmarks.measure.llm_mock [--orders 200] [--picture PNG]

The published figures have one run per point, of 50 requests posted at once. This repeats each point for many orders
of arrival, computes the metrics as the client of llm-mock does beside the right ones, and draws both beside the
published values. The prompts are the first 50 of 300 ShareGPT requests that pass llm-mock's filter, not those of
its medium-5k.json.
"""

import argparse
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchctl.report.charts import figure
from benchctl.workload.datasets.base import data_directory
from benchctl.workload.datasets.published import is_usable
from benchmarks.common.table import show
from benchmarks.measure.llm_mock_loop import cached_lengths, serve

NUM_PROMPTS = 50
CACHE_SIZES = (0, 500, 1000, 5000)
BATCH_SIZES = (10, 20)
GPT2_PER_TOKEN = 2
"""GPT-2's tokens of a word such as " #12", of which llm-mock's answers consist."""
PUBLISHED_HIT_TOKENS = (0.0, 1.47, 1.47, 1.66)
PUBLISHED_TTFT_S = {10: (126.1, 122.6, 121.7, 112.2), 20: (131.4, 129.0, 124.9, 117.5)}
PUBLISHED_THROUGHPUT = {10: (0.35, 0.37, 0.37, 0.39)}
PUBLISHED_TPOT_MS = {10: (1273, 1217, 1212, 1126)}
RANGE = (0.05, 0.5, 0.95)


@dataclass(frozen=True)
class Point:
    """Metrics of one run: as the client of llm-mock takes them (``stated``), and right ones."""

    p99_ttft_s: float
    request_throughput: float
    stated_p99_tpot_ms: float
    p99_tpot_ms: float
    stated_tokens_per_s: float
    tokens_per_s: float


def point_of(served):
    """The metrics of a load. The client divides its whole latency by GPT-2's count of the text."""
    wall_s = max(one.end_ns for one in served) / 1e9
    tokens = sum(one.output_tokens for one in served)
    stated_ns = [one.end_ns / (GPT2_PER_TOKEN * one.output_tokens) for one in served]
    right_ns = [(one.last_token_ns - one.first_token_ns) / (one.output_tokens - 1) for one in served]
    return Point(
        p99_ttft_s=float(np.percentile([one.first_token_ns for one in served], 99)) / 1e9,
        request_throughput=len(served) / wall_s,
        stated_p99_tpot_ms=float(np.percentile(stated_ns, 99)) / 1e6,
        p99_tpot_ms=float(np.percentile(right_ns, 99)) / 1e6,
        stated_tokens_per_s=GPT2_PER_TOKEN * tokens / wall_s,
        tokens_per_s=tokens / wall_s,
    )


def load_rows():
    """The token ids of all prompts, and those of the 50 that are served."""
    path = data_directory() / "sharegpt" / "sharegpt-llama-3.1-8b-300-sps10.jsonl"
    if not path.is_file():
        sys.exit(f"{path} is not there; get it with 'benchctl data fetch sharegpt-replay'")
    rows = [json.loads(line) for line in path.read_bytes().splitlines()]
    usable = [row["input_tok_ids"] for row in rows if is_usable(row["input_toks"], row["output_toks"])]
    return [row["input_tok_ids"] for row in rows], usable[:NUM_PROMPTS]


def orders_of(count):
    """Orders of arrival, the first as in the file, with the number of requests that the first step finds."""
    stream = random.Random(0)
    yield list(range(NUM_PROMPTS)), None
    for _ in range(count - 1):
        yield stream.sample(range(NUM_PROMPTS), NUM_PROMPTS), stream.randint(1, NUM_PROMPTS)


def runs_of(prompts, cached, batch_size, orders):
    """A point for each order; the published figure has one of them."""
    return [
        point_of(
            serve(
                [len(prompts[i]) for i in order],
                batch_size=batch_size,
                cached_tokens=[cached[i] for i in order],
                first_batch=first_batch,
            )
        )
        for order, first_batch in orders
    ]


def quantiles(points, name):
    return np.quantile([getattr(point, name) for point in points], RANGE)


def points_table(points, cached):
    rows = []
    for (batch, size), runs in points.items():
        number = CACHE_SIZES.index(size)
        low, middle, high = quantiles(runs, "p99_ttft_s")
        rows.append(
            {
                "batch": batch,
                "cache": size,
                "hit tokens": float(np.mean(cached[size])),
                "published": PUBLISHED_HIT_TOKENS[number],
                "P99 TTFT s": float(middle),
                "5 - 95 %": f"{low:.1f} - {high:.1f}",
                "published s": PUBLISHED_TTFT_S[batch][number],
                "req/s": float(quantiles(runs, "request_throughput")[1]),
                "published req/s": PUBLISHED_THROUGHPUT.get(batch, (None,) * 4)[number],
            }
        )
    return rows


def effects_table(points, prompts, orders):
    """The change by each cache in the same order, by 1.66 tokens for every request, and by the order alone."""
    rows = []
    for batch in BATCH_SIZES:
        without = ttfts(points[batch, 0])
        rows += [
            change(f"batch {batch}, cache {size}, same order", ttfts(points[batch, size]) / without)
            for size in CACHE_SIZES[1:]
        ]
        hit = runs_of(prompts, [PUBLISHED_HIT_TOKENS[-1]] * len(prompts), batch, orders)
        rows.append(change(f"batch {batch}, 1.66 tokens of each prompt, same order", ttfts(hit) / without))
        rows.append(change(f"batch {batch}, another order, no cache", without[1:] / without[:-1]))
        published = PUBLISHED_TTFT_S[batch]
        rows.append(change(f"batch {batch}, published, cache 5000", published[-1:] / np.array(published[:1])))
    bigger = ttfts(points[20, 0]) / ttfts(points[10, 0])
    rows.append(change("batch 20 against 10, no cache, same order", bigger))
    rows.append(
        change("batch 20 against 10, published", np.array(PUBLISHED_TTFT_S[20][:1]) / PUBLISHED_TTFT_S[10][0])
    )
    return rows


def ttfts(points):
    return np.array([point.p99_ttft_s for point in points])


def change(name, ratios):
    low, middle, high = 100 * (np.quantile(ratios, RANGE) - 1)
    return {"change of P99 TTFT, %": name, "median": float(middle), "5 %": float(low), "95 %": float(high)}


def errors_table(point):
    return [
        {
            "metric": "P99 TPOT, ms",
            "stated": point.stated_p99_tpot_ms,
            "right": point.p99_tpot_ms,
            "published": float(PUBLISHED_TPOT_MS[10][0]),
        },
        {"metric": "output tokens/s", "stated": point.stated_tokens_per_s, "right": point.tokens_per_s},
    ]


def picture(points, prompts, orders):
    """The change of P99 TTFT over the size of the cache, and P99 TPOT as stated, beside the published points."""
    without = ttfts(points[10, 0])
    low, high = 100 * (np.quantile(without / np.median(without), (RANGE[0], RANGE[-1])) - 1)
    rows = []

    def add(panel, line, values, lows=(), highs=()):
        for i, (size, value) in enumerate(zip(CACHE_SIZES, values, strict=True)):
            ends = {"low": float(lows[i]), "high": float(highs[i])} if len(lows) else {"low": None, "high": None}
            rows.append({"panel": panel, "line": line, "size": str(size), "value": float(value), **ends})

    for batch in BATCH_SIZES:
        ratios = [ttfts(points[batch, size]) / ttfts(points[batch, 0]) for size in CACHE_SIZES]
        lows, middles, highs = np.array([100 * (np.quantile(ratio, RANGE) - 1) for ratio in ratios]).T
        add("change", f"batch {batch}, same order", middles, lows, highs)
        published = 100 * (np.array(PUBLISHED_TTFT_S[batch]) / PUBLISHED_TTFT_S[batch][0] - 1)
        add("change", f"batch {batch}, published", published)
    hit = runs_of(prompts, [PUBLISHED_HIT_TOKENS[-1]] * len(prompts), 10, orders)
    by_formula = 100 * float(np.median(ttfts(hit) / without) - 1)
    published_hit = {"panel": "change", "line": "1.66 tokens of each prompt, the published hit length"}
    rows.append({**published_hit, "size": str(CACHE_SIZES[-1]), "value": by_formula, "low": None, "high": None})
    names = {
        "stated_p99_tpot_ms": "as its client states it",
        "p99_tpot_ms": "without TTFT, in tokens of the engine",
    }
    for name, words in names.items():
        add("tpot", f"batch 10, {words}", [quantiles(points[10, size], name)[1] for size in CACHE_SIZES])
    add("tpot", "batch 10, TPOT published", PUBLISHED_TPOT_MS[10])
    lines = list(dict.fromkeys(row["line"] for row in rows))
    panels = [
        figure.panel(
            240,
            figure.axis(title, zero=True),
            [
                *([figure.grey_band(float(low), float(high))] if panel == "change" else []),
                figure.layer("area", y_by="low", y2_by="high", opacity=0.2, where="isValid(datum.low)"),
                figure.layer("line", y_by="value"),
                figure.layer("point", y_by="value"),
            ],
            where=[f"datum.panel === '{panel}'"],
            encoding=figure.by_series(lines, name="line"),
        )
        for panel, title in (
            ("change", "change of P99 TTFT against no cache, %; grey: order of arrival alone, 5 to 95 %, batch 10"),
            ("tpot", "P99 TPOT, ms"),
        )
    ]
    sizes = [str(size) for size in CACHE_SIZES]
    x = {
        "field": "size",
        "type": "ordinal",
        "title": "CACHE_SIZE, tokens",
        "sort": sizes,
        "axis": {"labelAngle": 0},
    }
    title = f"llm-mock's experiments: {len(orders)} orders of arrival, beside one published run per point"
    return figure.picture_bytes(figure.picture(panels, rows, x, legend=lines), title)


def main():
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--orders", type=int, default=200, help="orders of arrival per point")
    flags.add_argument("--picture", type=Path, help="PNG to write")
    arguments = flags.parse_args()
    sources, prompts = load_rows()
    orders = list(orders_of(arguments.orders))
    cached = {size: cached_lengths(prompts, sources, size) for size in CACHE_SIZES}
    points = {
        (batch, size): runs_of(prompts, cached[size], batch, orders)
        for batch in BATCH_SIZES
        for size in CACHE_SIZES
    }
    lengths = [len(prompt) for prompt in prompts]
    print(f"{len(prompts)} prompts of {min(lengths)} to {max(lengths)} tokens, mean {np.mean(lengths):.0f}")
    show(points_table(points, cached), f"median over {len(orders)} orders of arrival")
    show(effects_table(points, prompts, orders))
    show(
        errors_table(points[10, 0][0]), "as the client of llm-mock states it: batch 10, no cache, order of the file"
    )
    if arguments.picture is not None:
        arguments.picture.write_bytes(picture(points, prompts, orders))
        print(f"picture: {arguments.picture}")


if __name__ == "__main__":
    main()
