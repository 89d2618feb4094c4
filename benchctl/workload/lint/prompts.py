"""Rules about prompts and their answers: repeated prompts, too few, ones without a seed, answers that end early."""

from typing import Final

from benchctl.interop.readers.inference_perf import ConfigFile, KeyPath
from benchctl.interop.readers.inference_perf_schema import Data, Server
from benchctl.workload.lint.findings import LintFindings, finding
from benchctl.workload.lint.offered import PromptSet, Stage

BLOCK_TOKENS: Final = 16
"""Tokens of a block of vLLM's prefix cache: whole blocks are found, and at least one token is computed."""
SURELY_CACHED_TOKENS: Final = 32_768
"""A cache of this size is below that of any server measured so far (2,588 blocks on an RTX 4090)."""


def computed_tokens(prompt_tokens: int) -> int:
    """Tokens of a fully cached prompt that are computed again: q - 16 floor((q - 1) / 16)."""
    return prompt_tokens - BLOCK_TOKENS * ((prompt_tokens - 1) // BLOCK_TOKENS)


def repeated_prompts(
    file: ConfigFile, prompts: PromptSet, stages: tuple[Stage, ...], kv_tokens: float | None
) -> LintFindings:
    """Prompts that come again while a prefix cache still holds them: their prefill costs almost nothing.

    An error where any server's cache holds all of them; a warning where that of ``kv_tokens`` tokens does, for the
    decoding steps between are then still those of the file.
    """
    num_requests = sum(stage.num_requests for stage in stages)
    if prompts.is_exhaustible or num_requests <= prompts.num_distinct:
        return
    apart = prompts.num_distinct * (prompts.prompt_tokens + prompts.output_tokens)
    if apart > max(SURELY_CACHED_TOKENS, kv_tokens or 0):
        return
    length = round(prompts.prompt_tokens)
    yield finding(
        file,
        prompts.key,
        "repeated-prompt",
        "error" if apart <= SURELY_CACHED_TOKENS else "warning",
        problem=(
            f"{num_requests} requests send {_count(prompts.num_distinct)}; a prefix cache, on by default, still "
            f"holds a prompt that comes again, and of its {length} tokens only "
            f"{computed_tokens(length)} are computed"
        ),
        remedy=(
            f"set num_unique_system_prompts to {num_requests}, or start the server without prefix caching and lint "
            "with --no-prefix-caching"
        ),
    )


def _count(num_prompts: int) -> str:
    return "the same prompt" if num_prompts == 1 else f"{num_prompts} different prompts"


def missing_prompts(file: ConfigFile, prompts: PromptSet, stages: tuple[Stage, ...]) -> LintFindings:
    """Fewer prompts than requests where the generator does not start over."""
    num_requests = sum(stage.num_requests for stage in stages)
    if prompts.is_exhaustible and num_requests > prompts.num_distinct:
        yield finding(
            file,
            prompts.key,
            "too-few-prompts",
            "error",
            problem=f"{num_requests} requests and lengths for {prompts.num_distinct}: the run ends in an error",
            remedy=f"set total_count of both distributions to {num_requests}",
        )


def unseeded_prompts(file: ConfigFile, data: Data, base_seed: int | None) -> LintFindings:
    """Prompts that differ between two runs of the same file."""
    if data.type == "shared_prefix" and data.shared_prefix is not None and data.shared_prefix.seed is None:
        key: KeyPath = ("data", "shared_prefix")
        seed = "data.shared_prefix.seed"
    elif data.type in {"synthetic", "random"} and base_seed is None:
        key, seed = ("load",), "load.base_seed"
    else:
        return
    yield finding(
        file,
        key,
        "unseeded-prompts",
        "warning",
        problem=f"{seed} is not set, so every run draws other prompts",
        remedy=f"set {seed}",
    )


def early_ends(file: ConfigFile, prompts: PromptSet, server: Server | None) -> LintFindings:
    """Lengths of answers that are only limits, because the model may end an answer before."""
    if server is not None and not server.ignore_eos and prompts.output_tokens > 1:
        yield finding(
            file,
            ("server", "ignore_eos"),
            "answers-end-early",
            "warning",
            problem=(
                f"ignore_eos is false: the model ends answers where it likes, and the {prompts.output_tokens:g} "
                "output tokens are only a limit, so lengths and load differ between models and runs"
            ),
            remedy="set server.ignore_eos to true, unless answers of natural length are meant",
        )
