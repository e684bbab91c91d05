"""Every float32 bit pattern through every cast and primitive, against a second implementation in C.

`python -m tests.reference.exhaustive --help` tells how to run it in shards, resume it, and write the table of results.
"""
