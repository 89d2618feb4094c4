"""Names, docstrings, messages and documents use the words of ``docs/glossary.md``, and none that it replaces."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
QUESTION_WORDS = {
    *(
        "what",
        "how",
        "whether",
        "which",
        "where",
        "when",
        "who",
        "whose",
        "whom",
        "why",
        "is",
        "are",
        "was",
        "were",
    ),
    *("did", "does", "do", "may", "can", "has", "have"),
}
PHRASES = {
    r"\bwhoever\b": "anyone who",
    r"(?<![Tt]here )\bis no (?!longer\b|more\b|less\b|other\b|need\b|such\b)": "is not a",
    r"\bnobody asked\b|\bstands? beside\b": "",
}
"""English that reads as translated, and what to write."""


def table_cells(column: int) -> Iterator[str]:
    for line in GLOSSARY.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 3 and not set(cells[0]) <= {"-"}:
            yield cells[column]


REPLACED = frozenset(word for cell in table_cells(2) for word in re.findall(r"`(\w+)`", cell))
BARE_NAMES = frozenset(re.findall(r"`(\w+)`", GLOSSARY[GLOSSARY.index("rejected as names on their own") :]))


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def names_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of everything that the module itself names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name


def words_of(name: str) -> set[str]:
    """Singular words of a name in snake or camel case."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_")
    return {word for one in words for word in (one, one.removesuffix("s"))}


def prose_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of docstrings and messages: string constants of several words."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") >= 2:
            yield node.lineno, node.value


def documented_nodes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text


def forbidden_in(text: str) -> list[str]:
    words = {word.lower() for word in re.findall(r"[A-Za-z]+", text)}
    replaced = [word for word in sorted(REPLACED) if words & {word, word + "s"} and word != "place"]
    return replaced + [pattern for pattern in PHRASES if re.search(pattern, text)]


@pytest.mark.parametrize("room", sorted(path.name for path in (ROOT / "benchctl").iterdir() if path.is_dir()))
def test_names_are_those_of_the_glossary(room: str) -> None:
    wrong = []
    for path in sources(f"benchctl/{room}"):
        for line, name in names_of(ast.parse(path.read_text(encoding="utf-8"))):
            if name.lstrip("_") in BARE_NAMES or words_of(name) & REPLACED:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {name}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", sorted(path.name for path in (ROOT / "benchctl").iterdir() if path.is_dir()))
def test_docstrings_open_with_what_a_thing_is_or_does(room: str) -> None:
    wrong = []
    for path in sources(f"benchctl/{room}"):
        for line, text in documented_nodes(ast.parse(path.read_text(encoding="utf-8"))):
            opening = re.match(r"\W*(\w+)", text)
            if (opening and opening[1].lower() in QUESTION_WORDS) or text.split("\n\n")[0].rstrip().endswith("?"):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", sorted(path.name for path in (ROOT / "benchctl").iterdir() if path.is_dir()))
def test_messages_and_docstrings_use_the_words_of_the_glossary(room: str) -> None:
    wrong = []
    for path in sources(f"benchctl/{room}"):
        for line, text in prose_of(ast.parse(path.read_text(encoding="utf-8"))):
            wrong += [f"{path.relative_to(ROOT)}:{line}: {word}: {text[:90]!r}" for word in forbidden_in(text)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "document",
    [
        str(path.relative_to(ROOT))
        for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
        if path.exists() and path.name != "glossary.md"
    ],
)
def test_documents_use_the_words_of_the_glossary(document: str) -> None:
    lines = (ROOT / document).read_text(encoding="utf-8").splitlines()
    wrong = [f"{document}:{i}: {word}: {line}" for i, line in enumerate(lines, 1) for word in forbidden_in(line)]
    assert not wrong, "\n".join(wrong)


def test_the_glossary_rejects_what_it_replaces() -> None:
    assert {"doubt", "trouble", "place", "foresight", "anatomy"} <= REPLACED
    assert {"found", "told"} <= BARE_NAMES
    assert forbidden_in("results is no directory")
    assert forbidden_in("two doubts remain")
    assert not forbidden_in("there is no server")
