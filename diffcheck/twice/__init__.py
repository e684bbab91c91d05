"""One engine run again: does it repeat itself?"""

from diffcheck.twice.runs import CONDITIONS, Repeat, run_twice

__all__ = ["CONDITIONS", "Repeat", "run_twice"]
