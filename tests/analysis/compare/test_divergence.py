"""Divergence: which texts are the same, where the others part, and what one side has in common with itself."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.results.answered_questions import write_answers
from support.results.builders import edit_requests

from benchctl.analysis.compare.accuracy import (
    DivergenceComparison,
    compare_divergence,
    compare_texts,
    divergence_sentence,
)
from benchctl.records.directory import ResultDirectory
from benchctl.records.loaded import LoadedRun, load_results
from benchctl.records.record import ChoiceRecord, RequestError, RequestRecord


def request(text: str, chars: tuple[int, ...] | None, tokens: tuple[int, ...] | None = None) -> RequestRecord:
    num_chunks = len(chars) if chars is not None else 3
    choice = ChoiceRecord(
        index=0, chunk_ns=tuple(range(num_chunks)), chunk_chars=chars, chunk_tokens=tokens, text=text
    )
    return RequestRecord(request_id="r", index=0, scheduled_ns=0, done_ns=9, choices=(choice,))


def compare_directory(directory: ResultDirectory, temperature: float | None = 0.0) -> DivergenceComparison:
    runs = load_results(directory.path).runs
    a: list[LoadedRun] = [run for run in runs if run.record.variant == "baseline"]
    b: list[LoadedRun] = [run for run in runs if run.record.variant == "guided"]
    divergence = compare_divergence(a, b, temperature)
    assert divergence is not None
    return divergence


def test_equal_texts_do_not_part_whatever_their_chunks() -> None:
    parting = compare_texts(request("abcd", (1, 3), (1, 2)), request("abcd", (2, 2), (1, 1)), 0)
    assert parting == (None, None, -1)


def test_the_place_is_the_number_of_tokens_before_the_first_character_that_differs() -> None:
    parting = compare_texts(
        request("one two six", (3, 4, 4), (1, 1, 1)), request("one two ten", (3, 4, 4), (1, 1, 1)), 0
    )
    assert parting[:2] == (8, 2)


def test_chunks_of_several_tokens_bound_the_place_from_below_by_the_finer_side() -> None:
    coarse, fine = request("one two six", (7, 4), (2, 2)), request("one two ten", (3, 4, 1, 3), (1, 1, 1, 1))
    assert compare_texts(coarse, fine, 0).after_tokens == compare_texts(fine, coarse, 0).after_tokens == 3


def test_a_text_that_goes_on_parts_where_the_other_ends() -> None:
    parting = compare_texts(request("one", (3,), (1,)), request("one two", (3, 4), (1, 1)), 0)
    assert (parting.after_chars, parting.after_tokens, parting.longer_tokens) == (3, 1, 1)


def test_chunks_are_tokens_where_there_are_as_many_of_both() -> None:
    def counted(text: str) -> RequestRecord:
        counted_request = request(text, (3, 4, 4))
        choices = (msgspec.structs.replace(counted_request.choices[0], output_tokens=3),)
        return msgspec.structs.replace(counted_request, choices=choices, completion_tokens=3)

    assert compare_texts(counted("one two six"), counted("one two ten"), 0).after_tokens == 2


@pytest.mark.parametrize("chars", [None, (3, 4, 4)])
def test_where_tokens_are_unknown_the_place_is_told_in_characters(chars: tuple[int, ...] | None) -> None:
    parting = compare_texts(request("one two six", chars), request("one two ten", chars), 0)
    assert (parting.after_chars, parting.after_tokens) == (8, None)


@given(st.text(max_size=20), st.text(max_size=20), st.text(max_size=20))
def test_swapping_the_sides_changes_no_place_and_turns_the_length(head: str, one: str, other: str) -> None:
    a = request(head + one, (1,) * len(head + one), (1,) * len(head + one))
    b = request(head + other, (1,) * len(head + other), (1,) * len(head + other))
    there, back = compare_texts(a, b, 0), compare_texts(b, a, 0)
    assert there[:2] == back[:2]
    assert there.longer_tokens == -(back.longer_tokens or 0)
    assert there.after_tokens == there.after_chars
    assert there.after_chars is None or there.after_chars >= len(head)


def test_b_against_a_stands_beside_a_against_itself(tmp_path: Path) -> None:
    """Eight texts of 16 characters in 8 chunks. B differs in every second; A in the next block in one of eight."""

    def answers(variant: str, block: int, i: int, sample: int) -> str:
        if variant == "guided" and i % 2:
            return "same text at fXX"
        return "sameX text at fi" if variant == "baseline" and block == 1 and i == 0 else "same text at fir"

    divergence = compare_directory(write_answers(tmp_path / "r", answers, num_questions=8, blocks=2))
    assert (divergence.b_against_a.num_pairs, divergence.b_against_a.num_identical) == (16, 7)
    assert divergence.a_against_a is not None
    assert (divergence.a_against_a.num_pairs, divergence.a_against_a.num_identical) == (8, 7)
    assert (divergence.b_against_a.median_after_tokens, divergence.b_against_a.median_after_chars) == (7, 14)
    assert (divergence.a_against_a.median_after_tokens, divergence.a_against_a.median_after_chars) == (2, 4)
    assert divergence_sentence(divergence) == (
        "identical texts 43.8 % (7 of 16), A against itself in the next block 87.5 % (7 of 8); others part after "
        "7 tokens (median), those of A and A after 2 tokens (median)"
    )


def test_one_block_says_nothing_of_a_against_itself(tmp_path: Path) -> None:
    divergence = compare_directory(
        write_answers(tmp_path / "r", lambda variant, block, i, sample: "alike"), temperature=0.7
    )
    assert divergence.a_against_a is None
    assert divergence.b_against_a.identical_frac == 1
    assert "unknown without a second block" in divergence_sentence(divergence)
    assert "sampled tokens (temperature 0.7) differ" in divergence_sentence(divergence)


def test_answers_that_one_side_lacks_are_counted_and_not_compared(tmp_path: Path) -> None:
    directory = write_answers(tmp_path / "r", lambda variant, block, i, sample: "alike", num_questions=5, n=2)
    reset = RequestError(kind="reset", message="the connection broke")
    run_id = load_results(directory.path).runs[1].record.run_id
    edit_requests(directory, run_id, lambda r: msgspec.structs.replace(r, error=reset) if r.index == 1 else r)
    edit_requests(directory, run_id, lambda r: None if r.index == 2 else r)
    divergence = compare_directory(directory).b_against_a
    assert (divergence.num_pairs, divergence.num_missing) == (6, 4)


def test_sides_without_a_common_answer_have_no_divergence(tmp_path: Path) -> None:
    runs = load_results(write_answers(tmp_path / "r", lambda variant, block, i, sample: "x").path).runs
    assert compare_divergence(runs[:1], ()) is None
