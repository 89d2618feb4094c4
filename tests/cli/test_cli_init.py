"""``benchctl init``: whatever is answered, the file is a profile that runs."""

import json
import os
import platform
import pty
import select
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.cli import WITHOUT_SERVERS, document, only_result, printed, refusal
from support.servers import lenvm_fork

from benchctl.measure.telemetry.gpus import gpu_inventory
from benchctl.profile.load import load_profile
from benchctl.profile.model import VariantSettings
from benchctl.profile.planning import arms, variant_settings
from benchctl.records.loaded import load_results
from benchctl.records.stores import RunDuration, store_duration

SMALL = (
    "--blocks", "1", "--set", "workload.num_prompts=2", "--set", "workload.output_len=8", "--set",
    "engine.options.time_scale=100", "--quiet",
)  # fmt: skip


def init(cwd: Path, *args: object) -> str:
    return printed("init", *args, cwd=cwd, BENCHCTL_ENGINES_DIR=str(cwd / "no-engines"))


def sides(profile_file: Path) -> list[VariantSettings]:
    """The settings of the baseline and of the change, in this order."""
    profile = load_profile(str(profile_file))
    return [variant_settings(profile, *arm) for arm in arms(profile)]


@pytest.mark.parametrize(
    ("engine", "args", "expected"),
    [
        ("sim", ["--change", "flag", "--value", "max_num_seqs=4"], {"server.max_num_seqs": 4}),
        ("sim", ["--change", "sampler", "--value", "top_k=50"], {"sampling.top_k": 50}),
        ("sim", ["--change", "model", "--value", "qwen2.5-1.5b"], {"model": "qwen2.5-1.5b"}),
        ("vllm-cpu", ["--change", "flag", "--value", "max_num_seqs=4"], {"server.max_num_seqs": 4}),
        (
            "vllm",
            ["--change", "flag", "--value=--attention-backend TRITON", "--value", "enforce_eager=true"],
            {"server.extra_args": ("--attention-backend", "TRITON"), "server.enforce_eager": True},
        ),
        ("vllm", ["--change", "build", "--value", "/new env/bin/python"], {"server.python": "/new env/bin/python"}),
        ("transformers-cpu", ["--change", "build", "--value=/a/python", "--value=b"], {"server.python": "b"}),
        (
            "llamacpp-cpu",
            ["--change", "build", "--value", "/new/llama-server"],
            {"server.binary": "/new/llama-server"},
        ),
        ("sglang", ["--change", "sampler", "--value", "temperature=0"], {"sampling.temperature": 0.0}),
        ("vllm", ["--change", "sampler", "--value", "model=my-lora"], {"request.model": "my-lora"}),
        ("vllm", ["--change", "model", "--value", "models/b"], {"model": "models/b"}),
    ],
)
def test_a_profile_changes_what_was_asked_and_nothing_else(
    tmp_path: Path, engine: str, args: list[str], expected: dict[str, object]
) -> None:
    init(tmp_path, "x", "--engine", engine, "--model", "models/a", *args)
    baseline, changed = (settings.model_dump() for settings in sides(tmp_path / "x.yaml"))
    assert baseline["model"] == "models/a"
    for path, value in expected.items():
        section, _, name = path.partition(".")
        values = [each[section][name] if name else each[section] for each in (changed, baseline)]
        assert [each == value for each in values] == [True, False]


def test_several_values_of_one_option_are_a_variant_each_and_a_name_finds_its_file_and_its_results(
    tmp_path: Path,
) -> None:
    init(tmp_path, "x", "--change", "flag", "--engine", "sim", "--value", "max_num_seqs=2,4")
    assert [each.server.max_num_seqs for each in sides(tmp_path / "x.yaml")] == [1024, 2, 4]
    assert list(load_profile(str(tmp_path / "x.yaml")).variants) == ["baseline", "max_num_seqs-2", "max_num_seqs-4"]
    assert "no profile is called 'y'" in refusal("run", "y", cwd=tmp_path)
    printed("run", "x", *SMALL, cwd=tmp_path, **WITHOUT_SERVERS)
    assert printed("show", "x", cwd=tmp_path).startswith("x · ")
    told = printed("compare", "x:max_num_seqs-2", cwd=tmp_path, code=3)
    assert told.startswith("inconclusive: max_num_seqs-2 against baseline")
    (tmp_path / "x").mkdir()
    assert "x is not a result directory" in refusal("show", "x", cwd=tmp_path)
    told = refusal("init", "z", "--change", "flag", "--engine", "sim", "--value=a=1,2", "--value=b=3", cwd=tmp_path)
    assert "several values of one option only" in told


def test_prompts_of_a_file_are_all_taken_with_their_lengths_where_every_row_has_one(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "How far is the moon?", "max_tokens": 5}\n{"prompt": "Why?", "output_len": 7}\n')
    args = ("x", "--change", "flag", "--engine", "sim", "--value", "max_num_seqs=4", "--prompts", "mine.jsonl")
    init(tmp_path, *args)
    printed("run", "x", *SMALL[:2], "--dry-run", cwd=tmp_path)
    printed("run", "x", *SMALL[:2], *SMALL[-3:], cwd=tmp_path, **WITHOUT_SERVERS)
    requests = load_results(only_result(tmp_path)).requests
    assert [(request.prompt, request.max_tokens) for request in requests] == [
        ("How far is the moon?", 5),
        ("Why?", 7),
    ]
    file.write_text('{"prompt": "How far is the moon?"}\n')
    init(tmp_path, *args, "--force")
    assert load_profile(str(tmp_path / "x.yaml")).workload.output_len == 64
    assert "none.jsonl, which is not a file" in refusal(
        "init", *args, "--prompts", "none.jsonl", "--force", cwd=tmp_path
    )


def test_one_running_server_is_measured_as_it_is_or_with_other_fields_and_two_against_each_other(
    tmp_path: Path,
) -> None:
    url = "http://10.0.0.1:8000"
    init(tmp_path, "two", "--change", "server", "--engine", "vllm", f"--value={url}", f"--value={url}/b")
    servers = [each.server for each in sides(tmp_path / "two.yaml")]
    assert [(each.url, each.dialect) for each in servers] == [(url, "vllm"), (f"{url}/b", "vllm")]
    told = init(tmp_path, "x", "--url", url)
    (as_it_is,) = sides(tmp_path / "x.yaml")
    assert as_it_is.server.url == url
    assert "benchctl compare results/x/FIRST results/x/SECOND" in told
    init(tmp_path, "x", "--url", url, "--engine", "vllm", "--value", "top_k=50", "--force")
    baseline, changed = sides(tmp_path / "x.yaml")
    assert (baseline.server.dialect, changed.server.url, changed.sampling.top_k) == ("vllm", url, 50)
    told = refusal("init", "y", "--url", url, "--change", "flag", "--value", "max_num_seqs=4", cwd=tmp_path)
    assert "that changes where the server is started; leave out --change and --value" in told


@pytest.fixture(name="engine")
def _engine(tmp_path: Path) -> Path:
    """A repository of a stand-in for SGLang, whose second commit takes three times as long for a step."""
    repository = tmp_path / "engine"
    repository.mkdir()
    lenvm_fork.environment(repository)
    package = repository / "packages" / "sglang"
    start = (package / "launch_server.py").read_text()
    (package / "srt" / "lvm" / "__init__.py").write_text("")
    git = ("git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run((*git, "init", "--quiet"), check=True)
    for step_s in (0.004, 0.012):
        how = json.dumps({"step_s": step_s, "truth": os.devnull})
        (package / "launch_server.py").write_text(f"import os\nos.environ['STAND_IN'] = {how!r}\n{start}")
        subprocess.run((*git, "add", "."), check=True)
        subprocess.run((*git, "-c", "commit.gpgsign=false", "commit", "--quiet", "-m", "x"), check=True)
    return repository


@pytest.mark.slow
def test_two_commits_of_an_engine_are_built_and_compared_in_three_commands(tmp_path: Path, engine: Path) -> None:
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text('{"prompt": "One two three four five", "max_tokens": 20}\n' * 8)
    (engine / "uncommitted").write_text("of no commit")
    commands = ("mkdir -p .venv/bin", f"sh -c 'sed s:{engine}:$PWD: python-sglang > .venv/bin/python'")
    args = (
        "mine", "--repo=engine", "--value=HEAD~1", "--value=HEAD", "--engine=sglang-lenvm", "--model",
        lenvm_fork.model(tmp_path, "model"), "--prompts", prompts, *(f"--build={each}" for each in commands),
    )  # fmt: skip
    told = refusal("init", *args, "--build=test -x .venv/bin/python", cwd=tmp_path)
    assert "test -x .venv/bin/python in builds/engine-" in told
    assert "failed, as its own words above say: correct --build, or name another commit" in told
    told = init(tmp_path, *args, "--build=chmod +x .venv/bin/python")
    assert told.startswith("mine.yaml: HEAD against HEAD~1; 6 blocks on sglang-lenvm")
    of_fork = ("needs_gpu=false", "revision=V1", "overlap_schedule=false")
    printed("run", "mine", "--quick", *(f"--set=engine.options.{each}" for each in of_fork), cwd=tmp_path)
    (comparison,) = document("compare", "mine", cwd=tmp_path, code=3)["comparisons"]
    wall = comparison["cells"][0]["decomposition"]["wall"]
    assert 1.5 < wall["b_s"] / wall["a_s"] < 6, wall


def test_a_commit_of_pure_python_is_imported_from_its_checkout_and_one_that_cannot_be_had_is_refused(
    tmp_path: Path, engine: Path
) -> None:
    args = ("init", "x", "--repo", "engine", "--engine", "sglang", "--model", "m", "--value", "HEAD~1")
    init(tmp_path, *args[1:], "--value", "HEAD", "--program", "packages")
    paths = [each.server.env["PYTHONPATH"] for each in sides(tmp_path / "x.yaml")]
    assert [(tmp_path / path / "sglang").is_dir() for path in paths] == [True, True]
    for options, message in (
        (("--value=HEAD",), "x.yaml exists; choose another name"),
        (("--value=v9", "--force"), "--value v9: git finds no such commit in --repo engine; name a branch, tag or"),
        (("--value=HEAD", "--force"), " has no .venv/bin/python; give the commands that make it there"),
        (("--value=HEAD", "--force", "--build", "a 'b"), "No closing quotation"),
        (("--value=HEAD", "--force", "--engine=sim"), "engine 'sim' has one build; name another engine"),
        (("--url=localhost:8000",), "--repo engine is of builds that benchctl starts; leave out --url"),
    ):
        assert message in refusal(*args, *options, cwd=tmp_path)
    assert "install git" in refusal(*args, "--force", cwd=tmp_path, PATH="/nowhere")
    assert "the commits of --repo DIR; add that" in refusal("init", "x", "--program", "a", cwd=tmp_path)


def test_a_profile_is_about_twenty_lines_with_remarks_and_replaces_a_file_only_with_force(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("mine\n")
    args = ("x", "--change", "flag", "--engine", "sim", "--value", "max_num_seqs=4")
    told = refusal("init", *args, cwd=tmp_path)
    assert "x.yaml exists; choose another name, or replace it with --force" in told
    assert path.read_text() == "mine\n"
    init(tmp_path, *args, "--force")
    text = path.read_text()
    assert (len(text.splitlines()) <= 20, text.count("#") >= 5) == (True, True)


def test_the_load_for_a_real_engine_is_larger_and_as_long_as_a_start_that_was_measured_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BENCHCTL_DURATIONS_DIR", str(tmp_path / "durations"))
    here = {"host": platform.node(), "gpus": tuple(gpu.name for gpu in gpu_inventory()), "engine": "vllm"}
    run = {"measured_at": "2026", "server_sha256": "", "settings_sha256": "", "num_sequences": 8, "token_s": 0.01}
    store_duration(RunDuration(**here, **run, model="models/b", overhead_s=64.0))
    options = ("x", "--change=flag", "--value=max_num_seqs=4", "--force")
    for engine, model, size in (
        ("sim", "m", (16, 64)),
        ("vllm", "models/a", (64, 128)),
        ("vllm", "models/b", (400, 128)),
    ):
        init(tmp_path, *options, "--engine", engine, "--model", model)
        workload = load_profile(str(tmp_path / "x.yaml")).workload
        assert (workload.num_prompts, workload.output_len) == size


ENGINE = "sim" if find_spec("transformers") else ""
"""The simulator is the default where no engine is installed; transformers may be, beside benchctl itself."""
INTERRUPT = "\x03"
"""Ctrl-C at a terminal."""


def at_terminal(cwd: Path, *args: str, answers: str) -> tuple[int, str]:
    """Exit code and output of a command at a terminal that controls it, with these answers."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        ["/usr/bin/setsid", "--ctty", sys.executable, "-m", "benchctl", *args],
        cwd=cwd, stdin=theirs, stdout=theirs, stderr=theirs,
        env={**os.environ, "BENCHCTL_ENGINES_DIR": str(cwd / "no-engines"), "PATH": "/nowhere"},
    )  # fmt: skip
    os.close(theirs)
    output = b""
    while b"[1]" not in output:  # the first question
        output += os.read(ours, 65536)
    os.write(ours, answers.encode())
    with suppress(OSError):  # the terminal's other end is closed
        while True:
            if select.select([ours], [], [], 1.0)[0]:
                if not (chunk := os.read(ours, 65536)):
                    break
                output += chunk
            elif answers == INTERRUPT:  # a signal just before Python reads a line is only seen after it
                os.write(ours, INTERRUPT.encode())
    os.close(ours)
    return process.wait(timeout=60), output.decode()


def test_at_a_terminal_everything_is_asked_again_until_it_is_an_answer_and_enter_takes_the_default(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.yaml").write_text("")
    answers = f"7\n\nno-engine\n{ENGINE}\n\nmine\nMine\nmine2\nmax_num_seqs\nmax_num_seqs=0\nmax_num_seqs=2\n"
    code, output = at_terminal(tmp_path, "init", answers=answers)
    assert code == 0, output
    for reason in (
        "'7' is none of the changes; choose one of flag, build, sampler, model, server",
        "no-engine",
        "mine.yaml exists; choose another name",
        "NAME is 'Mine'; write lower-case letters",
        "--value max_num_seqs: write NAME=VALUE",
        "max_num_seqs: is 0; it must be at least 1",
    ):
        assert reason in output, output
    assert load_profile(str(tmp_path / "mine2.yaml")).engine.kind == "sim"
    assert sides(tmp_path / "mine2.yaml")[1].server.max_num_seqs == 2


def test_an_interrupted_question_ends_with_130_and_leaves_no_file(tmp_path: Path) -> None:
    code, _ = at_terminal(tmp_path, "init", "mine", answers=INTERRUPT)
    assert (code, list(tmp_path.glob("*.yaml"))) == (130, [])
