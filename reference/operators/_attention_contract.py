"""The contract of attention: which blocks, in which order, rounded where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from reference.contract.base import Contract, Group, Value, choice, format_choice
from reference.operators._numerics import (
    ATTENTION_EXPS,
    BLOCK_ORDERS,
    K_ORDERS,
    UNIT_NAMES,
    UNIT_WORDS,
    require_unit,
    row_order_words,
    unit_for,
)


@dataclass(frozen=True)
class Domain(Group):
    input: str = choice(
        ("bfloat16", "float16", "float32"),
        "multiplies {value} queries and keys",
        equivalent="operands outside the format are refused; only a matrix unit that treats formats apart can differ",
        given=True,
    )
    mask: str = choice(
        ("causal", "full"),
        {"causal": "lets a query see keys up to its own position", "full": "lets a query see every key"},
        given=True,
    )
    block_origin: str = choice(
        ("sequence", "packed_buffer"),
        {
            "sequence": "counts key blocks from position 0 of the sequence",
            "packed_buffer": "counts key blocks from the start of the packed buffer",
        },
        equivalent="a sequence at a multiple of the block size, or alone, has both origins in common",
        given=True,
    )


@dataclass(frozen=True)
class Partition(Group):
    block: int = choice(
        (64, 16, 32, 128, 256, 0),
        {0: "takes all keys at once"} | {n: f"takes keys in blocks of {n}" for n in (64, 16, 32, 128, 256)},
    )
    split: str = choice(
        ("none", "fixed-128", "fixed-256", "fixed-512", "equal-2", "equal-4", "equal-8"),
        {
            "none": "goes through all blocks in one pass",
            **{
                f"fixed-{n}": f"closes a partial result every {n} keys and merges them in order"
                for n in (128, 256, 512)
            },
            **{f"equal-{n}": f"splits the visible blocks into {n} parts and merges them in order" for n in (2, 4, 8)},
        },
    )


@dataclass(frozen=True)
class Order(Group):
    keys: str = choice(
        ("ascending", "descending"),
        {"ascending": "visits blocks upwards", "descending": "visits blocks downwards, the newest keys first"},
    )
    k: str = choice(("ascending", "pairs_odd_first"), K_ORDERS)
    row_sum: str = choice(BLOCK_ORDERS, row_order_words("adds a block's probabilities"))
    accumulate: str = choice(
        ("chain", "add", "fma"),
        {
            "chain": "rescales the accumulator and continues its chain through the block's values",
            "add": "sums the block from zero, and adds it to the rescaled accumulator",
            "fma": "sums the block from zero, and fuses the rescaling with the add",
        },
    )
    normalise: str = choice(
        ("after_values", "before_values"),
        {
            "after_values": "divides by the row sum at the end",
            "before_values": "divides probabilities by the row sum before it weighs the values",
        },
    )
    sink: str = choice(
        ("first", "last"),
        {"first": "starts the softmax from the sink", "last": "adds the sink after the last key"},
        equivalent="without sinks there is nothing to place",
    )


@dataclass(frozen=True)
class Rounding(Group):
    query: str = format_choice("float32", "does not round scaled queries", "rounds scaled queries to {value}")
    products: str = format_choice(
        "float32", "keeps products of queries and keys in float32", "rounds products of queries and keys to {value}"
    )
    scores: str = format_choice(
        "float32", "keeps scaled scores in float32", "rounds scaled scores to {value} before the softmax"
    )
    row_sum: str = format_choice("float32", "sums unrounded probabilities", "sums probabilities rounded to {value}")
    probabilities: str = format_choice(
        "bfloat16",
        "weighs the values with float32 probabilities",
        "rounds probabilities to {value} before it weighs the values",
    )
    output: str = format_choice("bfloat16", "rounds the output to {value}", given=True)


@dataclass(frozen=True)
class Primitives(Group):
    unit: str = choice(UNIT_NAMES, UNIT_WORDS)
    scale: str = choice(
        ("folded", "separate", "query"),
        {
            "folded": "scales scores by one constant, into which log2(e) is folded for base 2",
            "separate": "scales scores by 1/sqrt(d) first and, for base 2, by log2(e) second",
            "query": "scales queries by 1/sqrt(d) before the product and, for base 2, scores by log2(e) after it",
        },
    )
    exp: str = choice(tuple(ATTENTION_EXPS), "computes the softmax's exponential as {value}")
    update: str = choice(
        ("fma", "mul_add"),
        {"fma": "updates the row sum by FMA", "mul_add": "rescales the row sum, then adds to it"},
    )
    finish: str = choice(
        ("divide", "reciprocal"),
        {"divide": "divides by the row sum", "reciprocal": "multiplies by the reciprocal of the row sum"},
    )


@dataclass(frozen=True)
class AttentionContract(Contract):
    """Per query row and key block, with c = log2(e)/sqrt(d) or 1/sqrt(d)::

        s = c * dot(q, k), masked -> -inf;  m' = max(m, max(s));  a = exp(m - m');  p = exp(s - m')
        l = l * a + sum(p);  acc = acc * a + p @ v

    and at the end  y = acc / l + 0  (never -0). A masked key takes no part."""

    operator: ClassVar[str] = "attention"
    domain: Domain = Domain()
    partition: Partition = Partition()
    order: Order = Order()
    rounding: Rounding = Rounding()
    primitives: Primitives = Primitives()

    def check(self) -> None:
        def require(ok: bool, what: str) -> None:
            if not ok:
                raise ValueError(f"attention: {what}")

        whole = self.partition.block == 0
        require(
            not whole or self.partition.split == "none", "partition.split must be 'none' where partition.block is 0"
        )
        require(
            not whole or self.order.keys == "ascending", "order.keys must be 'ascending' where partition.block is 0"
        )
        require(
            not whole or self.order.accumulate == "chain", "order.accumulate must be 'chain' where partition.block is 0"
        )
        require(
            not whole or self.primitives.update == "fma", "primitives.update must be 'fma' where partition.block is 0"
        )
        require(
            not whole or self.domain.block_origin == "sequence",
            "domain.block_origin must be 'sequence' where partition.block is 0",
        )
        require(
            whole or self.order.normalise == "after_values", "order.normalise 'before_values' needs partition.block 0"
        )
        require(
            self.partition.split == "none" or self.order.keys == "ascending",
            "partition.split needs order.keys 'ascending'",
        )
        require(
            self.primitives.scale == "query" or self.rounding.query == "float32",
            "rounding.query must be 'float32' unless primitives.scale is 'query'",
        )
        require(
            self.order.normalise == "after_values" or self.order.sink == "first",
            "order.sink must be 'first' where order.normalise is 'before_values'",
        )
        base, _ = ATTENTION_EXPS[self.primitives.exp]
        require(
            base == "2" or self.primitives.scale != "separate",
            "primitives.scale 'separate' needs an exponential of base 2",
        )
        split_size = int(self.partition.split.removeprefix("fixed-")) if self.partition.split.startswith("fixed") else 0
        require(
            split_size % (self.partition.block or 1) == 0,
            "a fixed partition.split must be a multiple of partition.block",
        )
        require_unit(self.primitives.unit, self.domain.input, self.operator)

    def dtype_changes(self, dtype: str) -> dict[str, Value]:
        return super().dtype_changes(dtype) | {"primitives.unit": unit_for(self.primitives.unit, dtype)}
