"""Claims on a result directory: who may write into it, or into one block of it.

``lock`` holds a whole directory for one process of this host. ``lease``, ``watch``, ``held`` and ``shared`` give
each block of a shared directory to one process of any host; ``docs/design/shared-directories.md`` says how.
"""
