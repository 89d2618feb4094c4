"""The parts of the report page, from the verdict at its top to the provenance at its end."""
