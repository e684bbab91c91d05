"""HIP C++ where the instruction must be explicit: an MFMA matrix product, and an all-reduce over memory handles."""
