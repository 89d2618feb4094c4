"""The profiles that benchctl carries, their reference, and the commands that show them."""

import pytest
from generate import meaning_of
from typer.testing import CliRunner

from benchctl.cli.commands.setup import profiles as app
from benchctl.errors import ProfileError
from benchctl.profile.errors import option_keys, profile_keys
from benchctl.profile.files import GROUPS, OWN, builtin_profiles, grouped_profiles, list_profiles, preset_files
from benchctl.profile.load import load_profile, parse_profile
from benchctl.profile.planning import arms, variant_settings

NAMES = (
    "aa",
    "ci-smoke",
    "controls",
    "flag",
    "two-builds",
    "lenvm-50x16",
    "model-size-sweep",
    "natural",
    "rate-limited",
    "topk-sweep",
)
GUIDED_NAMES = ("fused-vs-two-phase", "guided-idle", "guided-switches", "lenvm-model-sizes", "noop-skip")
"""For engines that guide."""
runner = CliRunner()


@pytest.mark.parametrize("engine", ["sim", "sim-exact"])
@pytest.mark.parametrize("name", NAMES)
def test_every_built_in_profile_is_valid_and_declares_its_differences(name, engine):
    profile = load_profile(name, engine=engine)
    assert profile.description
    for arm in arms(profile):
        variant_settings(profile, *arm)


def test_the_built_in_profiles_are_these():
    assert {path.stem for path in builtin_profiles().glob("*.yaml")} >= {*NAMES, *GUIDED_NAMES, "rtx4090-replay"}
    assert set(preset_files()) == {
        "attach", "llamacpp-cpu", "sglang", "sglang-lenvm", "sim", "sim-exact", "transformers-cpu",
        "vllm", "vllm-cpu", "vllm-lenvm", "vllm-lenvm-gpu",
    }  # fmt: skip


def test_the_published_experiment_sends_50_requests_of_16_samples_at_once():
    profile = load_profile("lenvm-50x16")
    workload = profile.workload
    assert (workload.num_prompts, workload.samples_per_prompt, workload.samples_as) == (50, 16, "one-request")
    assert (profile.stop, workload.max_tokens, workload.output_len) == ("natural", 6000, None)
    assert (workload.arrival.kind, workload.arrival.max_concurrency) == ("burst", None)
    assert variant_settings(profile, "guided", {}).sampling.top_k == 5
    assert profile.engine.options["time_scale"] <= 4  # a pace that eight hundred streams can keep


def test_every_key_has_a_meaning():
    meanings = {key.path: meaning_of(key) for key in (*profile_keys(), *option_keys("sim"))}
    assert [path for path, meaning in meanings.items() if not meaning] == []
    assert {"workload.arrival.kind", "variants.<name>.guidance.mode", "engine.options.noise"} <= set(meanings)


def test_list_shows_every_profile_and_preset():
    result = runner.invoke(app, ["list"])
    assert result.exit_code == 0
    for entry in list_profiles():
        assert f"{entry.name} " in result.output
        assert entry.description in result.output
    assert f"engine presets: {', '.join(sorted(preset_files()))}" in result.output


def test_every_carried_profile_is_in_one_group_and_the_users_own_come_first(tmp_path, monkeypatch):
    members = [name for names in GROUPS.values() for name in names]
    assert len(members) == len(set(members))
    assert {path.stem for path in builtin_profiles().glob("*.yaml")} <= set(members)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "mine.yaml").write_text("extends: aa\n")
    groups = grouped_profiles()
    assert next(iter(groups)) == OWN
    assert [entry.name for entry in groups[OWN]] == ["mine"]
    assert {entry.name for entries in groups.values() for entry in entries} == {e.name for e in list_profiles()}


def test_show_prints_a_profile_that_can_be_read_back():
    options = ["--engine", "sim-exact", "--set", "seed=9", "--set", "blocks=3"]
    profile = parse_profile(runner.invoke(app, ["show", "ci-smoke", *options]).output, "stdout")
    assert profile == load_profile("ci-smoke", engine="sim-exact", overrides=["seed=9", "blocks=3"])


def test_validate_says_how_many_runs_a_valid_profile_has():
    changed = ["--engine", "sim-exact", "--set", "variants.baseline.server.max_num_seqs=4"]
    result = runner.invoke(app, ["validate", "aa", "topk-sweep", *changed])
    assert result.exit_code == 0
    assert result.output == "ok aa: 16 runs in 8 blocks on sim\nok topk-sweep: 36 runs in 6 blocks on sim\n"


def test_validate_continues_after_an_invalid_profile_and_fails_with_all_errors(tmp_path):
    faulty = tmp_path / "faulty.yaml"
    faulty.write_text("extends: aa\nsead: 5\n")
    result = runner.invoke(app, ["validate", str(faulty), "nothing", "aa"])
    assert isinstance(result.exception, ProfileError)
    assert result.exception.exit_code == 2
    first, second = str(result.exception).splitlines()
    assert first == f"{faulty}:2: sead: unknown key; did you mean 'seed'?"
    assert second.startswith("no profile is called 'nothing'. Known profiles: aa, ")
    assert result.output == "ok aa: 16 runs in 8 blocks on sim\n"
