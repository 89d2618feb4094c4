"""Experiments whose blocks ran on several nodes, with a known effect of each node on the ratio."""

import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.results.builders import edit_run, set_positions, write_results

from benchctl.records.directory import ResultDirectory
from benchctl.records.schema import NodeInfo

_ORDERS = ((0, 1, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0), (0, 2, 1), (1, 0, 2))


def write_on_nodes(
    path: Path,
    nodes: Sequence[str],
    effects: Mapping[str, float] | None = None,
    *,
    scatter: float = 0.004,
    orders: Sequence[tuple[int, int, int]] | None = None,
) -> ResultDirectory:
    """Three arms in the block of each node of ``nodes``; ``effects`` are added to the guided log-times of a node.

    ``orders`` are the positions of the arms in each block, balanced and shuffled unless they are given. Every run
    scatters normally by ``scatter``, and begins a minute after the one before.
    """
    stream = random.Random(5)
    block_factors = [
        {
            "baseline": math.exp(stream.gauss(0, scatter)),
            "guided": math.exp(stream.gauss(0, scatter) + (effects or {}).get(node, 0.0)),
        }
        for node in nodes
    ]
    results = write_results(path, block_factors=block_factors, cells=({"top_k": 2}, {"top_k": 5}))
    results.write_profile(results.profile_yaml().replace("[5]", "[2, 5]"))
    run_orders = [_ORDERS[block % len(_ORDERS)] for block in range(len(nodes))]
    stream.shuffle(run_orders)
    run_orders = run_orders if orders is None else list(orders)
    runs = results.plan().runs
    set_positions(results, {run.run_id: run_orders[run.block][run.index % 3] for run in runs})
    for run in runs:
        node = NodeInfo(name=nodes[run.block], hostname=nodes[run.block])
        minute = 3 * run.block + run_orders[run.block][run.index % 3]
        edit_run(results, run.run_id, node=node, started_at=f"2026-01-01T{minute // 60:02d}:{minute % 60:02d}:00Z")
    return results
