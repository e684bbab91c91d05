"""The field's own faults, each injected on purpose into one side of a small model: does the tool name it?"""

from diffcheck.faults.laboratory import Laboratory, Outcome, run_fault, scores
from diffcheck.faults.library import CONTROLS, FAULTS, Fault

__all__ = ["CONTROLS", "FAULTS", "Fault", "Laboratory", "Outcome", "run_fault", "scores"]
