"""Formats that weights are stored in: their bytes, and the arithmetic that multiplies them.

Bytes for each weight include the scales of its group, so that a table of 4-bit weights is not 3 % too small. A
format that is only stored (``int4``) is widened to bfloat16 before it is multiplied; one that is also computed in
(``fp8``, ``int8``) uses the device's faster peak, if it has one.
"""

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

Precision: TypeAlias = Literal["bfloat16", "fp8", "int8", "fp4"]
"""Arithmetic of matrix products."""

WeightFormat: TypeAlias = Literal["bfloat16", "fp8", "fp8-stored", "int8", "int8-stored", "int4", "fp4"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeights:
    """``bytes_per_param`` with scales; ``precision`` of the products with these weights."""

    bytes_per_param: float
    precision: Precision = "bfloat16"


WEIGHT_FORMATS: Final[dict[WeightFormat, StoredWeights]] = {
    "bfloat16": StoredWeights(bytes_per_param=2.0),
    # One 32-bit scale for a block of 128 times 128; one for each row or tensor is less still.
    "fp8": StoredWeights(bytes_per_param=1.0 + 4 / 128**2, precision="fp8"),
    "fp8-stored": StoredWeights(bytes_per_param=1.0 + 4 / 128**2),
    "int8": StoredWeights(bytes_per_param=1.0, precision="int8"),
    "int8-stored": StoredWeights(bytes_per_param=1.0),
    # Groups of 128 with a 16-bit scale and a 4-bit zero.
    "int4": StoredWeights(bytes_per_param=0.5 + 2.5 / 128),
    # Groups of 16 with an 8-bit scale (NVFP4); those of MXFP4 have 32.
    "fp4": StoredWeights(bytes_per_param=0.5 + 1 / 16, precision="fp4"),
}
