"""Options of ``benchctl load``; ``options.vllm`` translates those of ``vllm bench serve`` into these."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from benchctl.profile.choices import MAX_CONCURRENCY, MAX_OUTPUTS, MAX_SEED, MAX_TOKENS, MAX_WARMUPS, DatasetName

OUTPUT_TOKENS: Final = 128
"""Length of an output if neither the command line nor the dataset sets it."""


class Priority(StrEnum):
    """As ``load.priority`` of a profile."""

    AUTO = "auto"
    NONE = "none"


Url = Annotated[str, typer.Argument(metavar="URL", help="Address of the server, such as localhost:8000.")]
Model = Annotated[
    str | None,
    typer.Option("--model", help="Name of the model at the server; by default the first one that it offers."),
]
Dialect = Annotated[
    str,
    typer.Option("--dialect", metavar="DIALECT", help="API of the server: openai, or an engine such as vllm."),
]
NumPrompts = Annotated[int, typer.Option("--num-prompts", min=1, max=MAX_OUTPUTS, help="Number of requests.")]
MaxConcurrency = Annotated[
    int | None,
    typer.Option("--max-concurrency", min=1, max=MAX_CONCURRENCY, help="Most requests that are open at once."),
]
RequestRate = Annotated[
    float | None,
    typer.Option("--request-rate", help="Requests per second, as a Poisson process; by default all at once."),
]
Burstiness = Annotated[
    float | None,
    typer.Option("--burstiness", help="Burstiness of --request-rate: 1 is Poisson, less than 1 is burstier."),
]
DatasetOption = Annotated[
    DatasetName | None,
    typer.Option(
        "--dataset-name", help="Source of prompts; by default synthetic with --input-len, else generated."
    ),
]
DatasetPath = Annotated[str | None, typer.Option("--dataset-path", metavar="FILE", help="File of the dataset.")]
InputLen = Annotated[
    int | None,
    typer.Option(
        "--input-len",
        min=1,
        max=MAX_TOKENS,
        help="Approximate tokens of each prompt; all prompts begin differently.",
    ),
]
OutputLen = Annotated[
    int | None,
    typer.Option(
        "--output-len",
        min=1,
        max=MAX_TOKENS,
        help=f"Tokens of each output; by default the dataset's, or {OUTPUT_TOKENS}.",
    ),
]
IgnoreEos = Annotated[
    bool,
    typer.Option("--ignore-eos/--no-ignore-eos", help="Outputs have exactly this length, or at most this length."),
]
Seed = Annotated[int, typer.Option("--seed", min=0, max=MAX_SEED, help="Seed of all random choices.")]
NumWarmups = Annotated[
    int,
    typer.Option(
        "--num-warmups", min=0, max=MAX_WARMUPS, help="Short requests before the load, which no number includes."
    ),
]
Workers = Annotated[str, typer.Option("--workers", metavar="auto|N", help="Processes that send the load.")]
PriorityOption = Annotated[
    Priority, typer.Option("--priority", help="Request scheduling priority for the client, if permitted.")
]
ApiKeyEnv = Annotated[
    str | None,
    typer.Option("--api-key-env", metavar="NAME", help="Environment variable with the API key of the server."),
]
TimeoutS = Annotated[
    float, typer.Option("--timeout-s", help="Seconds for each request, from its send to its last token.")
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="DIR", help="New directory; by default results/load/<utc>-<hash8>."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]


Tokenizer = Annotated[
    str | None,
    typer.Option(
        "--tokenizer", metavar="DIR|REPO", help="Tokenizer of the prompts' lengths; by default that of the model."
    ),
]
Chat = Annotated[
    bool, typer.Option("--chat/--no-chat", help="Send each prompt as a chat with one message of the user.")
]
Temperature = Annotated[float | None, typer.Option("--temperature", help="Sampling: divides the logits.")]
TopP = Annotated[float | None, typer.Option("--top-p", help="Sampling: probability mass that is kept.")]
TopK = Annotated[int | None, typer.Option("--top-k", help="Sampling: number of tokens that are kept.")]
MinP = Annotated[float | None, typer.Option("--min-p", help="Sampling: least share of the likeliest token.")]
ExtraBody = Annotated[
    str | None, typer.Option("--extra-body", metavar="JSON", help="Fields added to the body of every request.")
]
Header = Annotated[
    list[str] | None,
    typer.Option(
        "--header", metavar="NAME=VALUE", help="Header of every request; ${NAME} is a variable; repeat as needed."
    ),
]
Goodput = Annotated[
    list[str] | None,
    typer.Option(
        "--goodput",
        metavar="LATENCY:MS",
        help="Count the requests within this limit of ttft, tpot or e2el; repeat as needed.",
    ),
]
LoadLabel = Annotated[str | None, typer.Option("--label", help="Remark for the manifest and result.json.")]
ResultFile = Annotated[
    Path | None, typer.Option("--result-file", metavar="FILE", help="Also write result.json to FILE.")
]
