"""``request`` in a profile: what is inherited, swept, refused, and said of the difference between variants."""

import pytest

from benchctl.analysis.validity.comparable import declared_settings
from benchctl.errors import ProfileError
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
