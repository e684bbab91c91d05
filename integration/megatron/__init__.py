"""The strict path in Megatron-core on a CPU.

- `functions`: each operator with its derivative; `modules`: Megatron's modules made of them.
- `plugin`: builds the model's specification, and what the capture asks for.
"""
