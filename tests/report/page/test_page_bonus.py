"""The verdict on backfill of bonus tokens: page, ``show`` and ``micro bonus`` read the same one."""

import html
import json
import re
from pathlib import Path

import pytest
from support.bonus_directory import LISTENER, launch_bound, measured
from support.cli import benchctl
from support.fake_passes import FakeWorkers

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.bonus import measured_bonus, verdict_sentences
from benchctl.measure.directory import Origin
from benchctl.micro.experiment import measure_forward
from benchctl.micro.points import forward_profile, grid_of_points
from benchctl.report.documents import summary_document
from benchctl.report.export import write_report
from benchctl.report.page.page import directory_page
from benchctl.report.time_tables import bonus_table

EXAMPLE = Path("results/example")


@pytest.fixture(name="directory", scope="module")
def _directory(tmp_path_factory) -> Path:
    return measured(tmp_path_factory.mktemp("bonus"), batch_sizes=(2, 4), blocks=6)


@pytest.fixture(name="page", scope="module")
def _page(directory) -> str:
    return directory_page(analyze_directory(directory))


def section_of(page: str) -> str:
    (section,) = re.findall(r'<section class="backfill">(.*?)</section>', page, re.DOTALL)
    return html.unescape(section).replace("\N{MINUS SIGN}", "-")


def bonus_in_data(page: str):
    (data,) = re.findall(r'<script type="application/json" id="benchctl-data">(.*?)</script>', page, re.DOTALL)
    return [directory.get("bonus") for directory in json.loads(data)["directories"]]


def is_without_verdict(path: Path) -> bool:
    """Nothing on the page, in its data and in the summary speaks of backfill."""
    analysis = analyze_directory(path)
    page = directory_page(analysis)
    is_absent = '<section class="backfill">' not in page and bonus_in_data(page) == [None]
    return is_absent and analysis.bonus is None and "bonus" not in summary_document(analysis)


def test_the_page_has_every_row_and_every_sentence_of_the_verdict(page, directory):
    section = section_of(page)
    (verdict,) = measured_bonus(directory).verdicts
    cells = re.findall(r"<td[^>]*>(.*?)</td>", section)
    assert cells == [
        text for modes in verdict.mode_pairs for row in bonus_table(verdict, modes).texts() for text in row
    ]
    assert len(verdict.comparisons) == 4 * (2 + 3)
    sentences = re.findall(r"<li>(.*?)</li>", section)
    assert [sentence.lower() for sentence in sentences] == [text.lower() for text in verdict_sentences(verdict)]
    assert sentences[-1].endswith("of each, over 6 blocks")
    assert "256 tokens in the cache of each sequence" in section
    assert "llama-68m, float16, on AMD EPYC" in section


def test_the_top_of_the_page_is_the_answer_on_backfill_with_the_exit_code_of_the_command(page, directory):
    top = html.unescape(re.search(r"<header>(.*?)</header>", page, re.DOTALL)[1])
    done = benchctl("micro", "bonus", directory)
    assert f"exit code {done.returncode}" in top
    (verdict,) = measured_bonus(directory).verdicts
    assert all(sentence.lower() in top.lower() for sentence in verdict_sentences(verdict)[:-1])
    assert ("decided</span></h1>" in top) == (done.returncode == 0)
    assert "graph" in re.findall(r'<ul class="each">(.*?)</ul>', top, re.DOTALL)[0], "modes are compared beside it"


def test_too_few_blocks_leave_the_top_inconclusive_with_the_number_of_decided_rows(tmp_path):
    path = measured(tmp_path, batch_sizes=(2,), modes=("eager",), blocks=2)
    top = re.search(r"<header>(.*?)</header>", directory_page(analyze_directory(path)), re.DOTALL)[1]
    assert "inconclusive</span></h1>" in top
    assert "0 of 2 comparisons are decided; " in top
    assert "exit code 3" in top


def test_page_show_summary_and_command_have_the_same_rows(page, directory):
    printed = json.loads(benchctl("micro", "bonus", directory, "--json").stdout)
    shown = json.loads(benchctl("show", directory, "--json").stdout)["bonus"]
    write_report(directory)
    stored = json.loads((directory / "summary.json").read_text())["bonus"]
    assert len(printed["verdicts"][0]["comparisons"]) == 20
    assert shown["verdicts"] == stored["verdicts"] == printed["verdicts"]
    assert bonus_in_data(page) == [shown]


def test_show_prints_the_sentences_that_the_command_prints(directory):
    lines = [line for line in benchctl("show", directory).stdout.splitlines() if line.startswith("* ")]
    printed = benchctl("micro", "bonus", directory).stdout
    assert "* decode and prefill with graphs: batch expansion is cheaper from batch 2 on (measured" in printed
    assert len(lines) >= 5
    assert all(line in printed for line in lines[:5])


def test_each_context_has_a_heading_and_a_table_of_its_own(tmp_path):
    path = measured(tmp_path, batch_sizes=(2,), modes=("eager",), contexts=(64, 2048), blocks=2)
    section = section_of(directory_page(analyze_directory(path)))
    assert re.findall(r"<h3>(\d+) tokens in the cache", section) == ["64", "2048"]
    assert section.count("<table>") == 2
    assert section.count("no verdict from 2 blocks; 6 are the least that give one") == 2


def test_passes_and_not_the_name_of_the_profile_say_that_ways_of_backfill_are_compared(tmp_path):
    path = measured(tmp_path, batch_sizes=(2,), modes=("eager",), blocks=1, name="other")
    assert "bonus" not in path.parent.name
    assert bonus_in_data(directory_page(analyze_directory(path)))[0]["verdicts"]


@pytest.mark.parametrize("context", [0, 256])
def test_forward_passes_that_compare_no_ways_of_backfill_have_no_such_section(tmp_path, context):
    points = grid_of_points(("decode", "prefill"), (1, 2, 4), (context,), (1,))
    profile = forward_profile(
        points, model="llama-68m", device="cpu", dtype="float16", modes=("eager",), blocks=1, replays=4
    )
    origin = Origin(output_root=tmp_path, argv=("benchctl", "micro", "forward"))
    workers = FakeWorkers(launch_bound)
    outcome = measure_forward(profile, origin, LISTENER, workers.start)
    assert is_without_verdict(outcome.path)


def test_requests_have_no_such_section():
    assert is_without_verdict(EXAMPLE)


def test_an_interrupted_measurement_is_shown_with_what_is_missing(tmp_path):
    workers = FakeWorkers(launch_bound, error=KeyboardInterrupt(), fails_at=3)
    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path, batch_sizes=(2,), modes=("eager",), workers=workers)
    (path,) = (path for path in tmp_path.glob("*/*") if not path.is_symlink())
    section = section_of(directory_page(analyze_directory(path)))
    sentence = "2 of 2 comparisons behind 256 tokens in the cache are missing, at batch 2: "
    assert sentence in section
    assert "<table>" not in section
    done = benchctl("show", path)
    assert done.returncode == 0, done.stderr
    assert sentence in done.stdout
