"""Interactive charts of the report page, each a Plotly figure as plain data with its words.

``figure`` has what they share, ``table`` lists them in the order of the page.
"""
