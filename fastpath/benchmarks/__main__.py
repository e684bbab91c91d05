"""``python -m fastpath.benchmarks``."""

import sys

from fastpath.benchmarks.contests import main

sys.exit(main())
