"""One question has one number: whatever prints a quantity prints the same, to the last digit that it shows."""

import csv
import html
import json
import math
import re
from functools import cache
from pathlib import Path

import pytest
import typer
from support import cli
from support.results.builders import edit_run, set_positions, write_results
from support.results.nodes import write_on_nodes
from typer.testing import CliRunner

import benchctl.analysis.experiment.experiment
import benchctl.profile.load
from benchctl.records.schema import FOREIGN_GPU_PROCESS, ResultWarning

FACTORS = [
    {
        "baseline": 1.0 + 0.02 * block + 0.01 * (block % 3),
        "guided": 1.0 + 0.02 * block + 0.017 * (block * block % 4),
    }
    for block in range(9)
]
ORDERS = ((0, 1, 2), (2, 0, 1), (1, 0, 2), (0, 2, 1), (2, 1, 0), (0, 1, 2), (1, 2, 0), (0, 2, 1), (1, 0, 2))
NUMBER = r"[-+]?[\d,]+(?:\.\d+)?"
SWEEP_METRICS = {"wall": "wall_s", "tok_per_s": "output_throughput"}


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
    for run in runs:
        if (key := (run.block, run.variant, run.cell.get("top_k"))) in excluding:
            state, code = excluding[key]
            edit_run(
                results, run.run_id, state=state, warnings=(ResultWarning(code=code, message=f"{code} it was"),)
            )
    said(path, "report")
    return path


@cache
def said(path: Path, *words: str) -> str:
    """What a command on the directory prints."""
    sides = [f"{path}:baseline", f"{path}:guided"] if words[0] == "compare" else [str(path)]
    done = cli.benchctl(words[0], *sides, *words[1:])
    assert done.returncode in {0, 1, 3}, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(name="truth", scope="module")
def _truth(path):
    """Every metric of every cell at full precision, as ``compare --json`` has it."""
    found = json.loads(said(path, "compare", "--json"))
    return {(metric["cell"], metric["name"]): metric for metric in found["metrics"]}


def agrees(text: str, value: float) -> bool:
    """Whether a printed number is ``value`` rounded to the digits that it shows."""
    digits = text.replace(",", "").replace("\u2212", "-")
    decimals = len(digits.partition(".")[2])
    return abs(float(digits) - value) <= 0.5000001 * 10**-decimals


def cells_of(line: str) -> list[str]:
    """The columns of a line of a table."""
    return re.split(r"\s{2,}", line.strip())


def test_the_experiment_holds_a_gate_suspects_and_an_unbalanced_order(truth):
    assert {truth[f"top_k={k}", "step_ms"]["blocks"] for k in (2, 5)} == {7, 8}
    assert {truth[f"top_k={k}", "wall_s"]["blocks"] for k in (2, 5)} == {6}
    adjusted = truth["top_k=5", "step_ms"]["ratio"]
    plain = [f["guided"] * 15.5 / (f["baseline"] * 10.0) for i, f in enumerate(FACTORS) if i != 1]
    assert adjusted != pytest.approx(sum(plain) / len(plain), rel=1e-3)


def test_the_table_of_compare_its_markdown_and_its_csv_are_of_one_set_of_numbers(path, truth, tmp_path):
    table, markdown = said(path, "compare"), said(path, "compare", "--markdown")
    said(path, "compare", "--output", str(tmp_path / "c.csv"))
    stored = {
        (row["cell"], row["name"]): row for row in csv.DictReader((tmp_path / "c.csv").read_text().splitlines())
    }
    seen = 0
    cell = ""
    for line in table.split("\n\n")[1].splitlines()[1:]:
        columns = cells_of(line)
        if columns[0].startswith("top_k"):
            cell = columns.pop(0).split(" ")[0]
        name, a, b, change, *_ = columns
        metric = truth[cell, name]
        assert f"| {change} |" in markdown
        for key in ("a", "b", "ratio", "ci_low", "ci_high"):
            assert float(stored[cell, name][key]) == metric[key]
        for text, key in ((a, "a"), (b, "b")):
            assert agrees(re.match(NUMBER, text)[0], metric[key]), (name, text, metric[key])
        seen += 1
        if change == "=":
            assert metric["ratio"] == metric["ci_low"] == metric["ci_high"] == 1
            continue
        shown = [float(text) for text in re.findall(r"([-+][\d.]+)%", change)]
        for percent, key in zip(shown, ("ratio", "ci_low", "ci_high"), strict=True):
            assert percent == pytest.approx((metric[key] - 1) * 100, abs=0.0501)
        assert metric["b"] / metric["a"] == pytest.approx(metric["ratio"], rel=1e-9)
    assert seen >= 16


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
    done = cli.benchctl("simulate", "--profile", "limited.yaml", "--quiet", "--output", "r", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    compared = json.loads(cli.benchctl("compare", "r:baseline", "r:few", "--json", cwd=tmp_path).stdout)
    metrics = {metric["name"]: metric for metric in compared["metrics"]}
    wall = compared["cells"][0]["decomposition"]["wall"]
    factors = {factor["name"]: factor for factor in wall["factors"]}
    assert len({tuple(metrics[name]["block_weights"]) for name in ("wall_s", "num_steps", "step_ms")}) == 3
    for factor, name in ((wall, "wall_s"), (factors["steps"], "num_steps"), (factors["time per step"], "step_ms")):
        for key in ("ratio", "ci_low", "ci_high"):
            assert factor[key] == metrics[name][key], (name, key)
    assert math.prod(factor["ratio"] for factor in factors.values()) == pytest.approx(wall["ratio"], rel=1e-12)


def test_what_is_called_centre_and_scatter_is_not_moved_by_a_block_that_counts_little(tmp_path):
    """Eight blocks of which one is three times as slow on the baseline alone; the plain scatter is 38 %."""
    factors = [{"baseline": 1 + 0.01 * (i % 3) + 2 * (i == 5), "guided": 1 + 0.01 * (i % 2)} for i in range(8)]
    path = write_results(tmp_path / "r", block_factors=factors).path
    baseline = json.loads(said(path, "show", "--json"))["cells"][0]["columns"]["step_ms"]
    assert baseline.keys() == {"centre", "scatter_frac", "sd", "n"}
    assert baseline["centre"] == pytest.approx(10.1, rel=0.01)
    assert 0.005 < baseline["scatter_frac"] < 0.03
    shown = f"{baseline['centre']:.4g} ± {baseline['scatter_frac']:.1%}"
    assert "Cells, centre ± scatter over blocks" in said(path, "show")
    assert "weighted by the estimator robust" in said(path, "show")
    assert f" {shown} " in said(path, "show")
    assert f" {shown} " in said(path, "compare")
    assert shown.split(" ± ")[1] in html.unescape(
        cli.benchctl("report", path).stdout + (path / "report.html").read_text()
    )


def test_tables_of_show_and_exported_files_have_the_ratios_of_compare(path, truth):
    shown = said(path, "show")
    rows = [cells_of(line) for line in shown.splitlines() if re.match(r"guided top_k=\d +\d+ .*\[", line)]
    stored = list(csv.DictReader((path / "sweep_summary.csv").read_text().splitlines()))
    documents = json.loads((path / "sweep_summary.json").read_text())["rows"]
    assert len(rows) == len(stored) == len(documents) == 2
    for row, line, document in zip(rows, stored, documents, strict=True):
        cell = line["cell"]
        wall, step = truth[cell, "wall_s"], truth[cell, "step_ms"]
        ratio, low, high = re.findall(r"[\d.]+", row[2])
        for text, key in ((ratio, "ratio"), (low, "ci_low"), (high, "ci_high")):
            assert agrees(text, wall[key])
        assert agrees(row[3], wall["a"])
        assert agrees(row[4], wall["b"])
        assert agrees(row[6], step["ratio"])
        for short, name in SWEEP_METRICS.items():
            metric = truth[cell, name]
            full = short if short == "wall" else "tok_per_s"
            columns = (f"base_{full}_s", f"lvm_{full}_s") if short == "wall" else (f"base_{full}", f"lvm_{full}")
            assert float(line[columns[0]]) == pytest.approx(metric["a"], rel=1e-12)
            assert float(line[columns[1]]) == pytest.approx(metric["b"], rel=1e-12)
            assert document["estimates"][short]["ratio"] == pytest.approx(metric["ratio"], rel=1e-12)
            assert document["estimates"][short]["p_value"] == pytest.approx(metric["p"], rel=1e-9)
        assert float(line["wall_ratio_ci_low"]) == pytest.approx(wall["ci_low"], rel=1e-9)
        assert float(line["wall_ratio_ci_high"]) == pytest.approx(wall["ci_high"], rel=1e-9)
        assert float(line["step_ms_ratio"]) == pytest.approx(step["ratio"], rel=1e-9)


def test_means_and_sections_of_show_are_those_of_compare_where_both_are_of_the_same_blocks(path, truth):
    summary = json.loads((path / "summary.json").read_text())
    guided = {cell["cell"]["top_k"]: cell for cell in summary["cells"] if cell["variant"] == "guided"}
    parts = {
        cell["cell"]: {part["name"]: part for part in cell["decomposition"]["sections"]["parts"]}
        for cell in json.loads(said(path, "compare", "--json"))["cells"]
    }
    for metric, sections in ((truth["top_k=5", "step_ms"], parts["top_k=5"]),):
        total = sum(part["b_s"] for part in sections.values()) * 1000
        assert total == pytest.approx(metric["b"], rel=1e-9)
        assert sum(part["a_s"] for part in sections.values()) * 1000 == pytest.approx(metric["a"], rel=1e-9)
    for top_k, cell in guided.items():
        for name in ("step_ms", "wall_s", "output_throughput", "ttft_ms", "num_steps"):
            metric = truth[f"top_k={top_k}", name]
            assert cell["columns"][name]["n"] == metric["blocks"]
            assert cell["columns"][name]["centre"] == pytest.approx(metric["b"], rel=1e-12)
    table = said(path, "show").split("Time per step")[1].split("\n\n")[0]
    (step,) = (cells_of(line) for line in table.splitlines() if line.startswith("step "))
    for text, cell in zip(step[1:], summary["cells"], strict=True):
        assert agrees(text, cell["columns"]["step_ms"]["centre"])


def test_the_page_shows_the_numbers_of_compare(path, truth):
    page = html.unescape((path / "report.html").read_text())
    data = json.loads(re.search(r'id="benchctl-data"[^>]*>(.*?)</script>', page, re.DOTALL)[1])
    (comparison,) = data["comparisons"]
    found = {(metric["cell"], metric["name"]): metric for metric in comparison["metrics"]}
    assert found.keys() == truth.keys()
    for key, metric in truth.items():
        for name in ("a", "b", "ratio", "ci_low", "ci_high", "p", "verdict", "blocks"):
            assert found[key][name] == metric[name], (key, name)
    text = re.sub(r"<[^>]+>", " ", page).replace("\u2212", "-")
    terminal = said(path, "compare").split("\n\n")[1]
    for change in re.findall(r"[-+][\d.]+% \[[-+][\d.]+%, [-+][\d.]+%\]", terminal):
        assert change in text


def test_terminal_and_page_show_the_same_metrics(path):
    page = (path / "report.html").read_text()
    main = page[page.index('class="metrics main"') : page.index('class="all-metrics"')]
    on_page = set(re.findall(r'<tr class="(?:deciding|exploratory)">\s*<th scope="row"><[^>]+>([a-z0-9_]+)<', main))
    rows = [cells_of(line) for line in said(path, "compare").split("\n\n")[1].splitlines()[1:]]
    in_terminal = {columns[1] if columns[0].startswith("top_k") else columns[0] for columns in rows}
    assert on_page == in_terminal


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


def test_results_by_node_are_the_same_in_all_documents(by_node):
    path, document = by_node
    truth = rows_by_node(document)
    summary = json.loads((path / "summary.json").read_text())["nodes"]
    page = html.unescape((path / "report.html").read_text())
    data = json.loads(re.search(r'id="benchctl-data"[^>]*>(.*?)</script>', page, re.DOTALL)[1])
    assert len(truth) == 2 * 3 * 3
    assert rows_by_node(summary[0]) == truth
    assert rows_by_node(data["comparisons"][0]["nodes"]) == truth
    lines = list(csv.DictReader((path / "nodes_summary.csv").read_text().splitlines()))
    assert len(lines) == len(truth)
    for line in lines:
        row = truth[line["cell"].removeprefix("guided "), line["metric"], line["node"]]
        assert float(line["ratio"]) == row["ratio"]
        assert int(line["blocks"]) == row["num_blocks"]


def test_results_by_node_are_those_of_the_verdict(by_node):
    path, document = by_node
    metrics = {(m["cell"], m["name"]): m for m in json.loads(said(path, "compare", "--json"))["metrics"]}
    for by_metric in document["metrics"]:
        metric, over_blocks = metrics[by_metric["cell"], by_metric["name"]], by_metric["over_blocks"]
        assert [over_blocks[key] for key in ("ratio", "ci_low", "ci_high")] == [
            metric[key] for key in ("ratio", "ci_low", "ci_high")
        ]


def test_tables_and_sentences_by_node_show_the_numbers_of_the_document(by_node):
    path, document = by_node
    truth = rows_by_node(document)
    page = re.sub(r"<[^>]+>", " ", html.unescape((path / "report.html").read_text())).replace("\u2212", "-")
    markdown = said(path, "compare", "--markdown", "--all")
    for words in (("compare",), ("compare", "--all"), ("show",)):
        table = said(path, *words).split("Results by node")[1].split("\n\n")[0]
        cell = metric = ""
        seen = 0
        for line in table.splitlines():
            if (columns := cells_of(line)) and re.match(r"(guided )?top_k=", line):
                cell = columns.pop(0).removeprefix("guided ")
            if columns and columns[0] in {*SWEEP_METRICS.values(), "step_ms", "tpot_ms"}:
                metric = columns.pop(0)
            if columns and columns[0] in {"n1", "n2", "n3"}:
                row = truth[cell, metric, columns[0]]
                seen += 1
                assert int(columns[1]) == row["num_blocks"]
                assert float(columns[2].removesuffix("%")) == pytest.approx((row["ratio"] - 1) * 100, abs=0.0501)
                assert columns[2] in page
                assert columns[2] in markdown
        assert seen == (18 if "--all" in words else 6)


def test_a_directory_is_analysed_with_its_profile_parsed_once(path, monkeypatch):
    from benchctl.analysis.compare.compare import CompareOptions, compare_sides
    from benchctl.analysis.experiment.pairing import Side
    from benchctl.report.export import write_report

    parsed = []

    def counting(text: str, source: str):
        parsed.append(source)
        return benchctl.profile.load.parse_profile(text, source)

    monkeypatch.setattr(benchctl.analysis.experiment.experiment, "parse_profile", counting)
    write_report(path)
    assert len(parsed) == 1
    parsed.clear()
    compare_sides(Side(path, "baseline"), Side(path, "guided"), CompareOptions())
    assert len(parsed) == 1


def test_a_page_of_two_directories_is_written_from_one_loading_and_one_judgement(tmp_path, monkeypatch):
    from benchctl.analysis.compare import compare
    from benchctl.cli.commands.compare import compare as command

    a, b = (write_results(tmp_path / name, block_factors=FACTORS[:6]).path for name in ("a", "b"))
    calls = []

    def count_calls(module, name):
        original = getattr(module, name)

        def counted(*args, **options):
            calls.append(name)
            return original(*args, **options)

        monkeypatch.setattr(module, name, counted)

    count_calls(benchctl.analysis.experiment.experiment, "parse_profile")
    count_calls(compare, "match_cells")
    app = typer.Typer()
    app.command()(command)
    done = CliRunner().invoke(app, [f"{a}:baseline", f"{b}:guided", "-o", str(tmp_path / "x.html")])
    assert done.exit_code in {0, 1, 3}, done.output
    assert sorted(calls) == ["match_cells", "parse_profile", "parse_profile"]
    assert "<html" in (tmp_path / "x.html").read_text()


def test_a_run_prints_what_show_and_compare_print_of_it(tmp_path):
    words = ["run", "--profile", "ci-smoke", "--blocks", "6", "--quiet", "--output-dir", str(tmp_path)]
    done = cli.benchctl(*words)
    assert done.returncode == 0, done.stderr
    path = tmp_path / "ci-smoke" / "latest"
    of_run, of_verdict = re.findall(r"^guided.*\[.*$", done.stdout, re.MULTILINE)
    of_show = re.findall(r"^guided.*\[.*$", said(path, "show"), re.MULTILINE)
    assert [of_run] == of_show
    metrics = {metric["name"]: metric for metric in json.loads(said(path, "compare", "--json"))["metrics"]}
    ratio, low, high = re.findall(r"[\d.]+", cells_of(of_run)[2])
    for text, key in ((ratio, "ratio"), (low, "ci_low"), (high, "ci_high")):
        assert agrees(text, metrics["wall_s"][key])
    verdict, name = re.findall(r"^guided \S+ +(\w+), (\w+) ", of_verdict)[0]
    numbers = re.findall(r"([-+][\d.]+)%", of_verdict)[:3]
    assert verdict == metrics[name]["verdict"]
    for text, key in zip(numbers, ("ratio", "ci_low", "ci_high"), strict=True):
        assert agrees(text, (metrics[name][key] - 1) * 100)
