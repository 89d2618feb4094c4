"""Program: what compiling the kernels for a GPU that is not there gives, as JSON.

First as a server's check does, then for passes and steps of many other sizes, which must compile nothing more.
"""

import dataclasses
import json
import sys

import torch

from benchctl.guided.kernels import layers, sampling
from benchmarks.guided.kernel_resources import DIMENSIONS, compile_all, compiling_for

CELLS = 4160


def numbers(count, offset):
    """Integers at an address that 16 divides, or not."""
    return torch.zeros(count + offset, dtype=torch.int64)[offset:]


def layers_of_a_pass(model, dtype, tokens, rows, columns, cells):
    hidden, heads, kv_heads, size, ffn, _ = DIMENSIONS[model]
    parity = tokens % 2

    def floats(*shape):
        return torch.zeros(shape, dtype=dtype)

    of_tokens, of_rows = numbers(tokens, parity), numbers(rows, parity)
    layers.add_norm(floats(tokens, hidden), floats(tokens, hidden), floats(hidden), 1e-6)
    layers.gated(floats(tokens, 2 * ffn))
    cache = floats(3 * cells, 2, kv_heads, size)
    norm = floats(heads + kv_heads, size) if model.startswith("qwen3") else None
    query = layers.turn_and_store(
        floats(tokens, (heads + 2 * kv_heads) * size),
        floats(cells, 2, size),
        of_tokens,
        of_tokens,
        cache,
        norm,
        1e-6,
    )
    layers.tree_attention(
        query, cache, of_rows, of_rows, of_rows, of_rows, of_rows, of_tokens, cells, columns, cells
    )
    layers.keep_drawn(
        cache[None], numbers(3 * 64, 0).view(3, 64), numbers(1, 0)[0], of_rows, of_rows, of_rows, cells
    )


def step(rows, width, vocabulary):
    table = torch.zeros(rows, 12, dtype=torch.float64)
    limits, modes = table.split((7, 5), dim=1)
    scores, top = torch.zeros(rows, vocabulary), torch.zeros(rows, width)
    mass = sampling.vocabulary_mass(scores, top, limits)
    probs, mask, counts = sampling.filter_candidates(top, mass, limits)
    sampling.filter_candidates(top, None, limits)
    ids, lines = numbers(rows * width, 0).view(rows, width), numbers(rows, rows % 2)
    log_probs = sampling.tilt_candidates(probs, mask, counts, ids, top, lines, numbers(1, 0), modes, 0)
    sampling.write_candidates(scores, lines, ids, log_probs, counts, limits)


def main(target, model, dtype):
    with compiling_for(int(target)) as compiled:
        compile_all(model, dtype)
        by_check = len(compiled)
        for tokens, rows, columns in ((1, 1, 1), (2, 1, 2), (17, 3, 9), (64, 16, 13), (300, 2, 150)):
            for cells in (448, CELLS):
                layers_of_a_pass(
                    model,
                    getattr(torch, dtype),
                    tokens,
                    rows,
                    columns,
                    cells,
                )
        for rows, width in ((1, 1), (2, 5), (3, 16), (16, 64)):
            step(rows, width, DIMENSIONS[model][-1])
    kernels = [dataclasses.asdict(each) for each in compiled]
    json.dump({"by_check": kernels[:by_check], "later": kernels[by_check:]}, sys.stdout)


main(*sys.argv[1:])
