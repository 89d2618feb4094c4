"""How long `benchctl compare` takes for many steps or tokens, beside the decoding of their lines alone.

    python -m benchmarks.analysis.compare_speed [--steps N] [--batch N] [--blocks N] [--only-times]
        [--repeats N] [--json FILE]

Each directory has N steps: blocks of a baseline and a guided run, whose steps have the sections of the LenVM log.
Each step gives every sequence of its batch a token, of which the requests have time and count, and without
--only-times lateness, characters and text.
The limit is what msgspec takes for the records of the same step logs, kept by nobody: no
checks, requests or statistics. All start a fresh interpreter, which is part of the time; the best of all repeats
counts, and the largest resident size.
"""

import argparse
import hashlib
import random
import sys
import tempfile
from pathlib import Path

import msgspec
import numpy as np

from benchctl.records.directory import ResultDirectory, run_directory_name
from benchctl.records.files import encode
from benchctl.records.integrity import digests_of_run, record_run
from benchctl.records.record import (
    ChoiceRecord,
    Manifest,
    Plan,
    PlannedRun,
    PreparedRequest,
    RequestRecord,
    RunRecord,
    RunTimes,
)
from benchctl.records.schema import HostInfo, StepRecord
from benchmarks.common.measured_process import best_of
from benchmarks.common.table import show, write

OUTPUT_TOKENS = 500
PROMPT_TOKENS = 100
T0_NS = 10**15
WORD = " tok"
PARTS_NS = {"schedule": 90_000, "model_forward": 8_000_000, "pre_lvm": 120_000, "sample": 300_000}
GUIDANCE_NS = {"lvm_build_pending": 1_000_000, "lvm_forward": 4_000_000, "lvm_apply_guidance": 500_000}
PROFILE = """\
name: long-logs
seed: 7
engine: {kind: sim}
model: qwen2.5-7b
workload: {dataset: generated, num_prompts: %d, arrival: {kind: closed-loop, max_concurrency: %d}}
variants:
  baseline: {}
  guided:
    server: {value_model: qwen2.5-1.5b}
    sampling: {top_k: 4}
    guidance: {mode: centered_exp, value_scale: 0.0}
"""

DECODE = """
import sys
import msgspec
from benchctl.records.schema import StepRecord
decoder = msgspec.json.Decoder(StepRecord)
for path in sys.argv[1:]:
    with open(path, "rb") as file:
        while lines := file.read(1 << 19) + file.readline():
            decoder.decode_lines(lines)
"""


def steps_of(rng, num_steps, batch, *, guided):
    """One batch of sequences after another, a token of each with each step; the times scatter by ten percent."""
    start_ns = 0
    for i in range(num_steps):
        token = i % OUTPUT_TOKENS
        means_ns = PARTS_NS | (GUIDANCE_NS if guided else {})
        sections = {name: int(mean_ns * (0.9 + 0.2 * rng.random())) for name, mean_ns in means_ns.items()}
        if guided:
            sections["lvm_apply_outer"] = sum(sections[name] for name in GUIDANCE_NS)
        sampled = ("pre_lvm", "sample", "lvm_apply_outer")
        sections["sampler_total"] = sum(sections.get(name, 0) for name in sampled)
        dur_ns = sections["schedule"] + sections["model_forward"] + sections["sampler_total"]
        yield StepRecord(
            step=i,
            start_ns=T0_NS + start_ns,
            dur_ns=dur_ns,
            clock="host",
            phase="decode" if token else "prefill",
            num_seqs=batch,
            num_prefill_tokens=0 if token else batch * PROMPT_TOKENS,
            num_decode_tokens=batch if token else 0,
            context_tokens=batch * (PROMPT_TOKENS + token),
            output_tokens=batch,
            is_greedy=False,
            guided_rows=batch if guided else 0,
            candidates=4 * batch if guided else 0,
            preempted=0,
            kv_used_blocks=batch * (8 + token // 16),
            sections_ns=sections,
        )
        start_ns += dur_ns


def request_of(prepared, ends_ns, lateness):
    choice = ChoiceRecord(
        index=0,
        chunk_ns=tuple(ends_ns[1:]),
        chunk_tokens=(1,) * OUTPUT_TOKENS,
        output_tokens=OUTPUT_TOKENS,
        finish_reason="length",
    )
    if lateness is not None:
        choice = msgspec.structs.replace(
            choice,
            chunk_late_ns=tuple(map(int, lateness.normal(60_000, 5_000, OUTPUT_TOKENS))),
            chunk_chars=(len(WORD),) * OUTPUT_TOKENS,
            text=WORD * OUTPUT_TOKENS,
        )
    return RequestRecord(
        request_id=prepared.request_id,
        index=prepared.index,
        scheduled_ns=ends_ns[0],
        sent_ns=ends_ns[0],
        done_ns=ends_ns[-1],
        stamps="loop" if lateness is None else "kernel",
        status=200,
        choices=(choice,),
        prompt_tokens=PROMPT_TOKENS,
        completion_tokens=OUTPUT_TOKENS,
    )


def write_run(directory, planned, prepared, batch, rng, *, only_times):
    ends_ns, lateness = [T0_NS], None if only_times else np.random.default_rng(rng.getrandbits(32))
    num_steps = OUTPUT_TOKENS * len(prepared) // batch
    with (directory.path / "steps.jsonl").open("wb") as log:
        for step in steps_of(rng, num_steps, batch, guided=planned.variant == "guided"):
            log.write(encode(step) + b"\n")
            ends_ns.append(step.start_ns + step.dur_ns)
    with directory.append("requests") as requests:
        for i, request in enumerate(prepared):
            first = i // batch * OUTPUT_TOKENS
            requests.write(request_of(request, ends_ns[first : first + OUTPUT_TOKENS + 1], lateness))
    directory.write(
        RunRecord(
            schema_version=3,
            index=planned.index,
            run_id=planned.run_id,
            block=planned.block,
            position=planned.position,
            variant=planned.variant,
            state="done",
            engine="sim",
            effective_config={"model": "qwen2.5-7b"},
            times=RunTimes(first_send_ns=T0_NS, last_token_ns=ends_ns[-1]),
            num_sent=len(prepared),
            num_completed=len(prepared),
            num_failed=0,
        )
    )


def write_results(path, num_steps, batch, num_blocks, seed, *, only_times=False):
    """A directory with ``num_steps`` steps, rounded up to whole answers."""
    rng = random.Random(seed)
    num_requests = batch * -(-num_steps // (2 * num_blocks * OUTPUT_TOKENS))
    prepared = [
        PreparedRequest(
            request_id=f"r{i}",
            index=i,
            arrival_ns=0,
            prompt="x",
            prompt_tokens=PROMPT_TOKENS,
            max_tokens=OUTPUT_TOKENS,
            ignore_eos=True,
            seed=i,
            source=f"generated:{i}",
        )
        for i in range(num_requests)
    ]
    arms = [(block, variant) for block in range(num_blocks) for variant in ("baseline", "guided")]
    planned = [
        PlannedRun(
            index=i,
            run_id=run_directory_name(i, block, variant, {}),
            block=block,
            position=i % 2,
            variant=variant,
        )
        for i, (block, variant) in enumerate(arms)
    ]
    results = ResultDirectory(path)
    content = b"".join(encode(request) + b"\n" for request in prepared)
    results.write_manifest(manifest(num_blocks, hashlib.sha256(content).hexdigest()))
    results.write_profile(PROFILE % (num_requests, batch))
    results.write_prepared_requests(content)
    results.write_plan(Plan(schema_version=3, runs=tuple(planned)))
    for run in planned:
        directory = results.run(run.run_id)
        directory.path.mkdir(parents=True)
        write_run(directory, run, prepared, batch, rng, only_times=only_times)
        directory.write(msgspec.structs.replace(directory.read(), files=digests_of_run(directory)))
        record_run(results, run.run_id)


def manifest(num_blocks, request_set_sha256):
    return Manifest(
        schema_version=3,
        state="done",
        profile="long-logs",
        profile_sha256="1" * 64,
        request_set_sha256=request_set_sha256,
        dataset="generated",
        seed=7,
        blocks=num_blocks,
        baseline="baseline",
        stop="forced",
        engine="sim",
        created_at="2026-01-01T00:00:00Z",
        argv=("benchctl", "run"),
        benchctl_version="0.1.0",
        host=HostInfo(hostname="host", platform="linux", python="3.11", num_cores=2, memory_bytes=1 << 30),
    )


def files_of(sides, name):
    return [path for side in sides for path in sorted(side.glob(f"runs/*/{name}"))]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000, help="of each directory")
    parser.add_argument("--batch", type=int, default=1, help="sequences of each step: tokens are steps times these")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--only-times", action="store_true", help="of each chunk only its time and tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        sides = [work / name for name in ("a", "b")]
        for seed, path in enumerate(sides):
            write_results(path, options.steps, options.batch, options.blocks, seed, only_times=options.only_times)
        logs = sorted(str(path) for side in sides for path in side.glob("runs/*/steps.jsonl"))
        num_bytes = sum(Path(log).stat().st_size for log in logs)
        request_bytes = sum(path.stat().st_size for path in files_of(sides, "requests.jsonl"))
        compare = ["compare", *map(str, sides)]
        rows = [
            best_of(name, [sys.executable, *argv], work, options.repeats, (0, 3))
            for name, argv in (
                ("benchctl compare", ["-m", "benchctl", *compare]),
                ("limit: decoding alone", ["-c", DECODE, *logs]),
            )
        ]
        said = (work / "benchctl compare.log").read_text()
    for row in rows:
        row["of limit"] = row["wall s"] / rows[1]["wall s"]
    sizes = ", ".join(
        f"{size / 2**20:.0f} MiB of {what}"
        for what, size in (("step logs", num_bytes), ("requests", request_bytes))
    )
    show(rows, f"two directories of {options.steps:,} steps and {options.steps * options.batch:,} tokens, {sizes}")
    print(f"\nwhat it found: {said.splitlines()[0]}")
    write(options.json, {"rows": rows, "bytes": num_bytes, "steps": options.steps, "said": said})


if __name__ == "__main__":
    main()
