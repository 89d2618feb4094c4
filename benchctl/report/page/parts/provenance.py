"""Provenance: experiment, machine, software, command and profile, and how the sides differ."""

import shlex
from typing import Any

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.validity.comparability.machines import Machine, machines_of
from benchctl.formats import count_of, gib
from benchctl.report.page.verdict import PageVerdict
from benchctl.report.text.prompt_lengths import prompt_lengths_text
from benchctl.report.text.tables import blocks_text, passes_text


def directory_values(analysis: AnalyzedExperiment) -> dict[str, Any]:
    """One result directory: the contents of ``manifest.json`` and ``profile.yaml``, and the servers' commands."""
    servers: dict[str, str] = {}
    for run in analysis.runs:
        if run.record.argv:
            servers.setdefault(run.label, shlex.join(run.record.argv))
    return {
        "name": analysis.results.path.resolve().name,
        "facts": [(name, text) for name, text in _facts(analysis).items() if text],
        "profile_sha256": analysis.results.manifest.profile_sha256,
        "servers": list(servers.items()),
        "profile_yaml": analysis.results.profile_yaml,
    }


def _facts(analysis: AnalyzedExperiment) -> dict[str, str | list[str] | None]:
    manifest = analysis.results.manifest
    git = manifest.git
    commit = "unknown" if git is None else f"{git.sha}{' with uncommitted changes' if git.is_dirty else ''}"
    versions = sorted({run.record.engine_version for run in analysis.runs if run.record.engine_version is not None})
    return {
        "directory": analysis.results.path.resolve().name,
        "label": manifest.label,
        "state": manifest.state,
        "measured": manifest.created_at,
        "command": shlex.join(manifest.argv),
        "engine": f"{manifest.engine} {', '.join(versions)}",
        **_work(analysis),
        "profile": manifest.profile,
        "seed, blocks": f"{manifest.seed}, {blocks_text(manifest)}",
        **_machine_facts(analysis),
        "benchctl": f"{manifest.benchctl_version}, commit {commit}",
        "versions": ", ".join(f"{name} {version}" for name, version in manifest.versions.items()),
    }


def _machine_facts(analysis: AnalyzedExperiment) -> dict[str, str | list[str] | None]:
    """The machines that measured, and the one on which the experiment was created, where that is another."""
    machines, host = machines_of(analysis.results), analysis.results.manifest.host
    is_here = any(machine.hostname == host.hostname for machine in machines)
    if len(machines) == 1:
        python = f", Python {host.python}" if is_here else ""
        facts: dict[str, str | list[str] | None] = {"host": f"{_machine_text(machines[0])}{python}"}
    else:
        facts = {
            f"{len(machines)} nodes": [
                f"{_machine_text(machine)}; {count_of(len(machine.blocks), 'block')}" for machine in machines
            ]
        }
    facts["GPUs"] = [
        text for machine in machines for text in _gpu_texts(machine, has_node=len(machines) > 1)
    ] or "none"
    return facts if is_here else {**facts, "created on": f"{host.hostname}, Python {host.python}"}


def _machine_text(machine: Machine) -> str:
    cores = machine.num_cores or "unknown"
    return (
        f"{machine.node}: {machine.cpu_model or 'unknown CPU'}, {cores} cores, {gib(machine.memory_bytes)}, "
        f"{machine.platform or 'unknown system'}"
    )


def _gpu_texts(machine: Machine, *, has_node: bool) -> list[str]:
    node = f"{machine.node}: " if has_node else ""
    return [
        f"{node}{gpu.name}, {gib(gpu.memory_bytes)}, driver {gpu.driver or 'unknown'}, {gpu.uuid or 'no UUID'}"
        for gpu in machine.gpus
    ]


def _work(analysis: AnalyzedExperiment) -> dict[str, str]:
    """The work that was computed: requests, or forward passes."""
    if analysis.passes is not None:
        return {"passes": passes_text(analysis)}
    manifest = analysis.results.manifest
    requests = f"{len(analysis.results.requests)} of {manifest.dataset}, stop {manifest.stop}"
    lengths = prompt_lengths_text(analysis.results.requests, manifest.engine)
    prompts = {} if lengths is None else {"prompts": lengths}
    return {"requests": requests, **prompts, "request set": manifest.request_set_sha256}


def comparison_values(verdict: PageVerdict) -> dict[str, Any]:
    """Settings in which the sides differ, the noise floors, and every warning of the comparisons once."""
    warnings: dict[tuple[str, str], None] = {}
    for comparison in verdict.comparisons:
        for warning in comparison.warnings:
            where = f" [{warning.where}]" if warning.where else ""
            warnings.setdefault((warning.code, warning.message + where))
    return {
        "differences": _differences(verdict),
        "noise": {name: noise for comparison in verdict.comparisons for name, noise in comparison.noise.items()},
        "warnings": list(warnings),
    }


def _differences(verdict: PageVerdict) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for each in verdict.all:
        allowed = each.comparison.allowed if each.comparison is not None else ()
        rows += [{"variant": each.b_name, "key": d.key, "a": d.a, "b": d.b, "is_allowed": True} for d in allowed]
        for line in each.differences:
            key, _, values = line.partition(": ")
            left, _, right = values.partition(" against ")
            rows.append({"variant": each.b_name, "key": key, "a": left, "b": right, "is_allowed": False})
    return rows
