"""A small folder of measured layers whose times follow simple formulas, so that any step's time is known."""

from itertools import product
from pathlib import Path

DENSE_US = {
    "embedding": (1.0, 0.01),
    "layernorm": (2.0, 0.02),
    "qkv_proj": (50.0, 0.25),
    "o_proj": (30.0, 0.125),
    "final_layernorm": (2.0, 0.01),
}
"""Time of a layer as intercept and slope in tokens."""
PER_SEQUENCE_US = {"lm_head": (500.0, 1.5), "sampler": (20.0, 0.5)}
CHUNKS, HISTORIES, ROWS, CONTEXTS = (0, 64, 256), (0, 128, 512), (0, 1, 8), (16, 256, 4096)


def attention_us(chunk: float, history: float, rows: float, context: float) -> float:
    """Linear along each axis, as interpolation takes it."""
    return 0.001 * chunk * history + 0.1 * chunk + 0.004 * rows * context + 2.0 * rows


def step_us(layers: int, tokens: int, num_rows: int, attention: float) -> float:
    """A step by hand: the norm of a layer runs twice, the embedding and the last norm once."""
    dense = {name: start + slope * tokens for name, (start, slope) in DENSE_US.items()}
    once = dense["embedding"] + dense["final_layernorm"]
    per_layer = 2 * dense["layernorm"] + dense["qkv_proj"] + dense["o_proj"]
    head = sum(start + slope * num_rows for start, slope in PER_SEQUENCE_US.values())
    return once + layers * (per_layer + attention) + head


def verification_us(query_tokens: float, rows: float, context: float) -> float:
    """Decoding rows alone with so many query tokens each."""
    return attention_us(0, 0, rows, context) + (query_tokens - 1) * (0.001 * rows * context + 0.5 * rows)


def write_tables(folder: Path, *, measures_key: bool = False, query_tokens: tuple[int, ...] = ()) -> Path:
    """The three tables; the newer layout of attention with ``measures_key``. Chunks with rows stop at 8 x 256.

    ``query_tokens`` adds decoding rows with so many query tokens each, in the newer layout.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "dense.csv", "layer,tokens,time_us", _lines(DENSE_US, (1, 8, 256)))
    _write(folder / "per_sequence.csv", "layer,sequences,time_us", _lines(PER_SEQUENCE_US, (1, 8)))
    cells = []
    for chunk, history, rows, context in product(CHUNKS, HISTORIES, ROWS, CONTEXTS):
        is_repeated = (not chunk and history) or (not rows and context > CONTEXTS[0])
        did_not_fit = chunk and rows * context > 8 * 256
        if is_repeated or did_not_fit or not (chunk or rows):
            continue
        place = (chunk, history, rows, context if rows else 0)
        time_us = attention_us(*place)
        if measures_key:
            cells.append(
                f"attention,{chunk},{history + chunk / 2 if chunk else 0},{place[2]},{place[3]},1,{time_us}"
            )
        else:
            cells.append(f"{','.join(map(str, place))},{time_us}")
    for number, rows, context in product(query_tokens, ROWS[1:], CONTEXTS):
        cells.append(f"attention,0,0,{rows},{context},{number},{verification_us(number, rows, context)}")
    header = "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"
    if measures_key:
        header = "layer,prefill_chunk,prefill_key,n_decode,kv_decode,decode_q_len,time_us"
    _write(folder / "attention.csv", header, cells)
    return folder


def _lines(times_us: dict[str, tuple[float, float]], places: tuple[int, ...]) -> list[str]:
    return [f"{name},{x},{start + slope * x}" for name, (start, slope) in times_us.items() for x in places]


def _write(path: Path, header: str, rows: list[str]) -> None:
    path.write_text("\n".join((header, *rows)) + "\n", encoding="utf-8")
