"""Every value of every key ends a plan with exit code 0 or 2; the simulator can run what a plan passes."""

import contextlib
import io
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import typer
from support.hostile_values import PROFILES, VALUES, keys_of, profile_text

from benchctl.cli.commands.run import run
from benchctl.cli.conduct import prepare_experiment
from benchctl.engines.engine import LaunchSite, engine_for
from benchctl.errors import BenchctlError
from benchctl.measure.run import noise_seed
from benchctl.measure.warmup import warmup_bursts
from benchctl.profile.load import load_profile
from benchctl.profile.planning import plan_runs, variant_settings
from benchctl.records.directory import run_directory_name
from benchctl.sim.__main__ import parser, read_config
from benchctl.sim.virtual import VirtualServer
from benchctl.workload.natural_lengths import needs_lengths

Case = tuple[str, str]
"""Name of a profile, and an assignment."""
SIMULATED: Final = ("sim", "guided", "speculation")
NUM_SAMPLED: Final = 350
LONG: Final = re.compile(
    r"=(1000000000|1e26|'?x{9})|time_scale|start_delay_s|num_prompts|samples_per_prompt|max_tokens"
)
"""Assignments whose runs are honestly long."""


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No name of a tokenizer or a model is looked up in the network."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NOPE", raising=False)
    for name in PROFILES:
        Path(f"{name}.yaml").write_text(profile_text(name))


def all_cases() -> Iterator[Case]:
    for name in PROFILES:
        yield from ((name, f"{key}={value}") for key in keys_of(name) for value in VALUES)


def plan(case: Case) -> tuple[int, str]:
    """The exit code of ``benchctl run --dry-run`` and what it prints."""
    name, assignment = case
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            run(name=f"{name}.yaml", overrides=[assignment], dry_run=True)
    except BenchctlError as error:
        return error.exit_code, str(error)
    except typer.Exit as leaving:
        return leaving.exit_code, out.getvalue()
    return 0, out.getvalue()


def can_be_simulated(case: Case) -> bool:
    return case[0] in SIMULATED and not LONG.search(case[1])


def check_plan(case: Case) -> int:
    """Plan with one assignment; an exception that is no error of benchctl's fails the test by itself."""
    code, text = plan(case)
    problem = f"{case[0]} --set {case[1][:80]}: exit {code}: {text[:300]}"
    assert code in {0, 2}, problem
    if code:
        lines = text.splitlines()
        assert len(lines) <= 60, problem
        assert max(map(len, lines)) <= 1500, problem
        assert all(character.isprintable() or character == "\n" for character in text), problem
        key, _, value = case[1].partition("=")
        assert any(part in text for part in (*key.split("."), value)), problem
    return code


def check_start(case: Case) -> None:
    """Do one run of each arm in virtual time, and read the command line of its server."""
    profile = load_profile(f"{case[0]}.yaml", overrides=[case[1]], is_to_send=True)
    if needs_lengths(profile):
        return
    requests = prepare_experiment(profile).requests
    engine, arms = engine_for("sim"), {(run.variant, str(run.cell)): run for run in plan_runs(profile).runs}
    for planned in arms.values():
        settings = variant_settings(profile, planned.variant, planned.cell)
        site = LaunchSite(port=1, directory=Path.cwd(), noise_seed=noise_seed(profile, planned))
        read_config(parser().parse_args(engine.argv(settings, site)[3:]).config)
        server = VirtualServer(settings, on_step=lambda _: None)
        for burst in warmup_bursts(requests, profile, settings):
            list(server.send(burst))
        records = list(server.send(requests, profile.workload.arrival))
        assert any(record.error is None for record in records), (case, records[0].error)
        assert len(run_directory_name(planned.index, planned.block, planned.variant, planned.cell)) <= 255


def test_a_sample_of_values_for_all_keys_ends_a_plan_with_code_0_or_2_and_can_be_run_on_the_simulator():
    stream, every = random.Random(1), list(all_cases())
    of_simulator = [case for case in every if can_be_simulated(case)]
    cases = [*stream.sample(every, NUM_SAMPLED), *stream.sample(of_simulator, NUM_SAMPLED)]
    codes = {case: check_plan(case) for case in cases}
    assert set(codes.values()) == {0, 2}
    passed = [case for case, code in codes.items() if code == 0 and can_be_simulated(case)]
    assert len(passed) > 10
    for case in passed:
        check_start(case)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("name", PROFILES)
def test_all_values_for_all_keys_end_a_plan_with_code_0_or_2(name):
    for case in all_cases():
        if case[0] == name and check_plan(case) == 0 and can_be_simulated(case):
            check_start(case)
