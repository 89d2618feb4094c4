"""Results of the LenVM project's own timing scripts: read, turned into a result directory, summed up as there.

Reading guide: ``files.py`` and ``responses.py`` say what lies in such a directory, ``convert.py`` what it means,
``doubts.py`` what of it cannot be trusted, ``imported.py`` ties them together, ``summary.py`` has their columns.
"""
