"""Results as JSON and CSV documents, with numbers at full precision.

They are the output of ``--json``, the exported files, and the data inside the page.
"""
