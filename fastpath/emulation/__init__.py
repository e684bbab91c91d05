"""gfx942 machine code executed without its GPU: decoded, translated once, run on all 64 lanes at a time.

`code_object` reads what the compiler wrote, `translate` decodes it, `machine` executes it (machine.c, built by the
machine's C compiler), `launch` gives it the arguments of a launch. An instruction that is not known stops it by name.
Whatever ran this way is *executed in emulation*: nothing here is a measurement of an MI300X.
"""

from fastpath.emulation.launch import Execution, ExecutionError, execute_plan

__all__ = ["Execution", "ExecutionError", "execute_plan"]
