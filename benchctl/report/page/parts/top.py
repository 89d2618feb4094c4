"""The top of the page: what was found, in one look."""

from collections.abc import Sequence

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.compare.result import Comparison
from benchctl.analysis.compare.text import floors_text, threshold_text
from benchctl.formats import capitalized, minus_in_numbers, percentage, range_of
from benchctl.report.page.html import Html, el
from benchctl.report.page.judged import Judged, Verdict
from benchctl.report.page.parts.icon import badge, icon, kind_of

_PAIRING = {
    "interleaved": "interleaved blocks",
    "same-plan": "blocks of two experiments with the same plan",
    "unpaired": "blocks a side, unpaired",
}


def top(analyses: Sequence[AnalyzedExperiment], verdict: Verdict) -> Html:
    """Verdict word with its shape, its sentence, what decides, and what must be known before it is believed."""
    word = el("h1", icon(verdict.word, 44), el("span", verdict.word), class_=f"headline is-{kind_of(verdict.word)}")
    notes = el("ul", *(el("li", note) for note in verdict.notes), class_="caveats") if verdict.notes else None
    return el(
        "header",
        el("div", el("p", _subject(analyses), class_="eyebrow"), _switch(), class_="bar"),
        word,
        el("p", capitalized(minus_in_numbers(verdict.sentence)), class_="lead"),
        _what_decides(verdict),
        notes,
        _each(verdict.judged) if len(verdict.judged) > 1 else _problem(verdict.judged),
        _controls(verdict.controls),
    )


def _subject(analyses: Sequence[AnalyzedExperiment]) -> str:
    parts = []
    for analysis in analyses:
        manifest = analysis.results.manifest
        label = f" ({manifest.label})" if manifest.label else ""
        device = ", ".join(dict.fromkeys(gpu.name for gpu in manifest.gpus)) or "no GPU"
        parts.append(f"{manifest.profile}{label} · {manifest.engine} · {device} · {manifest.created_at[:10]}")
    return "  |  ".join(dict.fromkeys(parts))


def _switch() -> Html:
    """Light, dark, or as the system has it."""
    names = {"auto": "Auto", "light": "Light", "dark": "Dark"}
    buttons = (el("button", text, type="button", data_theme_choice=name) for name, text in names.items())
    return el("div", *buttons, class_="switch controls", role="group", aria_label="Colours", hidden=True)


def _what_decides(verdict: Verdict) -> Html:
    said = [f"exit code {verdict.exit_code}"]
    comparisons = [one.comparison for one in verdict.judged if one.comparison is not None]
    if comparisons:
        said += _rules(comparisons)
    return el("p", " · ".join(said), class_="rules")


def _rules(comparisons: Sequence[Comparison]) -> list[str]:
    first = comparisons[0]
    deciding = dict.fromkeys(m.metric.name for c in comparisons for cell in c.cells for m in cell.deciding)
    blocks = range_of([cell.num_blocks for comparison in comparisons for cell in comparison.cells])
    return [
        f"decided by {', '.join(deciding) or 'nothing'}",
        minus_in_numbers(threshold_text(first)),
        *([f"noise floor {floors_text(first)}"] if first.noise else []),
        f"{percentage(first.confidence)} intervals over {blocks} {_PAIRING[first.pairing]}",
    ]


def _each(judged: Sequence[Judged]) -> Html:
    return el("ul", *(_one(one) for one in judged), class_="each")


def _one(one: Judged) -> Html:
    return el(
        "li",
        badge(one.word),
        " ",
        el("span", minus_in_numbers(one.sentence)),
        el("span", f" exit code {one.exit_code}", class_="quiet"),
    )


def _problem(judged: Sequence[Judged]) -> Html | None:
    """The whole message of a comparison that cannot be made."""
    if len(judged) != 1 or judged[0].problem is None or "\n" not in judged[0].problem:
        return None
    return el("pre", judged[0].problem.partition("\n")[2], class_="problem")


def _controls(controls: Sequence[Judged]) -> Html | None:
    if not controls:
        return None
    names = ", ".join(one.b_name for one in controls)
    return el("details", el("summary", f"Controls, which decide nothing: {names}"), _each(controls))
