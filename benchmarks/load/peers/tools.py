"""How each load generator is asked for the same load, and how what it tells is read.

All send streamed completions of an exact length to one server. The peers are found where install.sh puts
them, vLLM's where benchctl's engines live.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchctl.engines.environment import engines_directory
from benchctl.errors import BenchctlError
from benchctl.records.files import read_jsonl
from benchctl.records.record import RequestRecord
from benchmarks.common.harness import FailedError
from benchmarks.common.measured_process import Cost, run_measured
from benchmarks.common.truth import Seen, on_cores

NS_PER_S, NS_PER_MS = 1e9, 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is sent: ``concurrency`` requests at a time, or ``rate_per_s`` in a Poisson process, or all at once.

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
    workers: str = "1"
    prompts: Path | None = None
    """Rows with a prompt and the length of its answer, in place of ``output_len``."""
    keeps_reads: bool = False
    """Whether the limit writes down when it read, which costs it something."""


def words(**options: Any) -> list[str]:
    """Options of a command line: True is a switch, None and False are left out."""
    argv = []
    for name, value in options.items():
        if value is not None and value is not False:
            argv += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return argv


def gaps(times_ns: Sequence[int]) -> tuple[float, ...]:
    return tuple(later - earlier for earlier, later in pairwise(times_ns))


def benchctl_words(load: Load) -> list[str]:
    return ["load", load.url, *words(
        model="paced", dialect="openai", num_prompts=load.num_prompts, seed=load.seed, workers=load.workers,
        prompts=load.prompts, input_len=None if load.prompts else load.input_len,
        output_len=None if load.prompts else load.output_len, max_concurrency=load.concurrency,
        request_rate=load.rate_per_s, output=load.directory / "benchctl",
    )]  # fmt: skip


def seen_by_benchctl(directory: Path, *, by_loop: bool = False) -> list[Seen]:
    """By the stamps in the records, or by when the client read: the kernel's stamps later by that much."""
    (run,) = (directory / "benchctl" / "runs").iterdir()
    seen = []
    for record in read_jsonl(run / "requests.jsonl", RequestRecord):
        if record.is_warmup or record.error is not None:
            continue
        choice, tokens = record.choices[0], record.completion_tokens or 0
        late_ns = choice.chunk_late_ns if by_loop and choice.chunk_late_ns else (0,) * len(choice.chunk_ns)
        chunks_ns = [chunk + late for chunk, late in zip(choice.chunk_ns, late_ns, strict=True)]
        seen.append(
            Seen(
                request_id=record.request_id,
                ttft_ns=chunks_ns[0] - record.sent_ns,
                itl_ns=gaps(chunks_ns),
                tpot_ns=(chunks_ns[-1] - chunks_ns[0]) / (tokens - 1) if tokens > 1 else None,
                output_tokens=tokens,
                num_bound=sum(gap == 0 for gap in gaps(choice.chunk_ns)),
                scheduled_ns=record.scheduled_ns,
                sent_ns=record.sent_ns,
            )
        )
    return seen


def vllm_words(load: Load) -> list[str]:
    return ["bench", "serve", *words(
        backend="openai", base_url=load.url, model="paced", tokenizer=load.tokenizer, dataset_name="random",
        ignore_eos=True, random_input_len=load.input_len, random_output_len=load.output_len,
        num_prompts=load.num_prompts, seed=load.seed, request_id_prefix="bench-", save_result=True,
        save_detailed=True, result_dir=load.directory, result_filename="vllm.json",
        max_concurrency=load.concurrency, request_rate=load.rate_per_s, disable_tqdm=True,
    )]  # fmt: skip


def seen_by_vllm(directory: Path) -> list[Seen]:
    """Its details stand in the order of its requests, whose names count up."""
    document = json.loads((directory / "vllm.json").read_text())
    columns = [document[name] for name in ("ttfts", "itls", "output_lens", "start_times", "errors")]
    return [
        Seen(
            request_id=f"bench-{index}",
            ttft_ns=ttft_s * NS_PER_S,
            itl_ns=tuple(gap_s * NS_PER_S for gap_s in itl_s),
            tpot_ns=sum(itl_s) * NS_PER_S / (tokens - 1) if tokens > 1 else None,
            output_tokens=tokens,
            sent_ns=round(start_s * NS_PER_S),
        )
        for index, (ttft_s, itl_s, tokens, start_s, error) in enumerate(zip(*columns, strict=True))
        if not error
    ]


def guidellm_words(load: Load) -> list[str]:
    profile = "kind=throughput" if load.concurrency is None else f"kind=concurrent,streams={load.concurrency}"
    return ["run", *words(
        backend=f"kind=openai_http,target={load.url},model=paced,request_format=/v1/completions",
        profile=profile if load.rate_per_s is None else f"kind=poisson,rate={load.rate_per_s}",
        data=f"kind=synthetic_text,prompt_tokens={load.input_len},output_tokens={load.output_len}",
        constraint=f"kind=max_requests,count={load.num_prompts}",
        tokenizer=f"kind=huggingface_auto,model={load.tokenizer}", seed=f"kind=static,value={load.seed}",
        disable_console=True, output=f"kind=json,path={load.directory / 'guidellm.json'}",
    )]  # fmt: skip


def seen_by_guidellm(directory: Path) -> list[Seen]:
    """It sends no identity: its requests are known by their prompts. It keeps the times of the first and the last
    token."""
    document = json.loads((directory / "guidellm.json").read_text())
    seen = []
    for told in document["benchmarks"][0]["requests"]["successful"]:
        prompt = json.dumps(json.loads(told["request_args"])["body"]["prompt"], sort_keys=True)
        times, tokens = told["info"]["timings"], told["output_tokens"]
        first_s, last_s = times["first_token_iteration"], times["last_token_iteration"]
        seen.append(
            Seen(
                request_id=hashlib.sha256(prompt.encode()).hexdigest()[:16],
                ttft_ns=(first_s - times["request_start"]) * NS_PER_S,
                tpot_ns=(last_s - first_s) * NS_PER_S / (tokens - 1) if tokens > 1 else None,
                output_tokens=tokens,
            )
        )
    return seen


def aiperf_words(load: Load) -> list[str]:
    return ["profile", *words(
        model="paced", url=load.url, endpoint_type="completions", streaming=True, tokenizer=load.tokenizer,
        use_server_token_count=True, use_legacy_max_tokens=True, isl=load.input_len, osl=load.output_len,
        extra_inputs="ignore_eos:true", request_count=load.num_prompts, random_seed=load.seed,
        no_gpu_telemetry=True, concurrency=load.concurrency, request_rate=load.rate_per_s,
        arrival_pattern=load.rate_per_s and "poisson", export_level="records", ui="none",
        output_artifact_dir=load.directory / "aiperf",
    )]  # fmt: skip


def seen_by_aiperf(directory: Path) -> list[Seen]:
    seen = []
    for line in (directory / "aiperf" / "profile_export.jsonl").read_text().splitlines():
        told = json.loads(line)
        metrics = {name: metric["value"] for name, metric in told["metrics"].items()}
        tpot_ms = metrics.get("inter_token_latency")  # its word for what others call TPOT
        seen.append(
            Seen(
                request_id=told["metadata"]["x_request_id"],
                ttft_ns=metrics["time_to_first_token"] * NS_PER_MS,
                itl_ns=tuple(gap_ms * NS_PER_MS for gap_ms in metrics.get("inter_chunk_latency", ())),
                tpot_ns=None if tpot_ms is None else tpot_ms * NS_PER_MS,
                output_tokens=metrics["output_sequence_length"],
            )
        )
    return seen


def limit_words(load: Load, **more: object) -> list[str]:
    streams = min(load.concurrency or load.num_prompts, load.num_prompts)
    return [load.url, *words(
        streams=streams, requests=load.num_prompts, output_len=load.output_len, input_len=load.input_len,
        prompts=load.prompts, reads=load.directory / "limit.json" if load.keeps_reads else None,
        **more,
    )]  # fmt: skip


def seen_by_limit(directory: Path) -> list[Seen]:
    """It knows reads, not events: the gaps are the server's only where each read was one event."""
    if not (directory / "limit.json").exists():
        return []
    return [
        Seen(
            request_id=request["request_id"],
            ttft_ns=request["stamps_ns"][0] - request["sent_ns"],
            itl_ns=gaps(request["stamps_ns"]),
            sent_ns=request["sent_ns"],
        )
        for request in json.loads((directory / "limit.json").read_text())
        if request["stamps_ns"]
    ]


@dataclass(frozen=True, slots=True)
class Tool:
    """One load generator: how it is called, and how the files are read that it leaves."""

    program: Path
    before: tuple[str, ...]
    """Words of its command before those of the load."""
    words: Callable[[Load], Sequence[str]]
    read: Callable[[Path], list[Seen]]
    environment: Mapping[str, str] = field(default_factory=dict)
    suspect_code: int = 0
    """The exit code by which it says that it measured and that its figures are to be doubted."""

    def run(self, load: Load, cores: Sequence[int], *, timeout_s: float, is_watched: bool) -> Cost:
        """To its end, on these cores; its output goes to ``tool.log``. Raises FailedError."""
        if not self.program.exists():
            raise FailedError("not installed")
        if load.prompts and self.program != PYTHON:
            raise FailedError("asks for one length only")
        argv = on_cores([str(self.program), *self.before, *self.words(load)], cores)
        return run_measured(
            argv,
            load.directory / "tool.log",
            timeout_s=timeout_s,
            environment=self.environment,
            is_watched=is_watched,
            good_codes=(0, self.suspect_code),
        )

    def seen(self, directory: Path) -> list[Seen]:
        """What it tells of its requests. Raises FailedError when its files are not as expected."""
        try:
            return self.read(directory)
        except (OSError, LookupError, TypeError, ValueError, BenchctlError) as error:
            raise FailedError(f"what it wrote cannot be read: {type(error).__name__}: {error}") from error


def make_tokenizer(directory: Path) -> Path:
    """A model directory without weights, for the peers that need a tokenizer."""
    argv = [sys.executable, "-m", "benchctl", "models", "make-tiny", str(directory), "--no-weights", "--force"]
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    return directory


_CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"))
PEERS = Path(os.environ.get("BENCHCTL_PEERS", _CACHE / "benchctl" / "peers")).expanduser()
PYTHON, VLLM = Path(sys.executable), engines_directory() / "vllm" / "bin" / "vllm"
GUIDELLM, AIPERF = (PEERS / name / "bin" / name for name in ("guidellm", "aiperf"))
LIMIT, DELAYED = ("-m", "benchmarks.load.peers.limit_client"), ("-m", "benchmarks.load.peers.delayed_client")
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
_PATHS = filter(None, [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH")])
OURS = {"PYTHONPATH": os.pathsep.join(_PATHS)}
TOOLS = {
    "limit": Tool(PYTHON, LIMIT, limit_words, seen_by_limit, OURS),
    "limit-asyncio": Tool(PYTHON, LIMIT, lambda load: limit_words(load, loop="asyncio"), seen_by_limit, OURS),
    "limit-decode": Tool(PYTHON, LIMIT, lambda load: limit_words(load, decode=True), seen_by_limit, OURS),
    "benchctl": Tool(PYTHON, ("-m", "benchctl"), benchctl_words, seen_by_benchctl, OURS, suspect_code=4),
    "benchctl-delayed": Tool(PYTHON, DELAYED, benchctl_words, seen_by_benchctl, OURS, suspect_code=4),
    "vllm": Tool(VLLM, (), vllm_words, seen_by_vllm, OFFLINE),
    "guidellm": Tool(GUIDELLM, (), guidellm_words, seen_by_guidellm, OFFLINE),
    "aiperf": Tool(AIPERF, (), aiperf_words, seen_by_aiperf),  # offline it takes no tokenizer by its path
}
"""By the name that ``--tools`` takes."""
