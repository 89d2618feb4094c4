"""Tables as headings, rows and footnotes, for terminals and Markdown.

ms and % exist from here on; every number is formatted by ``benchctl.formats``.
"""
