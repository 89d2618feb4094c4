"""Loads on servers that end answers early and count tokens that never came: suspect, in every dialect."""

import json
from pathlib import Path

import pytest
from support import cli
from support.servers.early_server import EarlyAnswers, early_server

from benchctl.records.loaded import load_results
from benchctl.records.warning_codes import CLIENT_SUSPECT_CODES, SUSPECT_CODES

SIZE = (
    "--num-prompts",
    "12",
    "--input-len",
    "20",
    "--output-len",
    "64",
    "--num-warmups",
    "0",
    "--max-concurrency",
    "4",
)


def codes_of(tmp_path: Path, answers: EarlyAnswers, *options: str) -> tuple[int, set[str]]:
    """Exit code of a load on such a server, and the codes of its decisive warnings."""
    with early_server(answers) as url:
        done = cli.benchctl("load", url, *SIZE, *options, "-o", "out", cwd=tmp_path, timeout_s=60)
    (run,) = load_results(tmp_path / "out").runs
    decisive = {
        "output-ended-early",
        "output-tokens-unseen",
        "check-failed",
        "failed-requests",
        "finish-reason-unknown",
    }
    assert all(request.completion_tokens == 64 for request in run.requests), done.stderr
    codes = {warning.code for warning in run.record.warnings}
    # A client that a busy machine held up makes a load suspect as well, which says nothing of the answers.
    is_late_alone = codes & SUSPECT_CODES and codes & SUSPECT_CODES <= CLIENT_SUSPECT_CODES
    return 0 if is_late_alone else done.returncode, codes & decisive


@pytest.mark.parametrize(
    ("dialect", "counted_by"),
    [
        ("openai", "last usage"),
        pytest.param("openai", "running usage", marks=pytest.mark.slow),
        ("vllm", "ids"),
        ("sglang", "running usage"),
        pytest.param("sglang", "last usage", marks=pytest.mark.slow),
        ("llamacpp", "timings"),
        pytest.param("transformers", "last usage", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_answers_that_end_early_make_the_load_suspect_in_every_dialect(
    tmp_path: Path, dialect: str, counted_by: str, finish: str
) -> None:
    answers = EarlyAnswers(finish=finish, counted_by=counted_by)
    code, codes = codes_of(tmp_path, answers, "--dialect", dialect, "--chat" if finish == "stop" else "--no-chat")
    assert code == 4
    assert codes & {"output-ended-early", "check-failed"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "answers",
    [
        EarlyAnswers(share=1.0),
        EarlyAnswers(share=1.0, counted_by="timings", tokens_per_chunk=4),
        EarlyAnswers(share=1.0, counted_by="ids", tokens_per_chunk=8),
        EarlyAnswers(is_honest=True, pace_s=0.002),
        EarlyAnswers(is_honest=True, pace_s=0.002, counted_by="timings"),
    ],
    ids=repr,
)
def test_honest_answers_are_done(tmp_path: Path, answers: EarlyAnswers) -> None:
    code, codes = codes_of(tmp_path, answers, "--dialect", "openai")
    assert (code, codes) == (0, set())


def test_speculation_that_nobody_counts_is_noted(tmp_path: Path) -> None:
    code, codes = codes_of(tmp_path, EarlyAnswers(share=1.0, tokens_per_chunk=4), "--dialect", "openai")
    assert (code, codes) == (0, {"output-tokens-unseen"})


def test_an_unknown_finish_reason_makes_the_load_suspect_and_is_named(tmp_path: Path) -> None:
    answers = EarlyAnswers(share=1.0, finish="sudden\x1b[2Jdeath")
    code, codes = codes_of(tmp_path, answers, "--dialect", "openai")
    assert (code, codes) == (4, {"finish-reason-unknown"})
    record = json.loads((tmp_path / "out" / "runs" / "000-b0-load" / "run.json").read_text())
    assert any("sudden\\x1b[2Jdeath" in warning["message"] for warning in record["warnings"])
