"""Built results in which a variant drafts tokens: steps, requests, times and counters that agree."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
from support.results.builders import PROFILE_YAML, STEP_NS, T0_NS, edit_requests, edit_run, write_results

from benchctl.records.directory import ResultDirectory
from benchctl.records.files import encode
from benchctl.records.schema import PrometheusSample, StepRecord

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
