"""Charts of results: one module for each, which gives a Vega-Lite specification as plain data with its words.

``figure`` has what they share, ``table`` lists them.
"""
