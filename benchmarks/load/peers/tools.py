"""How each load generator is asked for the same load, and how what it tells is read.

All send streamed completions of an exact length to one server. The peers are found where install.sh puts
them, vLLM's where benchctl's engines live.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchctl.engines.environment import engines_directory
from benchctl.errors import BenchctlError
from benchctl.records.files import read_jsonl
from benchctl.records.record import RequestRecord
from benchmarks.common.measured_process import Cost, run_measured
from benchmarks.common.truth import Seen, on_cores

LIMIT = Path(__file__).with_name("limit_client.py")
DELAYED = Path(__file__).with_name("delayed_client.py")
NS_PER_S, NS_PER_MS = 1e9, 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The load: ``concurrency`` requests at a time, or ``rate_per_s`` in a Poisson process, or all at once.

    ``tokenizer`` is a model directory: the peers make their prompts with its tokenizer.
    """

    url: str
    directory: Path
    tokenizer: Path
    num_prompts: int
    output_len: int
    input_len: int = 16
    concurrency: int | None = None
    rate_per_s: float | None = None
    seed: int = 1
    workers: str = "auto"
    new_connections: bool = False
    """The server closes each after its answer: a client that knows no spare ones opens one for each request."""


class ToolError(Exception):
    """A tool ended well and nevertheless left nothing to go by."""


@dataclass(frozen=True, slots=True)
class Tool:
    """One load generator: how it is called, and how the files are read that it leaves."""

    name: str
    program: Path
    command: Callable[[Asked, Path], Sequence[str]]
    read: Callable[[Path], dict[str, list[Seen]]]
    environment: Mapping[str, str] = field(default_factory=dict)
    suspect_code: int | None = None
    """The exit code by which it says that it measured and that its figures are to be doubted."""

    def told(self, directory: Path) -> dict[str, list[Seen]]:
        """What it tells, under one name or more. Raises ToolError when its files are not as expected."""
        try:
            return self.read(directory)
        except (OSError, LookupError, TypeError, ValueError, BenchctlError) as error:
            raise ToolError(f"what it wrote cannot be read: {type(error).__name__}: {error}") from error

    @property
    def is_installed(self) -> bool:
        return self.program.exists()

    def run(self, asked: Asked, cores: Sequence[int], *, timeout_s: float, is_watched: bool) -> Cost:
        """To its end, on these cores; its output goes to ``tool.log``."""
        return run_measured(
            on_cores([str(self.program), *self.command(asked, asked.directory)], cores),
            asked.directory / "tool.log",
            timeout_s=timeout_s,
            environment=self.environment,
            is_watched=is_watched,
            good_codes=(0,) if self.suspect_code is None else (0, self.suspect_code),
        )

    def doubt(self, cost: Cost) -> dict[str, str]:
        """A cell for the table where the tool doubts its own figures."""
        return {"by itself": "suspect"} if cost.returncode == self.suspect_code else {}


def peers_directory() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"))
    return Path(os.environ.get("BENCHCTL_PEERS", cache / "benchctl" / "peers")).expanduser()


def make_tokenizer(directory: Path) -> Path:
    """A model directory without weights, for the peers that need a tokenizer."""
    argv = [sys.executable, "-m", "benchctl", "models", "make-tiny", str(directory), "--no-weights", "--force"]
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    return directory


def benchctl_command(asked: Asked, directory: Path) -> list[str]:
    return ["-m", "benchctl", *load_arguments(asked, directory)]


def delayed_command(asked: Asked, directory: Path) -> list[str]:
    """benchctl with a fault: each request that fills a slot is held up."""
    return [str(DELAYED), *load_arguments(asked, directory)]


def load_arguments(asked: Asked, directory: Path) -> list[str]:
    argv = ["load", asked.url, "--model", "paced", "--dialect", "openai"]
    argv += ["--num-prompts", str(asked.num_prompts), "--seed", str(asked.seed), "--workers", asked.workers]
    argv += ["--input-len", str(asked.input_len), "--output-len", str(asked.output_len)]
    if asked.concurrency is not None:
        argv += ["--max-concurrency", str(asked.concurrency)]
    if asked.rate_per_s is not None:
        argv += ["--request-rate", f"{asked.rate_per_s:g}"]
    return [*argv, "--output", str(directory / "benchctl")]


def seen_by_benchctl(directory: Path) -> dict[str, list[Seen]]:
    """Once by the stamps in the records, once by when the client read: the kernel's stamps later by that much."""
    (run,) = (directory / "benchctl" / "runs").iterdir()
    records = read_jsonl(run / "requests.jsonl", RequestRecord)
    told = [record for record in records if not record.is_warmup and record.error is None]
    shown = {"benchctl": [benchctl_request(record, is_late=False) for record in told]}
    if any(record.stamps == "kernel" for record in told):
        shown["benchctl, by its loop"] = [benchctl_request(record, is_late=True) for record in told]
    return shown


def benchctl_request(record: RequestRecord, *, is_late: bool) -> Seen:
    choice = record.choices[0]
    late_ns = choice.chunk_late_ns if is_late and choice.chunk_late_ns else (0,) * len(choice.chunk_ns)
    chunks_ns = [chunk + late for chunk, late in zip(choice.chunk_ns, late_ns, strict=True)]
    tokens = record.completion_tokens or 0
    assert record.sent_ns is not None
    return Seen(
        request_id=record.request_id,
        ttft_ns=chunks_ns[0] - record.sent_ns,
        itl_ns=gaps(chunks_ns),
        tpot_ns=(chunks_ns[-1] - chunks_ns[0]) / (tokens - 1) if tokens > 1 else None,
        output_tokens=tokens,
        num_bound=sum(gap == 0 for gap in gaps(choice.chunk_ns)),
        scheduled_ns=record.scheduled_ns,
        sent_ns=record.sent_ns,
    )


def gaps(times_ns: Sequence[int]) -> tuple[float, ...]:
    return tuple(later - earlier for earlier, later in pairwise(times_ns))


def vllm_command(asked: Asked, directory: Path) -> list[str]:
    argv = ["bench", "serve", "--backend", "openai", "--base-url", asked.url, "--model", "paced"]
    argv += ["--tokenizer", str(asked.tokenizer), "--dataset-name", "random", "--ignore-eos"]
    argv += ["--random-input-len", str(asked.input_len), "--random-output-len", str(asked.output_len)]
    argv += ["--num-prompts", str(asked.num_prompts), "--seed", str(asked.seed), "--request-id-prefix", "bench-"]
    argv += ["--save-result", "--save-detailed", "--result-dir", str(directory), "--result-filename", "vllm.json"]
    if asked.concurrency is not None:
        argv += ["--max-concurrency", str(asked.concurrency)]
    if asked.rate_per_s is not None:
        argv += ["--request-rate", str(asked.rate_per_s)]
    return [*argv, "--disable-tqdm"]


def seen_by_vllm(directory: Path) -> dict[str, list[Seen]]:
    """Its details stand in the order of its requests, whose names count up."""
    found = json.loads((directory / "vllm.json").read_text())
    told = zip(
        found["ttfts"], found["itls"], found["output_lens"], found["start_times"], found["errors"], strict=True
    )
    return {
        "vllm bench serve": [
            Seen(
                request_id=f"bench-{index}",
                ttft_ns=ttft_s * NS_PER_S,
                itl_ns=tuple(gap_s * NS_PER_S for gap_s in itl_s),
                tpot_ns=sum(itl_s) * NS_PER_S / (tokens - 1) if tokens > 1 else None,
                output_tokens=tokens,
                sent_ns=round(start_s * NS_PER_S),
            )
            for index, (ttft_s, itl_s, tokens, start_s, error) in enumerate(told)
            if not error
        ]
    }


def guidellm_command(asked: Asked, directory: Path) -> list[str]:
    if asked.rate_per_s is not None:
        profile = f"kind=poisson,rate={asked.rate_per_s}"
    elif asked.concurrency is not None:
        profile = f"kind=concurrent,streams={asked.concurrency}"
    else:
        profile = "kind=throughput"
    backend = f"kind=openai_http,target={asked.url},model=paced,request_format=/v1/completions"
    data = f"kind=synthetic_text,prompt_tokens={asked.input_len},output_tokens={asked.output_len}"
    argv = ["run", "--backend", backend, "--profile", profile, "--data", data]
    argv += ["--constraint", f"kind=max_requests,count={asked.num_prompts}"]
    argv += ["--tokenizer", f"kind=huggingface_auto,model={asked.tokenizer}"]
    argv += ["--seed", f"kind=static,value={asked.seed}", "--disable-console"]
    return [*argv, "--output", f"kind=json,path={directory / 'guidellm.json'}"]


def seen_by_guidellm(directory: Path) -> dict[str, list[Seen]]:
    """It sends no identity: its requests are known by their prompts. It keeps the times of the first and the last
    token."""
    found = json.loads((directory / "guidellm.json").read_text())
    return {"GuideLLM": [guidellm_request(told) for told in found["benchmarks"][0]["requests"]["successful"]]}


def guidellm_request(told: Mapping[str, Any]) -> Seen:
    prompt = json.loads(told["request_args"])["body"]["prompt"]
    times, tokens = told["info"]["timings"], told["output_tokens"]
    first_s, last_s = times["first_token_iteration"], times["last_token_iteration"]
    return Seen(
        request_id=hashlib.sha256(json.dumps(prompt, sort_keys=True).encode()).hexdigest()[:16],
        ttft_ns=(first_s - times["request_start"]) * NS_PER_S,
        tpot_ns=(last_s - first_s) * NS_PER_S / (tokens - 1) if tokens > 1 else None,
        output_tokens=tokens,
    )


def aiperf_command(asked: Asked, directory: Path) -> list[str]:
    argv = ["profile", "--model", "paced", "--url", asked.url, "--endpoint-type", "completions", "--streaming"]
    argv += ["--tokenizer", str(asked.tokenizer), "--use-server-token-count", "--use-legacy-max-tokens"]
    argv += ["--isl", str(asked.input_len), "--osl", str(asked.output_len), "--extra-inputs", "ignore_eos:true"]
    argv += ["--request-count", str(asked.num_prompts), "--random-seed", str(asked.seed), "--no-gpu-telemetry"]
    if asked.concurrency is not None:
        argv += ["--concurrency", str(asked.concurrency)]
    if asked.rate_per_s is not None:
        argv += ["--request-rate", str(asked.rate_per_s), "--arrival-pattern", "poisson"]
    return [*argv, "--export-level", "records", "--ui", "none", "--output-artifact-dir", str(directory / "aiperf")]


def seen_by_aiperf(directory: Path) -> dict[str, list[Seen]]:
    lines = (directory / "aiperf" / "profile_export.jsonl").read_text().splitlines()
    return {"AIPerf": [aiperf_request(json.loads(line)) for line in lines]}


def aiperf_request(told: Mapping[str, Any]) -> Seen:
    metrics = {name: metric["value"] for name, metric in told["metrics"].items()}
    tpot_ms = metrics.get("inter_token_latency")  # its word for what others call TPOT
    return Seen(
        request_id=told["metadata"]["x_request_id"],
        ttft_ns=metrics["time_to_first_token"] * NS_PER_MS,
        itl_ns=tuple(gap_ms * NS_PER_MS for gap_ms in metrics.get("inter_chunk_latency", ())),
        tpot_ns=None if tpot_ms is None else tpot_ms * NS_PER_MS,
        output_tokens=metrics["output_sequence_length"],
    )


def limit_command(loop: str, *flags: str, keeps_stamps: bool = False) -> Callable[[Asked, Path], list[str]]:
    def command(asked: Asked, directory: Path) -> list[str]:
        streams = min(asked.concurrency or asked.num_prompts, asked.num_prompts)
        argv = [str(LIMIT), asked.url, "--streams", str(streams), "--requests", str(asked.num_prompts)]
        argv += ["--output-len", str(asked.output_len), "--input-len", str(asked.input_len), "--loop", loop, *flags]
        argv += ["--new-connections"] if asked.new_connections else []
        return [*argv, "--reads", str(directory / "limit.json")] if keeps_stamps else argv

    return command


def seen_by_limit(directory: Path) -> dict[str, list[Seen]]:
    """It knows reads, not events: the gaps are the server's only where each read was one event."""
    told = json.loads((directory / "limit.json").read_text())
    return {
        "limit (uvloop)": [
            Seen(
                request_id=request["request_id"],
                ttft_ns=request["stamps_ns"][0] - request["sent_ns"],
                itl_ns=gaps(request["stamps_ns"]),
                sent_ns=request["sent_ns"],
            )
            for request in told
            if request["stamps_ns"]
        ]
    }


def seen_by_nobody(_directory: Path) -> dict[str, list[Seen]]:
    """A limit that keeps nothing."""
    return {}


PYTHON, VLLM = Path(sys.executable), engines_directory() / "vllm" / "bin" / "vllm"
GUIDELLM, AIPERF = (peers_directory() / name / "bin" / name for name in ("guidellm", "aiperf"))
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
TOOLS = {
    "limit": Tool("limit (uvloop)", PYTHON, limit_command("uvloop"), seen_by_nobody),
    "limit-asyncio": Tool("limit (asyncio)", PYTHON, limit_command("asyncio"), seen_by_nobody),
    "limit-decode": Tool("limit (uvloop) + decode", PYTHON, limit_command("uvloop", "--decode"), seen_by_nobody),
    "limit-stamps": Tool("limit (uvloop)", PYTHON, limit_command("uvloop", keeps_stamps=True), seen_by_limit),
    "benchctl": Tool("benchctl", PYTHON, benchctl_command, seen_by_benchctl, suspect_code=4),
    "benchctl-delayed": Tool("benchctl, delayed", PYTHON, delayed_command, seen_by_nobody, suspect_code=4),
    "vllm": Tool("vllm bench serve", VLLM, vllm_command, seen_by_vllm, OFFLINE),
    "guidellm": Tool("GuideLLM", GUIDELLM, guidellm_command, seen_by_guidellm, OFFLINE),
    "aiperf": Tool("AIPerf", AIPERF, aiperf_command, seen_by_aiperf),  # offline it takes no tokenizer by its path
}
"""By the name that ``--tools`` takes."""


def add_arguments(parser: argparse.ArgumentParser, tools: Iterable[str]) -> None:
    """The options of every benchmark that compares load generators."""
    parser.add_argument("--tools", nargs="+", choices=sorted(TOOLS), default=list(tools), metavar="NAME")
    parser.add_argument("--workers", default="1", help="processes of benchctl's load generator, or auto")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="for one run of one tool")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
