"""One size of KV cache for all arms beside a value model: computed, shown, stored, kept, or refused."""

import json
import os
import re
import shutil
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cli import benchctl

from benchctl.analysis.planning import repeated_baseline
from benchctl.engines.vllm_lenvm.kv_memory import kv_cache_bytes
from benchctl.errors import NotComparableError
from benchctl.measure.experiment import create_experiment
from benchctl.measure.kv_memory import KvPlan, plan_kv_memory, value_models
from benchctl.measure.result_directory import Origin, reopen_experiment
from benchctl.profile.load import load_profile
from benchctl.profile.model import Profile
from benchctl.profile.planning import arms, variant_settings
from benchctl.units import GIB, MIB
from benchctl.workload.prepare import prepare_requests

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
    assert 0 <= device * share - max(needed) - size < MIB
    assert size <= kv_cache_bytes(device, share, [0, *needed[1:]])


@pytest.mark.parametrize(("device", "model"), [(d, m) for d in MEMORY_MIB for m in SIZES])
def test_all_arms_get_what_the_arm_with_the_value_model_leaves(on, tmp_path, device, model):
    on((device, MEMORY_MIB[device]))
    profile = sweep(value_model(tmp_path / "value", model))
    plan = plan_kv_memory(profile)
    memory = plan.memory
    assert memory is not None
    assert memory.largest.value_model is not None
    assert memory.device_bytes == MEMORY_MIB[device] * MIB
    assert memory.largest.value_model.prefixes / GIB == pytest.approx(PREFIX_GIB[model], abs=0.005)
    assert memory.largest.weights / GIB == pytest.approx(14.19, abs=0.005)
    left = memory.device_bytes * memory.share - memory.largest.total
    assert left - MIB < memory.num_bytes <= left
    fits = device != "L4"
    assert (plan.refusal is None) is fits
    assert sizes(plan.applied_to(profile)) == {memory.num_bytes if fits else None}


def test_a_refusal_names_all_parts_and_what_to_change(on, tmp_path):
    on(("L4", MEMORY_MIB["L4"]))
    refusal = plan_kv_memory(sweep(value_model(tmp_path / "value"))).refusal
    assert refusal is not None
    for part in (
        "of the 22.49 GiB of NVIDIA L4", "base model 14.19 GiB", "weights 2.88 GiB",
        "prefixes 28.55 GiB for 256 sequences of 4,096 tokens", "GiB in reserve (activations", "nothing is left",
        "the longest sequence takes 0.22 GiB", "lower max_num_seqs or max_model_len", "a smaller value model",
    ):  # fmt: skip
        assert part in refusal
    value = value_model(tmp_path / "small", "qwen2.5-0.5b")
    smaller = sweep(value, "model=qwen2.5-1.5b", "engine.options.max_num_seqs=64")
    assert plan_kv_memory(smaller).refusal is None


def test_of_several_value_models_the_largest_decides_for_every_arm(on, tmp_path):
    on(("H200", MEMORY_MIB["H200"]))
    models = [value_model(tmp_path / name, name) for name in SIZES]
    listed = ", ".join(map(str, models))
    profile = load_profile(
        "model-size-sweep",
        engine="vllm-lenvm-gpu",
        overrides=[f"sweep.value_model=[{listed}]", "workload.dataset=generated"],
    )
    memory = plan_kv_memory(profile).memory
    assert memory is not None
    assert "qwen2.5-3b" in memory.largest.label
    assert memory.num_bytes == plan_kv_memory(sweep(models[2], "sweep.top_k=[5]")).memory.num_bytes  # type: ignore[union-attr]


def test_the_smallest_of_the_visible_devices_counts(on, tmp_path, monkeypatch):
    on(("H200", MEMORY_MIB["H200"]), ("H100", MEMORY_MIB["H100"]))
    value = value_model(tmp_path / "value")
    assert plan_kv_memory(sweep(value)).memory.device == "NVIDIA H100"  # type: ignore[union-attr]
    chosen = sweep(value, 'engine.options.env.CUDA_VISIBLE_DEVICES="0"')
    assert plan_kv_memory(chosen).memory.device == "NVIDIA H200"  # type: ignore[union-attr]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert plan_kv_memory(sweep(value)).memory.device == "NVIDIA H200"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "changes",
    [
        ["engine.options.kv_cache_memory_bytes=5G"],
        ["variants.guided.server.kv_cache_memory_bytes=1000000000"],
        ["engine.options.extra_args=[--num-gpu-blocks-override, '500']"],
        ["variants.guided.server.gpu_memory_utilization=0.5"],
        ["engine.kind=sim"],
        ["variants.guided.server.value_model=null", "variants.guided.guidance=null", "sweep.top_k=[5]"],
    ],
)
def test_what_a_profile_says_itself_and_what_loads_no_value_model_is_left_alone(on, tmp_path, changes):
    on(("H100", MEMORY_MIB["H100"]))
    if changes == ["engine.kind=sim"]:
        assert plan_kv_memory(load_profile("topk-sweep", overrides=["workload.dataset=generated"])) == KvPlan()
        return
    profile = sweep(value_model(tmp_path / "value"), *changes)
    plan = plan_kv_memory(profile)
    assert plan == KvPlan()
    assert plan.applied_to(profile) == profile


@pytest.mark.parametrize(
    ("devices", "changes", "said"),
    [
        ([], [], "no GPU is seen here; it is computed on the machine with the GPU"),
        ([("H100", "[N/A]")], [], "left to vLLM, so that arms may differ in it; the driver does not tell"),
        ([("H100", 81559)], ["model=owner/name"], "it cannot be computed: unknown model 'owner/name'"),
        ([("H100", 81559)], ["engine.options.max_model_len=null"], "set engine.options.max_model_len"),
    ],
)
def test_where_the_size_cannot_be_computed_the_reason_is_said(on, tmp_path, devices, changes, said):
    on(*devices)
    profile = sweep(value_model(tmp_path / "value"), *changes)
    plan = plan_kv_memory(profile)
    assert plan.text is not None
    assert said in plan.text
    assert plan.applied_to(profile) == profile


def test_prefixes_beyond_what_is_allowed_are_refused_without_a_gpu_too(on, tmp_path):
    on()
    profile = sweep(value_model(tmp_path / "value"), "engine.options.value_memory_bytes=30000000000")
    refusal = plan_kv_memory(profile).refusal
    assert refusal is not None
    assert "prefixes are 30653808640 bytes, and value_memory_bytes allows 30000000000" in refusal
    enough = sweep(value_model(tmp_path / "value"), "engine.options.value_memory_bytes=30653808640")
    assert plan_kv_memory(enough).refusal is None


def command(tmp_path: Path, *more: str) -> list[str]:
    value = value_model(tmp_path / "value")
    return [
        "run", "topk-sweep", "--engine", "vllm-lenvm-gpu", "--blocks", "1", "--set", "workload.dataset=generated",
        "--set", f"variants.guided.server.value_model={value}", *more,
    ]  # fmt: skip


def test_a_plan_shows_the_size_and_its_parts(tmp_path):
    done = benchctl(
        *command(tmp_path, "--dry-run"), cwd=tmp_path, **planted(tmp_path, ("H200", MEMORY_MIB["H200"]))
    )
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("KV cache of every arm"))
    parts = re.search(
        r"every arm: ([\d.]+) GiB, which is ([\d.]+) of the ([\d.]+) GiB of NVIDIA H200 less what guided top_k=\d "
        r"needs: base model ([\d.]+) GiB, value model weights ([\d.]+) GiB, prefixes ([\d.]+) GiB for .* tokens, "
        r"([\d.]+) GiB in reserve",
        line,
    )
    assert parts is not None
    size, share, device, *needed = map(float, parts.groups())
    assert size == pytest.approx(share * device - sum(needed), abs=0.05)
    without = benchctl(*command(tmp_path, "--dry-run"), cwd=tmp_path, **planted(tmp_path))
    assert "it is computed on the machine with the GPU" in without.stdout


def test_noise_is_measured_with_the_cache_of_the_experiment(on, tmp_path):
    on(("H200", MEMORY_MIB["H200"]))
    profile = sweep(value_model(tmp_path / "value"))
    plan = plan_kv_memory(profile)
    assert plan.memory is not None
    assert sizes(repeated_baseline(plan.applied_to(profile))) == {plan.memory.num_bytes}
    shown = benchctl(
        *command(tmp_path, "--dry-run", "--aa"), cwd=tmp_path, **planted(tmp_path, ("H200", MEMORY_MIB["H200"]))
    )
    assert f"KV cache of every arm: {plan.memory.num_bytes / GIB:.2f} GiB" in shown.stdout


def test_doctor_states_the_memory_of_a_value_model_and_of_the_cache(tmp_path):
    _, _, *words = command(tmp_path)
    words = [word for word in words if word not in {"--blocks", "1"}]
    visible = planted(tmp_path, ("H100", MEMORY_MIB["H100"]))
    done = benchctl("doctor", "--profile", "topk-sweep", *words, "--json", cwd=tmp_path, **visible)
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"] if check["topic"] == "memory"}
    model, cache = checks["value model"], checks["KV cache"]
    said = "weights 2.88 GiB, prefixes 28.55 GiB for 256 sequences of 4,096 tokens"
    assert model["finding"].startswith(said)
    assert said in cache["finding"]
    assert (model["state"], cache["state"]) == ("ok", "ok")
    assert cache["facts"]["device_bytes"] == MEMORY_MIB["H100"] * MIB
    refused = benchctl(
        "doctor", "--profile", "topk-sweep", *words, cwd=tmp_path, **planted(tmp_path, ("L4", 23034))
    )
    assert refused.returncode == 2
    assert "no KV cache fits beside the value model" in refused.stdout
    unknown = benchctl("doctor", "--profile", "topk-sweep", "--engine", "vllm-lenvm-gpu", cwd=tmp_path, **visible)
    assert "models/lenvm-1.5b/config.json" in unknown.stdout
    assert benchctl("doctor", "--set", "seed=1", cwd=tmp_path).returncode == 2


def test_a_run_that_does_not_fit_ends_before_anything_is_started(tmp_path):
    on_small = planted(tmp_path, ("L4", MEMORY_MIB["L4"]))
    done = benchctl(*command(tmp_path), cwd=tmp_path, **on_small)
    assert done.returncode == 2
    assert "no KV cache fits beside the value model" in done.stderr
    assert not (tmp_path / "results").exists()
    planned = benchctl(*command(tmp_path, "--dry-run"), cwd=tmp_path, **on_small)
    assert planned.returncode == 0
    assert "not to be measured on this machine: no KV cache fits" in planned.stderr


def test_an_experiment_stores_the_size_with_its_parts_and_keeps_it_when_it_is_resumed(on, tmp_path):
    on(("H200", MEMORY_MIB["H200"]))
    given_profile = sweep(value_model(tmp_path / "value"))
    plan = plan_kv_memory(given_profile)
    assert plan.memory is not None
    profile = plan.applied_to(given_profile)
    origin = Origin(output_root=tmp_path / "results", argv=("test",), notes=plan.notes)
    results = create_experiment(profile, prepare_requests(profile, tmp_path), origin)
    assert f"kv_cache_memory_bytes: {plan.memory.num_bytes}" in results.profile_yaml()
    (note,) = (note for note in results.manifest().warnings if note.code == "kv-memory-computed")
    assert note.message == plan.text
    on(("H200", 100_000))  # whatever the machine has by now
    for given_again in (None, given_profile, profile):
        assert sizes(reopen_experiment(results.path, given_again).profile) == {plan.memory.num_bytes}
    other = sweep(tmp_path / "value", "engine.options.kv_cache_memory_bytes=1000000000")
    with pytest.raises(NotComparableError, match="begun with another profile"):
        reopen_experiment(results.path, other)


def test_a_stated_size_is_not_taken_for_a_computed_one_when_an_experiment_is_resumed(on, tmp_path):
    on(("H200", MEMORY_MIB["H200"]))
    value = value_model(tmp_path / "value")
    stated = sweep(value, "engine.options.kv_cache_memory_bytes=1000000000")
    origin = Origin(output_root=tmp_path / "results", argv=("test",))
    results = create_experiment(stated, prepare_requests(stated, tmp_path), origin)
    with pytest.raises(NotComparableError, match="begun with another profile"):
        reopen_experiment(results.path, sweep(value))
    shutil.rmtree(results.path)


def test_the_numbers_of_the_documentation_are_those_of_the_formula(on, tmp_path):
    text = " ".join((Path(__file__).parents[2] / "docs" / "guided.md").read_text(encoding="utf-8").split())
    sentence = (
        r"is (\d+) KiB per token: (\d+) sequences of ([\d,]+) tokens take ([\d.]+) GiB, and the weights ([\d.]+)"
    )
    stated = re.search(sentence + " GiB", text)
    assert stated is not None
    per_token, num_seqs, length, prefixes, weights = (float(number.replace(",", "")) for number in stated.groups())
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
        planned = plan_kv_memory(profile).memory
        assert planned is not None
        assert planned.share == float(share[1])
        assert f"{planned.device_bytes / GIB:.2f}" == device
        assert f"{planned.num_bytes / GIB:.2f}" == size
