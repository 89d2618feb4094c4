"""Files of other tools may hold anything: each reader names the file and why, or counts damaged lines."""

import json
from functools import partial
from pathlib import Path

import pytest
from support import layer_tables
from support.hostile_files import HOSTILE, WRONG_VALUES, refusal_of, write_hostile
from support.results import lenvm_results

from benchctl.errors import UsageError
from benchctl.interop.foreign_readers import read_foreign
from benchctl.interop.foreign_values import aiperf_latencies
from benchctl.interop.inference_perf import read_config
from benchctl.interop.layer_profile import ATTENTION, CONFIG, DENSE, PER_SEQUENCE, read_layer_tables
from benchctl.interop.lenvm.import_directory import import_lenvm
from benchctl.interop.tables import TableDefaults, read_step_table
from benchctl.sim.requests import static_prefixes
from benchctl.workload.lint import lint_config

WRITTEN = Path(__file__).parent / "foreign"
STEPS = "model,hardware,dur_ns,num_prefill_tokens,num_decode_tokens,num_decodes,context_tokens\n"
READERS = {
    "result.json": lambda path: read_foreign(str(path)),
    "result.jsonl": lambda path: read_foreign(str(path)),
    "steps.csv": lambda path: read_step_table(path, TableDefaults()),
    "steps.jsonl": lambda path: read_step_table(path, TableDefaults()),
    "config.yaml": read_config,
    "prompts.jsonl": lambda path: static_prefixes(str(path), 100),
}
MAPPINGS = ("NaN under a key", "beyond a double", "half a pair of surrogates")
EXPECTED = {("prompts.jsonl", "empty"), *(("config.yaml", name) for name in MAPPINGS)}
"""Contents that are what the reader reads: no prompts, and a mapping with an unknown key, which is an entry."""


@pytest.mark.parametrize("file", READERS)
def test_a_hostile_file_is_named(tmp_path, file):
    for name in HOSTILE:
        path = write_hostile(tmp_path / name / file, name)
        refusal = refusal_of(partial(READERS[file], path))
        assert str(path) in refusal or (file, name) in EXPECTED, name
        assert len(refusal) < 1500, name


@pytest.mark.parametrize("table", [DENSE, PER_SEQUENCE, ATTENTION, CONFIG])
def test_a_hostile_table_of_layers_is_named(tmp_path, table):
    layer_tables.write_tables(tmp_path)
    for name in HOSTILE:
        path = write_hostile(next(tmp_path.rglob(table), tmp_path / table), name)
        assert str(path) in refusal_of(lambda: read_layer_tables(tmp_path)), name


@pytest.mark.parametrize("end", [".meta.json", ".timing.jsonl", ".gpu_samples.csv", ".responses.jsonl"])
def test_a_hostile_file_of_a_lenvm_directory_is_named_or_left_out(tmp_path, end):
    source = tmp_path / "source"
    lenvm_results.write_directory(source, num_questions=2, num_samples=2)
    path = next(path for path in sorted(source.iterdir()) if path.name.endswith(end))
    for number, name in enumerate(HOSTILE):
        write_hostile(path, name)
        out = tmp_path / f"out{number}"
        refusal = refusal_of(partial(import_lenvm, source, out, model=None, value_model=None, argv=()))
        assert not refusal or str(source) in refusal or path.name in refusal, (name, refusal)


def test_a_link_in_a_lenvm_directory_is_refused(tmp_path):
    source = tmp_path / "source"
    lenvm_results.write_directory(source, num_questions=2, num_samples=2)
    (tmp_path / "secret").write_text("secret")
    (source / "server.other.log").symlink_to(tmp_path / "secret")
    with pytest.raises(UsageError, match=r"server\.other\.log is a link"):
        import_lenvm(source, tmp_path / "out", model=None, value_model=None, argv=())


@pytest.mark.parametrize("file", ["vllm-0.json", "profile_export_aiperf.json", "guidellm.json"])
def test_no_value_in_the_place_of_another_ends_in_a_traceback(tmp_path, file):
    path = tmp_path / file
    for changed in _replaced(json.loads((WRITTEN / file).read_text())):
        path.write_text(json.dumps(changed))
        refusal = refusal_of(lambda: read_foreign(str(path)))
        assert not refusal or str(path) in refusal


def _replaced(document, depth=4):
    """The document with each value down to some depth replaced in turn; of a list the first alone."""
    is_list = isinstance(document, list)
    for key in [0] if is_list and document else document if isinstance(document, dict) else ():
        inner = _replaced(document[key], depth - 1) if depth else ()
        for value in (*WRONG_VALUES, *inner):
            yield [value, *document[1:]] if is_list else document | {key: value}


@pytest.mark.parametrize("value", ["nan", "inf", "-3", "1e300", "text"])
def test_a_table_with_an_impossible_number_names_its_row(tmp_path, value):
    path = tmp_path / "steps.csv"
    path.write_text(STEPS + "qwen2.5-7b,h200,30000000,0,8,8,800\n" + f"qwen2.5-7b,h200,30000000,0,8,8,{value}\n")
    with pytest.raises(UsageError, match=rf"steps\.csv: context_tokens is '{value}' in row 2"):
        read_step_table(path, TableDefaults())


def test_damaged_lines_of_latencies_are_left_out(tmp_path):
    path = tmp_path / "profile_export.jsonl"
    good = json.dumps({"metrics": {"time_to_first_token": {"value": 5, "unit": "ms"}}}).encode()
    wrong = [b'{"metadata": []}', b'{"metrics": 5}', good.replace(b'"ms"', b"[]")]
    hostile = [content.replace(b"\n", b" ") for content in HOSTILE.values()]
    path.write_bytes(b"\n".join([good, *hostile, *wrong, good]))
    assert aiperf_latencies(path) == {"ttft": (5.0, 5.0)}


def test_rows_without_a_common_cell_make_no_grid(tmp_path):
    layer_tables.write_tables(tmp_path)
    path = next(tmp_path.rglob(ATTENTION))
    header = path.read_text().splitlines()[0]
    rows = [",".join([str(number)] * len(header.split(","))) for number in range(1, 2001)]
    path.write_text("\n".join([header, *rows, ""]))
    with pytest.raises(UsageError, match="cells of a grid"):
        read_layer_tables(tmp_path)


@pytest.mark.parametrize("value", ["1e999", ".inf", ".nan", "-5", "[[]]", "null", "'7'", f"{'9' * 250}"])
def test_lint_survives_every_number(tmp_path, value):
    distribution = f"{{min: {value}, max: {value}, mean: {value}, std_dev: {value}}}"
    load = f"load: {{stages: [{{rate: {value}, duration: {value}}}]}}"
    (tmp_path / "config.yaml").write_text(f"{load}\ndata: {{type: random, input_distribution: {distribution}}}\n")
    assert lint_config(tmp_path / "config.yaml")
