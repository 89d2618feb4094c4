"""Result directories whose answers are known: what each side said to each question in each block."""

from collections.abc import Callable
from pathlib import Path

import msgspec
from support.results.builders import edit_manifest, edit_requests, rewrite_lines, share_request_set, write_results

from benchctl.records.directory import ResultDirectory
from benchctl.records.record import RequestRecord

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
