"""All-reduce over the devices of one machine: NCCL between GPUs, gloo between processes of a CPU.

One process for each device runs this file as a program, with its rank and a JSON document as arguments; the first
one prints the times. The rate is that of the bus: of a buffer of n bytes, each of p devices sends 2 (p - 1) / p n
bytes in one direction, whatever the algorithm.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_SMALL_BYTES = 8 * 2**10
_LARGE_BYTES = (64 * 2**20, 256 * 2**20)
_LIMIT_S = 300.0


def all_reduce_series(
    device: str, ranks: int, *, rounds: int, most_bytes: int, calls: int = 10
) -> list[dict[str, Any]]:
    """Values of every round: bytes/s of large buffers, seconds of a small one. ``device`` is cpu or cuda.

    Large buffers are of the usual sizes, or of ``most_bytes`` where these are smaller.
    Raises RuntimeError with the last words of a rank that fails.
    """
    large_bytes = sorted({min(size, most_bytes) for size in _LARGE_BYTES})
    with tempfile.TemporaryDirectory(prefix="benchctl-all-reduce-") as directory:
        settings = {
            "device": device,
            "ranks": ranks,
            "rounds": rounds,
            "calls": calls,
            "sizes": [_SMALL_BYTES, *large_bytes],
            "meeting": str(Path(directory) / "meeting"),
        }
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, str(rank), json.dumps(settings)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for rank in range(ranks)
        ]
        try:
            outputs = [process.communicate(timeout=_LIMIT_S) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        if process.returncode != 0:
            raise RuntimeError((errors.decode(errors="replace").strip().splitlines() or ["it printed nothing"])[-1])
    times_s = json.loads(outputs[0][0].splitlines()[-1])
    small = {"quantity": "all-reduce-time", "setting": f"{_SMALL_BYTES} x {ranks}", "values": times_s[0]}
    return [
        small,
        *(
            {
                "quantity": "all-reduce",
                "setting": f"{size} x {ranks}",
                "values": [2 * (ranks - 1) / ranks * size / each for each in values],
            }
            for size, values in zip(large_bytes, times_s[1:], strict=True)
        ),
    ]


def _run_rank(rank: int, settings: dict[str, Any]) -> list[list[float]]:
    """Seconds of one call, for each size and round."""
    is_cpu = settings["device"] == "cpu"
    device = torch.device("cpu" if is_cpu else f"cuda:{rank}")
    if not is_cpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if is_cpu else "nccl",
        init_method=f"file://{settings['meeting']}",
        rank=rank,
        world_size=settings["ranks"],
    )
    buffers = [torch.zeros(size // 4, device=device) for size in settings["sizes"]]
    for buffer in buffers:  # the first call of each size sets up connections
        _calls_s(buffer, 2)
    rounds = [[_calls_s(buffer, settings["calls"]) for buffer in buffers] for _ in range(settings["rounds"])]
    dist.destroy_process_group()
    return [list(values) for values in zip(*rounds, strict=True)]


def _calls_s(buffer: torch.Tensor, calls: int) -> float:
    """Seconds of one call, the mean of so many in a row that all ranks begin together."""
    dist.barrier()
    _synchronize(buffer)
    begin_ns = time.monotonic_ns()
    for _ in range(calls):
        dist.all_reduce(buffer)
    _synchronize(buffer)
    return (time.monotonic_ns() - begin_ns) / 1e9 / calls


def _synchronize(buffer: torch.Tensor) -> None:
    if buffer.is_cuda:
        torch.cuda.synchronize()


if __name__ == "__main__":
    print(json.dumps(_run_rank(int(sys.argv[1]), json.loads(sys.argv[2]))))  # noqa: T201 - read by the first process
