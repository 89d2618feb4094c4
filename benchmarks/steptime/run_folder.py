"""The folder of a real vLLM run, as LLMServingSim's bench writes it: settings, times of requests, load curve.

meta.json         the engine's settings, and the data set that was replayed
requests.jsonl    for each request its lengths and the engine's timestamps in seconds
timeseries.csv    each second the running and waiting requests and the share of key-value memory in use

Token ids and intended arrivals are in the data set itself, which is looked for beside the folder.
"""

import csv
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchctl.costs.shapes import shape_for
from benchctl.errors import UsageError
from benchctl.sim.config import SimConfig
from benchctl.sim.requests import Prompt, Request
from benchctl.units import GIB

MS_PER_S = 1000
STAMPS = ("queued", "first_token", "last_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """One value for each request in the order of sending; seconds from the first queueing."""

    queued_s: np.ndarray
    first_token_s: np.ndarray
    last_token_s: np.ndarray
    output_tokens: np.ndarray

    def ttft_ms(self):
        return (self.first_token_s - self.queued_s) * MS_PER_S

    def e2el_ms(self):
        return (self.last_token_s - self.queued_s) * MS_PER_S

    def tpot_ms(self):
        several = self.output_tokens > 1
        decode_s = (self.last_token_s - self.first_token_s)[several]
        return decode_s / (self.output_tokens[several] - 1) * MS_PER_S

    def duration_s(self):
        return float(self.last_token_s.max() - self.queued_s.min())


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCurve:
    """Running requests and share of the key-value memory in use, at the end of each second."""

    t_s: np.ndarray
    running: np.ndarray
    kv_frac: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class RealRun:
    """What was asked of a server, and what came of it."""

    config: SimConfig
    requests: tuple[Request, ...]
    arrival_ns: tuple[int, ...]
    times: RequestTimes
    curve: LoadCurve | None
    remarks: tuple[str, ...]


def read_run(folder, *, dataset=None, model=None, layer_profile=None):
    """The run in a folder. Raises UsageError when a file is missing, or the run is of several engines."""
    meta = json.loads(_text(folder / "meta.json"))
    rows = [json.loads(line) for line in _text(folder / "requests.jsonl").splitlines()]
    config, remarks = config_of(folder, meta, model or meta["model"], layer_profile or folder)
    prompts, arrival_ns, more = _replayed(folder, meta, rows, dataset or _beside(folder, meta.get("dataset_path")))
    requests = tuple(
        Request(
            request_id=row["request_id"],
            prompt=Prompt.of(prompt, config.block_size),
            max_tokens=row["output_toks"],
            ignore_eos=True,
        )
        for row, prompt in zip(rows, prompts, strict=True)
    )
    return RealRun(
        config=config,
        requests=requests,
        arrival_ns=tuple(arrival_ns),
        times=_times(folder, rows),
        curve=_curve(folder / "timeseries.csv"),
        remarks=(*remarks, *more),
    )


def config_of(folder, meta, model, layer_profile):
    """The server that ``meta.json`` describes, priced by the layer tables; and what was assumed."""
    engine, cache = meta["engine_kwargs"], meta.get("kv_cache") or {}
    resolved = meta.get("resolved_config") or {}
    scheduler = resolved.get("scheduler_config", {})
    remarks = []
    if engine.get("data_parallel_size", 1) != 1:
        raise UsageError(f"{folder}: a run of {engine['data_parallel_size']} engines; simulate them one by one")
    devices, block_size = engine.get("tensor_parallel_size", 1), cache.get("block_size", 16)
    blocks = cache.get("num_gpu_blocks")
    if not blocks:
        blocks = _blocks_of(folder / "config.json", shape_for(model), devices, block_size)
        remarks.append(f"meta.json has no kv_cache.num_gpu_blocks: {blocks} blocks from the memory in config.json")
    if "async_scheduling" not in scheduler:
        remarks.append("meta.json has no async_scheduling: taken as on, vLLM's default")
    config = SimConfig(
        model=model,
        cost_model="layer-profile",
        layer_profile=str(layer_profile),
        tensor_parallel_size=devices,
        max_num_seqs=engine["max_num_seqs"],
        max_num_batched_tokens=engine["max_num_batched_tokens"],
        max_model_len=engine.get("max_model_len") or SimConfig().max_model_len,
        num_kv_blocks=blocks,
        block_size=block_size,
        enable_prefix_caching=bool(cache.get("enable_prefix_caching", True)),
        async_scheduling=bool(scheduler.get("async_scheduling", True)),
    )
    return config, remarks


def _blocks_of(path, shape, devices, block_size):
    """Blocks that a share of each device's memory holds beside the weights."""
    try:
        memory = json.loads(_text(path))["nodes"][0]["instances"][0]["npu_mem"]
        usable_bytes = memory["mem_size"] * GIB * memory.get("mem_util", 0.9) * devices - shape.weight_bytes()
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise UsageError(
            f"{path}: no npu_mem.mem_size of an instance ({error!r}), and meta.json no blocks"
        ) from error
    return int(usable_bytes / shape.kv_bytes_per_token() / block_size)


def _replayed(folder, meta, rows, path):
    """Tokens and arrival of each request, and what has to be said about them."""
    if path is None:
        prompts = [[f"{i}:{k}" for k in range(row["input_toks"])] for i, row in enumerate(rows)]
        first_s = min(row["arrival_time"] for row in rows)
        arrival_ns = [round((row["arrival_time"] - first_s) * 1e9) for row in rows]
        return prompts, arrival_ns, ["the data set is not beside the folder: prompts are taken to share no prefix"]
    asked = [row for line in _text(path).splitlines() if "input_tok_ids" in (row := json.loads(line))][: len(rows)]
    if [row["output_toks"] for row in asked] != [row["output_toks"] for row in rows]:
        raise UsageError(f"{path}: its output_toks are not those of {folder / 'requests.jsonl'}; name another file")
    remarks = []
    if hashlib.sha256(path.read_bytes()).hexdigest() != meta.get("dataset_hash"):
        remarks.append(f"{path.name} is not the file that was replayed: its sha256 differs")
    prompts = [list(map(str, row["input_tok_ids"])) for row in asked]
    return prompts, [row["arrival_time_ns"] for row in asked], remarks


def _times(folder, rows):
    unfinished = [row["request_id"] for row in rows if row["last_token_ts"] is None]
    if unfinished:
        raise UsageError(
            f"{folder / 'requests.jsonl'}: {unfinished[0]} has no last_token_ts; leave it out of the run"
        )
    start_s = min(row["queued_ts"] for row in rows)
    return RequestTimes(
        **{f"{name}_s": np.array([row[f"{name}_ts"] - start_s for row in rows]) for name in STAMPS},
        output_tokens=np.array([row["output_toks"] for row in rows]),
    )


def _curve(path):
    """The load curve, or None where the run noted none."""
    if not path.is_file():
        return None
    rows = list(csv.DictReader(_text(path).splitlines()))
    t_s, running, kv_pct = (
        np.array([float(row[name]) for row in rows]) for name in ("t", "running", "kv_cache_pct")
    )
    return LoadCurve(t_s=t_s, running=running, kv_frac=kv_pct / 100)


def _beside(folder, dataset_path):
    if not dataset_path:
        return None
    name = Path(dataset_path).name
    places = [folder / name, *sorted(folder.parent.glob(f"*/{name}")), *sorted(folder.parent.glob(name))]
    return next((path for path in places if path.is_file()), None)


def _text(path):
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error}; the folder of a real run has this file") from error
