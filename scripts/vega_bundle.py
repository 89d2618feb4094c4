"""Write the script that draws the charts of a page: Vega, Vega-Lite and Vega-Embed as vl-convert has them.

    python scripts/vega_bundle.py

Run it after a new version of vl-convert-python, so that the page and the files are drawn by the same Vega-Lite.
"""

from pathlib import Path

import vl_convert

FOLDER = Path(__file__).parents[1] / "benchctl" / "report" / "page" / "vendor"
README = """# Vega

`vega.js` holds Vega {vega}, Vega-Lite {lite} and Vega-Embed {embed} with what they need, as vl-convert-python {own}
bundles them; `python scripts/vega_bundle.py` writes it and this page again. All are under the BSD licence of three
clauses (`vega.LICENSE`), the parts of D3 in them under the ISC licence.
"""


def main():
    (FOLDER / "vega.js").write_text(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"), encoding="utf-8")
    text = README.format(
        vega=vl_convert.get_vega_version(),
        lite=vl_convert.get_vegalite_versions()[-1],
        embed=vl_convert.get_vega_embed_version(),
        own=vl_convert.__version__,
    )
    (FOLDER / "README.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
