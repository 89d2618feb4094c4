"""``python -m benchctl`` is the command ``benchctl``."""

from benchctl.cli import main

main()
