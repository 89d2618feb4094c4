"""One question has one number: whatever prints a quantity prints the same, to the last digit that it shows."""

import csv
import html
import json
import math
import re
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from support import cli
from support.results.builders import edit_run, set_positions, write_results
from support.results.planted import write_on_nodes

import benchctl.analysis.compare.compare
import benchctl.analysis.experiment.experiment
from benchctl.records.schema import FOREIGN_GPU_PROCESS, ResultWarning
from benchctl.report.export import write_report

FACTORS = [
    {
        "baseline": 1.0 + 0.02 * block + 0.01 * (block % 3),
        "guided": 1.0 + 0.02 * block + 0.017 * (block * block % 4),
    }
    for block in range(9)
]
ORDERS = ((0, 1, 2), (2, 0, 1), (1, 0, 2), (0, 2, 1), (2, 1, 0), (0, 1, 2), (1, 2, 0), (0, 2, 1), (1, 0, 2))
NUMBER = r"[-+]?[\d,]+(?:\.\d+)?"
BY_NODE = {("compare",): 6, ("compare", "--all"): 18, ("show",): 6}
"""Commands that show results by node, and the number of their rows."""
RATIO = ("ratio", "ci_low", "ci_high")


@pytest.fixture(name="path", scope="module")
def _path(tmp_path_factory):
    """Nine blocks of three arms in an unbalanced order on a machine that slows down, with a run that violates a
    gate, one whose client was late and one that is suspect for another reason.
    """
    path = tmp_path_factory.mktemp("one") / "r"
    results = write_results(path, block_factors=FACTORS, cells=({"top_k": 2}, {"top_k": 5}))
    results.write_profile(f"{results.profile_yaml()}gates: [foreign-gpu-process]\n".replace("[5]", "[2, 5]"))
    runs = results.plan().runs
    set_positions(results, {run.run_id: ORDERS[run.block][run.index % 3] for run in runs})
    excluding = {
        (1, "baseline", None): ("done", FOREIGN_GPU_PROCESS),
        (3, "baseline", None): ("suspect", "arrival-times-unreliable"),
        (4, "guided", 5): ("suspect", "arrival-times-unreliable"),
        (6, "guided", 2): ("suspect", "warmup-failed"),
    }
    run_ids = {(run.block, run.variant, run.cell.get("top_k")): run.run_id for run in runs}
    for key, (state, code) in excluding.items():
        edit_run(results, run_ids[key], state=state, warnings=(ResultWarning(code=code, message="it was"),))
    said(path, "report")
    return path


@cache
def said(path: Path, *words: str) -> str:
    """What a command on the directory prints."""
    sides = [f"{path}:baseline", f"{path}:guided"] if words[0] == "compare" else [str(path)]
    done = cli.benchctl(words[0], *sides, *words[1:])
    assert done.returncode in {0, 1, 3}, done.stdout + done.stderr
    return done.stdout


def page_of(path: Path) -> tuple[str, Any]:
    """The text and the data of the page of the directory."""
    page = html.unescape((path / "report.html").read_text())
    data = json.loads(re.search(r'id="benchctl-data"[^>]*>(.*?)</script>', page, re.DOTALL)[1])
    return re.sub(r"<[^>]+>", " ", page).replace("\u2212", "-"), data


def read_csv(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


@pytest.fixture(name="truth", scope="module")
def _truth(path):
    """Every metric of every cell at full precision, as ``compare --json`` has it."""
    metrics = json.loads(said(path, "compare", "--json"))["metrics"]
    return {(metric["cell"], metric["name"]): metric for metric in metrics}


def agrees(text: str, value: float) -> bool:
    """Whether a printed number is ``value`` rounded to the digits that it shows."""
    digits = text.replace(",", "").replace("\u2212", "-")
    return abs(float(digits) - value) <= 0.5000001 * 10 ** -len(digits.partition(".")[2])


def cells_of(line: str) -> list[str]:
    """The columns of a line of a table."""
    return re.split(r"\s{2,}", line.strip())


def test_the_experiment_holds_a_gate_suspects_and_an_unbalanced_order(truth):
    assert {truth[f"top_k={k}", "step_ms"]["blocks"] for k in (2, 5)} == {7, 8}
    assert {truth[f"top_k={k}", "wall_s"]["blocks"] for k in (2, 5)} == {6}
    adjusted = truth["top_k=5", "step_ms"]["ratio"]
    plain = [f["guided"] * 15.5 / (f["baseline"] * 10.0) for i, f in enumerate(FACTORS) if i != 1]
    assert adjusted != pytest.approx(sum(plain) / len(plain), rel=1e-3)


def rows_of_table(table: str):
    """Cell, metric and the other columns of each row of the main table of a comparison."""
    cell = ""
    for line in table.split("\n\n")[1].splitlines()[1:]:
        columns = cells_of(line)
        if columns[0].startswith("top_k"):
            cell = columns.pop(0).split(" ")[0]
        yield cell, *columns


def test_the_table_of_compare_its_markdown_and_its_csv_are_of_one_set_of_numbers(path, truth, tmp_path):
    markdown = said(path, "compare", "--markdown")
    said(path, "compare", "--output", str(tmp_path / "c.csv"))
    stored = {(row["cell"], row["name"]): row for row in read_csv(tmp_path / "c.csv")}
    rows = list(rows_of_table(said(path, "compare")))
    assert len(rows) >= 16
    for cell, name, a, b, change, *_ in rows:
        metric = truth[cell, name]
        assert f"| {change} |" in markdown
        for key in ("a", "b", *RATIO):
            assert float(stored[cell, name][key]) == metric[key]
        for text, key in ((a, "a"), (b, "b")):
            assert agrees(re.match(NUMBER, text)[0], metric[key]), (name, text, metric[key])
        changes = [float(text) for text in re.findall(r"([-+][\d.]+)%", change.replace("=", "+0% +0% +0%"))]
        assert changes == pytest.approx([(metric[key] - 1) * 100 for key in RATIO], abs=0.0501)
        assert change == "=" or metric["b"] / metric["a"] == pytest.approx(metric["ratio"], rel=1e-9)


RATE_LIMITED = """
blocks: 6
stop: forced
engine: sim
model: qwen2.5-7b
workload:
  dataset: synthetic
  num_prompts: 24
  input_len: 64
  output_len: 32
  arrival: {kind: poisson, request_rate: 12}
variants:
  baseline: {}
  few: {server: {max_num_seqs: 4}}
allowed_differences: [server.max_num_seqs]
"""


def test_factors_of_the_wall_time_are_the_ratios_of_the_metrics_that_they_are(tmp_path):
    """On a load whose number of steps varies, where outlying blocks of the three metrics are others."""
    (tmp_path / "limited.yaml").write_text(RATE_LIMITED)
    cli.printed("simulate", "--profile", "limited.yaml", "--quiet", "--output", "r", cwd=tmp_path)
    compared = json.loads(cli.benchctl("compare", "r:baseline", "r:few", "--json", cwd=tmp_path).stdout)
    metrics = {metric["name"]: metric for metric in compared["metrics"]}
    wall = compared["cells"][0]["decomposition"]["wall"]
    factors = {factor["name"]: factor for factor in wall["factors"]}
    assert len({tuple(metrics[name]["block_weights"]) for name in ("wall_s", "num_steps", "step_ms")}) == 3
    for factor, name in ((wall, "wall_s"), (factors["steps"], "num_steps"), (factors["time per step"], "step_ms")):
        assert [factor[key] for key in RATIO] == [metrics[name][key] for key in RATIO], name
    assert math.prod(factor["ratio"] for factor in factors.values()) == pytest.approx(wall["ratio"], rel=1e-12)


def test_what_is_called_centre_and_scatter_is_not_moved_by_a_block_that_counts_little(tmp_path):
    """Eight blocks of which one is three times as slow on the baseline alone; the plain scatter is 38 %."""
    factors = [{"baseline": 1 + 0.01 * (i % 3) + 2 * (i == 5), "guided": 1 + 0.01 * (i % 2)} for i in range(8)]
    path = write_results(tmp_path / "r", block_factors=factors).path
    said(path, "report")
    baseline = json.loads(said(path, "show", "--json"))["cells"][0]["columns"]["step_ms"]
    assert baseline.keys() == {"centre", "scatter_frac", "sd", "n"}
    assert baseline["centre"] == pytest.approx(10.1, rel=0.01)
    assert 0.005 < baseline["scatter_frac"] < 0.03
    scatter = f"± {baseline['scatter_frac']:.1%}"
    assert "Cells, centre ± scatter over blocks" in said(path, "show")
    assert all(f" {baseline['centre']:.4g} {scatter} " in said(path, command) for command in ("show", "compare"))
    assert scatter in page_of(path)[0]


def test_tables_of_show_and_exported_files_have_the_ratios_of_compare(path, truth):
    rows = [cells_of(row) for row in re.findall(r"^guided top_k=\d +\d+ .*\[.*$", said(path, "show"), re.MULTILINE)]
    stored = read_csv(path / "sweep_summary.csv")
    documents = json.loads((path / "sweep_summary.json").read_text())["rows"]
    assert len(rows) == len(stored) == len(documents) == 2
    for row, line, document in zip(rows, stored, documents, strict=True):
        names = ("wall_s", "step_ms", "output_throughput")
        wall, step, throughput = (truth[line["cell"], name] for name in names)
        texts = [*re.findall(r"[\d.]+", row[2]), row[3], row[4], row[6]]
        assert all(map(agrees, texts, [*(wall[key] for key in (*RATIO, "a", "b")), step["ratio"]]))
        columns = {"base_wall_s": wall["a"], "lvm_wall_s": wall["b"], "step_ms_ratio": step["ratio"]}
        columns |= {"wall_ratio_ci_low": wall["ci_low"], "wall_ratio_ci_high": wall["ci_high"]}
        columns |= {"base_tok_per_s": throughput["a"], "lvm_tok_per_s": throughput["b"]}
        assert {column: float(line[column]) for column in columns} == pytest.approx(columns, rel=1e-9)
        for short, metric in (("wall", wall), ("tok_per_s", throughput)):
            estimate = document["estimates"][short]
            ratio, p_value = (pytest.approx(metric[key], rel=1e-9) for key in ("ratio", "p"))
            assert (estimate["ratio"], estimate["p_value"]) == (ratio, p_value)


def test_means_and_sections_of_show_are_those_of_compare_where_both_are_of_the_same_blocks(path, truth):
    summary = json.loads((path / "summary.json").read_text())
    _, last = json.loads(said(path, "compare", "--json"))["cells"]
    assert last["cell"] == "top_k=5"
    for side in "ab":
        total_ms = sum(part[f"{side}_s"] for part in last["decomposition"]["sections"]["parts"]) * 1000
        assert total_ms == pytest.approx(truth["top_k=5", "step_ms"][side], rel=1e-9)
    for cell in summary["cells"][1:]:
        for name in ("step_ms", "wall_s", "output_throughput", "ttft_ms", "num_steps"):
            metric, column = truth[f"top_k={cell['cell']['top_k']}", name], cell["columns"][name]
            assert (column["n"], column["centre"]) == (metric["blocks"], pytest.approx(metric["b"], rel=1e-12))
    table = said(path, "show").split("Time per step")[1].split("\n\n")[0]
    (step,) = (cells_of(line) for line in table.splitlines() if line.startswith("step "))
    for text, cell in zip(step[1:], summary["cells"], strict=True):
        assert agrees(text, cell["columns"]["step_ms"]["centre"])


def test_the_page_shows_the_numbers_and_the_metrics_of_compare(path, truth):
    text, data = page_of(path)
    on_page = {(metric["cell"], metric["name"]): metric for metric in data["comparisons"][0]["metrics"]}
    assert on_page.keys() == truth.keys()
    for key, metric in truth.items():
        names = ("a", "b", *RATIO, "p", "verdict", "blocks")
        assert [on_page[key][name] for name in names] == [metric[name] for name in names], key
    table = said(path, "compare")
    changes = re.findall(r"[-+][\d.]+% \[[-+][\d.]+%, [-+][\d.]+%\]", table.split("\n\n")[1])
    assert [change for change in changes if change not in text] == []
    page = (path / "report.html").read_text()
    main = page[page.index('class="metrics main"') : page.index('class="all-metrics"')]
    row = r'<tr class="(?:deciding|exploratory)">\s*<th scope="row"><[^>]+>([a-z0-9_]+)<'
    assert set(re.findall(row, main)) == {name for _, name, *_ in rows_of_table(table)}


@pytest.fixture(name="by_node", scope="module")
def _by_node(tmp_path_factory):
    """Twelve blocks on three nodes, one of which differs; the document of its comparison by node."""
    path = tmp_path_factory.mktemp("nodes") / "r"
    write_on_nodes(path, ("n1", "n2", "n3") * 4, {"n3": 0.05})
    said(path, "report")
    return path, json.loads(said(path, "compare", "--json"))["nodes"]


def rows_by_node(document) -> dict[tuple[str, str, str], dict[str, float]]:
    """Every row of a document by node, by cell, metric and node."""
    return {
        (metric["cell"].removeprefix("guided "), metric["name"], row["node"]): row
        for metric in document["metrics"]
        for row in metric["nodes"]
    }


def test_results_by_node_are_those_of_the_verdict_and_the_same_in_all_documents(by_node):
    path, document = by_node
    truth = rows_by_node(document)
    summary = json.loads((path / "summary.json").read_text())["nodes"]
    assert len(truth) == 2 * 3 * 3
    assert rows_by_node(summary[0]) == truth
    assert rows_by_node(page_of(path)[1]["comparisons"][0]["nodes"]) == truth
    stored = {
        (line["cell"].removeprefix("guided "), line["metric"], line["node"]): (line["ratio"], line["blocks"])
        for line in read_csv(path / "nodes_summary.csv")
    }
    assert stored == {key: (str(row["ratio"]), str(row["num_blocks"])) for key, row in truth.items()}
    metrics = {(m["cell"], m["name"]): m for m in json.loads(said(path, "compare", "--json"))["metrics"]}
    for by_metric in document["metrics"]:
        metric = metrics[by_metric["cell"], by_metric["name"]]
        assert [by_metric["over_blocks"][key] for key in RATIO] == [metric[key] for key in RATIO]


def test_tables_by_node_show_the_numbers_of_the_document(by_node):
    path, document = by_node
    page, _ = page_of(path)
    markdown = said(path, "compare", "--markdown", "--all")
    tables = {words: said(path, *words).split("Results by node")[1].split("\n\n")[0] for words in BY_NODE}
    changes = {
        (row["node"], row["num_blocks"], f"{(row['ratio'] - 1) * 100:+.1f}%")
        for row in rows_by_node(document).values()
    }
    for words, num_rows in BY_NODE.items():
        rows = re.findall(r"\b(n[123]) +(\d+) +([-+][\d.]+%)", tables[words])
        assert len(rows) == num_rows
        assert {(node, int(blocks), change) for node, blocks, change in rows} <= changes, words
        assert all(change in page and change in markdown for *_, change in rows)


@pytest.mark.usefixtures("without_pictures")
def test_each_directory_is_loaded_and_judged_once(path, monkeypatch):
    parse = mock.Mock(wraps=benchctl.analysis.experiment.experiment.parse_profile)
    match = mock.Mock(wraps=benchctl.analysis.compare.compare.match_cells)
    monkeypatch.setattr(benchctl.analysis.experiment.experiment, "parse_profile", parse)
    monkeypatch.setattr(benchctl.analysis.compare.compare, "match_cells", match)
    write_report(path)
    assert (parse.call_count, match.call_count) == (1, 1)


def test_a_simulation_prints_what_show_and_compare_print_of_it(tmp_path):
    output = cli.printed("simulate", "--profile", "ci-smoke", "--blocks", "6", "--quiet", "-o", tmp_path / "r")
    (of_verdict,) = re.findall(r"^guided \S.*\[.*$", output, re.MULTILINE)
    path = tmp_path / "r"
    metrics = {metric["name"]: metric for metric in json.loads(said(path, "compare", "--json"))["metrics"]}
    verdict, name = re.findall(r"^guided \S+ +(\w+), (\w+) ", of_verdict)[0]
    assert verdict == metrics[name]["verdict"]
    changes = re.findall(r"([-+][\d.]+)%", of_verdict)
    assert all(agrees(text, (metrics[name][key] - 1) * 100) for text, key in zip(changes, RATIO, strict=False))
