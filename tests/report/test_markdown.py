"""Text from outside in Markdown is shown, and does nothing."""

import pytest

from benchctl.report.table import fenced, markdown_text


@pytest.mark.parametrize(
    ("text", "markdown"),
    [
        ("+55.4% [+52.9%, +57.9%] in top_k=5", r"+55.4% [+52.9%, +57.9%] in top\_k=5"),
        ("a|b*c*`d`~~e~~\\", r"a\|b\*c\*\`d\`\~\~e\~\~" + "\\\\"),
        ("<img src=x onerror=alert(1)>", r"\<img src=x onerror=alert(1)>"),
        ("[text](//evil) ![x][y] [z]: /url", r"[text\](//evil) ![x\][y] [z\]: /url"),
        ("@octocat fixes #12", "@&#8203;octocat fixes #&#8203;12"),
        ("https://evil.example or www.evil.example", "https:&#8203;//evil.example or www&#8203;.evil.example"),
        ("$\\frac{1}{2}$ &lt;b", "&#36;\\\\frac{1}{2}&#36; \\&lt;b"),
        ("\x1b]0;t\x07\x9b31m\u202e\nnext\tcell", "\\\\x1b]0;t\\\\x07\\\\x9b31m\\\\u202e\\\\nnext\\\\tcell"),
    ],
)
def test_a_text_is_shown_as_it_is(text: str, markdown: str) -> None:
    assert markdown_text(text) == markdown


def test_a_block_of_code_ends_where_it_should() -> None:
    assert fenced("a\n```\n# b\x1b[2J\n````") == "`````text\na\n```\n# b\\x1b[2J\n````\n`````"
    assert fenced("plain") == "```text\nplain\n```"


def test_a_text_of_a_megabyte_is_cut() -> None:
    assert len(markdown_text("x" * 1_000_000)) == 2_000
