"""Order and arithmetic of a kernel from outside: designed inputs reveal the tree, random ones confirm it in bits."""

from diffcheck.infer.active.catalogue import KERNELS, named
from diffcheck.infer.active.kernel import FORMS, Kernel, load, torch_kernel
from diffcheck.infer.active.run import Answer, probe

__all__ = ["FORMS", "KERNELS", "Answer", "Kernel", "load", "named", "probe", "torch_kernel"]
