"""Option names of ``vllm bench serve``: renamed, left out or refused, never misunderstood."""

import pytest

from benchctl.cli.commands.load import translated
from benchctl.errors import UsageError


@pytest.mark.parametrize(
    ("line", "ours"),
    [
        ("http://a:1 --num-prompts 3", "http://a:1 --num-prompts 3"),
        ("--base-url http://a:1 --num-prompts 3", "http://a:1 --num-prompts 3"),
        ("--host h --port 9", "http://h:9"),
        ("--port=9 --random-input-len=5", "http://127.0.0.1:9 --input-len 5"),
        ("u --dataset-name random", "u --dataset-name synthetic --input-len 1024"),
        ("u --random-input-len 7 --dataset-name random", "u --input-len 7 --dataset-name synthetic"),
        ("u --dataset-name sharegpt --sharegpt-output-len 9", "u --dataset-name sharegpt --output-len 9"),
        ("u --backend openai-chat --endpoint /v1/chat/completions", "u --dialect openai --chat --chat"),
        ("u --goodput ttft:200 tpot:50 --seed 1", "u --goodput ttft:200 --goodput tpot:50 --seed 1"),
        ("--goodput ttft:200 localhost:8000", "--goodput ttft:200 localhost:8000"),
        ("u --header A=1 B=2", "u --header A=1 --header B=2"),
        ("u --save-result --result-dir d", "u --result-file d/benchctl-load.json"),
        ("u --random-range-ratio 0.0 --metric-percentiles 99", "u"),
    ],
)
def test_a_line_of_theirs_is_a_line_of_ours(line: str, ours: str) -> None:
    assert translated(line.split()) == ours.split()


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("--backend tgi", "--backend is 'tgi'; choose one of openai, "),
        ("--endpoint /generate", "requests go to /v1/completions or /v1/chat/completions"),
        ("--random-range-ratio 0.5", "lengths of one load are equal"),
        ("--metric-percentiles 99.9", "result.json has 50, 90, 95, 99 and no others"),
        ("--append-result", "each load has a directory of its own"),
        ("--lora-modules a", "name the adapter in --model"),
        ("--goodput", "--goodput needs a value"),
    ],
)
def test_what_would_mean_something_else_is_refused_with_the_remedy(line: str, problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        translated(line.split())
    assert problem in str(caught.value)
