"""Colours and dashes of every chart.

The palette is that of Okabe and Ito (2008), which people with any colour vision can tell apart.
"""

from typing import Final

BLUE: Final = "#0072B2"
SKY: Final = "#56B4E9"
GREEN: Final = "#009E73"
YELLOW: Final = "#F0E442"
ORANGE: Final = "#E69F00"
VERMILION: Final = "#D55E00"
PURPLE: Final = "#CC79A7"
SLATE: Final = "#555555"
GREY: Final = "#888888"
"""For whatever belongs to no series: as far from white as from black."""
SERIES: Final = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY)
"""The colours that stand out on white and on near-black alike: without the black and yellow of the palette."""
DASHES: Final = ("solid", "dash", "dot", "dashdot")


def series_color(index: int) -> str:
    """Colour of the series at ``index``; the colours start over where they run out, with another dash."""
    return SERIES[index % len(SERIES)]


def series_dash(index: int) -> str:
    """Line style of the series at ``index``: another one each time the colours start over."""
    return DASHES[index // len(SERIES) % len(DASHES)]
