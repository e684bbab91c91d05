"""Speed of the reference on one core: `python -m reference.benchmarks`."""

import os

# before NumPy and torch start their threads
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_variable] = "1"
