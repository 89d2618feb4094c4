"""Names, docstrings, messages and documents use the words of ``docs/glossary.md``; generated pages are current."""

import ast
import re
from pathlib import Path

import pytest
from generate import PAGES

ROOT = Path(__file__).parents[2]
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
QUESTION_WORDS = {
    *("what", "how", "whether", "which", "where", "when", "who", "whose", "whom", "why"),
    *("is", "are", "was", "were", "did", "does", "do", "may", "can", "has", "have"),
}
PHRASES = {
    r"\bwhoever\b": "anyone who",
    r"(?<![Tt]here )\bis no (?!longer\b|more\b|less\b|other\b|need\b|such\b)": "is not a",
    r"\bnobody asked\b|\bstands? beside\b": "",
}
"""English that reads as translated, and what to write."""


ROWS = [line.strip("|").split("|") for line in GLOSSARY.splitlines() if line.startswith("|")]
REPLACED = frozenset(word for cells in ROWS if len(cells) == 3 for word in re.findall(r"`(\w+)`", cells[2]))
BARE_NAMES = frozenset(re.findall(r"`(\w+)`", GLOSSARY[GLOSSARY.index("rejected as names on their own") :]))


def modules_of(room):
    """Every module of a room with its syntax tree."""
    for path in sorted((ROOT / "benchctl" / room).rglob("*.py")):
        yield path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))


def names_of(tree):
    """Line and name of everything that the module itself names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name


def words_of(name):
    """Singular words of a name in snake or camel case."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_")
    return {word for one in words for word in (one, one.removesuffix("s"))}


def prose_of(tree):
    """Line and text of docstrings and messages: string constants of several words."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") >= 2:
            yield node.lineno, node.value


def documented_nodes(tree):
    """Line and text of every docstring."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text


def forbidden_in(text):
    words = {word.lower() for word in re.findall(r"[A-Za-z]+", text)}
    replaced = [word for word in sorted(REPLACED) if words & {word, word + "s"} and word != "place"]
    return replaced + [pattern for pattern in PHRASES if re.search(pattern, text)]


ROOMS = sorted(path.name for path in (ROOT / "benchctl").iterdir() if path.is_dir())


@pytest.mark.parametrize("room", ROOMS)
def test_names_docstrings_and_messages_use_the_words_of_the_glossary(room):
    """A docstring opens with what a thing is or does, and with no question."""
    wrong = []
    for path, tree in modules_of(room):
        for line, name in names_of(tree):
            if name.lstrip("_") in BARE_NAMES or words_of(name) & REPLACED:
                wrong.append(f"{path}:{line}: {name}")
        for line, text in documented_nodes(tree):
            opening = re.match(r"\W*(\w+)", text)
            if (opening and opening[1].lower() in QUESTION_WORDS) or text.split("\n\n")[0].rstrip().endswith("?"):
                wrong.append(f"{path}:{line}: {text.splitlines()[0]}")
        for line, text in prose_of(tree):
            wrong += [f"{path}:{line}: {word}: {text[:90]!r}" for word in forbidden_in(text)]
    assert not wrong, "\n".join(wrong)


def test_documents_use_the_words_of_the_glossary():
    wrong = []
    for document in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        lines = document.read_text(encoding="utf-8").splitlines() if document.name != "glossary.md" else ()
        words = ((number, word, line) for number, line in enumerate(lines, 1) for word in forbidden_in(line))
        wrong += [f"{document.relative_to(ROOT)}:{number}: {word}: {line}" for number, word, line in words]
    assert not wrong, "\n".join(wrong)


def test_the_glossary_rejects_what_it_replaces():
    assert {"doubt", "trouble", "place", "foresight", "anatomy"} <= REPLACED
    assert {"found", "told"} <= BARE_NAMES
    texts = ("results is no directory", "two doubts remain", "there is no server")
    assert [bool(forbidden_in(text)) for text in texts] == [True, True, False]


def test_every_reference_page_is_generated_and_current_and_every_option_has_a_meaning():
    written = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "reference").glob("*.md")}
    assert written == {name: page() for name, page in PAGES.items()}, "run: python docs/generate.py"
    rows = [line.split("|") for line in written["commands"].splitlines() if line.startswith("| `")]
    assert [names for _, names, meaning, *_ in rows if not meaning.strip()] == []
