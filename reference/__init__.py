"""The executable specification: every operator as a pure NumPy function whose output bits are the contract.

No module here imports an engine or torch, and none uses `np.sum`, `np.dot` or a BLAS inside specified arithmetic:
the order of every addition is written out.
"""

# The package registers every contract before a module of it can ask for one.
from reference import contract, operators
from reference.contract import profile, space
from reference.models.qwen3 import forward

__all__ = ["contract", "forward", "operators", "profile", "space"]
