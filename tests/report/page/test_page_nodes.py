"""The section of the page with results by node."""

import re

from support.results.nodes import write_on_nodes

from benchctl.analysis.analyzed import analyze_directory
from benchctl.report.page.page import directory_page


def section_of(path) -> str:
    """The section with results by node, empty where there is none."""
    found = re.search(
        r'<section class="by-nodes">.*?</section>', directory_page(analyze_directory(path)), re.DOTALL
    )
    return "" if found is None else found[0]


def test_a_page_of_one_node_has_no_section_by_node(tmp_path):
    assert not section_of(write_on_nodes(tmp_path / "r", ("n1",) * 6).path)


def test_names_of_nodes_are_only_text_and_long_ones_are_cut(tmp_path):
    section = section_of(write_on_nodes(tmp_path / "r", ("<b>evil", "n" * 300, "over blocks") * 4).path)
    assert "<b>evil" not in section
    assert "&lt;b&gt;evil" in section
    assert "n" * 60 not in section
    assert section.count("<td>over blocks</td>") == 2 * 3 * 2, "a node of that name and the summary"
