"""The report page: one self-contained HTML file about a result directory or two sides of a comparison.

``build`` starts from directories, ``verdict`` and ``parts/`` prepare values, ``charts/`` makes Vega figures,
and ``templates/`` holds all markup.
"""
