"""Where the numbers come from: experiment, machine, software, command, profile, and how the sides differ."""

import shlex
from collections.abc import Iterable

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.compare.result import Comparison
from benchctl.formats import gib, percentage
from benchctl.records.noise import MetricNoise
from benchctl.report.page.html import Html, Part, el, join, lines
from benchctl.report.page.judged import Verdict
from benchctl.report.text.tables import blocks_text


def provenance(analysis: AnalyzedExperiment) -> Html:
    """One directory: what ``manifest.json`` and ``profile.yaml`` say."""
    manifest = analysis.results.manifest
    host = manifest.host
    git = manifest.git
    commit = "unknown" if git is None else f"{git.sha}{' with uncommitted changes' if git.is_dirty else ''}"
    engines = sorted({run.record.engine_version for run in analysis.runs if run.record.engine_version is not None})
    gpus = [
        f"{gpu.name}, {gib(gpu.memory_bytes)}, driver {gpu.driver or 'unknown'}, {gpu.uuid or 'no UUID'}"
        for gpu in manifest.gpus
    ]
    facts: dict[str, Part] = {
        "directory": el("code", str(analysis.results.path.resolve().name)),
        "label": manifest.label,
        "state": manifest.state,
        "measured": manifest.created_at,
        "command": el("code", shlex.join(manifest.argv)),
        "engine": f"{manifest.engine} {', '.join(engines)}",
        "requests": f"{len(analysis.results.requests)} of {manifest.dataset}, stop {manifest.stop}",
        "request set": el("code", manifest.request_set_sha256),
        "profile": join(manifest.profile, " ", el("code", manifest.profile_sha256)),
        "seed, blocks": f"{manifest.seed}, {blocks_text(manifest)}",
        "host": f"{host.hostname}: {host.cpu_model or 'unknown CPU'}, {host.num_cores or 'unknown'} cores, "
        f"{gib(host.memory_bytes)}, {host.platform}, Python {host.python}",
        "GPUs": lines(gpus) if gpus else "none",
        "benchctl": f"{manifest.benchctl_version}, commit {commit}",
        "versions": ", ".join(f"{name} {version}" for name, version in manifest.versions.items()) or None,
    }
    profile = el("details", el("summary", "Resolved profile"), el("pre", analysis.results.profile_yaml))
    return join(_facts(facts), _servers(analysis), profile if analysis.results.profile_yaml else None)


def _servers(analysis: AnalyzedExperiment) -> Html | None:
    """The command line of the first server of every arm."""
    argvs: dict[str, str] = {}
    for run in analysis.runs:
        if run.record.argv:
            argvs.setdefault(run.label, shlex.join(run.record.argv))
    if not argvs:
        return None
    facts = _facts({label: el("code", argv) for label, argv in argvs.items()})
    return el("details", el("summary", "Command lines of the servers, first block"), facts)


def _facts(facts: dict[str, Part]) -> Html:
    shown = [join(el("dt", name), el("dd", value)) for name, value in facts.items() if value]
    return el("dl", *shown, class_="facts")


def differences(verdict: Verdict) -> Html:
    """In which settings the sides differ, and whether they were allowed to."""
    rows = [row for one in verdict.all for row in _difference_rows(one.comparison, one.differences, one.b_name)]
    if not rows:
        return el("p", "No setting differs between the sides.", class_="quiet")
    heads = ("variant", "setting", "baseline", "other", "allowed")
    head = el("tr", *(el("th", heading, scope="col") for heading in heads))
    return el("div", el("table", el("thead", head), el("tbody", *rows), class_="differences"), class_="wide")


def _difference_rows(comparison: Comparison | None, refused: Iterable[str], name: str) -> list[Html]:
    rows = [_difference(name, d.key, d.a, d.b, is_allowed=True) for d in (comparison.allowed if comparison else ())]
    for line in refused:
        key, _, values = line.partition(": ")
        left, _, right = values.partition(" against ")
        rows.append(_difference(name, key, left, right, is_allowed=False))
    return rows


def _difference(name: str, key: str, a: str, b: str, *, is_allowed: bool) -> Html:
    allowed = el("td", "declared" if is_allowed else "NOT allowed", class_=None if is_allowed else "fault")
    return el("tr", el("td", name), el("td", el("code", key)), el("td", a), el("td", b), allowed)


def noise(verdict: Verdict) -> Html | None:
    """What an A/A experiment of this machine could not rule out, metric by metric; None where none is on file."""
    found = {name: noise for comparison in verdict.comparisons for name, noise in comparison.noise.items()}
    if not found:
        return None
    heads = ("metric", "floor", "scatter of the log-ratio", "blocks")
    head = el("tr", *(el("th", h, scope="col", class_="num" if h != "metric" else None) for h in heads))
    rows = [
        el("tr", el("td", name), *(el("td", text, class_="num") for text in _noise_texts(measured)))
        for name, measured in found.items()
    ]
    return el("div", el("table", el("thead", head), el("tbody", *rows)), class_="wide")


def _noise_texts(measured: MetricNoise) -> tuple[str, str, str]:
    return f"{percentage(measured.floor_frac, 2)}", f"{measured.log_sd:.2g}", str(measured.num_blocks)


def warnings(verdict: Verdict) -> Html | None:
    """The doubts of every comparison, each once."""
    met: dict[tuple[str, str], None] = {}
    for comparison in verdict.comparisons:
        for warning in comparison.warnings:
            place = f" [{warning.where}]" if warning.where else ""
            met.setdefault((warning.code, warning.message + place))
    if not met:
        return None
    return el("ul", *(el("li", el("code", code), f" {message}") for code, message in met), class_="notes")
