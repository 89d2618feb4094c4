"""llama.cpp's ``llama-server``: options, start and requests. It records no steps."""
