"""What two stores of outputs (benchmarks.outputs.store) say differently: numbers, whatever their layout, and texts.

    python -m benchmarks.outputs.differences OLD NEW [--numbers] [--lines N]

Of a text the numbers count as often as they occur, wherever they stand; of a JSON document every value at its path.
Nine digits count. Exit code 1 if a number of OLD has left or changed; numbers that only NEW has, and texts, are
printed and do not count. --numbers leaves the texts out; of each file at most --lines lines are shown.
"""

import argparse
import difflib
import json
import re
import sys
from collections import Counter
from pathlib import Path

# Not the digits of a name (p50, top_k5); a sign belongs to a number unless it joins two words or numbers.
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:[eE][-+]?\d+)?")


def rounded(number):
    return f"{float(number):.9g}"


def numbers_of_text(text):
    """How often each number occurs."""
    return Counter(rounded(found.replace(",", "")) for found in NUMBER.findall(text))


def leaves(document, path=""):
    """Each value of a JSON document that is no container, with its path."""
    if isinstance(document, dict | list):
        items = document.items() if isinstance(document, dict) else enumerate(document)
        for key, value in items:
            yield from leaves(value, f"{path}.{key}" if path else str(key))
    else:
        is_number = isinstance(document, int | float) and not isinstance(document, bool)
        yield path, rounded(document) if is_number else json.dumps(document, ensure_ascii=False), is_number


def documents_of(text, suffix):
    """The JSON documents of a file, or None where it is a text."""
    try:
        if suffix == ".json":
            return json.loads(text)
        return [json.loads(line) for line in text.splitlines()] if suffix == ".jsonl" else None
    except ValueError:  # a command that refused has printed no document
        return None


def compare_file(old, new, suffix):
    """Lines on numbers that left or changed, on those that are new, and on texts."""
    documents = documents_of(old, suffix), documents_of(new, suffix)
    if None in documents:
        before, after = numbers_of_text(old), numbers_of_text(new)
        left = [f"- {number} ({count} times)" for number, count in sorted((before - after).items())]
        added = [f"+ {number} ({count} times)" for number, count in sorted((after - before).items())]
        diff = difflib.unified_diff(old.splitlines(), new.splitlines(), "old", "new", lineterm="", n=0)
        return left, added, list(diff)
    before, after = ({path: (value, kind) for path, value, kind in leaves(each)} for each in documents)
    left, added, texts = [], [], []
    for path in sorted(before.keys() | after.keys()):
        (was, was_number), (is_now, now_number) = before.get(path, (None, False)), after.get(path, (None, False))
        if was == is_now:
            continue
        lines = left if was_number else added if now_number and was is None else texts
        lines.append(f"{'-' if is_now is None else '+' if was is None else '~'} {path}: {was} -> {is_now}")
    return left, added, texts


def files_of(store):
    """The outputs of a store by name; those of making its directories too, where it made them."""
    return {
        str(path.relative_to(store)): path
        for folder in ("outputs", "made")
        for path in (store / folder).rglob("*")
        if path.is_file()
    }


def show(title, by_file, limit):
    if by_file:
        print(f"\n{title}")
    for name, lines in by_file.items():
        print(f"  {name}: {len(lines)}")
        for line in lines[:limit]:
            print(f"    {line}")
        if len(lines) > limit:
            print(f"    … {len(lines) - limit} more")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--numbers", action="store_true", help="leave texts out")
    parser.add_argument("--lines", type=int, default=12, help="lines to show of each file")
    options = parser.parse_args()
    before, after = files_of(options.old), files_of(options.new)
    if not before or not after:
        sys.exit("one of the two is no store: make it with python -m benchmarks.outputs.store")
    if "made" not in {name.split("/")[0] for name in before.keys() & after.keys()}:
        before, after = ({k: v for k, v in each.items() if k.startswith("outputs")} for each in (before, after))
    left, added, texts = {}, {}, {}
    for name in sorted(before.keys() | after.keys()):
        old, new = (each[name].read_text(encoding="utf-8") if name in each else "" for each in (before, after))
        if old != new:
            found = compare_file(old, new, Path(name).suffix)
            for lines, by_file in zip(found, (left, added, texts), strict=True):
                if lines:
                    by_file[name] = lines
    for title, names in (
        ("only in OLD", before.keys() - after.keys()),
        ("only in NEW", after.keys() - before.keys()),
    ):
        print(f"{title}: {', '.join(sorted(names)) or 'nothing'}")
    if not options.numbers:
        show("Texts", texts, options.lines)
    show("Numbers that only NEW has", added, options.lines)
    show("Numbers that left or changed", left, options.lines)
    total = len(before.keys() | after.keys())
    print(f"\n{total} files; numbers left or changed in {len(left)}, new in {len(added)}, texts in {len(texts)}")
    sys.exit(bool(left))


if __name__ == "__main__":
    main()
