"""Built results in which something is planted: drafts, answers to questions, effects of nodes, hostile texts."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
from support.results.builders import (
    PROFILE_YAML,
    STEP_NS,
    T0_NS,
    change_requests,
    edit_manifest,
    edit_requests,
    edit_run,
    rewrite_lines,
    set_positions,
    share_request_set,
    write_results,
)

from benchctl.records.directory import ResultDirectory
from benchctl.records.files import encode
from benchctl.records.record import RequestError, RequestRecord, RunFailure
from benchctl.records.schema import GitState, GpuInfo, NodeInfo, PrometheusSample, ResultWarning, StepRecord

NUM_SEQS = 8


def write_drafted(
    path: Path,
    accepted: Sequence[Sequence[int]],
    *,
    num_draft_tokens: int = 3,
    step_factor: float = 1.5,
    has_bonus: bool = True,
    num_requests: int = 4,
) -> ResultDirectory:
    """An experiment whose variant ``guided`` drafts: ``accepted[block]`` has the tokens that every sequence accepts
    in each decode step.

    All blocks gain as many tokens. A step of it lasts ``step_factor`` times one of the baseline.
    """
    by_block = [[_gained(number, num_draft_tokens, has_bonus=has_bonus) for number in block] for block in accepted]
    (output_tokens,) = {1 + sum(tokens) for tokens in by_block}
    factors = ({"baseline": 1.0, "guided": step_factor},) * len(accepted)
    results = write_results(path, block_factors=factors, output_tokens=output_tokens, num_requests=num_requests)
    results.write_profile(profile_of(num_draft_tokens, has_bonus=has_bonus))
    drafting = [run for run in results.plan().runs if run.variant == "guided"]
    for planned, numbers, tokens in zip(drafting, accepted, by_block, strict=True):
        scatter = 1 + 0.001 * planned.block
        steps = list(_steps(numbers, tokens, num_draft_tokens, round(STEP_NS * step_factor * scatter)))
        _rewrite(results, planned.run_id, steps, (1, *tokens), T0_NS + planned.index)
    return results


def profile_of(num_draft_tokens: int, *, has_bonus: bool = True, more: str = "") -> str:
    """The profile of such an experiment: ``guided`` drafts tokens instead, and no value model guides it."""
    head, _, rest = PROFILE_YAML.partition("    server: {value_model")
    options = f"num_speculative_tokens: {num_draft_tokens}, acceptance: 0.5, draft_cost: 0.05"
    server = f"    server: {{{options}, bonus_token: {str(has_bonus).lower()}}}\n"
    return f"{head}{server}{rest[rest.index('sweep:') :]}{more}"


def _gained(accepted: int, num_draft_tokens: int, *, has_bonus: bool) -> int:
    """Tokens that a sequence gains in a step: without a bonus token none comes after a draft accepted whole."""
    return accepted + (1 if has_bonus or accepted < num_draft_tokens else 0)


def _steps(accepted, tokens, num_draft_tokens, duration_ns):
    for number, (count, output) in enumerate(zip((None, *accepted), (1, *tokens), strict=True)):
        drafts = {}
        if count is not None:
            drafts = {
                "drafts": NUM_SEQS,
                "draft_tokens": NUM_SEQS * num_draft_tokens,
                "accepted_tokens": NUM_SEQS * count,
                "accepted_by_position": tuple(NUM_SEQS * (count > i) for i in range(num_draft_tokens)),
            }
        yield StepRecord(
            step=number + 1,
            start_ns=number * duration_ns,
            dur_ns=duration_ns,
            clock="host",
            phase="prefill" if count is None else "decode",
            num_seqs=NUM_SEQS,
            num_prefill_tokens=20 * NUM_SEQS if count is None else 0,
            num_decode_tokens=0 if count is None else NUM_SEQS * (num_draft_tokens + 1),
            context_tokens=NUM_SEQS * (20 + sum(tokens[:number])),
            output_tokens=NUM_SEQS * output,
            is_greedy=False,
            guided_rows=0,
            candidates=0,
            sections_ns={"model_forward": duration_ns - 200_000, "sampler_total": 200_000, "sample": 200_000},
            **drafts,
        )


def _rewrite(results, run_id, steps, chunk_tokens, sent_ns):
    directory = results.run(run_id)
    (directory.path / "steps.jsonl").write_bytes(b"".join(encode(step) + b"\n" for step in steps))
    arrivals = tuple(sent_ns + step.start_ns + step.dur_ns for step in steps)
    tokens = {"chunk_ns": arrivals, "chunk_tokens": chunk_tokens, "output_tokens": sum(chunk_tokens)}

    def change(request):
        choices = tuple(msgspec.structs.replace(choice, **tokens) for choice in request.choices)
        return msgspec.structs.replace(request, choices=choices, done_ns=arrivals[-1])

    edit_requests(results, run_id, change)
    times = msgspec.structs.replace(directory.read().times, last_token_ns=arrivals[-1], stop_ns=arrivals[-1] + 1000)
    edit_run(results, run_id, times=times)
    _write_counters(directory.path / "prometheus.jsonl", steps, sent_ns, arrivals[-1])


def _write_counters(path, steps, first_ns, last_ns):
    grown = {
        "vllm:generation_tokens_total": sum(step.output_tokens for step in steps),
        "vllm:prefix_cache_hits_total": 0,
    }
    for name in ("drafts", "draft_tokens", "accepted_tokens"):
        grown[f"vllm:spec_decode_num_{name}_total"] = sum(getattr(step, name) or 0 for step in steps)
    by_position = [step.accepted_by_position for step in steps if step.accepted_by_position is not None]
    for position, counts in enumerate(zip(*by_position, strict=True)):
        key = f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{position}"}}'
        grown[key] = sum(counts)
    samples = [
        PrometheusSample(t_ns=t_ns, values={name: float(count * is_last) for name, count in grown.items()})
        for t_ns, is_last in ((first_ns, False), (last_ns, True))
    ]
    path.write_bytes(b"".join(encode(sample) + b"\n" for sample in samples))


Said = Callable[[str, int, int, int], str]
"""Variant, block, number of the question and of the sample to text. The gold answer of question i is 2 i."""


def right(i: int) -> str:
    return rf"We add {i} twice: \boxed{{{2 * i}}}"


def wrong(i: int) -> str:
    return f"It must be more.\n#### {2 * i + 1}"


def write_answers(
    path: Path, said: Said, num_questions: int = 40, blocks: int = 1, n: int = 1, stop: str = "natural"
) -> ResultDirectory:
    """One directory of a baseline and a guided cell, measured with stop mode ``stop``."""
    results = write_results(
        path,
        block_factors=[{"baseline": 1.0, "guided": 1.0}] * blocks,
        num_requests=num_questions,
        output_tokens=8,
        n=n,
    )
    edit_manifest(results, stop=stop)
    profile = results.profile_yaml()
    results.write_profile(f"{profile}stop: {stop}\n")
    if stop == "natural":
        rewrite_lines(results.path / "requests.jsonl", lambda line: {**line, "ignore_eos": False})
        share_request_set(results, results)
    for planned in results.plan().runs:
        edit_requests(results, planned.run_id, _telling(said, planned.variant, planned.block))
    return results


def _telling(said: Said, variant: str, block: int) -> Callable[[RequestRecord], RequestRecord]:
    def told(record: RequestRecord) -> RequestRecord:
        choices = []
        for choice in record.choices:
            text = said(variant, block, record.index, choice.index)
            num_chunks = len(choice.chunk_ns)
            each = len(text) // num_chunks
            chars = (*[each] * (num_chunks - 1), len(text) - each * (num_chunks - 1))
            choices.append(msgspec.structs.replace(choice, text=text, chunk_chars=chars, finish_reason="stop"))
        return msgspec.structs.replace(record, choices=tuple(choices))

    return told


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


HOSTILE = (
    "=cmd()\x1b]0;owned\x07\x9b31m\x1b[31m\x1b[2J\x08\r\u202e\u2028<script>alert(1)</script><img src=x>"
    "[red]a[/red][link=https://evil.example]b[/link] | `c` $\\frac$ @octocat {{ 7*7 }} \x7f\nsecond\tline"
)
LONG = "x" * 1_000_000
LOG = f"\x1b]0;owned\x07\x1b[2J\x9b31m\n\x1b[31mred\x1b[0m\rover\n{LONG}\n{HOSTILE}\n".encode() + b"\xff\xed\xa0\n"
CELLS = [{"top_k": 5, "value_model": value} for value in (HOSTILE, "other")]
FACTORS = [{"baseline": 1 + 0.01 * (i % 3), "guided": 1.3 + 0.013 * (i % 4)} for i in range(4)]


def write_hostile(path: Path) -> Path:
    """Write the directory, with one failed run and one failed request; returns its path."""
    path.mkdir(parents=True)
    results = write_results(path, block_factors=FACTORS, cells=CELLS)
    manifest = results.manifest()
    warning = ResultWarning(code="client-lag", message=HOSTILE, where=HOSTILE)
    edit_manifest(
        results,
        profile=HOSTILE,
        label=HOSTILE + LONG,
        dataset=HOSTILE,
        argv=("benchctl", "run", HOSTILE),
        host=msgspec.structs.replace(manifest.host, hostname=HOSTILE, cpu_model=HOSTILE, platform=HOSTILE),
        git=GitState(sha=HOSTILE, is_dirty=True),
        gpus=(GpuInfo(index=0, name=HOSTILE, uuid=HOSTILE, driver=HOSTILE, memory_bytes=1),),
        warnings=(warning,),
    )
    runs = [run.path.name for run in results.runs()]
    for run_id in runs:
        config = {"model": HOSTILE, "server.note": HOSTILE}
        edit_run(results, run_id, engine_version=HOSTILE, argv=(HOSTILE,), effective_config=config)
    edit_run(results, runs[0], warnings=(warning,))
    failure = RunFailure(cause=HOSTILE, message=HOSTILE + LONG, log_tail=LOG.decode(errors="replace"))
    edit_run(results, runs[-1], state="failed", failure=failure)
    (results.run(runs[-1]).path / "server.log").write_bytes(LOG)
    error = RequestError(kind="server-error", message=HOSTILE + LONG)
    change_requests(results, runs[1], 0, error=error)
    return path
