"""Pictures as PNG files, drawn with matplotlib.

``style`` has what they share and ``table`` lists those of a report; ``benchctl compare -o`` writes the forest plot.
"""
