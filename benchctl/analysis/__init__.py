"""What the records mean, as pure functions: metrics, validity, statistics, attribution and the verdict.

``metrics`` derives numbers of one run, ``validity`` says which to trust, ``statistics`` how sure a
difference is, ``attribution`` and ``quality`` where it sits; ``experiment`` puts runs side by side; ``compare``,
``summary`` and ``planning`` answer what people ask.
"""
