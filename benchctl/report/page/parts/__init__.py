"""Values of the sections of the report page, from the verdict at its top to the provenance at its end.

Each module prepares plain values for the template of the same name in ``templates/``; none holds markup.
"""
