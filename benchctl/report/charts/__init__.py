"""Charts of results, each of which gives a Vega-Lite specification as plain data with its words.

``figure`` has what they share.
"""
