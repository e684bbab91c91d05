"""``python -m fastpath.compiled``: the command of `fastpath.machine_code`."""

import sys

from fastpath.machine_code.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
