"""Model shapes, hardware peaks, FLOPs and bytes; pure.

``shapes.py`` and ``hardware.py`` find models and devices, ``run_work.py`` counts the work of a run and ``flops.py``
prices it, and ``roofline.py`` has the least time of forward passes.
"""
