"""Every kernel against the reference, in bits: ``python -m fastpath.conformance [--json OUT] [--only NAME]``.

One module per family of kernels, each with a function ``cases()``; a module that is added here is run.
"""
