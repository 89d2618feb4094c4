"""What servers need of GPUs, refused before one starts: a device at all, and one size of KV cache for all arms."""

import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from support.cli import benchctl, refusal
from support.nvidia_smi import FakeSmi
from support.nvml import FakeNvml

from benchctl.engines.vllm_lenvm.kv_memory import kv_cache_bytes
from benchctl.measure.devices import absent_gpu, gpu_shortfalls, kv_shortfalls, value_models
from benchctl.profile.load import engine_sha256, load_profile, profile_sha256
from benchctl.profile.model import Profile
from benchctl.units import GIB, MIB

NEEDY = ("vllm-lenvm-gpu", "sglang", "sglang-lenvm")
FREE = ("sim", "vllm", "vllm-cpu", "vllm-lenvm", "transformers-cpu", "llamacpp-cpu")


SIZES = {
    "qwen2.5-0.5b": (896, 24, 14, 2, 4864),
    "qwen2.5-1.5b": (1536, 28, 12, 2, 8960),
    "qwen2.5-3b": (2048, 36, 16, 2, 11008),
}


MEMORY_MIB = {"L4": 23034, "H100": 81559, "H200": 143771}


PREFIX_GIB = {"qwen2.5-0.5b": 12.24, "qwen2.5-1.5b": 28.55, "qwen2.5-3b": 36.71}
"""256 sequences of 4,096 tokens and 64 candidates, and one slot more: counted by hand."""


@pytest.fixture(autouse=True)
def _no_gpu(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))


def needs(engine, *overrides, nvml=None):
    """The messages for a profile on a machine whose driver is that of ``nvml``; none by default."""
    loaded = load_profile("topk-sweep", engine=engine, overrides=overrides)
    nvml = nvml or FakeNvml(has_driver=False)
    return [(shortfall.message, shortfall.is_certain) for shortfall in gpu_shortfalls(loaded, nvml)]


def test_presets_for_gpus_need_one_and_those_for_cpus_none_unless_their_options_say_so():
    for engine in NEEDY:
        ((message, is_certain),) = needs(engine)
        reasons = "(NVML: no library; nvidia-smi: no program nvidia-smi is on the PATH)"
        assert (is_certain, message.startswith(f"no GPU is seen here {reasons}")) == (True, True)
        assert needs(engine, nvml=FakeNvml()) == []
    for engine in FREE:
        assert needs(engine) == []
    for engine, option, is_needed in (
        ("transformers-cpu", "device=cuda", True),
        ("transformers-cpu", "device=cuda:1", True),
        ("transformers-cpu", "device=auto", False),
        ("sglang", "device=cpu", False),
        ("vllm-lenvm-gpu", "needs_gpu=false", False),
        ("vllm-cpu", "needs_gpu=true", True),
    ):
        assert bool(needs(engine, f"engine.options.{option}")) is is_needed, option
    assert "--engine vllm-cpu;" in needs("vllm", "engine.options.needs_gpu=true")[0][0]
    assert "--engine" not in needs("sglang")[0][0], "no preset serves without a GPU"


def test_a_variable_that_hides_all_devices_counts_as_none_and_is_named_the_server_s_own_first(monkeypatch):
    for value in ("", "-1", "7", "GPU-zz"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        ((message, is_certain),) = needs("sglang", nvml=FakeNvml())
        assert is_certain
        assert f"CUDA_VISIBLE_DEVICES is {value!r}; NVML: none of its devices is visible" in message
    assert needs("sglang", 'engine.options.env.CUDA_VISIBLE_DEVICES="1"', nvml=FakeNvml()) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert needs("sglang", 'engine.options.env.CUDA_VISIBLE_DEVICES=""', nvml=FakeNvml())


@pytest.mark.parametrize(
    ("file", "visible", "has_driver", "is_certain"),
    [
        (None, None, False, True),
        ("nvidia0", None, False, False),
        ("kfd", None, False, False),
        ("nvidiactl", None, False, True),
        ("nvidia0", "", False, True),
        ("nvidia0", "7", True, True),
    ],
)
def test_a_device_that_only_cannot_be_read_is_not_said_to_be_absent(
    tmp_path, file, visible, has_driver, is_certain
):
    if file is not None:
        (tmp_path / file).touch()
    absence = absent_gpu(visible, FakeNvml(has_driver=has_driver), tmp_path)
    assert absence[1] is is_certain


def test_the_demand_for_a_gpu_leaves_the_identity_of_an_experiment_as_it_was():
    free = load_profile("topk-sweep", engine="vllm-lenvm-gpu", overrides=["engine.options.needs_gpu=false"])
    needy = load_profile("topk-sweep", engine="vllm-lenvm-gpu")
    assert (profile_sha256(needy), engine_sha256(needy)) == (profile_sha256(free), engine_sha256(free))


def test_a_plan_warns_and_the_run_ends_with_2_before_it_leaves_anything(tmp_path):
    (tmp_path / "value").mkdir()
    command = ("run", "topk-sweep", "--engine", "vllm-lenvm-gpu", "--quick")
    planned = benchctl(*command, "--dry-run", cwd=tmp_path)
    assert planned.returncode == 0
    assert planned.stderr.startswith("warning: not to be measured on this machine: no GPU is seen here (NVML: ")
    hidden = {"PATH": str(FakeSmi(tmp_path / "bin").directory), "CUDA_VISIBLE_DEVICES": ""}
    for env, says in (
        ({}, "benchctl: no GPU is seen here (NVML: "),
        (hidden, "no GPU is seen here (CUDA_VISIBLE_DEVICES is ''; NVML: "),
        (hidden, "nvidia-smi: none of its devices is visible"),
    ):
        said = refusal(*command, cwd=tmp_path, **env)
        assert (says in said, "--engine vllm-lenvm;" in said) == (True, True), said
    assert not (tmp_path / "results").exists()
    for engine in ("vllm-lenvm-gpu", "vllm-lenvm"):
        checked = benchctl("doctor", "--engine", engine, cwd=tmp_path)
        assert ("gpu device" in checked.stdout.splitlines()[-1]) is (engine == "vllm-lenvm-gpu")


def value_model(directory: Path, name: str = "qwen2.5-1.5b") -> Path:
    hidden, layers, heads, kv_heads, ffn = SIZES[name]
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "qwen2", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": ffn, "vocab_size": 151936, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def planted(directory: Path, *listed: tuple[str, int | str]) -> dict[str, str]:
    """An environment whose nvidia-smi shows these devices, by name and MiB, and in which no vLLM is installed."""
    smi = FakeSmi(directory / "bin")
    smi.behave(
        devices=[
            {"index": str(i), "uuid": f"GPU-{i}", "name": f"NVIDIA {name}", "memory.total": str(mib)}
            for i, (name, mib) in enumerate(listed)
        ]
    )
    return {"PATH": str(smi.directory), "BENCHCTL_ENGINES_DIR": str(directory / "no-engines"), "COLUMNS": "200"}


@pytest.fixture(name="on")
def _on(tmp_path, monkeypatch):
    """Let this process see devices."""

    def on(*listed: tuple[str, int | str]) -> None:
        for name, value in planted(tmp_path, *listed).items():
            monkeypatch.setenv(name, value)

    return on


def sweep(value: Path, *changes: str) -> Profile:
    overrides = [f"variants.guided.server.value_model={value}", "workload.dataset=generated", *changes]
    return load_profile("topk-sweep", engine="vllm-lenvm-gpu", overrides=overrides)


def said(profile: Profile) -> str:
    """What is said of an experiment's KV caches; empty where nothing is."""
    return "; ".join(f"{shortfall.is_certain}: {shortfall.message}" for shortfall in kv_shortfalls(profile))


def stated(profile: Profile) -> float:
    """The size that a refusal names, in GiB, after a comparison of both of its forms."""
    parts = re.search(r"kv_cache_memory_bytes=(\d+), which is ([\d.]+) GiB", said(profile))
    assert f"{int(parts[1]) / GIB:.2f}" == parts[2]
    return int(parts[1]) / GIB


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
    sizes = f"sweep.value_model=[{', '.join(map(str, models))}]"
    overrides = [sizes, "workload.dataset=generated"]
    profile = load_profile("model-size-sweep", engine="vllm-lenvm-gpu", overrides=overrides)
    assert re.search(r"less what \S+ .*qwen2.5-3b needs", said(profile))
    assert stated(profile) == stated(sweep(models[2], "sweep.top_k=[5]"))


def test_the_smallest_of_the_visible_devices_counts(on, tmp_path, monkeypatch):
    on(("H200", MEMORY_MIB["H200"]), ("H100", MEMORY_MIB["H100"]))
    value = value_model(tmp_path / "value")
    assert "of NVIDIA H100" in said(sweep(value))
    assert "of NVIDIA H200" in said(sweep(value, 'engine.options.env.CUDA_VISIBLE_DEVICES="0"'))
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
        ([], ["engine.options.value_memory_bytes=30653808640"], "none is seen here"),
    ],
)
def test_where_the_size_cannot_be_computed_the_reason_is_a_warning(on, tmp_path, devices, changes, reason):
    on(*devices)
    warning = said(sweep(value_model(tmp_path / "value"), *changes))
    assert warning.startswith("False: the KV caches of the arms may differ in size")
    assert reason in warning


def test_prefixes_beyond_what_is_allowed_are_refused_without_a_gpu_too(on, tmp_path):
    refused = said(sweep(value_model(tmp_path / "value"), "engine.options.value_memory_bytes=30000000000"))
    assert refused.startswith("True: ")
    assert "prefixes are 30653808640 bytes, and value_memory_bytes allows 30000000000" in refused


def test_a_plan_and_doctor_name_the_size_to_state_and_a_run_without_it_ends_before_anything_is_started(tmp_path):
    on_large, on_small = (planted(tmp_path / name, (name, MEMORY_MIB[name])) for name in ("H100", "L4"))
    settings = (
        "workload.dataset=generated",
        f"variants.guided.server.value_model={value_model(tmp_path / 'value')}",
    )
    words = ("--engine", "vllm-lenvm-gpu", *(word for setting in settings for word in ("--set", setting)))
    plan = ("run", "topk-sweep", *words, "--dry-run")
    planned = benchctl(*plan, cwd=tmp_path, **on_large)
    assert planned.returncode == 0, planned.stderr
    assert "not to be measured on this machine: the arms would get KV caches of different sizes" in planned.stderr
    refused = refusal("run", "topk-sweep", *words, "--aa", cwd=tmp_path, **on_large)
    (option,) = re.findall(r"--set (engine.options.kv_cache_memory_bytes=\d+)", refused)
    assert option in planned.stderr
    assert "KV cache" not in benchctl(*plan, "--set", option, cwd=tmp_path, **on_large).stderr
    nothing_fits = "no KV cache fits beside the value model"
    assert nothing_fits in refusal("run", "topk-sweep", *words, cwd=tmp_path, **on_small)
    assert not (tmp_path / "results").exists()
    doctor = ("doctor", "--profile", "topk-sweep", *words)
    listed = json.loads(benchctl(*doctor, "--json", cwd=tmp_path, **on_large).stdout)["checks"]
    model, cache = (check for check in listed if check["topic"] == "memory")
    parts = "weights 2.88 GiB, prefixes 28.55 GiB for 256 sequences of 4,096 tokens"
    assert (model["state"], model["finding"].startswith(parts)) == ("ok", True)
    assert (cache["state"], parts in cache["finding"], f"--set {option}" in cache["finding"]) == (
        "missing",
        True,
        True,
    )
    assert nothing_fits in benchctl(*doctor, cwd=tmp_path, **on_small).stdout


def test_the_numbers_of_the_documentation_are_those_of_the_formula(on, tmp_path):
    text = " ".join((Path(__file__).parents[2] / "docs" / "guided.md").read_text(encoding="utf-8").split())
    sizes = (
        r"is (\d+) KiB per token: (\d+) sequences of ([\d,]+) tokens take ([\d.]+) GiB, and the weights ([\d.]+) "
    )
    numbers = re.search(sizes, text).groups()
    per_token, num_seqs, length = (int(number.replace(",", "")) for number in numbers[:3])
    limits = (f"engine.options.max_num_seqs={num_seqs}", f"engine.options.max_model_len={length}")
    profile = sweep(value_model(tmp_path / "value"), *limits)
    on(("H200", MEMORY_MIB["H200"]))
    (memory,) = value_models(profile).values()
    assert (f"{memory.prefixes / GIB:.2f}", f"{memory.weights / GIB:.2f}") == numbers[3:]
    assert memory.prefixes == per_token * 1024 * (num_seqs + 1) * (length + 64)
    (share,) = re.findall(r"lets a server take ([\d.]+) of the memory", text)
    rows = re.findall(r"\| (H\d00) \| ([\d.]+) GiB \| ([\d.]+) GiB \|", text)
    assert [name for name, _, _ in rows] == ["H100", "H200"]
    for name, device, size in rows:
        on((name, MEMORY_MIB[name]))
        assert f"is {size} GiB, {share} of the {device} GiB of NVIDIA {name}" in said(profile)
