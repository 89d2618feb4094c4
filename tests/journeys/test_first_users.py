"""Eight first users: each goes from an empty directory to an answer by at most three commands.

All that they read is kept in ``golden/``, one file for each user, standard error marked with ``!``. After a change
of the output, write the files again and read what has changed:

    REFRESH_GOLDEN=1 scripts/test tests/journeys
"""

import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.cli import WITHOUT_PICTURES, preloaded_directory
from support.servers.openai_server import OpenAIServer, SentRequest

GOLDEN = Path(__file__).parent / "golden"
ADDRESS = "http://127.0.0.1:8000"
"""Of the running server in commands and in golden files; at each run it has another port."""
PROMPTS = """\
{"prompt": "Translate to French: The library opens at nine.", "max_tokens": 8}
{"messages": [{"role": "user", "content": "What is the capital of Norway?"}], "max_tokens": 6}
{"prompt": "Write a line about a queue.", "max_tokens": 7}
{"prompt": "Why does a batch of eight take longer than one of four?", "max_tokens": 8}
"""


@dataclass(frozen=True, kw_only=True)
class User:
    """One first user: the commands, their exit codes, and what the answer must say at once."""

    commands: tuple[str, ...]
    codes: tuple[int, ...]
    says: tuple[str, ...]
    """Stand in the first ten lines that the last command prints: the answer, the change, the reason to trust it."""
    has_pictures: bool = False
    """Others do without: pictures take longer to draw than an experiment to simulate."""
    is_served: bool = False
    """Servers are processes of their own, whose times vary; else they are simulated in virtual time, exactly."""


FLAG = "benchctl init mine --change flag --engine sim --value max_num_seqs=4"
BUILDS = (
    "benchctl init builds --change build --engine llamacpp --model tiny --value /bin/false --value /usr/bin/false"
)
TRUST = "6 blocks"
USERS: Mapping[str, User] = {
    "flag": User(
        commands=(FLAG, "benchctl run mine", "benchctl compare mine"),
        codes=(0, 0, 1),
        says=("regression", "max_num_seqs 4 against", TRUST),
    ),
    "prompts": User(
        commands=(
            "benchctl init chat --prompts prompts.jsonl --change flag --engine sim --value max_num_seqs=1",
            "benchctl run chat",
            "benchctl compare chat",
        ),
        codes=(0, 0, 1),
        says=("regression", "max_num_seqs 1 against", TRUST),
    ),
    "running server": User(
        commands=(
            f"benchctl init probe --url {ADDRESS} --prompts prompts.jsonl --value temperature=0",
            "benchctl run probe",
            "benchctl compare probe",
        ),
        codes=(0, 0, 1),
        says=("regression", "temperature 0 against", TRUST),
        is_served=True,
    ),
    "two builds": User(
        commands=("benchctl run two-builds", "benchctl compare two-builds"),
        codes=(0, 3),
        says=("inconclusive", "async_scheduling", TRUST),
    ),
    "several values": User(
        commands=(
            "benchctl init seqs --change flag --engine sim --value max_num_seqs=2,4,8",
            "benchctl run seqs",
            "benchctl compare seqs",
        ),
        codes=(0, 0, 1),
        says=("regression", "max_num_seqs 2, 4, 8 against", TRUST),
    ),
    "ci gate": User(
        commands=(
            FLAG,
            "benchctl run mine --quiet && benchctl compare mine --baseline kept --threshold 5%",
            "benchctl run mine --quiet >job.log && benchctl compare mine --baseline kept --threshold 5%",
        ),
        codes=(0, 0, 0),
        says=("equivalent", "against kept", "margin of 5%", TRUST),
    ),
    "paper figure": User(
        commands=(FLAG, "benchctl run mine", "benchctl report mine --figures figures"),
        codes=(0, 0, 0),
        says=("figures/01-ratios.png", "figures/02-block-values.png"),
        has_pictures=True,
    ),
    "all servers die": User(
        commands=(
            "benchctl models make-tiny tiny --gguf",
            f"{BUILDS} && benchctl run builds",
            "benchctl compare builds",
        ),
        codes=(0, 5, 4),
        says=("invalid", "every run failed", "server-died", "exit code 1", "its log is empty"),
        is_served=True,
    ),
}


class SlowWhenGreedy(OpenAIServer):
    """A server whose tokens take three times as long where the temperature is 0."""

    def events(self, sent: SentRequest) -> Iterator[dict[str, Any]]:
        self.pace_s = 0.1 if sent.body.get("temperature") == 0 else 0.03
        return super().events(sent)


OF_A_BUSY_MACHINE = re.compile(
    r"server-coalescing|between bounds|^estimator|noisy|What follows|stands? out|position or drift|"
    r"per block \(|^(?:warning|note): | with --all$|^$"
)
"""Words of lines that only some runs print: what a machine was busy with, and what chance makes of few blocks."""
VARYING = ((r"\d{8}T\d{6}Z-[0-9a-f]{8}", "DATE-HASH"), (r"\b[\d.,]+ (?:ms|s|min|h)\b", "N s"))
MEASURED = (
    (r"(?<=.{80})\n(?:! )?(?: {2}| {4})(?=\S)", " "),
    (r"(measured on: (?:attach|[^,\n]+, [^,\n]+)), .*", r"\1, HOST"),
    (r"(?<=done in N s); [a-z, -]+", ""),
    (r"(?:(?<![A-Za-z_\d])|(?<=\bx))\d+(?:[.,]\d+)*", "N"),
    (r"(?<!\w)[-+<](?=N)", ""),
    (r"(?m)(?<= )\(?(?:regression|improvement|equivalent|inconclusive)\)?$", "VERDICT"),
    (r"\b(?:tpot|ttft)_ms\b|\bwall_s\b", "METRIC"),
    (r" {2,}", "  "),
)
"""What varies beside where servers are measured."""


def normalised(lines: Iterable[str], *, is_served: bool) -> list[str]:
    """The lines without what another run or a busier machine would change."""
    text = "\n".join(line.rstrip() for line in lines)
    for pattern, word in (*VARYING, *(MEASURED if is_served else ())):
        text = re.sub(pattern, word, text)
    stable = [line for line in text.splitlines() if not is_served or not OF_A_BUSY_MACHINE.search(line)]
    return [line.rstrip() for line in stable]


@contextmanager
def environment(user: User, tmp_path: Path) -> Iterator[dict[str, str]]:
    """That of a user who has never called benchctl, with a running server where one is needed."""
    ours = {
        name: value for name, value in os.environ.items() if not name.startswith(("BENCHCTL_", "COLUMNS", "XDG_"))
    }
    env = {**ours, "HOME": str(tmp_path / "home"), "PATH": f"{preloaded_directory()}:{os.environ['PATH']}"}
    if not user.has_pictures:
        env |= WITHOUT_PICTURES
    if not user.is_served:
        env["BENCHCTL_TEST_WITHOUT_SERVERS"] = "1"
    with SlowWhenGreedy().running() as server:
        yield {**env, "ADDRESS": server.url}


@pytest.mark.parametrize("name", USERS)
def test_a_first_user_reads_the_answer_the_change_and_the_trust_at_once(name: str, tmp_path: Path) -> None:
    user, work = USERS[name], tmp_path / "work"
    for directory in (work, tmp_path / "home"):
        directory.mkdir()
    (work / "prompts.jsonl").write_text(PROMPTS)
    story, done, width = [], [], 0
    with environment(user, tmp_path) as env:
        for command in user.commands:
            words = ["sh", "-c", command.replace(ADDRESS, "$ADDRESS")]
            done.append(subprocess.run(words, cwd=work, env=env, capture_output=True, text=True, check=False))
            messages, output = done[-1].stderr.splitlines(), done[-1].stdout.splitlines()
            width = max(width, *map(len, messages), *map(len, output))
            told = [
                line.replace(env["ADDRESS"], ADDRESS) for line in (*(f"! {line}" for line in messages), *output)
            ]
            story += [f"$ {command}", *normalised(told, is_served=user.is_served), ""]
    golden, text = GOLDEN / f"{name.replace(' ', '-')}.txt", "\n".join(story)
    if os.environ.get("REFRESH_GOLDEN"):
        golden.write_text(text)
    assert (len(user.commands) <= 3, tuple(each.returncode for each in done)) == (True, user.codes), text
    assert text == golden.read_text()
    first_lines = " ".join(" ".join(output[:10]).split())
    assert [words for words in user.says if words not in first_lines] == [], first_lines
    assert width <= 120
    assert len(output) <= 40 or "compare" not in user.commands[-1]
