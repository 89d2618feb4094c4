"""Directories as the LenVM timing scripts write them, with a truth that is known.

The law: Q questions of n samples; question i has ``prompt_of(i)`` and each of its samples ``output_of(i)`` tokens.
All are sent at once and the batch shrinks as they end. A step takes ``STEP_MS`` in the sampler, a guided one
``LVM_MS`` more. Before the load come the eight greedy steps of the server's own request.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEP_MS, LOAD_MS = 0.25, 2500.0
LVM_MS = {"t_lvm_build_pending_ms": 12.0, "t_lvm_forward_ms": 36.0, "t_lvm_apply_guidance_ms": 5.0}
EPOCH_S = 1_760_000_000.0
SECONDS_PER_TOKEN = 0.2
CLIENT_START_S = 6.0
DATASET = "gsm8k"


def prompt_of(question: int) -> int:
    return 100 + question


def output_of(question: int) -> int:
    return 20 + 3 * question


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What was written."""

    path: Path
    num_questions: int
    num_samples: int

    @property
    def prompt_tokens(self) -> int:
        return sum(map(prompt_of, range(self.num_questions)))

    @property
    def output_tokens(self) -> int:
        return self.num_samples * sum(map(output_of, range(self.num_questions)))

    @property
    def num_steps(self) -> int:
        return max(map(output_of, range(self.num_questions)))

    @property
    def makespan_s(self) -> float:
        return SECONDS_PER_TOKEN * self.num_steps


def batch_sizes(num_questions: int, num_samples: int) -> list[int]:
    lengths = [output_of(i) for i in range(num_questions) for _ in range(num_samples)]
    return [sum(length > step for length in lengths) for step in range(max(lengths))]


def own_steps(num: int = 8) -> list[dict[str, Any]]:
    """The greedy steps of the server's first request, numbered from 1."""
    plain = {"t_sampler_total_ms": 0.1, "lvm_active": False, "batch_size": 1, "is_greedy": True}
    return [{"step": i + 1, **plain} for i in range(num)]


def sampled_steps(
    sizes: Sequence[int], *, revision: str = "V1", is_guided: bool = False, first: int = 9, loads: bool = False
) -> list[dict[str, Any]]:
    """Steps of the load in the schema of a revision; the first loads the value model where ``loads``."""
    found = []
    for i, size in enumerate(sizes):
        lvm_ms = sum(LVM_MS.values()) if is_guided else 0.0
        load_ms = LOAD_MS if loads and i == 0 else 0.0
        record: dict[str, Any] = {"step": first + i, "t_pre_lvm_ms": 0.05}
        if is_guided:
            record |= {"t_lvm_build_pending_ms": LVM_MS["t_lvm_build_pending_ms"], "lvm_n_reqs_with_guidance": size}
            record |= {name: time for name, time in LVM_MS.items() if name not in record}
            record |= of_revision(revision, size)
        if revision != "V4" or is_guided:
            record["t_lvm_apply_outer_ms"] = lvm_ms + load_ms
        record |= {"t_sample_ms": 0.15, "t_sampler_total_ms": STEP_MS + lvm_ms + load_ms, "lvm_active": is_guided}
        found.append(record | {"batch_size": size, "is_greedy": False})
    return found


def of_revision(revision: str, size: int) -> dict[str, Any]:
    if revision == "V3":
        return {"lvm_fused_path": 1}
    if revision != "V4":
        return {}
    return {
        "lvm_guided_rows": size, "lvm_forward_rows": size, "lvm_n_candidates": 3 * size, "lvm_candidate_max_len": 1,
        "t_preprocess_logits_ms": 0.01, "t_lvm_build_topk_filter_ms": 1.0,
        "lvm_fused_total_extend_tokens": 4 * size, "lvm_gpu_guidance_path": True, "lvm_has_topk_all_path": False,
    }  # fmt: skip


def as_lines(records: Sequence[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def body_of(question: int, *, num_samples: int, top_k: int, custom_params: dict[str, Any] | None) -> dict[str, Any]:
    messages = [{"role": "system", "content": "You are Qwen."}, {"role": "user", "content": f"What is {question}?"}]
    body: dict[str, Any] = {"model": "default", "messages": messages, "max_tokens": 6000, "temperature": 1.0}
    body |= {"top_p": 1.0, "top_k": top_k, "min_p": 0.01, "n": num_samples}
    return body if custom_params is None else body | {"custom_params": custom_params}


def rows_of(
    question: int, *, num_samples: int, top_k: int, custom_params: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """The lines of one question: one for each choice, all with the usage of the request."""
    output = num_samples * output_of(question)
    usage = {"prompt_tokens": prompt_of(question), "completion_tokens": output}
    usage["total_tokens"] = sum(usage.values())
    body = body_of(question, num_samples=num_samples, top_k=top_k, custom_params=custom_params)
    common = {"idx": question, "question": f"What is {question}?", "answer": str(question), "request": body}
    seconds = SECONDS_PER_TOKEN * output_of(question)
    text = f"It is \\boxed{{{question}}}."
    return [
        {**common, "choice_idx": i, "usage": usage, "text": text, "elapsed_s": seconds,
         "choice": {"message": {"content": text}, "finish_reason": "stop"}}
        for i in range(num_samples)
    ]  # fmt: skip


def failed_row(question: int, *, num_samples: int, top_k: int) -> dict[str, Any]:
    body = body_of(question, num_samples=num_samples, top_k=top_k, custom_params=None)
    common = {"idx": question, "question": f"What is {question}?", "answer": str(question), "request": body}
    return common | {"error": "HTTP 500", "elapsed_s": 1.0}


GUIDED = {"value_scale": -10.0, "value_mode": "centered_exp", "gamma": 0.997}


def write_arm(
    path: Path, tag: str, *, num_questions: int, num_samples: int, revision: str | None, start_s: float
) -> None:
    """All files of one arm; without a ``revision`` its server wrote no steps."""
    is_guided = tag != "baseline"
    top_k, params = (5, GUIDED) if is_guided else (-1, None)
    name = f"{DATASET}.{tag}_q{num_questions}_n{num_samples}_p1.0_topk{top_k}_minp0.01.responses.jsonl"
    rows = [
        row
        for question in range(num_questions)
        for row in rows_of(question, num_samples=num_samples, top_k=top_k, custom_params=params)
    ]
    (path / name).write_bytes(as_lines(rows))
    truth = Truth(path=path, num_questions=num_questions, num_samples=num_samples)
    wall_s = CLIENT_START_S + truth.makespan_s
    meta = {
        "tag": tag, "server_url": "http://127.0.0.1:10020", "dataset": DATASET, "max_questions": num_questions,
        "n_samples_per_q": num_samples, "max_concurrency": num_questions, "max_tokens": 6000, "top_k": top_k,
        "value_scale": GUIDED["value_scale"] if is_guided else None,
        "value_mode": GUIDED["value_mode"] if is_guided else None, "value_gamma": 0.997 if is_guided else None,
        "wall_clock_s": wall_s, "wall_start_epoch_s": start_s, "wall_end_epoch_s": start_s + wall_s,
        "responses_path": f"/elsewhere/results/{name}", "summary": {"n_requests": len(rows)},
        "cmd": ["python", "-m", "inference.tradeoff.sample_eval", "--temperature", "1.0", "--min-p", "0.01"],
    }  # fmt: skip
    (path / f"{tag}.meta.json").write_text(json.dumps(meta, indent=2))
    if revision is not None:
        sizes = batch_sizes(num_questions, num_samples)
        steps = sampled_steps(sizes, revision=revision, is_guided=is_guided, loads=is_guided)
        (path / f"{tag}.timing.jsonl").write_bytes(as_lines([*own_steps(), *steps]))
    gpu = ["timestamp, index, utilization.gpu [%], memory.used [MiB]"]
    gpu += [f"2025/10/09 10:53:{20 + i:02d}.500, 0, {50 + i}, {1000 + i}" for i in range(3)]
    (path / f"{tag}.gpu_samples.csv").write_text("\n".join(gpu) + "\n")


def write_directory(
    path: Path, *, num_questions: int = 4, num_samples: int = 16, revision: str | None = "V1"
) -> Truth:
    """A directory of both arms, run one after the other."""
    path.mkdir(parents=True, exist_ok=True)
    sizes = {"num_questions": num_questions, "num_samples": num_samples}
    write_arm(path, "baseline", revision=revision, start_s=EPOCH_S, **sizes)
    write_arm(path, "lenvm", revision=revision, start_s=EPOCH_S + 100.0, **sizes)
    return Truth(path=path, **sizes)


def responses_of(path: Path, tag: str) -> Path:
    (found,) = path.glob(f"*.{tag}_q*.responses.jsonl")
    return found
