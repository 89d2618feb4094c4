"""Every value of every option ends a command with one of its exit codes, never with a traceback."""

import contextlib
import io
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from support.hostile_values import profile_text

from benchctl.cli.app import app, load_command
from benchctl.errors import BenchctlError

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
BAD_ADDRESSES: Final = (
    "ftp://host", "http://host:0", "http://host:70000", "http://host:x", "http://[::1", "http://user:pass@host", "http://",
    "http://host name", "http://host\nX-A: b", "http://host:80\r\nX: y", "http://host?a=b", "", " ", "://", "http://:80",
    "file:///etc/passwd", "http://" + "x" * 5000, "http://" + "x" * 64 + ".de", "http://xn--a.b:1", "http://\u2603\u200d.de",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    Path("sim.yaml").write_text(profile_text("sim"))


def outcome(*words: str) -> tuple[int, str]:
    """Exit code and output of a command, called as ``benchctl`` calls it; any other exception is raised."""
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            app(args=[*words], prog_name="benchctl")
    except SystemExit as leaving:
        return int(leaving.code or 0), out.getvalue()
    except BenchctlError as error:
        return error.exit_code, str(error)
    except OSError as error:  # ``benchctl`` names it in one line
        return BenchctlError.exit_code, str(error)
    return 0, out.getvalue()


def command_of(words: list[str]) -> Any:
    command: Any = load_command(words[0])
    for word in words[1:]:
        if word not in getattr(command, "commands", {}):
            break
        command = command.commands[word]
    return command


def cases() -> Iterator[tuple[str, str, str]]:
    for command in COMMANDS:
        for option in command_of(command.split()).params:
            if (
                not getattr(option, "is_flag", False)
                and option.opts[0].startswith("--")
                and option.opts[0] not in HEAVY
            ):
                yield from ((command, option.opts[0], value) for value in VALUES)


def check(case: tuple[str, str, str]) -> None:
    command, option, value = case
    code, text = outcome(*command.split(), option, value)
    assert code in CODES, (command, option, value[:60], code, text[:300])


def test_a_sample_of_values_for_all_options_ends_with_an_exit_code():
    for case in random.Random(1).sample([*cases()], NUM_SAMPLED):
        check(case)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_all_values_for_all_options_end_with_an_exit_code(command: str):
    for case in cases():
        if case[0] == command:
            check(case)


@pytest.mark.parametrize("address", BAD_ADDRESSES, ids=lambda address: repr(address[-30:]))
def test_an_address_that_is_none_is_refused_before_anything_is_sent(address: str):
    code, text = outcome("load", address, "--num-prompts", "1")
    assert code == 2, text


@pytest.mark.parametrize("header", ["X-A=a\nb", "X A=b", "X-A=\x00", "Host=other", "Content-Length=1", "=b", "X-A"])
def test_a_header_that_would_break_a_request_is_refused(header: str):
    code, text = outcome("load", "localhost:9", "--num-prompts", "1", "--header", header)
    assert code == 2, text


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["flops", "--samples", "1000000000"], "--samples"),
        (["speculation", "--acceptance", "0.7", "--draft-tokens", "1..1000000000"], "--draft-tokens"),
        (["models", "make-tiny", "tiny", "--layers", "1000000000"], "--layers"),
        (["load", "localhost:9", "--num-prompts", "1000000000"], "--num-prompts"),
        (["run", "sim.yaml", "--blocks", "1000000000"], "--blocks"),
    ],
)
def test_a_number_that_would_fill_the_memory_is_refused_with_its_option(words: list[str], option: str):
    code, text = outcome(*words)
    assert code == 2
    assert option in text
