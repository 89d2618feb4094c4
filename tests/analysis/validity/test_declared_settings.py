"""Declared by saying it: what variants and cells set needs no second declaration, and anything else is refused."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.results.builders import edit_run, share_request_set, write_results

from benchctl.analysis.compare.compare import CompareOptions, compare_sides
from benchctl.analysis.compare.result import Comparison
from benchctl.analysis.experiment.pairing import parse_side
from benchctl.analysis.validity.comparable import Difference, declared_settings, is_declared, refused_differences
from benchctl.errors import NotComparableError
from benchctl.profile.load import load_profile, parse_profile
from benchctl.profile.model import VariantSettings
from benchctl.profile.planning import variant_settings
from benchctl.records.directory import ResultDirectory
from benchctl.records.record import RunRecord

VLLM = """\
name: two
engine:
  kind: vllm
  options: {max_num_seqs: 8, env: {OMP_NUM_THREADS: "1", SHARED: "1"}, extra_args: [--seed, "3"]}
workload: {dataset: generated, num_prompts: 1, arrival: {kind: burst}}
stop: natural
variants: {baseline: {}, changed: %s}
"""


GUIDED = """\
name: two
engine: {kind: vllm-lenvm, options: {value_model: v}}
sampling: {top_k: 5}
workload: {dataset: generated, num_prompts: 1, arrival: {kind: burst}}
stop: natural
variants: {baseline: {guidance: {mode: exp}}, changed: {guidance: {mode: exp}, %s}}
"""


def pair(changed: str, text: str = VLLM) -> tuple[VariantSettings, VariantSettings]:
    profile = parse_profile(text % changed, "two.yaml")
    return variant_settings(profile, "baseline", {}), variant_settings(profile, "changed", {})


def declared(changed: str, text: str = VLLM, kind: str = "vllm") -> frozenset[str]:
    return declared_settings(*pair(changed, text), kind)


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ("{}", set()),
        ("{server: {max_num_seqs: 8}}", set()),
        ("{sampling: {top_k: 5, min_p: 0.1}}", {"sampling.top_k", "sampling.min_p"}),
        ("{request: {model: adapter}}", {"request.model"}),
        ("{request: {extra_body: {foo: 1}}}", {"request.extra_body.foo"}),
        ("{server: {load_format: dummy}}", {"server.load_format"}),
        (
            '{server: {env: {OMP_NUM_THREADS: "2", SHARED: "1", NEW: x}}}',
            {"server.env", "env.OMP_NUM_THREADS", "env.NEW"},
        ),
        (
            '{server: {extra_args: [--seed, "3", --stream-interval, "4"]}}',
            {"server.extra_args", "argv.--stream-interval", "server.stream_interval"},
        ),
    ],
)
def test_a_variant_declares_what_it_sets_and_nothing_else(changed, names):
    assert declared(changed) == names


@pytest.mark.parametrize(
    ("changed", "consequence"),
    [
        ("{server: {max_num_batched_tokens: 512}}", "server.encoder_cache_size"),
        ("{server: {enforce_eager: true}}", "server.compilation.mode"),
        ("{server: {tensor_parallel_size: 2}}", "server.world_size"),
        ("{server: {num_speculative_tokens: 3, speculative_method: ngram}}", "server.speculative.method"),
        ("{server: {num_speculative_tokens: 3, speculative_method: ngram}}", "server.max_num_scheduled_tokens"),
        ("{server: {python: /opt/b/bin/python}}", "server.torch_version"),
        ("{server: {python: /opt/b/bin/python}}", "engine_version"),
        ("{server: {extra_args: [--enable-lora]}}", "server.compilation.mode"),
    ],
)
def test_what_an_option_brings_about_is_declared_with_it(changed, consequence):
    one = (("a",), ("b",))
    assert is_declared(consequence, one, declared(changed))
    assert not is_declared(consequence, one, declared("{}"))
    assert not is_declared("server.scheduler_cls", one, declared(changed))


@pytest.mark.parametrize(
    ("changed", "described"),
    [
        ("server: {value_reuse: false}", set()),
        ("server: {value_graphs: false}", {"recorded_passes"}),
        ("server: {value_kernels: false}", {"has_kernels", "kernels_reason", "recorded_passes"}),
        ("server: {value_skips_early: false}", set()),
        ("sampling: {top_k: 7}", {"recorded_passes"}),
    ],
)
def test_a_switch_of_the_guided_step_declares_what_it_changes_in_the_description_of_the_value_model(
    changed, described
):
    of_switch = declared_settings(*pair(changed, GUIDED), "vllm-lenvm")
    one = (("a",), ("b",))
    possible = {"recorded_passes", "has_kernels", "kernels_reason", "num_bytes", "prefix_bytes", "layers", "dtype"}
    assert {name for name in possible if is_declared(f"server.value_model.{name}", one, of_switch)} == described


def test_a_section_that_one_arm_lacks_is_declared_with_its_nulls():
    profile = load_profile("topk-sweep", engine="sim")
    arms_of_profile = variant_settings(profile, "baseline", {}), variant_settings(profile, "guided", {"top_k": 2})
    reported = {f"guidance.{name}" for name in arms_of_profile[1].guidance.model_dump()}
    assert reported <= declared_settings(*arms_of_profile, "sim")
    assert any(value is None for value in arms_of_profile[1].guidance.model_dump().values())


def test_a_variable_of_a_variant_does_not_declare_every_variable():
    of_one = declared('{server: {env: {OMP_NUM_THREADS: "2", SHARED: "1"}}}')
    one = (("1",), ("2",))
    assert is_declared("env.OMP_NUM_THREADS", one, of_one)
    assert not is_declared("env.SHARED", one, of_one)
    of_one = declared('{server: {extra_args: [--seed, "3", --stream-interval, "4"]}}')
    assert is_declared("argv.--stream-interval", one, of_one)
    assert not is_declared("argv.--seed", one, of_one)


OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "max_num_seqs": st.sampled_from([8, 16, 32]),
        "enforce_eager": st.booleans(),
        "dtype": st.sampled_from(["float32", "bfloat16"]),
        "env": st.dictionaries(st.sampled_from(["A", "B"]), st.sampled_from(["1", "2"])),
        "extra_args": st.lists(st.sampled_from(["--a=1", "--b", "--enable-lora"]), unique=True),
    },
)


def with_options(options: dict[str, object]) -> VariantSettings:
    _, changed = pair(json.dumps({"server": options}))
    return changed


@given(a=OPTIONS, b=OPTIONS)
def test_declarations_are_the_same_in_both_directions_and_none_without_a_difference(a, b):
    left, right = with_options(a), with_options(b)
    assert declared_settings(left, right, "vllm") == declared_settings(right, left, "vllm")
    assert declared_settings(left, left, "vllm") == frozenset()


KEYS = st.sampled_from(["server.a", "server.b", "env.X", "argv.--c", "stop", "engine_version"])
DIFFERENCES = st.lists(st.builds(Difference, KEYS, st.just("1"), st.just("2"), is_declared=st.booleans()))
PATTERNS = st.lists(st.sampled_from(["server.*", "server.a", "env.*", "*", "argv.--c", "stop"]))


@given(differences=DIFFERENCES, patterns=PATTERNS, more=PATTERNS, declares=st.integers(0, 63))
def test_declaring_more_never_refuses_more(differences, patterns, more, declares):
    before = set(map(str, refused_differences(differences, patterns)))
    assert set(map(str, refused_differences(differences, [*patterns, *more]))) <= before
    wider = [
        Difference(d.key, d.a, d.b, is_declared=d.is_declared or bool(declares >> i & 1))
        for i, d in enumerate(differences)
    ]
    assert set(map(str, refused_differences(wider, patterns))) <= before


def directory(path: Path, **configs: dict[str, object]) -> ResultDirectory:
    """A directory whose profile lists no allowed difference; ``configs`` are added to what servers report."""
    results = write_results(path)
    profile = results.path / "profile.yaml"
    lines = profile.read_text().splitlines(keepends=True)
    profile.write_text("".join(line for line in lines if not line.startswith("allowed_differences")))
    for run in results.runs():
        record = run.read()
        config = record.effective_config | configs.get(record.variant, {})
        edit_run(results, record.run_id, effective_config=config)
    return results


def edit_first(results: ResultDirectory, variant: str, **changes: object) -> RunRecord:
    """Change one run of a variant."""
    record = next(run.read() for run in results.runs() if run.read().variant == variant)
    edit_run(results, record.run_id, **changes)
    return record


def compared(results: ResultDirectory, other: ResultDirectory | None = None, *allow: str) -> Comparison:
    other = other or results
    sides = parse_side(f"{results.path}:baseline"), parse_side(f"{other.path}:guided")
    return compare_sides(*sides, CompareOptions(allow=allow))


def test_variants_compare_without_a_second_declaration(tmp_path):
    comparison = compared(
        directory(tmp_path, guided={"guidance.mode": "centered_exp", "guidance.value_scale": 0.0})
    )
    assert {difference.key for difference in comparison.allowed} == {
        "sampling.top_k",
        "server.value_model",
        "guidance.mode",
        "guidance.value_scale",
    }


def test_a_third_difference_is_refused_with_the_words_to_paste(tmp_path):
    results = directory(tmp_path, guided={"server.max_model_len": 512}, baseline={"server.max_model_len": 4096})
    for run in results.runs():
        edit_run(results, run.read().run_id, env={"OMP": "2" if run.read().variant == "guided" else "1"})
    with pytest.raises(NotComparableError) as caught:
        compared(results)
    assert caught.value.differences == ('env.OMP: "1" against "2"', "server.max_model_len: 4096 against 512")
    words = "--allow-difference env.OMP --allow-difference server.max_model_len"
    assert words in str(caught.value)
    assert compared(results, None, *words.replace("--allow-difference", "").split()).verdict != "invalid"


def test_one_run_that_reports_otherwise_is_refused_even_in_what_its_variant_sets(tmp_path):
    results = directory(tmp_path)
    record = next(run.read() for run in results.runs() if run.read().variant == "guided")
    config = record.effective_config | {"server.value_model": "qwen2.5-0.5b"}
    edit_first(results, "guided", effective_config=config)
    with pytest.raises(
        NotComparableError, match=r'server.value_model: absent against "qwen2.5-0.5b" or "qwen2.5-1.5b"'
    ):
        compared(results)


def test_a_cell_declares_for_itself_alone(tmp_path):
    results = write_results(tmp_path, cells=({"top_k": 2}, {"top_k": 5}))
    profile = results.path / "profile.yaml"
    text = profile.read_text().replace(
        "allowed_differences: [sampling.top_k, server.value_model, guidance.*]\n", ""
    )
    profile.write_text(text.replace("top_k: [5]", "top_k: [2, 5]"))
    assert compared(results).verdict != "invalid"
    for run in results.runs():
        record = run.read()
        if record.cell == {"top_k": 5}:
            config = record.effective_config | {"server.block_size": 32}
            edit_run(results, record.run_id, effective_config=config)
    with pytest.raises(NotComparableError) as caught:
        compared(results)
    assert caught.value.differences == ("server.block_size: absent against 32 (top_k=5)",)


def test_two_directories_declare_what_both_of_their_profiles_set(tmp_path):
    one, other = directory(tmp_path / "a"), directory(tmp_path / "b")
    share_request_set(other, one)
    assert compared(one, other).verdict != "invalid"


def test_what_two_profiles_set_differently_in_one_variant_is_declared_by_neither(tmp_path):
    one, other = directory(tmp_path / "a"), directory(tmp_path / "b", guided={"server.value_model": "qwen2.5-0.5b"})
    share_request_set(other, one)
    profile = other.path / "profile.yaml"
    profile.write_text(profile.read_text().replace("qwen2.5-1.5b", "qwen2.5-0.5b"))
    sides = parse_side(f"{one.path}:guided"), parse_side(f"{other.path}:guided")
    with pytest.raises(NotComparableError, match=r"or add:\n  --allow-difference server\.value_model\n"):
        compare_sides(*sides, CompareOptions())
