"""``request``, secrets and variables in a profile: what is inherited, swept, refused, and never repeated."""

import pytest
from support.cli import benchctl

from benchctl.analysis.validity.comparable import declared_settings
from benchctl.errors import ProfileError
from benchctl.measure.redaction import server_env
from benchctl.profile.engine_table import own_variables
from benchctl.profile.load import dump_profile, load_profile, parse_profile, profile_sha256
from benchctl.profile.planning import arms, variant_settings

PENALTY = "request.extra_body.repetition_penalty"


def loaded(*overrides, engine="vllm", **options):
    return load_profile("aa", engine=engine, overrides=overrides, **options)


def stated(profile, variant="again"):
    return variant_settings(profile, variant, {}).request.stated()


def test_a_variant_adds_to_what_the_profile_sends_and_null_removes_it():
    profile = loaded(
        "request={extra_body: {a: {x: 1, y: 2}, b: 3}, headers: {User-Agent: blue}, model: one}",
        "variants.again.request={extra_body: {a: {y: null, z: 4}, b: null, c: null}, headers: {User-Agent: null}}",
    )
    assert stated(profile, "baseline") == {
        "model": "one", "extra_body.a.x": 1, "extra_body.a.y": 2, "extra_body.b": 3, "headers.User-Agent": "blue",
    }  # fmt: skip
    assert stated(profile) == {"model": "one", "extra_body.a.x": 1, "extra_body.a.z": 4, "extra_body.c": None}
    assert stated(parse_profile(dump_profile(profile), "again")) == stated(profile)


def test_a_field_of_the_body_is_swept_by_its_path_and_null_leaves_it_out():
    profile = loaded(f"sweep.{PENALTY}=[null, 1.1]", "request.extra_body.top_n_tokens=3")
    swept = [variant_settings(profile, *arm).request.extra_body for arm in arms(profile)[1:]]
    assert swept == [{"top_n_tokens": 3}, {"top_n_tokens": 3, "repetition_penalty": 1.1}]
    baseline, swept_last = (variant_settings(profile, *arm) for arm in (arms(profile)[0], arms(profile)[-1]))
    assert declared_settings(baseline, swept_last, profile.engine.kind) == {PENALTY}
    with pytest.raises(ProfileError, match="no factor or setting has this name"):
        loaded("sweep.request.extra_bodies.x=[1]")


def test_what_a_profile_does_not_say_leaves_its_identity_as_it_was():
    plain = loaded()
    assert profile_sha256(loaded("request.headers={}", "sampling.presence_penalty=0.0")) == profile_sha256(plain)
    assert profile_sha256(loaded("request.model=x")) != profile_sha256(plain)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("request.extra_body={max_tokens: 3}", r"max_tokens, which has a key of its own; set workload\.output_len"),
        ("request.extra_body={ignore_eos: true}", "set stop instead"),
        ("request.extra_body={stream: false}", "sets stream, by which answers are timed and counted; remove it"),
        ("request.extra_body={temperature: 0}", r"set sampling\.temperature instead"),
        ("variants.again.request.extra_body={messages: []}", "set workload instead"),
        ("request.headers={Content-Type: text/plain}", "Content-Type is benchctl's own"),
        ("request.headers={transfer-encoding: chunked}", "benchctl's own"),
        ("request.headers={X-Api-Key: abc}", "X-Api-Key may be a secret, .* write \\${NAME} here"),
        ("request.headers={Cookie: session=sk-abc}", "Cookie may be a secret"),
        ("request.headers={X-Session-Id: sk-abc}", "X-Session-Id may be a secret"),
        ("variants.again.request.headers={Ocp-Apim-Subscription-Key: sk-abc}", "Subscription-Key may be a secret"),
        ("request.headers={X-Note: sk-abcdefghijklmnop}", "X-Note looks like a secret"),
        ("request.headers={X-Note: 'a ${b c}'}", "'\\${' that names no variable"),
        ("request.headers={'a b': c}", "'a b' is not the name of a header"),
        ("request.extra_body={api_key: abc}", "api_key, which looks like a secret"),
    ],
)  # fmt: skip
def test_what_a_request_must_not_carry_is_refused_with_the_key_that_sets_it(assignment, message):
    with pytest.raises(ProfileError, match=message) as error:
        loaded(assignment)
    assert "sk-abc" not in str(error.value)


def test_a_header_that_an_older_version_recorded_is_still_read():
    stored = dump_profile(loaded("request.headers={User-Agent: blue}")).replace("User-Agent", "X-Team")
    assert stated(parse_profile(stored, "profile.yaml")) == {"headers.X-Team": "blue"}


@pytest.mark.parametrize(
    ("engine", "assignment", "message"),
    [
        ("transformers", "request.response_format={type: json_object}", "'transformers' have no response_format"),
        ("llamacpp", "request.structured_outputs={regex: a}", "have choice, grammar, json .*, not regex"),
        ("transformers", "sampling.presence_penalty=0.5", "'transformers' have no presence_penalty"),
        ("attach", "variants.again.request.structured_outputs={json: {}}", "'openai' have none"),
        ("attach", "request.chat_template_kwargs={a: 1}", "'openai' pass nothing on to the chat template"),
    ],
)
def test_what_an_engine_does_not_have_is_refused_before_anything_starts(engine, assignment, message):
    attach = ("engine.options.url=http://h:1", "engine.options.dialect=openai") if engine == "attach" else ()
    with pytest.raises(ProfileError, match=message):
        loaded(*attach, assignment, engine=engine)


def test_a_missing_variable_is_told_with_file_and_line_before_requests_are_to_be_sent(tmp_path, monkeypatch):
    file = tmp_path / "p.yaml"
    file.write_text(
        "extends: aa\nvariants:\n  again:\n    request:\n      headers:\n        X-Key: Bearer ${TEAM_KEY}\n"
    )
    monkeypatch.delenv("TEAM_KEY", raising=False)
    assert load_profile(str(file)).variants["again"].request == {"headers": {"X-Key": "Bearer ${TEAM_KEY}"}}
    with pytest.raises(ProfileError, match=r"p\.yaml:6: .*X-Key: TEAM_KEY is not set in the environment"):
        load_profile(str(file), is_to_send=True)
    monkeypatch.setenv("TEAM_KEY", "1")
    assert load_profile(str(file), is_to_send=True)


def test_guidance_is_not_overwritten_by_a_field_of_the_body():
    with pytest.raises(ProfileError, match="custom_params carries the guidance of this variant"):
        load_profile(
            "guided-idle",
            engine="sim",
            overrides=["request.extra_body={custom_params: {}}", "variants.idle.guidance={}"],
        )


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
@pytest.mark.parametrize("section", ["engine.options", "variants.baseline.server"])
def test_a_variable_of_benchctl_in_env_is_refused_with_the_option_to_use(section, engine, name, says):
    with pytest.raises(ProfileError) as refused:
        load_profile("topk-sweep", engine=engine, overrides=[f"{section}.env.{name}=1"])
    assert f"{section}.env.{name}: benchctl sets this variable itself" in str(refused.value)
    assert says in str(refused.value)


def test_other_variables_are_taken_and_a_stored_profile_of_an_older_version_stays_readable():
    set_here = ['engine.options.env.VLLM_USE_V2_MODEL_RUNNER="1"']
    profile = load_profile("topk-sweep", engine="vllm-lenvm", overrides=set_here)
    assert profile.engine.options["env"] == {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    text = dump_profile(profile).replace("VLLM_USE_V2_MODEL_RUNNER", "BENCHCTL_LENVM_CLOCK")
    assert parse_profile(text, "profile.yaml").engine.options["env"] == {"BENCHCTL_LENVM_CLOCK": "1"}


def test_what_a_shell_sets_for_another_server_does_not_reach_ours():
    told = dict.fromkeys(own_variables(), "leaked")
    assert {"BENCHCTL_LENVM_CLOCK", "BENCHCTL_STEP_LOG", "BENCHCTL_CORRECTS_CPU_SAMPLING"} <= set(told)
    env = server_env(told | {"HOME": "/h"}, {"BENCHCTL_STEP_LOG": "/run/steps"})
    assert env == {"HOME": "/h", "BENCHCTL_STEP_LOG": "/run/steps"}


def test_a_run_says_what_it_does_not_pass_on(tmp_path):
    done = benchctl("run", "ci-smoke", "--dry-run", cwd=tmp_path, BENCHCTL_LENVM_CLOCK="device")
    assert done.returncode == 0
    assert "BENCHCTL_LENVM_CLOCK is set in this environment and not passed on to servers" in done.stderr
