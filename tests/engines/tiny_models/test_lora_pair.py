"""A model and a LoRA adapter for it, in PEFT's files, and the command line of a server that serves both."""

import json
import sys
from pathlib import Path

import pytest
import safetensors
from support import cli

from benchctl.engines.engine import LaunchSite
from benchctl.engines.vllm import VllmEngine
from benchctl.engines.vllm_options import VllmOptions
from benchctl.errors import EngineUnavailableError, ProfileError
from benchctl.profile.load import load_profile
from benchctl.profile.model import Sampling, VariantSettings


@pytest.fixture(autouse=True)
def _taken_for_installed(monkeypatch):
    monkeypatch.setattr("benchctl.engines.environment.interpreter_for", lambda *_: Path(sys.executable))


def made(directory, *options):
    return cli.benchctl("models", "make-tiny", "--lora", directory, *options)


def test_every_linear_layer_has_two_matrices_of_the_rank_that_is_asked_for(tmp_path):
    done = made(tmp_path / "pair", "--lora-rank", 4)
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "pair/adapter/adapter_config.json").read_text())
    base = dict(safetensors.deserialize((tmp_path / "pair/base/model.safetensors").read_bytes()))
    adapter = dict(safetensors.deserialize((tmp_path / "pair/adapter/adapter_model.safetensors").read_bytes()))
    adapted = {name: tensor["shape"] for name, tensor in base.items() if name.endswith("_proj.weight")}
    assert {name.split(".")[-2] for name in adapted} == set(config["target_modules"])
    expected = {}
    for name, (rows, columns) in adapted.items():
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        expected |= {f"{prefix}.lora_A.weight": [4, columns], f"{prefix}.lora_B.weight": [rows, 4]}
    assert {name: tensor["shape"] for name, tensor in adapter.items()} == expected
    assert (config["r"], config["base_model_name_or_path"]) == (4, str(tmp_path / "pair/base"))
    assert any(bytes(tensor["data"]).strip(b"\0") for name, tensor in adapter.items() if "lora_B" in name)


def test_the_same_options_give_the_same_adapter(tmp_path):
    for name in ("one", "two"):
        made(tmp_path / name)
    files = [(tmp_path / name / "adapter/adapter_model.safetensors").read_bytes() for name in ("one", "two")]
    assert files[0] == files[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [(("--draft",), "--lora and --draft exclude each other"), (("--gguf",), "--lora and --gguf exclude")],
)
def test_two_kinds_of_pairs_are_not_made_at_once(tmp_path, options, message):
    done = made(tmp_path / "pair", *options)
    assert (done.returncode, message in done.stderr) == (2, True)
    assert not (tmp_path / "pair").exists()


def test_a_server_is_told_of_the_adapters_by_name_and_directory(tmp_path):
    made(tmp_path / "pair")
    adapter = str(tmp_path / "pair/adapter")
    options = VllmOptions(python=sys.executable, enable_lora=True, max_lora_rank=8, lora_modules={"mine": adapter})
    model = str(tmp_path / "pair/base")
    settings = VariantSettings(variant="v", model=model, server=options, sampling=Sampling(), guidance=None)
    argv = VllmEngine().argv(settings, LaunchSite(port=1, directory=tmp_path))
    assert argv[argv.index("--lora-modules") + 1] == f"mine={adapter}"
    assert argv[argv.index("--max-lora-rank") + 1] == "8"
    assert "--enable-lora" in argv
    assert "--enable-lora" not in VllmEngine().argv(
        settings.model_copy(update={"server": VllmOptions(python=sys.executable)}),
        LaunchSite(port=1, directory=tmp_path),
    )
    assert VllmEngine().env(settings, LaunchSite(port=1, directory=tmp_path))["HF_HUB_OFFLINE"] == "1"


def test_an_adapter_that_is_not_there_is_told_with_the_command_that_makes_one(tmp_path):
    made(tmp_path / "pair")
    profile = load_profile("lora", overrides=["variants.idle.server.lora_modules={adapter: models/none/adapter}"])
    options = VllmOptions(**profile.variants["idle"].server, python=sys.executable)
    settings = VariantSettings(
        variant="idle", model=str(tmp_path / "pair/base"), server=options, sampling=Sampling(), guidance=None
    )
    with pytest.raises(EngineUnavailableError, match="make-tiny --lora models/none"):
        VllmEngine().check_available(settings)
    with pytest.raises(ProfileError, match="lora_modules names adapters, and enable_lora is false"):
        load_profile("lora", overrides=["variants.idle.server.enable_lora=false"])
