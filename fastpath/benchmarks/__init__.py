"""Time of the kernels beside a named peer: ``python -m fastpath.benchmarks [--json OUT] [--only NAME] [--tune]``."""
