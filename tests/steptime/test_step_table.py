"""Tables of steps: our names, those of vLLM's traces, and every way in which one cannot be used."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from support.datasets import DATA, needs_data
from support.step_time import planted_run, write_table

from benchctl.analysis.experiment.observed import read_sources
from benchctl.errors import UsageError
from benchctl.interop.tables import TableDefaults, read_step_table

PLANTED = {"compute": 1.6, "memory": 1.2, "layers": 45.0, "requests": 10.0, "steps": 100.0}
PUBLISHED = DATA / "steps/vllm-h100-steps.csv"
NO_DEFAULTS = TableDefaults()


def test_a_table_with_our_columns_returns_the_steps(tmp_path: Path) -> None:
    run = planted_run("qwen2.5-7b", 1, PLANTED)
    (observed,) = read_step_table(write_table(tmp_path / "steps.csv", run), NO_DEFAULTS)
    assert (observed.run, observed.model, observed.deployment) == (run.run, run.model, run.deployment)
    np.testing.assert_allclose(observed.duration_us, run.duration_us)
    for name, values in asdict(run.work).items():
        np.testing.assert_allclose(getattr(observed.work, name), values, err_msg=name)
    assert observed.origin is not None
    assert len(observed.origin.sha256) == 64


def test_json_lines_in_nanoseconds_are_the_same_steps(tmp_path: Path) -> None:
    run = planted_run("qwen2.5-7b", 1, PLANTED, num_steps=20)
    rows = [
        {
            "dur_ns": round(run.duration_us[i] * 1000),
            "num_seqs": int(run.work.num_seqs[i]),
            "num_prefill_tokens": int(run.work.prefill_tokens[i]),
            "num_decode_tokens": int(run.work.decode_tokens[i]),
            "context_tokens": int(run.work.context[i] + run.work.tokens[i]),
        }
        for i in range(20)
    ]
    path = tmp_path / "steps.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (observed,) = read_step_table(path, TableDefaults(model="qwen2.5-7b", hardware="h100-sxm"))
    np.testing.assert_allclose(observed.duration_us, run.duration_us, rtol=1e-6)
    np.testing.assert_allclose(observed.work.num_decodes, run.work.num_decodes)
    np.testing.assert_allclose(observed.work.num_prefills, run.work.num_prefills)


@pytest.mark.parametrize(
    ("renamed", "message"),
    [
        (
            {"num_prefill_tokens": "x", "context_tokens": "y"},
            "columns are missing: num_prefill_tokens or prefill_tokens or batch.prefill_tokens; context_tokens",
        ),
        ({"duration_us": "time"}, "columns are missing: dur_ns or duration_us or cycle_us"),
        ({"duration_us": "step.duration_us"}, "step.duration_us is the time of the scheduler and not of the step"),
        ({"num_decodes": "x"}, "columns are missing: num_decodes or batch.num_decode_reqs or num_seqs"),
        ({"hardware": "x"}, "no column hardware; add it, or name the hardware with --hardware"),
        ({"model": "x"}, "no column model; add it, or name the model with --model"),
    ],
    ids=["two", "time", "scheduler", "rows", "hardware", "model"],
)
def test_a_missing_column_is_named_with_the_remedy(tmp_path: Path, renamed: dict[str, str], message: str) -> None:
    path = write_table(tmp_path / "steps.csv", planted_run("qwen2.5-7b", 1, PLANTED), **renamed)
    with pytest.raises(UsageError) as refusal:
        read_step_table(path, NO_DEFAULTS)
    assert f"{path}: {message}" in str(refusal.value)


def test_values_that_are_no_numbers_and_models_without_a_shape_are_named(tmp_path: Path) -> None:
    run = planted_run("qwen2.5-7b", 1, PLANTED, num_steps=5)
    path = write_table(tmp_path / "steps.csv", run)
    lines = path.read_text(encoding="utf-8").splitlines()
    cells = lines[3].split(",")
    cells[-1] = "many"
    path.write_text("\n".join([*lines[:3], ",".join(cells), *lines[4:]]), encoding="utf-8")
    with pytest.raises(UsageError, match="context_tokens is 'many' in row 3 of its run; every step needs a number"):
        read_step_table(path, NO_DEFAULTS)
    path.write_text("\n".join(lines).replace("qwen2.5-7b", "gpt-5-preview"), encoding="utf-8")
    with pytest.raises(UsageError, match=r"gpt-5-preview.*--shape gpt-5-preview=DIR names the directory"):
        read_step_table(path, NO_DEFAULTS)
    shapes = TableDefaults(shapes={"gpt-5-preview": "qwen2.5-7b"})
    assert read_step_table(path, shapes)[0].deployment.shape.name == "qwen2.5-7b"


def test_files_and_directories_that_hold_no_steps_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("model,hardware,duration_us\n", encoding="utf-8")
    with pytest.raises(UsageError, match="has no rows; it needs one row a step"):
        read_sources([tmp_path / "empty.csv"])
    (tmp_path / "broken.jsonl").write_text("{", encoding="utf-8")
    with pytest.raises(UsageError, match=r"broken.jsonl:1: no row of a table: .*; correct the row"):
        read_sources([tmp_path / "broken.jsonl"])
    (tmp_path / "long.csv").write_text("model,duration_us\na,1\nb,2,3\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"long.csv:3: 3 values under 2 names; correct the row"):
        read_sources([tmp_path / "long.csv"])
    (tmp_path / "latin.csv").write_bytes("model\nmodèle\n".encode("latin-1"))
    with pytest.raises(UsageError, match=r"latin.csv:2: cannot be read: it is not UTF-8 text .*; correct the row"):
        read_sources([tmp_path / "latin.csv"])
    (tmp_path / "steps.parquet").write_bytes(b"PAR1")
    with pytest.raises(UsageError, match="from a Parquet file, write a CSV file first"):
        read_sources([tmp_path / "steps.parquet"])
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(UsageError, match="neither a result directory nor a table of steps"):
            read_sources([path])


def test_saturated_steps_are_marked_with_the_first_reason(tmp_path: Path) -> None:
    run = planted_run("qwen2.5-7b", 1, PLANTED, num_steps=6)
    path = write_table(tmp_path / "steps.csv", run, duration_us="cycle_us")
    extra = [
        "preempted,kv_used_frac,prev.prefill,next.batch.prefill_tokens",
        "1,0.99,0,0",
        ",0.96,,",
        *[",0.2,,"] * 4,
    ]
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [f"{line},{more}" for line, more in zip(lines, extra, strict=False)]
    path.write_text("\n".join([*rows[:6], rows[6].replace(",0.2,,", ",0.2,900,")]), encoding="utf-8")
    (observed,) = read_step_table(path, NO_DEFAULTS)
    assert observed.left_out["preemption"] == 1
    assert observed.left_out["key-value memory above 95%"] == 1
    assert observed.is_saturated[[0, 1, 5]].all()


@needs_data
def test_the_published_steps_are_two_runs_without_those_next_to_long_prompts() -> None:
    runs = read_step_table(PUBLISHED, TableDefaults(hardware="h100-sxm"))
    assert [(run.deployment.shape.name, run.deployment.tensor_parallel) for run in runs] == [
        ("llama-2-70b", 4),
        ("codellama-34b", 2),
    ]
    assert [len(run.duration_us) for run in runs] == [658, 716]
    assert [run.left_out for run in runs] == [
        {"long prompt next to a time from start to start": 1},
        {"long prompt next to a time from start to start": 2},
    ]
