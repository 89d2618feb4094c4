"""Pictures as PNG files, drawn with matplotlib.

``style`` has what they share and ``table`` lists those of a report; ``benchctl compare -o`` writes the forest plot.
Without matplotlib, importing any of this raises MissingPackageError.
"""

from benchctl.errors import MissingPackageError

try:
    import matplotlib as mpl  # noqa: F401 - whether it is there
except ImportError as error:
    raise MissingPackageError(("matplotlib",), "PNG pictures cannot be drawn") from error
