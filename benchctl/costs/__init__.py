"""Model shapes, hardware peaks, FLOPs and bytes; pure.

``shapes.py`` and ``hardware.py`` describe models and devices, ``work.py`` counts, ``flops.py`` prices the counts.
"""
