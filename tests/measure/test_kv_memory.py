"""One size of KV cache for all arms beside a value model: stated, or refused with the one to state."""

import json
import math
import os
import re
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cli import benchctl

from benchctl.engines.vllm_lenvm.kv_memory import kv_cache_bytes
from benchctl.measure.devices import kv_shortfalls, value_models
from benchctl.profile.load import load_profile
from benchctl.profile.model import Profile
from benchctl.profile.planning import arms, variant_settings
from benchctl.units import GIB, MIB

SIZES = {
    "qwen2.5-0.5b": (896, 24, 14, 2, 4864),
    "qwen2.5-1.5b": (1536, 28, 12, 2, 8960),
    "qwen2.5-3b": (2048, 36, 16, 2, 11008),
}
MEMORY_MIB = {"L4": 23034, "H100": 81559, "H200": 143771}
PREFIX_GIB = {"qwen2.5-0.5b": 12.24, "qwen2.5-1.5b": 28.55, "qwen2.5-3b": 36.71}
"""256 sequences of 4,096 tokens and 64 candidates, and one slot more: counted by hand."""


def value_model(directory: Path, name: str = "qwen2.5-1.5b") -> Path:
    hidden, layers, heads, kv_heads, ffn = SIZES[name]
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "qwen2", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": ffn, "vocab_size": 151936, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def planted(directory: Path, *devices: tuple[str, int | str]) -> dict[str, str]:
    """An environment whose nvidia-smi shows these devices, by name and MiB, and in which no vLLM is installed."""
    program = directory / "bin" / "nvidia-smi"
    program.parent.mkdir(parents=True, exist_ok=True)
    lines = "\n".join(
        f"{i}, GPU-{i}, {mib}, 570.1, 0, 1, 70, 345, 1593, 30, 0x0, NVIDIA {name}"
        for i, (name, mib) in enumerate(devices)
    )
    program.write_text(f'#!/bin/sh\ncase "$*" in *memory.total*) echo "{lines}";; esac\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    return {"PATH": path, "BENCHCTL_ENGINES_DIR": str(directory / "no-engines"), "COLUMNS": "200"}


@pytest.fixture(name="on")
def _on(tmp_path, monkeypatch):
    """Let this process see devices."""

    def on(*devices: tuple[str, int | str]) -> None:
        for name, value in planted(tmp_path, *devices).items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return on


def sweep(value: Path, *changes: str, name: str = "topk-sweep") -> Profile:
    overrides = [f"variants.guided.server.value_model={value}", "workload.dataset=generated", *changes]
    return load_profile(name, engine="vllm-lenvm-gpu", overrides=overrides)


def sizes(profile: Profile) -> set[object]:
    return {variant_settings(profile, *arm).server.kv_cache_memory_bytes for arm in arms(profile)}  # type: ignore[attr-defined]


@given(
    device=st.integers(1, 1 << 40),
    share=st.floats(0.01, 1),
    needed=st.lists(st.integers(0, 1 << 40), min_size=1, max_size=9),
)
def test_the_cache_is_what_the_neediest_arm_leaves_of_its_share_in_whole_mib(device, share, needed):
    size = kv_cache_bytes(device, share, needed)
    assert size % MIB == 0
    assert 0 <= math.floor(device * share) - max(needed) - size < MIB
    assert size <= kv_cache_bytes(device, share, [0, *needed[1:]])


def said(profile: Profile) -> str:
    """What is said of an experiment's KV caches; empty where nothing is."""
    return "; ".join(f"{shortfall.is_certain}: {shortfall.message}" for shortfall in kv_shortfalls(profile))


def stated(profile: Profile) -> float:
    """The size that a refusal names, in GiB, after a comparison of both of its forms."""
    parts = re.search(r"kv_cache_memory_bytes=(\d+), which is ([\d.]+) GiB", said(profile))
    assert f"{int(parts[1]) / GIB:.2f}" == parts[2]
    return int(parts[1]) / GIB


@pytest.mark.parametrize(
    ("device", "model"), [("L4", "qwen2.5-1.5b"), ("H100", "qwen2.5-3b"), ("H200", "qwen2.5-0.5b")]
)
def test_all_arms_get_what_the_arm_with_the_value_model_leaves_or_are_refused_with_what_to_change(
    on, tmp_path, device, model
):
    on((device, MEMORY_MIB[device]))
    refusal = said(sweep(value_model(tmp_path / "value", model)))
    parts = re.search(
        r"([\d.]+) of the ([\d.]+) GiB of NVIDIA \S+ less what guided top_k=\d+ needs: base model ([\d.]+) GiB, "
        r"value model weights ([\d.]+) GiB, prefixes ([\d.]+) GiB for .* tokens, ([\d.]+) GiB in reserve",
        refusal,
    )
    share, memory, base, weights, prefixes, reserve = map(float, parts.groups())
    assert memory == pytest.approx(MEMORY_MIB[device] * MIB / GIB, abs=0.005)
    assert (base, prefixes) == (pytest.approx(14.19, abs=0.005), pytest.approx(PREFIX_GIB[model], abs=0.005))
    left = memory * share - base - weights - prefixes - reserve
    if device == "L4":
        for part in (
            "no KV cache fits beside the value model", "of the 22.49 GiB of NVIDIA L4", "weights 2.88 GiB",
            "prefixes 28.55 GiB for 256 sequences of 4,096 tokens", "nothing is left",
            "the longest sequence takes 0.22 GiB", "lower max_num_seqs or max_model_len", "a smaller value model",
        ):  # fmt: skip
            assert part in refusal
    else:
        size = stated(sweep(tmp_path / "value"))
        assert size == pytest.approx(left, abs=0.05)
        assert said(sweep(tmp_path / "value", f"engine.options.kv_cache_memory_bytes={size * GIB:.0f}")) == ""


def test_of_several_value_models_the_largest_decides_for_every_arm(on, tmp_path):
    on(("H200", MEMORY_MIB["H200"]))
    models = [value_model(tmp_path / name, name) for name in SIZES]
    listed = ", ".join(map(str, models))
    profile = load_profile(
        "model-size-sweep",
        engine="vllm-lenvm-gpu",
        overrides=[f"sweep.value_model=[{listed}]", "workload.dataset=generated"],
    )
    assert re.search(r"less what \S+ .*qwen2.5-3b needs", said(profile))
    assert stated(profile) == stated(sweep(models[2], "sweep.top_k=[5]"))


def test_the_smallest_of_the_visible_devices_counts(on, tmp_path, monkeypatch):
    on(("H200", MEMORY_MIB["H200"]), ("H100", MEMORY_MIB["H100"]))
    value = value_model(tmp_path / "value")
    assert "of NVIDIA H100" in said(sweep(value))
    chosen = sweep(value, 'engine.options.env.CUDA_VISIBLE_DEVICES="0"')
    assert "of NVIDIA H200" in said(chosen)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert "of NVIDIA H200" in said(sweep(value))


def test_what_a_profile_says_itself_and_what_loads_no_value_model_is_left_alone(on, tmp_path):
    on(("H100", MEMORY_MIB["H100"]))
    value = value_model(tmp_path / "value")
    for changes in (
        ["engine.options.kv_cache_memory_bytes=5G"],
        ["variants.guided.server.kv_cache_memory_bytes=1000000000"],
        ["engine.options.extra_args=[--num-gpu-blocks-override, '500']"],
        ["variants.guided.server.gpu_memory_utilization=0.5"],
        ["variants.guided.server.value_model=null", "variants.guided.guidance=null", "sweep.top_k=[5]"],
    ):
        assert said(sweep(value, *changes)) == "", changes
    assert said(load_profile("topk-sweep", overrides=["workload.dataset=generated"])) == ""


@pytest.mark.parametrize(
    ("devices", "changes", "reason"),
    [
        ([], [], "none is seen here; ask on the machine that has it"),
        ([("H100", "[N/A]")], [], "the driver does not tell the memory"),
        ([("H100", 81559)], ["model=owner/name"], "unknown model 'owner/name'"),
        ([("H100", 81559)], ["engine.options.max_model_len=null"], "set engine.options.max_model_len"),
    ],
)
def test_where_the_size_cannot_be_computed_the_reason_is_a_warning(on, tmp_path, devices, changes, reason):
    on(*devices)
    warning = said(sweep(value_model(tmp_path / "value"), *changes))
    assert warning.startswith("False: the KV caches of the arms may differ in size")
    assert reason in warning


def test_prefixes_beyond_what_is_allowed_are_refused_without_a_gpu_too(on, tmp_path):
    on()
    profile = sweep(value_model(tmp_path / "value"), "engine.options.value_memory_bytes=30000000000")
    assert "prefixes are 30653808640 bytes, and value_memory_bytes allows 30000000000" in said(profile)
    assert said(profile).startswith("True: ")
    enough = sweep(value_model(tmp_path / "value"), "engine.options.value_memory_bytes=30653808640")
    assert said(enough).startswith("False: ")


def command(tmp_path: Path, *more: str) -> list[str]:
    value = value_model(tmp_path / "value")
    return [
        "run", "topk-sweep", "--engine", "vllm-lenvm-gpu", "--blocks", "1", "--set", "workload.dataset=generated",
        "--set", f"variants.guided.server.value_model={value}", *more,
    ]  # fmt: skip


def test_a_plan_names_the_size_to_state_and_a_run_without_it_ends_before_anything_is_started(tmp_path):
    on_large, on_small = (planted(tmp_path / name, (name, MEMORY_MIB[name])) for name in ("H200", "L4"))
    planned = benchctl(*command(tmp_path, "--dry-run"), cwd=tmp_path, **on_large)
    assert planned.returncode == 0, planned.stderr
    assert "not to be measured on this machine: the arms would get KV caches of different sizes" in planned.stderr
    done = benchctl(*command(tmp_path, "--aa"), cwd=tmp_path, **on_large)
    assert done.returncode == 2
    (option,) = re.findall(r"--set (engine.options.kv_cache_memory_bytes=\d+)", done.stderr)
    assert option in planned.stderr
    stated = benchctl(*command(tmp_path, "--dry-run", "--set", option), cwd=tmp_path, **on_large)
    assert "KV cache" not in stated.stderr
    small = benchctl(*command(tmp_path), cwd=tmp_path, **on_small)
    assert (small.returncode, "no KV cache fits beside the value model" in small.stderr) == (2, True)
    assert not (tmp_path / "results").exists()


def test_doctor_states_the_memory_of_a_value_model_and_of_the_cache(tmp_path):
    _, _, *words = command(tmp_path)
    words = [word for word in words if word not in {"--blocks", "1"}]
    visible = planted(tmp_path, ("H100", MEMORY_MIB["H100"]))
    done = benchctl("doctor", "--profile", "topk-sweep", *words, "--json", cwd=tmp_path, **visible)
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"] if check["topic"] == "memory"}
    model, cache = checks["value model"], checks["KV cache"]
    parts = "weights 2.88 GiB, prefixes 28.55 GiB for 256 sequences of 4,096 tokens"
    assert model["finding"].startswith(parts)
    assert parts in cache["finding"]
    assert (model["state"], cache["state"]) == ("ok", "missing")
    assert "--set engine.options.kv_cache_memory_bytes=" in cache["finding"]
    refused = benchctl(
        "doctor", "--profile", "topk-sweep", *words, cwd=tmp_path, **planted(tmp_path, ("L4", 23034))
    )
    assert refused.returncode == 2
    assert "no KV cache fits beside the value model" in refused.stdout


def test_the_numbers_of_the_documentation_are_those_of_the_formula(on, tmp_path):
    text = " ".join((Path(__file__).parents[2] / "docs" / "guided.md").read_text(encoding="utf-8").split())
    sentence = (
        r"is (\d+) KiB per token: (\d+) sequences of ([\d,]+) tokens take ([\d.]+) GiB, and the weights ([\d.]+)"
    )
    numbers = re.search(sentence + " GiB", text)
    per_token, num_seqs, length, prefixes, weights = (float(number.replace(",", "")) for number in numbers.groups())
    settings = {"engine.options.max_num_seqs": num_seqs, "engine.options.max_model_len": length}
    profile = sweep(value_model(tmp_path / "value"), *(f"{key}={value:.0f}" for key, value in settings.items()))
    on(("H200", MEMORY_MIB["H200"]))
    (memory,) = value_models(profile).values()
    assert f"{memory.prefixes / GIB:.2f}" == f"{prefixes:.2f}"
    assert f"{memory.weights / GIB:.2f}" == f"{weights:.2f}"
    assert memory.prefixes == per_token * 1024 * (num_seqs + 1) * (length + 64)
    share = re.search(r"lets a server take ([\d.]+) of the memory", text)
    assert share is not None
    rows = re.findall(r"\| (H\d00) \| ([\d.]+) GiB \| ([\d.]+) GiB \|", text)
    assert [name for name, _, _ in rows] == ["H100", "H200"]
    for name, device, size in rows:
        on((name, MEMORY_MIB[name]))
        assert f"is {size} GiB, {share[1]} of the {device} GiB of NVIDIA {name}" in said(profile)
