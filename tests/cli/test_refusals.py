"""What cannot be done is refused with one clear message before anything is measured or written."""

import random
import re
import shlex
from pathlib import Path
from typing import Any, Final

import pytest
from support.cli import in_process
from support.hostile_values import profile_text
from support.results.builders import write_results

from benchctl.cli.app import load_command

SPECULATION = "--acceptance 0.8 --model qwen2.5-7b --hardware h100-sxm"
KEYS = re.compile(r"\b(workload|sampling|engine|server|request|timeouts|load)\.[a-z_]+|the command line: |variant ")
"""Words for the writer of a profile."""
REFUSED = {
    "run": [
        ("--quiet ci-smoke --set workload.num_promts=3", "num_prompts"),
        ("--quiet ci-smoke --set blocks=many", "blocks"),
        ("topk-swep", "topk-sweep"),
        ("ci-smoke --set workload.on_missing_dataset=fail", "benchctl data fetch gsm8k"),
        ("ci-smoke --engine sglang-lenvm", "sglang-lenvm"),
        ("ci-smoke --engine simm", "'sim'"),
        ("ci-smoke --engine attach", "benchctl: --engine: engine.options.url: missing; add url: Address"),
        ("ci-smoke --quick --blocks 3", "--quick"),
        ("", "name a profile"),
        ("--set a=1", "name it"),
        ("ci-smoke -o a-file", "a-file"),
        ("--resume nowhere", "nowhere"),
        ("aa --profile ci-smoke", "two profiles are named"),
        ("ci-smoke --dry-run --json", "--dry-run"),
        ("ci-smoke --step-time-model model.json", "add --dry-run"),
        ("--frobnicate", "frobnicate"),
        ("two-errors.yaml", "two-errors.yaml:2"),
        ("two-errors.yaml", "two-errors.yaml:4"),
        *(
            (
                f"--resume results/x {option}",
                "--resume continues results/x as it was begun: leave out --aa, --label",
            )
            for option in ("--label x", "--output-dir elsewhere", "-o x", "--aa")
        ),
    ],
    "init x --engine sim": [
        ("--change flags --value x=1", "'flags' is not one of 'flag', 'build', 'sampler', 'model', 'server'"),
        ("--change flag --value max_num_seq=4", "has no option 'max_num_seq'; did you mean 'max_num_seqs'?"),
        ("--change flag --value max_num_seqs", "--value max_num_seqs: write NAME=VALUE"),
        (
            "--change flag --value max_num_seqs=many",
            "benchctl: --value max_num_seqs: expected a whole number",
        ),
        ("--change flag --value=--fast", "engine 'sim' takes no flags; write an option=value"),
        ('--change flag --value="--x \'a"', "--x 'a: No closing quotation; write words as"),
        ("--change flag", "add --value (the option and its value, such as max_num_seqs=4"),
        ("--change build --value /x", "engine 'sim' has one build; name another engine"),
        ("--change sampler --value topk=4", "requests have no field 'topk'; did you mean 'top_k'?"),
    ],
    "init x": [
        ("--change server --value http://a:1", "--change server takes 2 --value, and 1 are given"),
        (
            "--engine vllm",
            "--change flag|build|sampler|model|server, --value (what it changes to), --model (for vllm",
        ),
    ],
    "load": [
        (
            "ftp://127.0.0.1:8000",
            "benchctl: URL: is 'ftp://127.0.0.1:8000'; write an address that",
        ),
        ("127.0.0.1:9 --extra-body {", "--extra-body is not JSON"),
        ("127.0.0.1:9 --header plain", "--header plain: write NAME=VALUE"),
        ("127.0.0.1:9 --goodput itl:5", "--goodput itl:5: expected ttft, tpot or e2el with a limit in ms"),
        ("127.0.0.1:9 --goodput ttft:fast", "--goodput ttft:fast: expected ttft, tpot or e2el with"),
        ("http://127.0.0.1:9 --burstiness 2", "--request-rate"),
        ("http://127.0.0.1:9 --request-rate -1", "benchctl: --request-rate: is -1.0; it must be at least"),
        ("http://127.0.0.1:9 --num-prompts 0", "num-prompts"),
        ("http://127.0.0.1:9 --num-prompts 1000000000", "--num-prompts"),
        ("http://127.0.0.1:9 --workers many", "benchctl: --workers: is 'many'; allowed are"),
        ("http://127.0.0.1:9 --workers -1", "it must be at least 1"),
        ("http://127.0.0.1:many", "a port from 1 to 65535"),
        ("http://127.0.0.1:9 --dataset-name gsm8k", "benchctl data fetch gsm8k"),
        ("http://127.0.0.1:9 --dataset-name synthetic", "--input-len is missing with dataset synthetic"),
        ("http://127.0.0.1:9 --output taken", "taken"),
        ("http://127.0.0.1:9 --output a-file/below", "a-file"),
        ("http://127.0.0.1:9 --dialect klingon", "klingon"),
        ("http://127.0.0.1:9 --api-key-env NOWHERE_SET", "benchctl: --api-key-env names NOWHERE_SET"),
        ("http://127.0.0.1:9 --prompts none.jsonl", "--prompts is none.jsonl, which is not a file; correct it\n"),
        ("http://127.0.0.1:9 --top-k 4", "or name its dialect in --dialect"),
        ("http://127.0.0.1:9 --header 'A b=c'", "--header: 'A b' is not the name of a header"),
        ("http://127.0.0.1:9 --extra-body '{\"n\": 2}'", "sets n, and one answer is counted; remove it"),
        *(
            (shlex.join([address, "--num-prompts", "1"]), "benchctl: ")
            for address in (
                "http://host:0",
                "http://host:70000",
                "http://[::1",
                "http://user:pass@host",
                "http://",
                "http://host name",
                "http://host\nX-A: b",
                "http://host:80\r\nX: y",
                "http://host?a=b",
                "",
                " ",
                "://",
                "http://:80",
                "file:///etc/passwd",
                "http://" + "x" * 5000,
                "http://" + "x" * 64 + ".de",
                "http://xn--a.b:1",
                "http://\u2603\u200d.de",
            )
        ),
        *(
            (shlex.join(["localhost:9", "--num-prompts", "1", "--header", header]), "benchctl: ")
            for header in ("X-A=a\nb", "X A=b", "X-A=\x00", "Host=other", "Content-Length=1", "=b", "X-A")
        ),
    ],
    "simulate": [
        ("", "name a profile with --profile"),
        ("--profile ci-smoke --engine vllm", "simulate it with --engine sim"),
        ("--profile ci-smoke --set model=no-such", "no-such"),
        ("--profile llm-mock-cache", "the commands under 'The cache' in docs/tasks/llm-mock.md make it"),
        ("--profile ci-smoke --jobs 0", "--jobs"),
        ("--profile ci-smoke sweep", "options of sweep follow that word"),
        ("--profile ci-smoke --keep summary", "keep the requests"),
    ],
    "simulate sweep --profile ci-smoke --engine sim-exact --jobs 1": [
        ("--rate 1 --max-concurrency 2", "give one of the two"),
        ("--rate 1,x", "expected numbers separated by commas"),
        ("--rate 0", "above 0"),
        ("--largest rate", "give --slo"),
        ("--rate 1 --slo ttft_p99_ms=1", "did you mean 'p99_ttft_ms'?"),
        ("--rate 1 --set workload.num_prompts=40 --slo p99_ttft_ms=1", "raise workload.num_prompts"),
    ],
    "speculation": [
        ("", "state the acceptance once"),
        ("--acceptance 0.8 --drafts 10 --accepted 8", "state the acceptance once"),
        ("--drafts 10", "belong together"),
        ("--acceptance 1.2", "it is a probability from 0 to 1"),
        ("--acceptance nine", "expected numbers separated by commas"),
        ("--acceptance 80/x", "write counts as accepted/judged"),
        ("--acceptance 90/80", "no more accepted than judged"),
        ("--drafts 10 --accepted 5,6", "counters by position never increase"),
        ("--acceptance 0.8 --draft-tokens 0", "each must be from 1 to"),
        ("--acceptance 0.8 --draft-tokens 8..1", "write a range as 1..8"),
        ("--acceptance 0.8 --draft-tokens 1..1000000000", "--draft-tokens"),
        ("--acceptance 0.8 --draft-cost -1", "draft cost -1"),
        ("--acceptance 0.8 --draft-model qwen2.5-0.5b", "name the model that is served"),
        ("--acceptance 0.8 --model qwen2.5-7b", "--model needs a device"),
        (f"{SPECULATION} --batch-size 0", "each must be from 1 up"),
        (f"{SPECULATION} --rate 0", "must be above 0"),
        (f"{SPECULATION} --backfill-cost 0.1", "--backfill-cost is a constant"),
        ("--acceptance 0.8 --draft-cost 0.1 --draft-model qwen2.5-0.5b", "both state the cost of a draft"),
        ("--acceptance 0.8 --plot x.jpg", "x.jpg: name a picture that ends in .png, .svg, .pdf"),
        ("--acceptance 0.8 --model qwen2.5-7b --step-time-model no-file.json", "no-file.json"),
    ],
    "steptime": [
        ("guided --hardware gpu9", "any other with its peaks, as name:TFLOP/s:GB/s"),
        ("guided --batch 0", "each must be from 1 to 65536"),
        ("guided --top-k x", "expected numbers separated by commas, such as 1,2,4"),
        ("guided --value-model qwen2.5-2b", "did you mean"),
        ("guided --launch-us nan", "each must be finite"),
        ("guided --launch-us -1", "give microseconds from 0 to 1000000, or measured"),
        ("guided --launch-us measured", "'benchctl micro roofline' measures them"),
        ("fit r -o model.json --picture x.jpg", "x.jpg: name a picture that ends in .png, .svg, .pdf"),
        ("evaluate r --picture x.jpg", "x.jpg: name a picture that ends in .png, .svg, .pdf"),
        ("predict no-file.json --model qwen2.5-7b", "no-file.json"),
    ],
    **{
        command: [
            ("--set primary_metrics=[step_mz]", "no metric is called 'step_mz'; did you mean 'step_ms'?"),
            ("--set hardware=h1000", "hardware: unknown hardware 'h1000': name one of h100-sxm"),
            ("--set blocks=99999999999", "blocks: is 99999999999; it must be at most 10000"),
            ("--set workload.num_prompts=5000000", "workload.num_prompts: is 5000000; it must be at most 1000000"),
            (
                "--set workload.samples_per_prompt=129",
                "asks for 129 samples in one request, which takes at most 128",
            ),
            ("--set workload.samples_per_prompt=500000", "asks for 1500000 outputs, more than 1000000; lower"),
            ("--set engine.options.time_scale=1e-300", "time_scale: is 1e-300; it must be at least 1e-06"),
            ("--set engine.options.max_num_seqs=9000", "max_num_batched_tokens is 8192, below max_num_seqs 9000"),
            ("--set engine.options.cost_model=llm-mock", "cost_model llm-mock cannot price a value"),
            ("--set workload.arrival.request_rate=1e-300", "request_rate: is 1e-300; it must be at least 1e-06"),
        ]
        for command in ("profiles validate ci-smoke", "run --dry-run --profile ci-smoke")
    },
    "compare": [
        ("here there", "here"),
        ("r:no-variant", "no-variant"),
        ("r:baseline r:no-variant", "no-variant"),
        ("r --metrics no-metric", "no-metric"),
        ("r:baseline r:guided --metrics no-metric", "no-metric"),
        ("r:baseline r:guided --markdown --json", "--markdown"),
        ("r:baseline r:guided --threshold much", "much"),
        ("r:baseline r:guided --threshold 1", "threshold"),
        ("r:baseline r:guided --confidence 95", "confidence"),
        ("r:baseline r:guided -o c.txt --json", "unknown suffix"),
        ("r:baseline r:guided -o no/c.md --json", "is not a directory"),
        ("r --noise-floor no-directory", "no-directory"),
        ("r --step-time-model no-file.json", "no-file.json"),
    ],
    "": [
        ("profiles show no-profile", "no-profile"),
        ("profiles validate no-profile", "no-profile"),
        ("list no-directory", "no-directory is not a directory"),
        ("import lenvm no-directory", "no-directory"),
        ("noise show no-key", "no-key"),
        ("noise remove no-key", "no-key"),
        ("workloads lint no-file.yml", "no-file.yml"),
        ("report r r:no-variant", "no-variant"),
        ("export r --format no-format", "no-format"),
        ("flops --samples 1000000000", "--samples"),
        ("flops --hardware measured", "'benchctl micro roofline' measures them"),
        ("models make-tiny tiny --layers 1000000000", "--layers"),
    ],
}
DIRECTORY_COMMANDS = (
    "show {}", "report {}", "report {} {}", "export {} --format vllm", "verify {}", "compare {}", "compare {} {}",
    "compare {}:baseline {}:guided", "run --resume {}", "run --resume {} --blocks 9", "noise add {}",
    "speculation {}", "steptime fit {}", "steptime evaluate {} --model m.json", "steptime diagnose {}",
)  # fmt: skip


@pytest.fixture(name="cwd", autouse=True)
def _cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A result directory, an empty one, files, and results without a manifest and with a damaged record."""
    for name in ("r", "without-manifest", "damaged"):
        write_results(tmp_path / name, block_factors=({"baseline": 1.0, "guided": 1.1},) * 2)
    (tmp_path / "without-manifest" / "manifest.json").unlink()
    (tmp_path / "damaged" / "manifest.json").write_text("{")
    (tmp_path / "empty").mkdir()
    (tmp_path / "taken").mkdir()
    for path in (tmp_path / "taken" / "something", tmp_path / "a-file"):
        path.write_text("")
    (tmp_path / "two-errors.yaml").write_text("extends: ci-smoke\nblocks: 0\nworkload:\n  num_promts: 3\n")
    (tmp_path / "sim.yaml").write_text(profile_text("sim"))
    for name, value in {"DATA": "no-data", "ENGINES": "no-engines", "PEAKS": "no-peaks"}.items():
        monkeypatch.setenv(f"BENCHCTL_{name}_DIR", str(tmp_path / value))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(line: str, code: int = 2) -> str:
    """The message with which a command is refused; it has no other output."""
    actual_code, out, err = in_process(*shlex.split(line))
    assert (actual_code, out) == (code, ""), (line, err)
    assert err.count("benchctl: ") == 1 or "Usage: " in err, (line, err)
    return err


@pytest.mark.parametrize("command", REFUSED)
def test_what_cannot_be_done_is_refused_with_one_message_and_leaves_nothing(cwd: Path, command: str) -> None:
    before = sorted(cwd.rglob("*"))
    for options, words in REFUSED[command]:
        message = refused(f"{command} {options}")
        assert words in message, options
        assert command != "load" or not KEYS.search(message), message
    assert sorted(cwd.rglob("*")) == before


def test_what_holds_no_results_is_wrong_usage_and_damaged_results_are_invalid_data() -> None:
    for command in DIRECTORY_COMMANDS:
        for name in ("nowhere", "empty"):
            assert name in refused(command.format(name, name)), command
        for name in ("without-manifest", "damaged") if "steptime" not in command else ():
            assert "manifest.json" in refused(command.format(name, name), code=4), command


VALUES: Final = (
    "", " ", "-1", "0", "1", "1e26", "1e400", "nan", "inf", "-inf", "-0.0", "5e-324", "9" * 30, "9" * 5000, "0.5",
    "1000000000", "x", "1,2", "1,,2", ",", "a=b", "=", "a=", "١٢", "../..", "/dev/full", "{}", "[", "null",
    "\x1b[31m", "a\nb", "9..1", "1..1000000000", "..", "100%", "nan%", "1e26%", "1/0", "0/0", "3/2", "-1/2",
    "1e26/2", "ttft:nan", "ttft:-1", "ttft:", "x:1e400", "X-A=a\nb", "X=", '{"a": 1e400}', "[" * 5000, "x" * 5000,
    "\ud800",
)  # fmt: skip
COMMANDS: Final = (
    "run sim.yaml --dry-run",
    "load http://127.0.0.1:9 --num-prompts 1 --num-warmups 0 --timeout-s 1",
    "speculation --acceptance 0.7",
    "flops",
    "steptime predict none.json --model qwen2.5-7b",
    "steptime guided",
    "models make-tiny tiny --no-weights",
    "workloads lint sim.yaml",
    "init mine --change flag --engine sim --value max_num_seqs=4",
    "micro forward --python none",
    "micro roofline --python none",
    "simulate sweep --profile none",
    "compare none",
)
CODES: Final = {0, 1, 2, 3, 4, 5}
HEAVY: Final = {"--picture", "--plot"}
"""Options that draw."""
NUM_SAMPLED: Final = 120


def values_of_options(*commands: str) -> list[tuple[str, ...]]:
    """Every value of every option of these commands, each as a command line."""
    lines = []
    for command in commands:
        of_command: Any = load_command(command.split()[0])
        for word in command.split()[1:]:
            of_command = getattr(of_command, "commands", {}).get(word, of_command)
        names = {param.opts[0] for param in of_command.params if not getattr(param, "is_flag", False)}
        options = sorted(name for name in names - HEAVY if name.startswith("--"))
        lines += [(*command.split(), option, value) for option in options for value in VALUES]
    return lines


def require_exit_codes(lines: list[tuple[str, ...]]) -> None:
    for line in lines:
        code, *texts = in_process(*line)
        assert code in CODES, (line, code, texts)


def test_a_sample_of_values_for_all_options_ends_with_an_exit_code() -> None:
    require_exit_codes(random.Random(1).sample(values_of_options(*COMMANDS), NUM_SAMPLED))


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_all_values_for_all_options_end_with_an_exit_code(command: str) -> None:
    require_exit_codes(values_of_options(command))
