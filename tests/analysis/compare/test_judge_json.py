"""The judge ``json``: an answer is right where it is a JSON document, whatever the question was."""

from functools import partial
from pathlib import Path

import msgspec
import pytest
from support.results.builders import edit_requests, write_request_set, write_results

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.compare.accuracy import quality_lines
from benchctl.analysis.compare.compare import CompareOptions, compare_sides
from benchctl.analysis.compare.judge import judge_named
from benchctl.analysis.experiment.pairing import parse_side
from benchctl.cli.outcome import print_verdicts
from benchctl.profile.load import dump_profile, parse_profile
from benchctl.records.directory import ResultDirectory
from benchctl.records.files import encode
from benchctl.records.record import RequestRecord
from benchctl.report.verdicts import directory_verdict

WHOLE = judge_named("json").is_correct
BEGINNING = judge_named("json", runs_on=True).is_correct


@pytest.mark.parametrize("text", ['{"a": [1, 2.5e3, null]}', " \n[]\t", '{"a": "}"}', '{"a": {"b": true}}'])
def test_a_document_is_valid_with_blanks_around_it(text):
    assert WHOLE(text, "")
    assert BEGINNING(text + " and so on {", "")


@pytest.mark.parametrize(
    "text",
    ["", "yes", "12", '"text"', '{"a": 1', "{'a': 1}", '{"a": NaN}', '{"a": 1,}', '{"a": "\x1d"}', "[" * 100_000],
)
def test_what_is_no_object_or_array_of_json_is_not_valid(text):
    assert not WHOLE(text, "")
    assert not BEGINNING(text, "")


def test_text_around_a_document_is_only_forgiven_behind_it_where_lengths_are_forced():
    assert not WHOLE('{"a": 1} done', "")
    assert not BEGINNING('Sure: {"a": 1}', "")


def forced_results(path) -> ResultDirectory:
    """Two blocks of 4 questions without gold, with 2 answers each; guided, 3 are answered in JSON."""
    results = write_results(path, block_factors=({"baseline": 1.0, "guided": 1.1},) * 2)
    lines = (path / "requests.jsonl").read_bytes().splitlines()
    plain = [{**msgspec.json.decode(line), "answer": None} for line in lines]
    write_request_set(results, b"".join(encode(line) + b"\n" for line in plain))
    for run in results.plan().runs:
        most = 0 if run.variant == "baseline" else 3
        edit_requests(results, run.run_id, partial(answered, num_valid=most))
    return results


def answered(record: RequestRecord, num_valid: int) -> RequestRecord:
    text = '{"a": 1} rest' if record.index < num_valid else "so {"
    choices = tuple(msgspec.structs.replace(choice, text=text) for choice in record.choices)
    return msgspec.structs.replace(record, choices=choices)


def asking_for_json(path: Path) -> Path:
    """The same with a profile whose guided requests ask for JSON."""
    asked = {"structured_outputs": {"json": {"type": "object"}}}
    profile = parse_profile((path / "profile.yaml").read_text(), "p")
    variants = {**profile.variants, "guided": profile.variants["guided"].model_copy(update={"request": asked})}
    document = dump_profile(profile.model_copy(update={"variants": variants}))
    (path / "profile.yaml").write_text(document)
    return path


def test_it_is_chosen_where_requests_ask_for_json_and_counts_the_answers_of_both_sides(tmp_path):
    path = asking_for_json(forced_results(tmp_path / "r").path)
    options = CompareOptions(allow=("request.*",), allow_altered=True)
    sides = (parse_side(f"{path}:baseline"), parse_side(f"{path}:guided"))
    (cell,) = compare_sides(*sides, options).cells
    assert cell.quality is not None
    assert (cell.quality.judge, cell.quality.a_accuracy, cell.quality.b_accuracy) == ("json 1", 0.0, 0.75)
    first = next(iter(quality_lines(cell.quality)))
    assert first.startswith("valid JSON 0.0 % against 75.0 % (0 of 16 against 12 of 16 answers): +75.0 points [")


def test_the_end_of_a_run_counts_the_valid_answers_of_both_sides(tmp_path, capsys):
    path = asking_for_json(forced_results(tmp_path / "r").path)
    analysis = analyze_directory(path)
    print_verdicts(analysis, directory_verdict(analysis, CompareOptions(allow=("request.*",), allow_altered=True)))
    assert "valid JSON 0.0 % against 75.0 % (0 of 16 against 12 of 16 answers)" in capsys.readouterr().out
