"""Preparation of the charts that exist as a picture and on the page: runs, lines, labels, intervals and scales.

Nothing here draws: ``report/plots`` makes PNG files of these values, ``report/page`` SVG and Plotly figures.
"""
