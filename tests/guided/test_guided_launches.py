"""Every carried profile on the engines that guide: servers are started alike, but for what is declared."""

import sys
from pathlib import Path

import pytest
from support.engine_settings import model_in

from benchctl.analysis.validity.comparable import declared_settings, is_declared
from benchctl.analysis.validity.launch import launch_settings
from benchctl.engines.engine import LaunchSite, engine_for
from benchctl.profile.files import list_profiles
from benchctl.profile.load import load_profile
from benchctl.profile.model import Profile, VariantSettings
from benchctl.profile.planning import arms, variant_settings
from benchctl.profile.settings import load_points, under_load
from benchctl.records.directory import arm_label
from benchctl.records.record import RunRecord

SIMULATED = {"llm-mock-cache", "bonus-tokens"}
"""Profiles that sweep options which the simulator alone has."""
PROFILES = [entry.name for entry in list_profiles() if entry.name not in SIMULATED]
OF_THE_PLUGIN = {"fused-vs-two-phase", "guided-switches", "lora", "noop-skip", "speculation"}
"""Profiles about options that SGLang's fork does not have."""
OF_SEVERAL_DEVICES = {"steptime-w5"}
"""Profiles that spread a model over devices, where the fork writes no step log."""


@pytest.fixture(name="models")
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directories that look like models; the engines are taken for installed."""
    for name in ("base", "value"):
        model_in(tmp_path / name, model_type="qwen2", max_position_embeddings=4096)
    monkeypatch.setattr("benchctl.engines.environment.interpreter_for", lambda *_: Path(sys.executable))
    monkeypatch.setattr("benchctl.engines.sglang_lenvm.fork_interpreter", lambda *_: Path(sys.executable))
    return tmp_path


def settings_by_arm(profile: Profile, models: Path) -> dict[str, VariantSettings]:
    """Settings of each arm, with the models that exist here."""
    by_arm = {}
    for arm in arms(profile):
        settings = variant_settings(profile, *arm)
        value_model = str(models / "value") if settings.server.guides_with else None
        server = settings.server.model_copy(update={"value_model": value_model})
        by_arm[arm_label(*arm)] = settings.model_copy(update={"model": str(models / "base"), "server": server})
    return by_arm


def launches(profile: Profile, models: Path) -> dict[str, dict[str, str]]:
    """What each arm's server is started with, all with the models that exist here."""
    engine, site = engine_for(profile.engine.kind), LaunchSite(port=8123, directory=models / "000-b0-a")
    return {
        label: launch_settings(
            RunRecord(
                schema_version=3, index=0, run_id="000-b0-a", block=0, position=0, variant="v",
                argv=engine.argv(settings, site), env=engine.env(settings, site),
            )
        )
        for label, settings in settings_by_arm(profile, models).items()
    }  # fmt: skip


def differences(profile: Profile, models: Path, *, undeclared: bool = False) -> set[str]:
    """Settings in which some server differs from the baseline's; only those that its variant does not declare."""
    profile = under_load(profile, load_points(profile)[0])
    by_arm, settings, different = launches(profile, models), settings_by_arm(profile, models), set()
    baseline = by_arm.pop(profile.baseline)
    for label, launch in by_arm.items():
        declared = declared_settings(settings[profile.baseline], settings[label], profile.engine.kind)
        differing = {key for key in baseline.keys() | launch.keys() if baseline.get(key) != launch.get(key)}
        different |= {
            key for key in differing if not undeclared or not is_declared(key, ((key,), (key,)), declared)
        }
    return different


@pytest.mark.parametrize("name", PROFILES)
def test_servers_are_started_alike_but_for_what_their_variants_set(name: str, models: Path) -> None:
    for kind in ("vllm-lenvm", "sglang-lenvm"):
        # The fork logs the steps of one device, so its servers of several are not started alike.
        if kind == "vllm-lenvm" or name not in OF_THE_PLUGIN | OF_SEVERAL_DEVICES:
            assert not differences(load_profile(name, engine=kind), models, undeclared=True)
    # The plugin leaves the scheduling of a guided server as its baseline has it.
    profile = load_profile(name, engine="vllm-lenvm")
    assert not [key for key in differences(profile, models) if "async" in key]
    baseline, *others = (variant_settings(profile, *arm) for arm in arms(profile))
    scheduling = {"server.overlap_schedule", "server.async_scheduling"}
    assert not any(scheduling & declared_settings(baseline, other, "vllm-lenvm") for other in others)


def test_each_arm_of_the_switches_lacks_one_part_of_the_guided_step_and_declares_nothing_else(models: Path) -> None:
    profile = load_profile("guided-switches", engine="vllm-lenvm")
    assert differences(profile, models) == {"env.BENCHCTL_LENVM_SETTINGS"}
    settings = settings_by_arm(profile, models)
    complete = settings.pop("all-on")
    declared = {name: declared_settings(complete, other, "vllm-lenvm") for name, other in settings.items()}
    assert {name: {key for key in keys if "server.value_model." not in key} for name, keys in declared.items()} == {
        "no-reuse": {"server.value_reuse"},
        "no-kernels": {"server.value_kernels"},
        "no-graphs": {"server.value_graphs"},
        "no-early-skipping": {"server.value_skips_early"},
    }
    # Two forwards are compared with one that reuses nothing either.
    two_phase, fused = settings_by_arm(load_profile("fused-vs-two-phase", engine="vllm-lenvm"), models).values()
    assert declared_settings(two_phase, fused, "vllm-lenvm") == {"server.fused"}
    assert two_phase.server.model_dump()["value_reuse"] is fused.server.model_dump()["value_reuse"] is False


def test_sglang_s_fork_guides_without_overlapped_scheduling_and_the_plugin_with_a_processor(models: Path) -> None:
    differing = differences(load_profile("topk-sweep", engine="sglang-lenvm"), models)
    assert "argv.--disable-overlap-schedule" in differing
    assert "argv.--logits-processors" in differences(load_profile("guided-idle", engine="vllm-lenvm"), models)
