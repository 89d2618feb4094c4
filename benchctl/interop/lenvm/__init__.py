"""Results of the LenVM project's own timing scripts: read, converted to a result directory, summed up as there.

``import_directory.py`` ties it together: ``files.py`` and ``responses.py`` read such a directory, ``convert.py``
makes records of it, ``warnings.py`` states its limits, ``summary.py`` has the project's own columns.
"""
