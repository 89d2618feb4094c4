"""Acceptance of drafts in a real vLLM beside the acceptance that the weights of both models make.

A pair of a known law (``tests/support/known_draft.py``) is served by the preset vllm-cpu with drafts that are
drawn, with the draft's likeliest tokens, and with vLLM's own sampling, which on a CPU is not put right. Requests
draw at temperature 1; the server's counters give drafts and those accepted by position. ``p`` is the chance of
counts as far from the law as these, by chi-square over the numbers of accepted tokens.

    python -m benchmarks.measure.known_draft [--tokens 4] [--requests 32] [--output-len 300] [--acceptance 0.7]
"""

import argparse
import asyncio
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import httpx
import numpy as np
from scipy.stats import chisquare
from support.known_draft import make_known_pair

from benchctl.costs.shapes import ModelShape
from benchctl.engines.engine import LaunchSite
from benchctl.engines.tiny_models.recipe import Recipe
from benchctl.engines.vllm import VllmEngine
from benchctl.measure.server.process import choose_port
from benchctl.profile.load import load_profile
from benchctl.profile.planning import variant_settings
from benchmarks.common.fresh_server import fresh_server

SHAPE = ModelShape(
    name="tiny", layers=2, hidden=128, q_heads=4, kv_heads=2, head_dim=32, ffn=256, vocab=2048,
    tied_embeddings=False, qkv_bias=True,
)  # fmt: skip
COUNTER = re.compile(r"^vllm:spec_decode_num_(\w+)_total\{(.*)\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One server: how the draft chooses tokens, and whether vLLM's sampling on a CPU is put right."""

    name: str
    sampling: str
    is_corrected: bool = True


CASES = (
    Case(name="draft drawn", sampling="probabilistic"),
    Case(name="likeliest drafted", sampling="greedy"),
    Case(name="draft drawn, vLLM as it is", sampling="probabilistic", is_corrected=False),
)


@contextmanager
def serving(pair: Path, case: Case, num_tokens: int, directory: Path) -> Iterator[str]:
    """The address of a server that drafts."""
    options = {
        "draft_model": pair / "draft", "num_speculative_tokens": num_tokens, "draft_sampling": case.sampling,
        "correct_cpu_sampling": str(case.is_corrected).lower(), "dtype": "float32",
    }  # fmt: skip
    overrides = [f"model={pair / 'base'}", *(f"engine.options.{name}={value}" for name, value in options.items())]
    profile = load_profile("aa", engine="vllm-cpu", overrides=tuple(overrides))
    settings = variant_settings(profile, profile.baseline, {})
    engine, site = VllmEngine(), LaunchSite(port=choose_port(None), directory=directory)
    env = {**os.environ, **engine.env(settings, site)}
    with fresh_server(engine, profile, settings, site, env) as base_url:
        yield base_url


async def burst(base_url: str, model: str, requests: int, output_len: int) -> int:
    """Tokens of all answers by usage; each prompt is another one."""
    body = {"model": model, "max_tokens": output_len, "ignore_eos": True, "temperature": 1.0}

    async def ask(client: httpx.AsyncClient, number: int) -> int:
        response = await client.post("/v1/completions", json=body | {"prompt": [10 + number, 500, 700]})
        response.raise_for_status()
        return int(response.json()["usage"]["completion_tokens"])

    async with httpx.AsyncClient(base_url=base_url, timeout=600) as client:
        return sum(await asyncio.gather(*(ask(client, number) for number in range(requests))))


def survivors_of(page: str) -> list[int]:
    """Drafts, and those of which the first, the first two, ... tokens were accepted."""
    drafts, by_position = 0, {}
    for name, labels, value in COUNTER.findall(page):
        if name == "drafts":
            drafts = round(float(value))
        if position := re.search(r'position="(\d+)"', labels):
            by_position[int(position[1])] = round(float(value))
    return [drafts, *(by_position[position] for position in sorted(by_position))]


def lengths_of(survivors: Sequence[float]) -> np.ndarray:
    """Drafts of which exactly 0, 1, ... tokens were accepted."""
    return -np.diff(np.append(np.asarray(survivors, float), 0.0))


def chance_of(survivors: Sequence[int], acceptance: float) -> float:
    expected = acceptance ** np.arange(len(survivors)) * survivors[0]
    return float(chisquare(lengths_of(survivors), lengths_of(expected)).pvalue)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=300)
    parser.add_argument("--acceptance", type=float, default=0.7)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        recipe = Recipe(arch="qwen2", shape=SHAPE, context=4096, dtype="float32", seed=0)
        law = make_known_pair(directory / "pair", recipe, recipe, acceptance=given.acceptance)
        for case in CASES:
            with serving(directory / "pair", case, given.tokens, directory) as base_url:
                model = str(directory / "pair" / "base")
                usage = asyncio.run(burst(base_url, model, given.requests, given.output_len))
                survivors = survivors_of(httpx.get(f"{base_url}/metrics").text)
            once = law.drawn if case.sampling == "probabilistic" else law.likeliest
            print(f"{case.name}: {usage} tokens, {survivors[0]} drafts, p {chance_of(survivors, once):.2g}")
            for position, accepted in enumerate(survivors[1:], start=1):
                share = accepted / survivors[0]
                print(f"  first {position} accepted: {accepted:6d} = {share:.4f}, law {once**position:.4f}")


if __name__ == "__main__":
    main()
