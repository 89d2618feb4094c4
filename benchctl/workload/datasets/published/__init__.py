"""Published data sets, each read from a file whose address and sha256 are pinned."""
