"""What servers were started with: settings by name, without what belongs to one launch, and what is refused."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from support.results.builders import edit_manifest, edit_run, write_results

from benchctl.analysis.compare.compare import CompareOptions, compare_sides
from benchctl.analysis.experiment.pairing import parse_side
from benchctl.analysis.validity.comparable import setting_differences
from benchctl.analysis.validity.launch import launch_settings, names_of
from benchctl.engines.engine import LaunchSite, engine_for
from benchctl.errors import NotComparableError
from benchctl.profile.engine_table import options_class
from benchctl.profile.model import Sampling, VariantSettings
from benchctl.records.directory import ResultDirectory
from benchctl.records.loaded import load_run
from benchctl.records.record import RunRecord
from benchctl.records.schema import HostInfo

BASELINE, GUIDED = "000-b0-baseline", "001-b0-guided-top_k5"


def record(run_id: str = "000-b0-a", **fields: Any) -> RunRecord:
    return RunRecord(schema_version=3, index=0, run_id=run_id, block=0, position=0, variant="a", **fields)


def values_of(*argv: str, **options: Any) -> dict[str, str]:
    return launch_settings(record(argv=("/venv/bin/python", *argv), **options))


def test_flags_are_read_with_their_values_in_every_spelling() -> None:
    words = [
        "launcher.py",
        "--port",
        "8000",
        "--a",
        "1",
        "--b=2",
        "--c",
        "--d",
        "-1",
        "--a",
        "x",
        "--",
        "serve",
        "model",
    ]
    assert values_of(*words) == {
        "argv.program": "/venv/bin/python",
        "argv.words": "launcher.py serve model",
        "argv.--a": "1 x",
        "argv.--b": "2",
        "argv.--c": "given",
        "argv.--d": "-1",
    }


def test_what_belongs_to_one_launch_is_the_same_for_all() -> None:
    first = values_of(
        "--log", "/r/runs/000-b0-a/steps.jsonl", "--nccl-port", "1", "--peer", "127.0.0.1:81", "--noise-seed", "3",
        env={"LOG": "/r/runs/000-b0-a", "MASTER_PORT": "4", "PYTHONPATH": "/x/benchctl/engines/vllm/inside:/y"},
    )  # fmt: skip
    second = launch_settings(
        record(
            "001-b0-b",
            argv=(
                "/venv/bin/python", "--log", "/q/runs/001-b0-b/steps.jsonl", "--nccl-port", "2", "--peer",
                "127.0.0.1:99", "--noise-seed", "8",
            ),
            env={"LOG": "/q/runs/001-b0-b", "PYTHONPATH": "/z/benchctl/engines/vllm/inside:/y"},
        )
    )  # fmt: skip
    assert first == second
    assert first["argv.--log"] == "<run>/steps.jsonl"
    assert first["env.PYTHONPATH"] == "/y"


def test_a_hidden_secret_is_no_setting() -> None:
    assert values_of(env={"HF_TOKEN": "***", "OMP_NUM_THREADS": "2"}) == {
        "argv.program": "/venv/bin/python",
        "env.OMP_NUM_THREADS": "2",
    }


def test_marks_of_secrets_in_older_and_newer_directories_are_one_setting() -> None:
    older = values_of(
        "--api-key", "***", "--mirror", "http://***@host/x", env={"NOTE": "a *** b", "HF_TOKEN": "***"}
    )
    newer = values_of(
        "--api-key", "[redacted: --api-key]", "--mirror", "http://[redacted: password in a URL]@host/x",
        env={"NOTE": "a [redacted: API key] b", "HF_TOKEN": "[redacted: HF_TOKEN]"},
    )  # fmt: skip
    assert older == newer


def test_the_simulator_runs_in_whatever_interpreter_benchctl_has() -> None:
    assert values_of("-m", "benchctl.sim") == {"argv.-m": "benchctl.sim"}


def test_on_two_hosts_paths_are_compared_by_their_last_part() -> None:
    runs = [record(argv=(f"/{home}/bin/python", "--model", f"/{home}/tiny", "--size", "3")) for home in ("a", "b")]
    here, there = (launch_settings(run, has_one_host=False) for run in runs)
    assert here == there
    assert here["argv.--model"] == "tiny"


CHANGED: dict[str, Any] = {
    "tensor_parallel_size": 2, "data_parallel_size": 2, "max_num_seqs": 7, "max_num_batched_tokens": 7777,
    "num_kv_blocks": 99, "block_size": 48, "mem_fraction_static": 0.3, "gpu_memory_utilization": 0.3,
    "kv_cache_memory_bytes": 1 << 20, "enable_prefix_caching": True, "enforce_eager": True, "dtype": "float16",
    "load_format": "dummy", "overlap_schedule": False, "attention_backend": "triton", "sampling_backend": "pytorch",
    "step_log": False, "threads": 3, "n_gpu_layers": 5, "max_model_len": 512, "enable_chunked_prefill": False,
    "async_scheduling": True, "device": "cuda", "attn_implementation": "eager", "continuous_batching": False,
    "quantization": "fp8", "extra_args": ("--anything", "1"), "env": {"OMP_NUM_THREADS": "3"},
    "time_scale": 3.0, "noise": "none", "value_model": "qwen2.5-1.5b",
}  # fmt: skip
SINGLE_DEVICE = ("sim", "tensor_parallel_size")


@pytest.mark.parametrize("kind", ["sim", "vllm", "sglang", "llamacpp", "transformers"])
def test_a_difference_declared_by_an_options_name_covers_what_the_option_does_to_the_launch(
    kind: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    program = tmp_path / "program"
    versions = '{"vllm": "1", "sglang": "1", "transformers": "1"}'
    program.write_text(f"""#!/bin/sh\necho '{{"versions": {versions}}}'\n""")
    program.chmod(0o755)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    fields = options_class(kind).model_fields
    programs = {"python": str(program), "binary": str(shutil.which("true"))}
    own = {name: path for name, path in programs.items() if name in fields}
    plain = launched(kind, tmp_path, own)
    # The simulator's cost models price one device unless they are told of several.
    tried = {name: value for name, value in CHANGED.items() if name in fields and (kind, name) != SINGLE_DEVICE}
    assert len(tried) >= 5
    for option, value in tried.items():
        changed = launched(kind, tmp_path, own | {option: value})
        for key in plain.keys() | changed.keys():
            if plain.get(key) != changed.get(key):
                names = names_of(key)
                assert f"server.{option}" in names, f"{key} differs with {option} and knows only {names}"


def launched(kind: str, directory: Path, options: dict[str, Any]) -> dict[str, Any]:
    engine = engine_for(kind)  # type: ignore[arg-type]
    model = {"sim": "qwen2.5-7b", "llamacpp": str(directory / "m.gguf")}.get(kind, str(directory))
    settings = VariantSettings(
        variant="baseline",
        model=model,
        server=options_class(kind).model_validate(options),
        sampling=Sampling(),
        guidance=None,
    )
    site = LaunchSite(port=1234, directory=directory / "000-b0-a", noise_seed=1)
    site.directory.mkdir(parents=True, exist_ok=True)  # the simulator is told its settings by a file
    return launch_settings(record(argv=engine.argv(settings, site), env=engine.env(settings, site)))


@pytest.fixture(name="results")
def _results(tmp_path: Path) -> ResultDirectory:
    return write_results(tmp_path / "r")


def refused(results: ResultDirectory, *allow: str) -> tuple[str, ...]:
    sides = (parse_side(f"{results.path}:baseline"), parse_side(f"{results.path}:guided"))
    with pytest.raises(NotComparableError) as caught:
        compare_sides(*sides, CompareOptions(allow=allow))
    return caught.value.differences


def test_a_flag_that_nobody_declared_makes_two_sides_incomparable(results: ResultDirectory) -> None:
    for block, index in ((0, 1), (1, 3), (2, 5)):
        argv = ("python", "-m", "benchctl.sim", "--swap-space", "8")
        edit_run(results, f"{index:03d}-b{block}-guided-top_k5", argv=argv, env={"OMP_NUM_THREADS": "1"})
    assert refused(results) == ('argv.--swap-space: absent against "8"', 'env.OMP_NUM_THREADS: absent against "1"')
    assert refused(results, "argv.--swap-space") == ('env.OMP_NUM_THREADS: absent against "1"',)
    assert refused(results, "server.extra_args") == ('env.OMP_NUM_THREADS: absent against "1"',)
    assert refused(results, "server.env") == ('argv.--swap-space: absent against "8"',)


def test_what_the_server_itself_tells_of_a_flag_is_told_once(results: ResultDirectory) -> None:
    base = ("python", "-m", "benchctl.sim")
    edit_run(
        results, BASELINE, argv=(*base, "--max-running-requests", "4"), effective_config={"server.max_num_seqs": 4}
    )
    edit_run(
        results, GUIDED, argv=(*base, "--max-running-requests", "8"), effective_config={"server.max_num_seqs": 8}
    )
    runs = {name: load_run(results.run(name)) for name in (BASELINE, GUIDED)}
    (found,) = setting_differences({"cell": ([runs[BASELINE]], [runs[GUIDED]])})
    assert str(found) == "server.max_num_seqs: 4 against 8"


def test_a_setting_that_changes_between_the_blocks_of_one_side_is_a_difference(results: ResultDirectory) -> None:
    edit_run(results, "002-b1-baseline", env={"LD_PRELOAD": "libtcmalloc.so"})
    assert refused(results) == ('env.LD_PRELOAD: absent or "libtcmalloc.so" against absent',)


def test_directories_of_two_hosts_may_have_their_things_in_other_places(tmp_path: Path) -> None:
    sides = []
    for name in ("one", "two"):
        results = write_results(tmp_path / name)
        host = HostInfo(hostname=name, platform="linux", python="3.11", num_cores=2, memory_bytes=1)
        edit_manifest(results, host=host, created_at=f"2026-01-0{len(sides) + 1}T00:00:00Z")
        for planned in results.plan().runs:
            edit_run(results, planned.run_id, argv=(f"/home/{name}/venv/bin/python", "-m", "some.server"))
        sides.append(parse_side(str(results.path)))
    assert compare_sides(sides[0], sides[1], CompareOptions()).allowed == ()
    edit_manifest(results, host=ResultDirectory(tmp_path / "one").manifest().host)
    with pytest.raises(NotComparableError, match=r"argv\.program"):
        compare_sides(sides[0], sides[1], CompareOptions())
