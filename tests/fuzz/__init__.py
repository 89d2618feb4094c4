"""Random damage to everything that benchctl reads: files, answers of servers, whole result directories.

``python -m tests.fuzz --seconds 300 --seed N`` searches, ``--only NAME`` one target; its tests do the same
for a short time. Each case follows from the seed and its number alone. What was found is in ``corpus/found``.
"""
