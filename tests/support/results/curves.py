"""Result directories of arms over the load whose knees are known: a step takes a + b N with N open requests."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random

import msgspec
from support.results.builders import edit_manifest, prepared, write_results, write_run

from benchctl.records.directory import ResultDirectory, run_directory_name
from benchctl.records.files import encode
from benchctl.records.record import PlannedRun
from benchctl.records.schema import Cell

SIZES = (1, 2, 4, 8, 16, 32, 64)
KNEES = {"baseline": 16.0, "wide": 12.0}
"""a / b of each arm, in open requests."""


def scattered(variant: str, block: int, size: float) -> float:
    """Factor on the step times of a run: 3 % of scatter between servers, and 0.3 % between the loads of one."""
    launch, load = (Random(f"{seed}") for seed in ((variant, block), (variant, block, size)))
    return math.exp(launch.gauss(0, 0.03) + load.gauss(0, 0.003))


def write_curves(
    path: Path,
    *,
    knees: Mapping[str, float] = KNEES,
    sizes: Sequence[int] = SIZES,
    blocks: int = 3,
    other: Sequence[Cell] = ({},),
    factor: Callable[[str, int, float], float] = scattered,
) -> ResultDirectory:
    """Every arm at every size, ``other`` times: its run sends so many requests at once, and all of them at the end
    of each step get a token.
    """
    results = write_results(path, block_factors=({"baseline": 1.0},) * blocks, cells=())
    for run in results.runs():
        for file in run.path.iterdir():
            file.unlink()
        run.path.rmdir()
    requests = prepared(max(sizes), 8)
    content = b"".join(encode(request) + b"\n" for request in requests)
    results.write_prepared_requests(content)
    edit_manifest(results, request_set_sha256=hashlib.sha256(content).hexdigest(), blocks=blocks)
    arrival = {"kind": "closed-loop", "max_concurrency": max(sizes)}
    profile = {
        "name": "curves",
        "engine": {"kind": "sim"},
        "model": "qwen2.5-7b",
        "blocks": blocks,
        "gates": [],
        "workload": {"dataset": "generated", "num_prompts": max(sizes), "prompts_per_slot": 1, "arrival": arrival},
        "sweep": {"max_concurrency": list(sizes)} | {name: [cell[name] for cell in other] for name in other[0]},
        "variants": {name: {} for name in knees},
    }
    results.write_profile(json.dumps(profile))
    planned: list[PlannedRun] = []
    for block in range(blocks):
        arms = [(variant, {"max_concurrency": n} | more) for variant in knees for more in other for n in sizes]
        for position, (variant, cell) in enumerate(arms):
            run_id = run_directory_name(len(planned), block, variant, cell)
            planned.append(
                PlannedRun(
                    index=len(planned), run_id=run_id, block=block, position=position, variant=variant, cell=cell
                )
            )
            size = int(cell["max_concurrency"] or 0)
            step = (1 + size / knees[variant]) * factor(variant, block, size)
            write_run(results, planned[-1], requests[:size], step)
    results.write_plan(msgspec.structs.replace(results.plan(), runs=tuple(planned)))
    return results
