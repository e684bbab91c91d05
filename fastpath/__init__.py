"""Kernels with the reference's bits: Triton for Hopper and gfx942, HIP C++ where the instruction must be explicit.

Every file bears the name of the operator in `reference.operators` whose contract it implements, for models held in
bfloat16 or float32. What cannot be computed under the contract is refused with the reason, never approximated.
"""
