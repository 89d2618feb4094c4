"""Results of benchctl in the file formats of other load generators.

``export`` writes a directory of them; every module besides it knows one format.
"""
