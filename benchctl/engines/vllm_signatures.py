"""placeholder"""

from benchctl.engines.engine import Signature

SIGNATURES: tuple[Signature, ...] = ()
