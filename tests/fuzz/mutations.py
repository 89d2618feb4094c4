"""Random damage to a text: to bytes, lines, and the structure of JSON and YAML. A seed decides all of it."""

import json
import random
from contextlib import suppress
from typing import Any, Final

import yaml

_DEEP: Final = 100_000
RAW: Final = {
    "@raw:deep-lists@": "[" * _DEEP + "]" * _DEEP,
    "@raw:deep-objects@": '{"a":' * _DEEP + "1" + "}" * _DEEP,
    "@raw:deep-some@": "[" * 600 + "]" * 600,
    "@raw:digits@": "9" * 5_000,
    "@raw:exponent@": "1e999",
    "@raw:nan@": "NaN",
    "@raw:infinity@": "-Infinity",
    "@raw:surrogate@": '"\\ud800"',
    "@raw:latin@": '"\udcff\udcfe"',
}
"""Values that Python's encoders do not write, by the text that stands for them until then."""
NUMBERS: Final = (
    0,
    -1,
    1,
    2,
    255,
    65_536,
    10**6,
    10**9,
    2**31,
    2**53 + 1,
    2**63 - 1,
    2**63,
    -(2**63) - 1,
    2**64,
    10**30,
    10**400,
    0.0,
    -0.0,
    0.5,
    -1.5,
    1e-320,
    1e-9,
    1e18,
    1e300,
    1.7e308,
    -1.7e308,
    float("nan"),
    float("inf"),
    float("-inf"),
)
TEXTS: Final = (
    "",
    " ",
    "\n",
    "\x00",
    "\x1b[31mred\x1b]0;title\x07",
    "\u202egpj.exe",
    "\ufeff",
    "..",
    "../../outside/file.txt",
    "/etc/passwd",
    "./",
    "a/b",
    "-rf",
    "--help",
    "~",
    "$HOME",
    "%s%n",
    "{0.__class__}",
    "{{ 7*7 }}",
    "<b>x</b>",
    "=1+1",
    "NaN",
    "1e5",
    "true",
    "null",
    "0x10",
    "1_000",
    "١٢",
    "a" * 300,
    "x" * 100_000,
    "é" * 300,
    "🙂",
    "\u2028",
    "done",
    "running",
    "failed",
    "baseline",
    "slow",
    "2026-01-01T00:00:00Z",
    "9999-99-99",
    "latest",
)
_BYTES: Final = (
    b"\x00",
    b"\xff\xfe",
    b"\xc3",
    b"\xed\xa0\x80",
    b"\x1b[2J",
    b"\r",
    b"\r\n",
    b"\n",
    b"\n\n",
    b"\xef\xbb\xbf",
    b"{",
    b"}",
    b"[",
    b"]",
    b'"',
    b"\\",
    b",",
    b":",
    b"-",
    b"9" * 400,
    b"null",
    b"NaN",
    b"1e999",
    b"\x85",
    b"\xe2\x80\xa8",
    b"&a [*a, *a]",
    b"!!python/none",
)

_UNDAMAGEABLE: Final = (ValueError, RecursionError, OverflowError, yaml.YAMLError)
"""What this module itself fails by on values that it put there."""


def hostile_value(draw: random.Random) -> Any:
    """A value that honest files do not hold where it comes to stand."""
    nested = ([], {}, [[]], {"": None}, [None], {"a": {"b": []}}, [0] * 3_000, ["x", 1, None])
    return draw.choice(draw.choice((NUMBERS, NUMBERS, TEXTS, (None, True, False), nested, tuple(RAW))))


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Every (container, key or index) of a tree."""
    found, left = [], [tree]
    while left:
        node = left.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        for key in keys:
            found.append((node, key))
            left.append(node[key])
    return found


def _near(value: Any, draw: random.Random) -> Any:
    """The same kind of value, but another: what checks of types let through."""
    match value:
        case bool():
            others: tuple[Any, ...] = (not value,)
        case int() | float():
            half = value // 2 if value else 3
            others = (-value, value + 1, value * 1_000_000, half, float(value), str(value), value - 1)
        case str():
            others = (
                value[:-1],
                value + value,
                value.upper(),
                f" {value}",
                f"{value}\x1b[1m",
                f"../{value}",
                [value],
            )
        case list():
            others = (value[::-1], value * 2, value[:-1], value[:1] * 500, dict.fromkeys(map(str, range(3)), value))
        case dict():
            longer = {f"{key}x": part for key, part in value.items()}
            others = (list(value.items()), list(value), longer, list(value.values()))
        case _:
            others = (0,)
    return draw.choice(others)


def mutated_tree(tree: Any, draw: random.Random) -> Any:
    """``tree`` with one to three values, keys or elements altered. The tree itself may be altered."""
    holder = [tree]
    for _ in range(draw.choice((1, 1, 2, 3))):
        node, key = draw.choice(_places(holder))
        match draw.randrange(8):
            case 0 | 1:
                node[key] = hostile_value(draw)
            case 2 | 3:
                node[key] = _near(node[key], draw)
            case 4 if node is not holder:
                del node[key]
            case 5 if isinstance(node, dict):
                node[draw.choice(TEXTS)] = node.pop(key)
            case 6 if isinstance(node, dict):
                node[draw.choice((*TEXTS[:20], f"{key}s"))] = hostile_value(draw)
            case 7:
                other, place = draw.choice(_places(holder))
                if not isinstance(node[key], dict | list) and not isinstance(other[place], dict | list):
                    node[key], other[place] = other[place], node[key]
            case _:
                node[key] = hostile_value(draw)
    return holder[0]


def mutated_json(content: bytes, draw: random.Random) -> bytes:
    """A JSON document with another structure."""
    tree = mutated_tree(json.loads(content), draw)
    text = json.dumps(tree, indent=draw.choice((None, 1)))
    for name, raw in RAW.items():
        text = text.replace(f'"{name}"', raw)
    if draw.random() < 0.1 and "{" in text:  # a key that is there twice
        at = draw.choice([i for i, letter in enumerate(text) if letter == "{"])
        text = f'{text[: at + 1]}"{draw.choice(("state", "schema_version", "a"))}": 1, {text[at + 1 :]}'
    return text.encode("utf-8", "surrogateescape")


def mutated_yaml(content: bytes, draw: random.Random) -> bytes:
    """A YAML document with another structure, in flow style, which can hold what the encoder of YAML refuses."""
    return mutated_json(json.dumps(yaml.safe_load(content)).encode(), draw)


def mutated_lines(content: bytes, draw: random.Random) -> bytes:
    """Lines deleted, repeated, exchanged, cut, joined; a line of JSON with another structure; cells of a table."""
    lines = content.split(b"\n")
    for _ in range(draw.choice((1, 1, 2, 4))):
        at, other = draw.randrange(len(lines)), draw.randrange(len(lines))
        match draw.randrange(9):
            case 0 if len(lines) > 1:
                del lines[at]
            case 1:
                lines[at:at] = [lines[at]] * draw.choice((1, 2, 1000))
            case 2:
                lines[at], lines[other] = lines[other], lines[at]
            case 3:
                lines[at] = lines[at][: draw.randrange(len(lines[at]) + 1)]
            case 4:
                lines[at] += lines[other]
            case 5:
                cells = lines[at].split(b",")
                cells[draw.randrange(len(cells))] = str(draw.choice((*NUMBERS, *TEXTS))).encode("utf-8", "replace")
                lines[at] = b",".join(cells)
            case _:
                try:
                    lines[at] = mutated_json(lines[at], draw).replace(b"\n", b" ")
                except _UNDAMAGEABLE:
                    lines[at] = mutated_bytes(lines[at], draw)
    return b"\n".join(lines)


def mutated_bytes(content: bytes, draw: random.Random) -> bytes:
    """Bytes changed, inserted, deleted, repeated or cut off."""
    data = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 8))):
        at = draw.randrange(len(data) + 1)
        end = min(len(data), at + draw.choice((1, 2, 8, 64, 1024)))
        match draw.randrange(7):
            case 0:
                data[at:end] = b""
            case 1 | 2:
                data[at:at] = draw.choice(_BYTES)
            case 3:
                data[at:at] = data[at:end] * draw.choice((1, 2, 100))
            case 4:
                del data[at:]
            case 5 if at < len(data):
                data[at] = draw.randrange(256)
            case _:
                data[at:end] = draw.randbytes(end - at)
    return bytes(data)


def mutated(content: bytes, kind: str, draw: random.Random) -> bytes:
    """``content`` damaged in a way that suits its ``kind``: json, yaml, lines or bytes."""
    ways = {"json": mutated_json, "yaml": mutated_yaml, "lines": mutated_lines}
    if draw.random() < 0.8:
        with suppress(*_UNDAMAGEABLE):
            return ways.get(kind, mutated_bytes)(content, draw)
    return b"" if draw.random() < 0.03 else mutated_bytes(content, draw)


def kind_of(name: str) -> str:
    """The kind of a file by its name."""
    suffix = name.rpartition(".")[2]
    return {"json": "json", "yaml": "yaml", "yml": "yaml", "jsonl": "lines", "csv": "lines"}.get(suffix, "bytes")
