"""Vega-Lite as pictures. It imports nothing else of benchctl, so that a process that only draws begins soon."""

from typing import Any, Final

_LIGHT: Final = {"background": "white", "font": "Arial, sans-serif", "axis": {"gridColor": "#e5e5e5"}}


def load_vega() -> None:
    """Draw nothing, because the first picture of a process takes many times as long as others."""
    vega_bytes({"vconcat": []}, ".png")


def vega_bytes(spec: dict[str, Any], suffix: str) -> bytes:
    """The file of a specification: ``.png``, ``.svg`` or ``.pdf``."""
    import vl_convert  # noqa: PLC0415 - takes a second, and only pictures need it

    if suffix == ".svg":
        return vl_convert.vegalite_to_svg(spec, config=_LIGHT).encode()
    if suffix == ".pdf":
        return bytes(vl_convert.vegalite_to_pdf(spec, config=_LIGHT))
    return bytes(vl_convert.vegalite_to_png(spec, scale=1.5, config=_LIGHT))
