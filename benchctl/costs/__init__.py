"""Model shapes, hardware peaks, FLOPs and bytes; pure."""
