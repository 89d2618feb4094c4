"""What of a measurement may be trusted: reconciliation, the client, gates, comparability, integrity.

Each module returns warnings as data; ``usability`` turns them into the one answer which runs count, and for what.
"""
