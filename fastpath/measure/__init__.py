"""The measurement kit: what the GPU of this machine computes, as one JSON that two owners can compare.

`measure` runs unit probes, primitives over all 2^32 inputs, the kernels' conformance cases and two ceilings;
`compare` sets two of its files side by side. Unit probes run on any GPU that Triton compiles for, known or not.
"""

from fastpath.measure.compare import Difference, compare
from fastpath.measure.kit import SCHEMA, measure

__all__ = ["SCHEMA", "Difference", "compare", "measure"]
