"""Variables by which benchctl tells its servers what to do: refused in ``env``, not inherited from a shell."""

import pytest
from support.cli import benchctl

from benchctl.errors import ProfileError
from benchctl.measure.redaction import server_env
from benchctl.profile.engine_table import own_variables
from benchctl.profile.load import dump_profile, load_profile, parse_profile


def refusal(engine, assignment):
    with pytest.raises(ProfileError) as refused:
        load_profile("topk-sweep", engine=engine, overrides=[assignment])
    return str(refused.value)


@pytest.mark.parametrize(
    ("engine", "name", "says"),
    [
        ("vllm-lenvm", "BENCHCTL_LENVM_CLOCK", "from engine.options.guidance_clock; set that and remove"),
        (
            "vllm-lenvm",
            "BENCHCTL_LENVM_SETTINGS",
            "from engine.options.value_dtype, engine.options.value_load_format",
        ),
        ("vllm-lenvm", "BENCHCTL_LENVM_MODEL", "from engine.options.value_model; set that and remove"),
        ("vllm-lenvm", "BENCHCTL_LENVM_STEP_LOG", "from engine.options.step_log; set that and remove"),
        ("vllm-lenvm", "BENCHCTL_LENVM_DESCRIPTION", "from engine.options.value_model; set that"),
        ("vllm", "BENCHCTL_STEP_LOG", "from engine.options.step_log;"),
        ("sglang", "BENCHCTL_STEP_LOG", "from engine.options.step_log;"),
        ("vllm", "BENCHCTL_LENVM_CLOCK", "itself; remove it"),
        ("vllm", "BENCHCTL_NOT_YET_KNOWN", "itself; remove it"),
    ],
)
def test_a_variable_of_benchctl_in_env_is_refused_with_the_option_to_use(engine, name, says):
    message = refusal(engine, f"engine.options.env.{name}=1")
    assert f"engine.options.env.{name}: benchctl sets this variable itself" in message
    assert says in message


def test_a_variable_of_benchctl_in_the_env_of_a_variant_is_refused_at_its_place():
    message = refusal("vllm-lenvm", "variants.guided.server.env.BENCHCTL_LENVM_CLOCK=device")
    assert "variants.guided.server.env.BENCHCTL_LENVM_CLOCK: benchctl sets" in message


def test_other_variables_are_taken():
    profile = load_profile(
        "topk-sweep", engine="vllm-lenvm", overrides=['engine.options.env.VLLM_USE_V2_MODEL_RUNNER="1"']
    )
    assert profile.engine.options["env"] == {"VLLM_USE_V2_MODEL_RUNNER": "1"}


def test_a_stored_profile_of_an_older_version_stays_readable():
    profile = load_profile("topk-sweep", engine="vllm-lenvm")
    text = dump_profile(profile).replace("    env: {}", "    env: {BENCHCTL_LENVM_CLOCK: device}")
    assert parse_profile(text, "profile.yaml").engine.options["env"] == {"BENCHCTL_LENVM_CLOCK": "device"}


def test_what_a_shell_sets_for_another_server_does_not_reach_ours():
    told = dict.fromkeys(own_variables(), "leaked")
    assert {"BENCHCTL_LENVM_CLOCK", "BENCHCTL_STEP_LOG", "BENCHCTL_CORRECTS_CPU_SAMPLING"} <= set(told)
    env = server_env(told | {"HOME": "/h"}, {"BENCHCTL_STEP_LOG": "/run/steps"})
    assert env == {"HOME": "/h", "BENCHCTL_STEP_LOG": "/run/steps"}


def test_a_run_says_what_it_does_not_pass_on(tmp_path):
    done = benchctl("run", "ci-smoke", "--dry-run", cwd=tmp_path, BENCHCTL_LENVM_CLOCK="device")
    assert done.returncode == 0
    assert "BENCHCTL_LENVM_CLOCK is set in this environment and not passed on to servers" in done.stderr
