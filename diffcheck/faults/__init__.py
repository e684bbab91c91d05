"""The field's own faults, each injected on purpose into one side of a small model: does the tool name it?

- `library`: into the reference engine, which follows contracts; `laboratory` runs them.
- `real_library`: into real vLLM and real Megatron-core, by `changes` inside the live engine; `engines` runs them.
"""

from diffcheck.faults.laboratory import Laboratory, run_fault
from diffcheck.faults.library import CONTROLS, FAULTS, Fault
from diffcheck.faults.outcome import Outcome, scores

__all__ = ["CONTROLS", "FAULTS", "Fault", "Laboratory", "Outcome", "run_fault", "scores"]
