"""Result directories with a known truth, written by the same code that a measurement uses.

The law: a baseline step takes ``step_ns`` and every step yields one token for each sequence; a guided step takes
``step_ns`` plus the three LenVM sections. In a cell with top_k 1 a guided run is greedy and takes the baseline's
time. A block multiplies all times by its own factor.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchctl.records.directory import ResultDirectory, run_directory_name
from benchctl.records.files import encode
from benchctl.records.record import (
    ChoiceRecord,
    Manifest,
    Message,
    Plan,
    PlannedRun,
    PreparedRequest,
    RequestRecord,
    RunRecord,
    RunTimes,
)
from benchctl.records.schema import Cell, GpuSample, HostInfo, HostSample, PrometheusSample, StepRecord

STEP_NS = 10_000_000
LVM_SECTIONS_NS = {"lvm_build_pending": 1_000_000, "lvm_forward": 4_000_000, "lvm_apply_guidance": 500_000}
T0_NS = 1_000_000_000_000
BASELINE, GUIDED = "000-b0-baseline", "001-b0-guided-top_k5"
"""The runs of the first block."""
ONE_BLOCK = ({"baseline": 1.0, "guided": 1.0},)
PROFILE_YAML = """\
name: built
seed: 7
engine: {kind: sim}
model: qwen2.5-7b
hardware: h100-sxm
workload:
  dataset: generated
  num_prompts: 4
  samples_per_prompt: 2
  arrival: {kind: closed-loop, max_concurrency: 4}
variants:
  baseline: {}
  guided:
    server: {value_model: qwen2.5-1.5b}
    guidance: {mode: centered_exp, value_scale: 0.0}
sweep: {top_k: [5]}
allowed_differences: [sampling.top_k, server.value_model, guidance.*]
"""


def prepared(
    num_requests: int, output_tokens: int, n: int = 1, asks: str = "What is"
) -> tuple[PreparedRequest, ...]:
    return tuple(
        PreparedRequest(
            request_id=f"r{i:05d}",
            index=i,
            arrival_ns=0,
            messages=(Message(role="user", content=f"{asks} {i} + {i}?"),),
            prompt_tokens=20,
            max_tokens=output_tokens,
            ignore_eos=True,
            n=n,
            seed=1000 + i,
            source=f"generated:{i}",
            answer=str(2 * i),
        )
        for i in range(num_requests)
    )


def steps_of(
    num_seqs: int,
    output_tokens: int,
    factor: float,
    *,
    guided: bool,
    prompt_tokens: int = 20,
    is_greedy: bool = False,
) -> list[StepRecord]:
    steps, start = [], 0
    for i in range(output_tokens):
        sections = {"model_forward": STEP_NS - 200_000, "sampler_total": 200_000, "sample": 200_000}
        if guided:
            lvm = sum(LVM_SECTIONS_NS.values())
            sections |= {"lvm_apply_outer": lvm, **LVM_SECTIONS_NS, "sampler_total": 200_000 + lvm}
        sections = {name: round(value * factor) for name, value in sections.items()}
        duration = sections["model_forward"] + sections["sampler_total"]
        steps.append(
            StepRecord(
                step=i + 1,
                start_ns=start,
                dur_ns=duration,
                clock="host",
                phase="prefill" if i == 0 else "decode",
                num_seqs=num_seqs,
                num_prefill_tokens=num_seqs * prompt_tokens if i == 0 else 0,
                num_decode_tokens=0 if i == 0 else num_seqs,
                context_tokens=num_seqs * (prompt_tokens + i),
                output_tokens=num_seqs,
                is_greedy=is_greedy,
                guided_rows=num_seqs if guided else 0,
                candidates=3 * num_seqs if guided else 0,
                value_prefill_tokens=num_seqs * prompt_tokens if guided and i == 0 else 0,
                value_extend_tokens=num_seqs if guided and i > 0 else 0,
                preempted=0,
                sections_ns=sections,
            )
        )
        start += duration
    return steps


def load_step() -> StepRecord:
    """The warm-up step in which a value model is loaded: two seconds."""
    load_ns = 2_000_000_000
    return StepRecord(
        step=1,
        start_ns=-load_ns,
        dur_ns=load_ns,
        clock="host",
        phase="decode",
        is_warmup=True,
        num_seqs=1,
        sections_ns={"sampler_total": load_ns, "lvm_apply_outer": load_ns, "value_model_load": load_ns},
    )


def requests_of(
    requests: Sequence[PreparedRequest], steps: Sequence[StepRecord], sent: int = T0_NS
) -> list[RequestRecord]:
    """All requests sent at once; each choice receives one chunk at the end of every step."""
    arrivals = tuple(sent + step.start_ns + step.dur_ns for step in steps)
    return [
        RequestRecord(
            request_id=request.request_id,
            index=request.index,
            scheduled_ns=sent,
            sent_ns=sent,
            done_ns=arrivals[-1],
            status=200,
            choices=tuple(
                ChoiceRecord(
                    index=c,
                    chunk_ns=arrivals,
                    chunk_tokens=(1,) * len(arrivals),
                    output_tokens=len(arrivals),
                    finish_reason="length",
                    text=f"{request.request_id} choice {c}",
                )
                for c in range(request.n)
            ),
            prompt_tokens=request.prompt_tokens,
            completion_tokens=len(arrivals) * request.n,
        )
        for request in requests
    ]


def write_results(
    path: Path,
    *,
    block_factors: Sequence[dict[str, float]] = ({"baseline": 1.0, "guided": 1.0},) * 3,
    cells: Sequence[Cell] = ({"top_k": 5},),
    num_requests: int = 4,
    output_tokens: int = 8,
    n: int = 2,
    seed: int = 7,
    asks: str = "What is",
    state: str = "done",
    loads_in_warmup: bool = False,
) -> ResultDirectory:
    """An experiment of ``len(block_factors)`` blocks: the baseline and one guided run for each cell.

    ``block_factors[b][variant]`` multiplies the step times of that variant in block b. With ``loads_in_warmup``
    every guided run begins with a warm-up step that loads the value model. Each run begins a nanosecond later than
    the one before, because no two runs have the same times.
    """
    results = ResultDirectory(path)
    requests = prepared(num_requests, output_tokens, n, asks)
    content = b"".join(encode(request) + b"\n" for request in requests)
    results.write_manifest(
        Manifest(
            schema_version=3,
            state=state,
            profile="built",
            profile_sha256="1" * 64,
            request_set_sha256=hashlib.sha256(content).hexdigest(),
            dataset="generated",
            seed=seed,
            blocks=len(block_factors),
            baseline="baseline",
            stop="forced",
            engine="sim",
            created_at="2026-01-01T00:00:00Z",
            argv=("benchctl", "run"),
            benchctl_version="0.1.0",
            host=HostInfo(hostname="host", platform="linux", python="3.11", num_cores=2, memory_bytes=1 << 30),
        )
    )
    results.write_profile(PROFILE_YAML)
    results.write_prepared_requests(content)
    planned: list[PlannedRun] = []
    for block, factors in enumerate(block_factors):
        for position, (variant, cell) in enumerate([("baseline", {}), *(("guided", cell) for cell in cells)]):
            index = len(planned)
            planned.append(
                PlannedRun(
                    index=index,
                    run_id=run_directory_name(index, block, variant, cell),
                    block=block,
                    position=position,
                    variant=variant,
                    cell=cell,
                )
            )
            write_run(
                results, planned[-1], requests, factors[variant], loads=loads_in_warmup and variant == "guided"
            )
    results.write_plan(Plan(schema_version=3, runs=tuple(planned)))
    return results


def set_positions(results: ResultDirectory, positions: Mapping[str, int]) -> None:
    """Plan and record runs, by run_id, at other positions of their blocks."""
    plan = results.plan()
    runs = tuple(
        msgspec.structs.replace(run, position=positions.get(run.run_id, run.position)) for run in plan.runs
    )
    results.write_plan(msgspec.structs.replace(plan, runs=runs))
    for run_id, position in positions.items():
        edit_run(results, run_id, position=position)


def rewrite_lines(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Replace every record of a JSON Lines file by what ``change`` makes of it."""
    changed = [change(msgspec.json.decode(line)) for line in path.read_bytes().splitlines()]
    path.write_bytes(b"".join(encode(record) + b"\n" for record in changed))


def write_run(
    results: ResultDirectory,
    planned: PlannedRun,
    requests: Sequence[PreparedRequest],
    factor: float,
    *,
    loads: bool = False,
) -> None:
    directory = results.run(planned.run_id)
    num_seqs = sum(request.n for request in requests)
    is_greedy = planned.cell.get("top_k") == 1
    guided = planned.variant == "guided" and not is_greedy
    steps = steps_of(num_seqs, requests[0].max_tokens, factor, guided=guided, is_greedy=is_greedy)
    first = T0_NS + planned.index
    records = requests_of(requests, steps, first)
    last = max(record.done_ns or 0 for record in records)
    directory.write(
        RunRecord(
            schema_version=3,
            index=planned.index,
            run_id=planned.run_id,
            block=planned.block,
            position=planned.position,
            variant=planned.variant,
            cell=planned.cell,
            state="done",
            attempt=1,
            argv=("python", "-m", "benchctl.sim"),
            engine="sim",
            effective_config={"model": "qwen2.5-7b", "sampling.top_k": planned.cell.get("top_k", -1)}
            | ({"server.value_model": "qwen2.5-1.5b"} if planned.variant == "guided" else {}),
            started_at="2026-01-01T00:00:00Z",
            times=RunTimes(
                launch_ns=first - 2_000_000_000,
                ready_ns=first - 1_000_000_000,
                first_send_ns=first,
                last_token_ns=last,
                stop_ns=last + 1_000_000,
            ),
            num_sent=len(records),
            num_completed=len(records),
            num_failed=0,
        )
    )
    with directory.append("requests") as writer:
        for record in records:
            writer.write(record)
    with directory.append("prometheus") as writer:
        for t_ns, total in ((T0_NS, 0), (last, sum(record.completion_tokens or 0 for record in records))):
            values = {"vllm:generation_tokens_total": float(total), "vllm:prefix_cache_hits_total": 0.0}
            writer.write(PrometheusSample(t_ns=t_ns, values=values))
    with directory.append("steps") as writer:
        for step in [load_step(), *steps] if loads else steps:
            writer.write(step)


def edit_manifest(results: ResultDirectory, **changes: Any) -> None:
    """Replace fields of ``manifest.json``."""
    results.write_manifest(msgspec.structs.replace(results.manifest(), **changes))


def edit_run(results: ResultDirectory, run_id: str, **changes: Any) -> None:
    """Replace fields of one ``run.json``."""
    directory = results.run(run_id)
    directory.write(msgspec.structs.replace(directory.read(), **changes))


def write_request_set(results: ResultDirectory, content: bytes) -> None:
    """Let ``content`` be the request set from the beginning."""
    results.write_prepared_requests(content)
    edit_manifest(results, request_set_sha256=hashlib.sha256(content).hexdigest())


def share_request_set(results: ResultDirectory, other: ResultDirectory) -> None:
    """Let ``results`` have been asked what ``other`` was, whatever came of it."""
    write_request_set(results, (other.path / "requests.jsonl").read_bytes())


def edit_requests(
    results: ResultDirectory, run_id: str, change: Callable[[RequestRecord], RequestRecord | None]
) -> None:
    """Replace each request of one run by what ``change`` makes of it; None leaves it out."""
    path = results.run(run_id).path / "requests.jsonl"
    changed = [change(request) for request in results.run(run_id).requests()]
    path.write_bytes(b"".join(encode(request) + b"\n" for request in changed if request is not None))


def change_requests(results: ResultDirectory, run_id: str, *indices: int, **fields: Any) -> None:
    """Replace fields of the requests of one run: of those at ``indices``, or of all."""
    edit_requests(
        results,
        run_id,
        lambda each: msgspec.structs.replace(each, **fields) if each.index in (indices or [each.index]) else each,
    )


def change_steps(results: ResultDirectory, run_id: str, *numbers: int, **fields: Any) -> None:
    """Replace fields of the steps of one run: of those with these numbers, or of all."""
    rewrite_lines(
        results.run(run_id).step_log,
        lambda step: step | fields if step["step"] in (numbers or [step["step"]]) else step,
    )


def run_ids(results: ResultDirectory, variant: str = "guided") -> list[str]:
    """The runs of a variant, by block."""
    return [run.run_id for run in results.plan().runs if run.variant == variant]


def write_samples(results: ResultDirectory) -> None:
    """Add samples of a GPU and of the host to every run, 5 ms apart."""
    for run in results.runs():
        with run.append("gpu") as gpu, run.append("host") as host:
            for i in range(20):
                t_ns = T0_NS + i * 5_000_000
                gpu.write(GpuSample(t_ns=t_ns, index=0, source="nvml", power_w=300.0 + i, utilization_frac=0.9))
                host.write(HostSample(t_ns=t_ns, server_cpu_cores=1.0 + i / 20, client_cpu_cores=0.2))
