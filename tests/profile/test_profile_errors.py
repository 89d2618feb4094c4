"""Every error of a profile: at its line, by its path, with the value and the remedy, all at once."""
# ruff: noqa: E501  # a message stands on one line, as it is shown

import itertools
import textwrap

import pytest

from benchctl.errors import ProfileError
from benchctl.profile.choices import DATASETS
from benchctl.profile.files import preset_files
from benchctl.profile.load import load_profile, parse_profile

HEAD = """\
name: p
engine: {kind: sim}
workload:
  dataset: gsm8k
  arrival: {kind: burst}
variants:
  baseline: {}
"""


def errors_of(text: str) -> list[str]:
    with pytest.raises(ProfileError) as error:
        parse_profile(text, "p.yaml")
    return str(error.value).splitlines()


def error_of(text: str) -> str:
    (message,) = errors_of(text)
    return message


GUIDED = HEAD + (
    "  guided:\n    server: {value_model: qwen2.5-1.5b}\n    sampling: {top_k: 5}\n    guidance: {value_scale: 0.0}\n"
)


def test_all_errors_of_a_profile_are_reported_at_once():
    text = """\
    name: Big Test
    engine: {kind: simm}
    workload:
      dataset: gsm9k
      num_promts: 3
      num_prompts: "5"
      output_len: {cv: 1}
      input_len: x
      arrival: {kind: closed-loop, max_concurrency: 0}
      top_k: 5
    variants:
      baseline:
      Guided: {guidance: {mode: muul}}
    sweep:
      top_k: [[1], 2]
      b: []
    seed: yes
    seed: 7
    telemetry: {gpu_hz: 500}
    sampling: {top_k: 0, top_p: 0}
    blocks: 1.5
    timeouts: []
    """
    assert errors_of(textwrap.dedent(text)) == [
        "21 errors in the profile",
        "p.yaml:1: name: 'Big Test' is not a name; write lower-case letters, digits, '.', '_' and '-', first a letter or digit",
        "p.yaml:2: engine.kind: is 'simm'; allowed are sim, vllm, vllm-lenvm, sglang, sglang-lenvm, transformers, llamacpp, attach, micro; did you mean 'sim'?",
        f"p.yaml:4: workload.dataset: is 'gsm9k'; allowed are {', '.join(DATASETS)}; did you mean 'gsm8k'?",
        "p.yaml:5: workload.num_promts: unknown key; did you mean 'num_prompts'?",
        "p.yaml:6: workload.num_prompts: expected a whole number, found '5'; remove the quotes",
        "p.yaml:7: workload.output_len.mean: missing; add mean: Mean length before cutting",
        "p.yaml:8: workload.input_len: expected a whole number or a mapping or a list, found 'x'",
        "p.yaml:9: workload.arrival.max_concurrency: is 0; it must be at least 1",
        "p.yaml:10: workload.top_k: unknown key here; it belongs to sampling",
        "p.yaml:12: variants.baseline: expected a mapping, found nothing (null); write {} where nothing is to be set",
        "p.yaml:13: variants.Guided.guidance.mode: is 'muul'; allowed are mul, linear, exp, length_mul, centered_exp, value_bias; did you mean 'mul'?",
        "p.yaml:13: variants.Guided: 'Guided' is not a name; write lower-case letters, digits, '.', '_' and '-', first a letter or digit",
        "p.yaml:15: sweep.top_k[0]: expected text or a whole number or a number or true or false, found a list",
        "p.yaml:16: sweep.b: is empty; give at least one, or remove the key",
        "p.yaml:17: seed: expected a whole number, found 'yes'",
        "p.yaml:18: seed: written twice, first in line 17; remove one of the two",
        "p.yaml:19: telemetry.gpu_hz: is 500; it must be at most 100",
        "p.yaml:20: sampling.top_k: top_k is 0; write -1 for the whole vocabulary or a positive count",
        "p.yaml:20: sampling.top_p: is 0; it must be above 0",
        "p.yaml:21: blocks: expected a whole number, found 1.5",
        "p.yaml:22: timeouts: expected a mapping, found a list",
    ]


def with_line(line):
    """The smallest profile with one more line of the workload."""
    return HEAD.replace("  arrival", f"  {line}\n  arrival")


HUNDRED = list(range(1, 101))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "1: found nothing where a profile is a mapping; write keys such as 'workload:'"),
        ("- a\n", "1: found a list where a profile is a mapping; write keys such as 'workload:'"),
        ("\nfive\n", "2: found a single value where a profile is a mapping; write keys such as 'workload:'"),
        ("a: b\nc: [\n", "3: not readable as YAML: while parsing a flow node, expected the node content"),
        ("a: 1\n---\nb: 2\n", "2: not readable as YAML: expected a single document in the stream, but found"),
        ("a: \0\n", "1: not readable as YAML: unacceptable character #x0000"),
        (HEAD + "seed: -1\n", "8: seed: is -1; it must be at least 0"),
        (HEAD + "sampling: {min_p: 2}\n", "8: sampling.min_p: is 2; it must be at most 1"),
        (HEAD + "sampling: {min_p: true}\n", "8: sampling.min_p: expected a number, found true"),
        (HEAD + "model: 5\n", "8: model: expected text, found 5"),
        (HEAD + "num_prompts: 5\n", "8: num_prompts: unknown key here; it belongs to workload"),
        (HEAD + "primary_metrics: step_ms\n", "8: primary_metrics: expected a list, found 'step_ms'"),
        (HEAD + f"stop: {'x' * 200}\n", "8: stop: is 'xxxxx"),
        (
            HEAD + "baseline: basline\n",
            "8: baseline: the baseline 'basline' is not a variant; variants are baseline; did",
        ),
        (HEAD + "load: {workers: many}\n", "8: load.workers: is 'many'; allowed are auto, a whole number"),
        (HEAD + "load: {workers: 65}\n", "8: load.workers: is 65; it must be at most 64"),
        (HEAD + "sweep: {top_k: [1]}\n", "8: sweep: applies to no variant; add a variant"),
        (
            HEAD.replace("{kind: burst}", "{kind: closed-loop}"),
            "5: workload.arrival: kind closed-loop needs max_concurrency",
        ),
        (HEAD.replace("{kind: burst}", "{kind: poisson}"), "5: workload.arrival: kind poisson needs request_rate"),
        (
            with_line("output_len: {mean: 5, average: 9}"),
            "5: workload.output_len.average: unknown key; known keys here are mean, cv, min, max",
        ),
        (
            with_line("output_len: {mean: 5, min: 9}"),
            "5: workload.output_len: needs min <= mean <= max, got 9 <= 5.0 <= 1000000",
        ),
        (
            HEAD.replace("variants:\n  baseline: {}", "variants: {}"),
            "6: variants: is empty; give at least one, or remove the key",
        ),
        (
            HEAD.replace("  baseline: {}", "  stock: {}\n  guided: {}"),
            "6: variants: the baseline 'baseline' is not a variant; variants are stock, guided; add it, or name one of them in baseline",
        ),
        (
            HEAD.replace("{kind: sim}", "{kind: sim, preset: sim}"),
            "2: engine: has both preset and kind; a preset has its own kind, so remove one of the two",
        ),
        *(
            (HEAD + addition, message)
            for addition, message in [
                (
                    "seed: !!int 5\nblocks: !x 5\n",
                    "9: blocks: the tag !x is not supported; write the plain value",
                ),
                ("timeouts: !!set {}\n", "8: timeouts: the tag !!set is not supported; write the plain value"),
                ("? [a]\n: 5\n", "8: a key is a list or a mapping; write plain text before the ':'"),
                (
                    "seed: !!int five\n",
                    "8: seed: 'five' is not a number that can be stored; write another",
                ),
                (
                    "telemetry: {gpu_hz: 1e999}\n",
                    "8: telemetry.gpu_hz: '1e999' is not a number that can be stored",
                ),
                ("<<: {seed: 5}\n", "8: <<: unknown key; known keys here are name, description, seed, blocks,"),
            ]
        ),
        *(
            (f"{HEAD}  odd: {variant}\n", f"8: {message}")
            for variant, message in [
                (
                    "{server: {max_num_sqs: 4}}",
                    "variants.odd.server.max_num_sqs: unknown key; did you mean 'max_num_seqs'?",
                ),
                (
                    "{server: {max_num_seqs: four}}",
                    "variants.odd.server.max_num_seqs: expected a whole number, found 'four'",
                ),
                ("{server: 4}", "variants.odd.server: expected a mapping, found 4"),
                ("{sampling: {topp: 1}}", "variants.odd.sampling.topp: unknown key; did you mean 'top_p'?"),
                (
                    "{sampling: {top_k: 0}}",
                    "variants.odd.sampling.top_k: top_k is 0; write -1 for the whole vocabulary",
                ),
                (
                    "{guidance: {}, sampling: {top_k: 3}}",
                    "variants.odd.guidance: variant 'odd' is guided, but its server loads no value model; set variants.odd.server",
                ),
                (
                    "{guidance: {mode: value_bias}, server: {value_model: m}, sampling: {top_k: -1}}",
                    "variants.odd.sampling.top_k: variant 'odd' is guided with mode value_bias, which needs a finite top_k, and",
                ),
                (
                    "{guidance: {}, server: {value_model: m}}",
                    "variants.odd.guidance: variant 'odd' is guided with mode centered_exp, which needs a finite top_k, and has -1",
                ),
            ]
        ),
        *(
            (f"{GUIDED}sweep: {sweep}\n", f"{11 if message.startswith('variants') else 12}: {message}")
            for sweep, message in [
                (
                    "{top_q: [1]}",
                    "sweep.top_q: no factor or setting has this name; factors are model, top_k, value_model,",
                ),
                (
                    "{server.max_num_sqs: [1]}",
                    "sweep.server.max_num_sqs: no factor or setting has this name; factors are ... did you mean 'server.max_num_seqs'",
                ),
                (
                    "{zzz: [1]}",
                    "sweep.zzz: no factor or setting has this name; ... name one such as server.max_num_seqs or sampling.min_p",
                ),
                ("{top_k: [1, 2, 1]}", "sweep.top_k: lists 1 twice; list each value once"),
                (
                    "{top_k: [1], sampling.top_k: [2]}",
                    "sweep.sampling.top_k: sets what top_k sets already; sweep one of the two",
                ),
                ("{top_k: [2, x]}", "sweep.top_k[1]: expected a whole number, found 'x'"),
                (
                    "{top_k: [2, 0]}",
                    "sweep.top_k[1]: top_k is 0; write -1 for the whole vocabulary or a positive count",
                ),
                (
                    "{top_k: [5, -1]}",
                    "sweep.top_k[1]: variant 'guided' is guided with mode centered_exp, which needs a finite",
                ),
                (
                    "{value_model: [a, null]}",
                    "variants.guided.guidance: variant 'guided' is guided, but its server loads no value",
                ),
                ("{top_k: 5}", "sweep.top_k: expected a list, found 5"),
                ("[1]", "sweep: expected a mapping, found a list"),
                (
                    f"{{top_k: {HUNDRED}, max_num_seqs: {HUNDRED}, server.block_size: {HUNDRED}}}",
                    "sweep: has 1,000,000 cells, more than 1,000; sweep fewer values, or split the profile",
                ),
            ]
        ),
    ],
    ids=itertools.count(),
)
def test_an_error_is_named_at_its_line_with_its_remedy_and_nothing_else(text, message):
    """A message is its beginning, and what follows after `` ... ``."""
    begins, _, inside = f"p.yaml:{message}".partition(" ... ")
    error = error_of(text)
    assert error.startswith(begins)
    assert inside in error
    assert len(error) < 500


def test_a_missing_key_says_what_belongs_there():
    assert errors_of("name: p\nvariants: {baseline: {}}\nworkload: {arrival: {kind: burst}}\n") == [
        "2 errors in the profile",
        "p.yaml:1: engine: missing; add engine: Server software, shared by all variants: a preset's name, or kind and options",
        f"p.yaml:3: workload.dataset: missing; add dataset: one of {', '.join(DATASETS)}",
    ]


def test_other_modes_of_guidance_take_the_whole_vocabulary_and_top_k_1_is_allowed_though_it_is_greedy():
    for mode in ("mode: mul", "mode: linear", "mode: length_mul, value_scale: 2"):
        profile = parse_profile(HEAD + f"  g: {{guidance: {{{mode}}}, server: {{value_model: m}}}}\n", "p.yaml")
        assert profile.variants["g"].guidance is not None
    assert list(parse_profile(GUIDED + "sweep: {top_k: [1, 2]}\n", "p.yaml").sweep["top_k"]) == [1, 2]


def test_errors_in_options_of_all_variants_are_reported_once_at_their_own_line():
    text = HEAD.replace("{kind: sim}", "{kind: sim, options: {noize: none, time_scale: 0}}") + "  a: {}\n  b: {}\n"
    assert errors_of(text) == [
        "2 errors in the profile",
        "p.yaml:2: engine.options.noize: unknown key; did you mean 'noise'?",
        "p.yaml:2: engine.options.time_scale: is 0; it must be at least 1e-06",
    ]


def test_a_sweep_of_guidance_does_not_guide_a_control_silently():
    text = GUIDED + "  forced-flags: {server: {overlap_schedule: false}}\nsweep: {value_scale: [0.0, -1.0]}\n"
    assert error_of(text) == (
        "p.yaml:13: sweep.value_scale: value_scale (guidance.value_scale) is swept, but variant 'forced-flags' has no guidance; give it a guidance section, or set variants.forced-flags.swept: false"
    )
    parse_profile(text.replace("{server: {", "{swept: false, server: {"), "p.yaml")


@pytest.mark.parametrize("engine", ["simm", "{preset: simm}"])
def test_an_unknown_engine_preset_is_answered_with_the_nearest(engine):
    message = error_of(HEAD.replace("{kind: sim}", engine))
    presets = ", ".join(sorted(preset_files()))
    assert (
        f"'simm' is neither an engine preset nor a kind of engine; presets are {presets}, kinds are sim," in message
    )
    assert message.endswith("did you mean 'sim'?")


def test_errors_of_command_line_options_name_the_option():
    with pytest.raises(ProfileError) as error:
        load_profile("topk-sweep", engine="simm", blocks=0, seed=-1)
    lines = str(error.value).splitlines()
    assert lines[1] == "--blocks: blocks: is 0; it must be at least 1"
    assert lines[2].startswith("--engine: engine: 'simm' is neither an engine preset")
    assert lines[3] == "--seed: seed: is -1; it must be at least 0"


def test_inherited_errors_point_at_the_file_they_come_from(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "profiles" / "engines").mkdir(parents=True)
    (tmp_path / "profiles/engines/odd.yaml").write_text("kind: sim\noptions:\n  time_skale: 5\n")
    (tmp_path / "profiles/base.yaml").write_text(HEAD.replace("{kind: sim}", "odd") + "sead: 5\n")
    (tmp_path / "profiles/child.yaml").write_text("extends: base\nblocs: 5\n")
    with pytest.raises(ProfileError) as error:
        load_profile("child")
    assert str(error.value).splitlines() == [
        "3 errors in the profile",
        "profiles/base.yaml:8: sead: unknown key; did you mean 'seed'?",
        "profiles/child.yaml:2: blocs: unknown key; did you mean 'blocks'?",
        "profiles/engines/odd.yaml:3: options.time_skale: unknown key; did you mean 'time_scale'?",
    ]


@pytest.mark.parametrize(
    ("extends", "problem"),
    [
        ("topk-swep", "no other profile is called 'topk-swep'. Did you mean 'topk-sweep'? Known profiles: "),
        ("./gone.yaml", "{here}/gone.yaml: no such file; a path is relative to the file that extends"),
        ("5", "is 5; write the name or the path of one profile"),
        ("[a]", "is a list; write the name or the path of one profile"),
        ("a" * 300, f"is '{'a' * 60}..., longer than a name (255 bytes)".replace("a" * 60, "a" * 56)),
        ("./d.yaml", "{here}/d.yaml: not a regular file"),
    ],
)
def test_a_missing_base_is_reported_with_the_errors_that_do_not_follow_from_it(tmp_path, extends, problem):
    (tmp_path / "d.yaml").mkdir()
    path = tmp_path / "p.yaml"
    path.write_text(f"seed: x\nextends: {extends}\n")
    with pytest.raises(ProfileError) as error:
        load_profile(str(path))
    heading, seed, base = str(error.value).splitlines()
    assert heading == "2 errors in the profile"
    assert seed == f"{path}:1: seed: expected a whole number, found 'x'"
    assert base.startswith(f"{path}:2: extends: {problem.format(here=tmp_path)}")
