"""Model shapes, hardware peaks, FLOPs and bytes; pure.

``shapes.py`` and ``hardware.py`` describe models and devices, ``flops.py`` counts and prices the work of a run, and
``roofline.py`` has the least time of forward passes.
"""
