"""Secrets belong neither into a profile nor into a result directory."""

import pytest

from benchctl.errors import ProfileError
from benchctl.profile.load import load_profile

KEY = "sk-abcdefghijklmnopqrstuvwx"


@pytest.mark.parametrize(
    ("assignment", "what"),
    [
        ("engine.options.extra_args=[--api-key, opensesame]", "--api-key"),
        ("engine.options.extra_args=[--api-key=opensesame]", "--api-key"),
        (f"engine.options.extra_args=[--middleware, {KEY}]", "a token"),
        ("engine.options.env={HF_TOKEN: opensesame}", "HF_TOKEN"),
        (f"engine.options.env={{MIRROR: {KEY}}}", "MIRROR"),
        ("variants.again.server.extra_args=[--ssl-key-password, opensesame]", "--ssl-key-password"),
    ],
)
def test_a_secret_in_a_profile_is_refused_and_not_repeated(assignment, what):
    with pytest.raises(ProfileError, match=f"{what} looks like a secret.*HF_TOKEN is taken from your env") as error:
        load_profile("aa", engine="vllm", overrides=[assignment])
    assert "opensesame" not in str(error.value)
    assert KEY not in str(error.value)


def test_ordinary_options_and_variables_are_no_secrets():
    options = [
        "engine.options.extra_args=[--max-num-batched-tokens, '64']",
        "engine.options.env={OMP_NUM_THREADS: '2'}",
    ]
    profile = load_profile("aa", engine="vllm", overrides=options)
    assert profile.engine.options["extra_args"] == ["--max-num-batched-tokens", "64"]
