"""Settings of servers: as launched, as reported, as declared; those that differ undeclared are refused.

What variants and cells set needs no second declaration. Sizes of KV caches are equal where they were stated, and
alike where servers chose them.
"""

import json
import shutil

import msgspec
import pytest
from hypothesis import given, settings, strategies as st
from support.results.builders import (
    BASELINE,
    GUIDED,
    edit_manifest,
    edit_run,
    run_ids,
    share_request_set,
    write_results,
)
from support.results.comparing import compare, compare_arms

from benchctl.analysis.validity.comparable import (
    Difference,
    declared_settings,
    is_declared,
    refused_differences,
    setting_differences,
)
from benchctl.analysis.validity.launch import alike_sizes, launch_settings, names_of
from benchctl.engines.engine import LaunchSite, engine_for
from benchctl.errors import NotComparableError
from benchctl.profile.engine_table import VLLM_KV_SIZES, options_class
from benchctl.profile.load import load_profile, parse_profile
from benchctl.profile.model import Sampling, VariantSettings
from benchctl.profile.planning import variant_settings
from benchctl.records.loaded import load_run
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


GUIDING = """\
name: two
engine: {kind: vllm-lenvm, options: {value_model: v}}
sampling: {top_k: 5}
workload: {dataset: generated, num_prompts: 1, arrival: {kind: burst}}
stop: natural
variants: {baseline: {guidance: {mode: exp}}, changed: {guidance: {mode: exp}, %s}}
"""


def pair(changed, text=VLLM):
    profile = parse_profile(text % changed, "two.yaml")
    return [variant_settings(profile, variant, {}) for variant in ("baseline", "changed")]


def declared(changed, text=VLLM, kind="vllm"):
    return declared_settings(*pair(changed, text), kind)


ONE = (("a",), ("b",))


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
    assert is_declared(consequence, ONE, declared(changed))
    assert not is_declared(consequence, ONE, declared("{}"))
    assert not is_declared("server.scheduler_cls", ONE, declared(changed))


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
    of_switch = declared(changed, GUIDING, "vllm-lenvm")
    possible = {"recorded_passes", "has_kernels", "kernels_reason", "num_bytes", "prefix_bytes", "layers", "dtype"}
    assert {name for name in possible if is_declared(f"server.value_model.{name}", ONE, of_switch)} == described


def test_a_section_that_one_arm_lacks_is_declared_with_its_nulls():
    profile = load_profile("topk-sweep", engine="sim")
    plain, guided = variant_settings(profile, "baseline", {}), variant_settings(profile, "guided", {"top_k": 2})
    section = guided.guidance.model_dump()
    assert None in section.values()
    assert {f"guidance.{name}" for name in section} <= declared_settings(plain, guided, "sim")


def test_a_value_model_declares_no_other_cache_and_the_size_of_one_all_of_it():
    guided = VLLM.replace("kind: vllm", "kind: vllm-lenvm")
    of_value_model = declared("{server: {value_model: models/v}}", guided, "vllm-lenvm")
    assert "server.value_model.*" in of_value_model
    assert of_value_model.isdisjoint(VLLM_KV_SIZES)
    assert declared("{server: {gpu_memory_utilization: 0.5}}") >= {*VLLM_KV_SIZES}


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


@settings(max_examples=40)
@given(a=OPTIONS, b=OPTIONS)
def test_declarations_are_the_same_in_both_directions_and_none_without_a_difference(a, b):
    left, right = (pair(json.dumps({"server": options}))[1] for options in (a, b))
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


ALLOWED = "allowed_differences: [sampling.top_k, server.value_model, guidance.*]\n"


def rewrite_profile(results, old, new):
    results.write_profile(results.profile_yaml().replace(old, new))


def report(results, run_id, **config):
    """Add to what the server of a run reports."""
    edit_run(results, run_id, effective_config=results.run(run_id).read().effective_config | config)


def directory(path, baseline=None, guided=None, **options):
    """A directory whose profile lists no allowed difference, and what its servers report more."""
    results = write_results(path, **options)
    rewrite_profile(results, ALLOWED, "")
    for variant, config in (("baseline", baseline), ("guided", guided)):
        for run_id in run_ids(results, variant):
            report(results, run_id, **(config or {}))
    return results


def differences(*directories, **options):
    """What a comparison of both arms is refused for; empty where it is not."""
    try:
        comparison = compare_arms(*directories, **options)
    except NotComparableError as refusal:
        return refusal.differences
    assert comparison.verdict != "invalid"
    return ()


BLOCKS = "server.num_gpu_blocks"
STATED = {"server.kv_cache_memory_bytes": 25_000_000_000}
SAME = {BLOCKS: 77_000}


@pytest.mark.parametrize(
    ("baseline", "guided", "refused"),
    [
        pytest.param({}, {"guidance.mode": "exp", "guidance.value_scale": 0.0}, None, id="what variants set"),
        pytest.param(
            {"server.max_model_len": 4096}, {"server.max_model_len": 512}, "server.max_model_len: 4096 against 512",
            id="a third difference",
        ),
        pytest.param(SAME, {BLOCKS: 29_000}, f"{BLOCKS}: 77000 against 29000", id="a smaller cache"),
        pytest.param(SAME, {BLOCKS: 76_500}, None, id="caches of two starts of one server"),
        pytest.param(SAME | STATED, SAME | STATED, None, id="caches that were stated and are equal"),
        pytest.param(
            SAME | STATED, {BLOCKS: 76_999} | STATED, f"{BLOCKS}: 77000 against 76999", id="stated and nearly equal"
        ),
        pytest.param({}, {BLOCKS: 29_000}, None, id="a cache that an older directory does not report"),
    ],
)  # fmt: skip
def test_what_servers_report_differently_is_refused_unless_variants_set_it_or_it_means_nothing(
    tmp_path, baseline, guided, refused
):
    results = directory(tmp_path, baseline, guided)
    assert differences(results) == (() if refused is None else (refused,))
    if refused is not None:
        key = refused.partition(":")[0]
        with pytest.raises(NotComparableError, match=f"--allow-difference {key}"):
            compare_arms(results)
        assert differences(results, allow=(key,)) == ()


def test_one_run_that_reports_otherwise_is_refused_even_in_what_its_variant_sets(tmp_path):
    results = directory(tmp_path, SAME, SAME)
    report(results, GUIDED, **{"server.value_model": "qwen2.5-0.5b"})
    report(results, BASELINE, **{BLOCKS: 50_000})
    assert sorted(differences(results)) == [
        f"{BLOCKS}: 50000 or 77000 against 77000",
        'server.value_model: absent against "qwen2.5-0.5b" or "qwen2.5-1.5b"',
    ]


def test_a_cell_declares_for_itself_alone(tmp_path):
    results = directory(tmp_path, cells=({"top_k": 2}, {"top_k": 5}))
    rewrite_profile(results, "top_k: [5]", "top_k: [2, 5]")
    assert differences(results) == ()
    for run_id in run_ids(results)[1::2]:
        report(results, run_id, **{"server.block_size": 32})
    assert differences(results) == ("server.block_size: absent against 32 (top_k=5)",)


def test_two_directories_declare_what_both_of_their_profiles_set(tmp_path):
    one, other = directory(tmp_path / "a"), directory(tmp_path / "b", guided={"server.value_model": "qwen2.5-0.5b"})
    share_request_set(other, one)
    assert differences(one, directory(tmp_path / "c")) == ()
    rewrite_profile(other, "qwen2.5-1.5b", "qwen2.5-0.5b")
    with pytest.raises(NotComparableError, match=r"or add:\n  --allow-difference server\.value_model$"):
        compare(f"{one.path}:guided", f"{other.path}:guided")


numbers = st.lists(st.integers(1, 10**6).map(str), min_size=1, max_size=4)


@given(left=numbers, right=numbers)
def test_sizes_are_alike_in_both_directions_and_only_where_no_value_is_far_from_another(left, right):
    values = [int(value) for value in (*left, *right)]
    for a, b in ((left, right), (right, left)):
        one, other = alike_sizes(BLOCKS, (tuple(a), tuple(b)), ({},))
        assert (len({*one, *other}) == 1) is (max(values) <= 1.02 * min(values))


def record(run_id="000-b0-a", **fields):
    return RunRecord(schema_version=3, index=0, run_id=run_id, block=0, position=0, variant="a", **fields)


def values_of(words, run_id="000-b0-a", **fields):
    """Settings of a launch with these words, divided by blanks."""
    return launch_settings(record(run_id, argv=("/venv/bin/python", *words.split()), **fields))


def test_flags_are_read_with_their_values_in_every_spelling():
    assert values_of("launcher.py --port 8000 --a 1 --b=2 --c --d -1 --a x -- serve model") == {
        "argv.program": "/venv/bin/python",
        "argv.words": "launcher.py serve model",
        "argv.--a": "1 x",
        "argv.--b": "2",
        "argv.--c": "given",
        "argv.--d": "-1",
    }
    assert values_of("-m benchctl.sim") == {"argv.-m": "benchctl.sim"}, "whatever interpreter benchctl has"


def test_what_belongs_to_one_launch_is_the_same_for_all():
    first = values_of(
        "--log /r/runs/000-b0-a/steps.jsonl --nccl-port 1 --peer 127.0.0.1:81 --noise-seed 3",
        env={"LOG": "/r/runs/000-b0-a", "MASTER_PORT": "4", "PYTHONPATH": "/x/benchctl/engines/vllm/inside:/y"},
    )
    second = values_of(
        "--log /q/runs/001-b0-b/steps.jsonl --nccl-port 2 --peer 127.0.0.1:99 --noise-seed 8",
        env={"LOG": "/q/runs/001-b0-b", "PYTHONPATH": "/z/benchctl/engines/vllm/inside:/y"},
        run_id="001-b0-b",
    )
    assert first == second
    assert first["argv.--log"] == "<run>/steps.jsonl"
    assert first["env.PYTHONPATH"] == "/y"


def test_a_variable_that_is_a_secret_is_no_setting():
    settings = values_of("", env={"NOTE": "a [redacted: API key] b", "HF_TOKEN": "[redacted: HF_TOKEN]"})
    assert ("env.NOTE" in settings, "env.HF_TOKEN" in settings) == (True, False)


CHANGED = {
    "tensor_parallel_size": 2, "data_parallel_size": 2, "max_num_seqs": 7, "max_num_batched_tokens": 7777,
    "num_kv_blocks": 99, "block_size": 48, "mem_fraction_static": 0.3, "gpu_memory_utilization": 0.3,
    "kv_cache_memory_bytes": 1 << 20, "enable_prefix_caching": True, "enforce_eager": True, "dtype": "float16",
    "load_format": "dummy", "overlap_schedule": False, "attention_backend": "triton", "sampling_backend": "pytorch",
    "step_log": False, "threads": 3, "n_gpu_layers": 5, "max_model_len": 512, "enable_chunked_prefill": False,
    "async_scheduling": True, "device": "cuda", "attn_implementation": "eager", "continuous_batching": False,
    "quantization": "fp8", "extra_args": ("--anything", "1"), "env": {"OMP_NUM_THREADS": "3"},
    "time_scale": 3.0, "noise": "none", "value_model": "qwen2.5-1.5b",
}  # fmt: skip
SINGLE_DEVICE = ("sim", "tensor_parallel_size")


@pytest.mark.parametrize("kind", ["sim", "vllm", "sglang", "llamacpp", "transformers"])
def test_a_difference_declared_by_an_options_name_covers_what_the_option_does_to_the_launch(
    kind, tmp_path, monkeypatch
):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    program = tmp_path / "program"
    program.write_text("""#!/bin/sh\necho '{"versions": {"vllm": "1", "sglang": "1", "transformers": "1"}}'\n""")
    program.chmod(0o755)
    fields = options_class(kind).model_fields
    programs = {"python": str(program), "binary": str(shutil.which("true"))}
    own = {name: path for name, path in programs.items() if name in fields}
    # The simulator's cost models price one device unless they are told of several.
    tried = {name: value for name, value in CHANGED.items() if name in fields and (kind, name) != SINGLE_DEVICE}
    assert len(tried) >= 5
    plain = launched(kind, tmp_path, own)
    for option, value in tried.items():
        changed = launched(kind, tmp_path, own | {option: value})
        differing = {key for key in plain.keys() | changed.keys() if plain.get(key) != changed.get(key)}
        unknown = {key: names_of(key) for key in differing if f"server.{option}" not in names_of(key)}
        assert unknown == {}, f"they differ with {option} and know only other names"


def launched(kind, directory, options):
    engine, model = engine_for(kind), {"sim": "qwen2.5-7b", "llamacpp": str(directory / "m.gguf")}
    asked = VariantSettings(
        variant="baseline",
        model=model.get(kind, str(directory)),
        server=options_class(kind).model_validate(options),
        sampling=Sampling(),
        guidance=None,
    )
    site = LaunchSite(port=1234, directory=directory / "000-b0-a", noise_seed=1)
    site.directory.mkdir(parents=True, exist_ok=True)  # the simulator is told its settings by a file
    return launch_settings(record(argv=engine.argv(asked, site), env=engine.env(asked, site)))


def test_a_flag_that_nobody_declared_makes_two_sides_incomparable(tmp_path):
    results = write_results(tmp_path)
    argv = ("python", "-m", "benchctl.sim", "--swap-space", "8")
    for run_id in run_ids(results):
        edit_run(results, run_id, argv=argv, env={"OMP_NUM_THREADS": "1"})
    flag, variable = 'argv.--swap-space: absent against "8"', 'env.OMP_NUM_THREADS: absent against "1"'
    allowed = ((), ("argv.--swap-space",), ("server.extra_args",), ("server.env",))
    refused = [differences(results, allow=allow) for allow in allowed]
    assert refused == [(flag, variable), (variable,), (variable,), (flag,)]


def test_a_setting_that_changes_between_blocks_is_a_difference_and_one_that_a_server_tells_is_told_once(tmp_path):
    results = write_results(tmp_path)
    edit_run(results, "002-b1-baseline", env={"LD_PRELOAD": "libtcmalloc.so"})
    assert differences(results) == ('env.LD_PRELOAD: absent or "libtcmalloc.so" against absent',)
    for run_id, number in ((BASELINE, 4), (GUIDED, 8)):
        argv = ("python", "-m", "benchctl.sim", "--max-running-requests", str(number))
        edit_run(results, run_id, argv=argv, effective_config={"server.max_num_seqs": number})
    a, b = (load_run(results.run(name)) for name in (BASELINE, GUIDED))
    assert list(map(str, setting_differences({"cell": ([a], [b])}))) == ["server.max_num_seqs: 4 against 8"]
    edit_run(results, GUIDED, env={"BENCHCTL_LENVM_MODEL": "1"})  # by which benchctl passes on its own option
    cells = {"cell": ([a], [load_run(results.run(GUIDED))])}
    for declared, keys in ((["server.value_model"], []), ([], ["env.BENCHCTL_LENVM_MODEL"])):
        differing = [each.key for each in setting_differences(cells, {"cell": declared})]
        assert differing == [*keys, "server.max_num_seqs"]


def test_directories_of_two_hosts_may_have_their_things_in_other_places(tmp_path):
    one, two = (write_results(tmp_path / name) for name in ("one", "two"))
    host = one.manifest().host
    edit_manifest(two, host=msgspec.structs.replace(host, hostname="two"), created_at="2026-01-02T00:00:00Z")
    for results in (one, two):
        for planned in results.plan().runs:
            home = f"/home/{results.path.name}"
            argv = (f"{home}/venv/bin/python", "-m", "some.server", "--model", f"{home}/tiny")
            edit_run(results, planned.run_id, argv=argv)
    assert compare(one.path, two.path).allowed == ()
    edit_manifest(two, host=host)
    with pytest.raises(NotComparableError, match=r"argv\.program"):
        compare(one.path, two.path)
