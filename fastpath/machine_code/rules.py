"""What compiled code must show before its bits can be those of a contract: rules as data, one check each.

A rule holds or gives findings, each one sentence. `RULES` lists them by runtime; `EXPECTATIONS` says, beside the name
of each operator, which refined sequences and matrix products its contract has, so that anything else stands out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fastpath.machine_code.code import Code
from reference.contract.base import BACKWARD


@dataclass(frozen=True)
class Expectation:
    """What the contract of an operator asks of machine code beyond additions, multiplications and FMA."""

    division: bool = False
    square_root: bool = False
    matrix: bool = False


PLAIN = Expectation()
_NORM = Expectation(division=True, square_root=True)
_PRODUCT = Expectation(matrix=True)

#: Operator -> what its forward and backward kernels may contain.
EXPECTATIONS: dict[str, Expectation] = {
    "embedding": PLAIN,
    "rms_norm": _NORM,
    "qk_norm": _NORM,
    "rope": PLAIN,
    "swiglu": Expectation(division=True),
    "residual_add": PLAIN,
    "moe_router": Expectation(division=True),
    "moe_combine": PLAIN,
    "kv_cache": PLAIN,
    "attention": Expectation(division=True, matrix=True),
    "linear": _PRODUCT,
    "row_linear": _PRODUCT,
    "lm_head": _PRODUCT,
    "logprob": _PRODUCT,
    "logsumexp": PLAIN,
    "entropy": Expectation(division=True),
    "processed_logits": Expectation(division=True),
    "all_reduce": PLAIN,
    "all_gather": PLAIN,
    "reduce_scatter": PLAIN,
}

#: (runtime, arithmetic profile) -> instructions that compute it, and the K width of their operands in TTGIR: one
#: instruction's own; a wider one interleaves the K of several instructions. On sm_90, `fma32-seq` is plain FMA.
MATRIX_INSTRUCTIONS: dict[tuple[str, str], tuple[str, int]] = {
    ("hip", "mfma-cdna3-g8"): (r"v_mfma_f32_(16x16x16|32x32x8)_bf16", 4),
    ("hip", "fma32-seq"): (r"v_mfma_f32_(16x16x4|32x32x2)_f32", 1),
    ("cuda", "hopper-k16"): (
        r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.bf16\.bf16"
        r"|mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32",
        2,
    ),
}

#: FMA that LLVM adds for one division (of float32 in float32, of float64 in float64), and for one IEEE square root.
DIVISION_FMAS, SQUARE_ROOT_FMAS = 5, 2
#: At most so many for one 64-bit integer division: its first estimate joins two halves, by 2^32 and by -2^32.
WIDE_DIVISION_FMAS = 2
_OF_WIDE_DIVISION = re.compile(
    r"^\tv_(?:fma|fmamk|fmaak|fmac|mad|madmk|madak|mac)_f32[^;\n]*0x[4c]f800000", re.MULTILINE
)

_FMA = re.compile(
    r"v_(fma|fmac|fmamk|fmaak|mad|mac|madmk|madak)_f32|v_pk_fma_f32|v_fma_mix_f32|fma\.rn(\.ftz)?\.f32(x2)?"
)
_EXPLICIT_FMA = ("llvm.fma.f32", "llvm.fmuladd.f32")


@dataclass(frozen=True)
class Rule:
    """One property of compiled code."""

    name: str
    says: str
    check: Callable[[Code], Iterator[str]]


def expectation(code: Code) -> Expectation:
    """What the code's contract asks for; raises KeyError for an operator without an entry in ``EXPECTATIONS``."""
    return EXPECTATIONS[code.contract.operator.removesuffix(BACKWARD)]


def unit_of(code: Code) -> str:
    """The arithmetic profile of the code's contract; the portable one where it names none."""
    return str(getattr(code.contract.primitives, "unit", "fma32-seq"))


def _fmas(code: Code) -> int:
    """FMA results of the machine code; a packed one has two."""
    return sum(
        n * (2 if "pk_" in name or "x2" in name else 1) for name, n in code.instructions.items() if _FMA.fullmatch(name)
    )


def _integer_divisions(code: Code, *types: str) -> int:
    """Divisions and remainders of integers, which gfx942 has no instruction for."""
    return sum(len(re.findall(rf" = [us](?:div|rem) {kind} ", code.llir)) for kind in types)


def no_contraction(code: Code) -> Iterator[str]:
    """Every FMA of the machine code is one that the kernel wrote, or part of an IEEE division or square root."""
    written = sum(code.operations[name] for name in _EXPLICIT_FMA)
    expected = written
    if code.target.runtime == "hip":
        roots = code.operations["llvm.sqrt.f32"]
        expected += DIVISION_FMAS * code.operations["fdiv"] + SQUARE_ROOT_FMAS * roots
        wide = len(_OF_WIDE_DIVISION.findall(code.assembly))
        expected += min(wide, WIDE_DIVISION_FMAS * _integer_divisions(code, "i64"))
        double = sum(code.instructions[name] for name in ("v_fma_f64", "v_fmac_f64"))
        if double != DIVISION_FMAS * code.operations["fdiv.f64"]:
            yield f"{double} fused multiply-adds of float64 for {code.operations['fdiv.f64']} divisions"
    if _fmas(code) != expected:
        yield f"{_fmas(code)} fused multiply-adds where the kernel has {written} ({expected} with divisions and roots)"
    # nnan alone: LLVM proved that there is no NaN, which frees nothing
    for flags in set(re.findall(r"= f(?:add|sub|mul|div) ((?:\w+ )*?)(?:float|<)", code.llir)) - {"", "nnan "}:
        yield f"fast-math flags '{flags.strip()}' on a floating-point operation"
    if code.target.runtime == "cuda":
        loose = [name for name in code.instructions if re.fullmatch(r"(mul|add|sub)\.f32", name)]
        for name in loose:
            yield f"{name} without .rn: the assembler may fuse it"


def no_approximation(code: Code) -> Iterator[str]:
    """No hardware exponential, logarithm, reciprocal, root or trigonometric function outside an IEEE sequence."""
    found, expected = code.instructions, expectation(code)
    if code.target.runtime == "cuda":
        for name in found:
            if re.search(r"\.approx|\.full", name):
                yield f"{name} is a hardware approximation"
        allowed = {"div.rn.f32": expected.division or expected.square_root, "sqrt.rn.f32": expected.square_root}
        for name, is_allowed in allowed.items():
            if found[name] and not is_allowed:
                yield f"{name} where the contract of {code.contract.operator} has none"
        return
    judged = ("v_rcp_f32", "v_rcp_iflag_f32", "v_rsq_f32", "v_sqrt_f32", "v_rcp_f64")
    for name in found:
        if name not in judged and re.match(
            r"v_(?:exp|log|sin|cos|rcp|rsq|sqrt|tanh)(?:_\w+)?_(?:f16|f32|f64|bf16)$", name
        ):
            yield f"{name} is a hardware approximation"
    divisions, roots = code.operations["fdiv"], code.operations["llvm.sqrt.f32"]
    # an integer division begins with an estimate in float32, which integer steps correct
    spare = found["v_rcp_f32"] + found["v_rcp_iflag_f32"] - found["v_div_fixup_f32"]
    if not 0 <= spare <= _integer_divisions(code, "i32", "i64") or found["v_div_fixup_f32"] != divisions:
        yield f"{found['v_rcp_f32'] + found['v_rcp_iflag_f32']} reciprocals for {divisions} IEEE divisions"
    if divisions:
        yield f"{divisions} float32 divisions that ask more of v_rcp_f32 than it documents: primitives.div_rn does not"
    double = code.operations["fdiv.f64"]
    if not found["v_rcp_f64"] == found["v_div_fixup_f64"] == double:
        yield f"{found['v_rcp_f64']} reciprocals of float64 for {double} divisions"
    divisions += double
    refined = _refined_roots(code.llir)
    if found["v_rsq_f32"] != refined:
        yield f"{found['v_rsq_f32']} v_rsq_f32 of which {refined} are refined to an IEEE square root"
    if found["v_sqrt_f32"] != roots:
        yield f"{found['v_sqrt_f32']} v_sqrt_f32 for {roots} IEEE square roots"
    if divisions and not expected.division:
        yield f"{divisions} divisions where the contract of {code.contract.operator} has none"
    if (roots or refined) and not expected.square_root:
        yield f"{roots + refined} square roots where the contract of {code.contract.operator} has none"


def _refined_roots(llir: str) -> int:
    """Estimates of 1/sqrt that Triton before 3.9 refines to a square root: exact for normal x, which is all we take.

    That sequence alone asks whether x is a zero or +Inf (class 608).
    """
    estimates = re.findall(r"call float @llvm\.amdgcn\.rsq\.f32\(float (%\w+)\)", llir)
    return sum(f"@llvm.is.fpclass.f32(float {x}, i32 608)" in llir for x in estimates)


def matrix_instruction(code: Code) -> Iterator[str]:
    """Matrix products use the instruction that the contract's profile models, and nothing else does."""
    found = {n for n in code.instructions if re.match(r"v_(mfma|smfmac|dot)|wgmma\.mma|mma\.sync", n)}
    expected = MATRIX_INSTRUCTIONS.get((code.target.runtime, unit_of(code)))
    if expected is None or not expectation(code).matrix:
        for name in sorted(found):
            yield f"{name} where {code.contract.operator} under {unit_of(code)} has no matrix instruction"
        return
    for name in sorted(found):
        if not re.fullmatch(expected[0], name):
            yield f"{name}, where {unit_of(code)} is {expected[0]}"
    if "tt.dot" in code.ttgir and not found:
        yield f"no {expected[0]} although the kernel has matrix products"


def ascending_k(code: Code) -> Iterator[str]:
    """Operands of a matrix instruction hold consecutive K: their width in TTGIR is the instruction's own."""
    expected = MATRIX_INSTRUCTIONS.get((code.target.runtime, unit_of(code)))
    if expected is None:
        return
    for width in sorted(set(re.findall(r"#ttg\.dot_op<\{[^}]*kWidth = (\d+)", code.ttgir))):
        if int(width) != expected[1]:
            yield f"operands of width {width} along K where the instruction takes {expected[1]}: K is interleaved"
    for modifier in sorted(set(re.findall(r"\tv_mfma[^\n]*\b(cbsz|abid|blgp):", code.assembly))):
        yield f"{modifier} permutes or negates operands of a matrix instruction"


def kpack_is_one(code: Code) -> Iterator[str]:
    """The option that packs K of two instructions into one load is off."""
    if code.options.get("kpack") != 1:
        yield f"kpack = {code.options.get('kpack')!r}, must be 1"


def no_float_atomics(code: Code) -> Iterator[str]:
    """No floating-point addition whose order the hardware chooses."""
    amd = r"(?:(?:global|buffer|flat)_atomic|ds)_(?:pk_)?add(?:_rtn)?_(?:f16|f32|f64|bf16)"
    nvidia = r"(?:atom|red)\..*add.*\.b?f(?:16|32|64).*"
    for name in sorted(found for found in code.instructions if re.fullmatch(f"{amd}|{nvidia}", found)):
        yield f"{name} adds in the order of arrival"
    for kind in sorted(set(re.findall(r"atomicrmw (?:volatile )?(f(?:add|sub))", code.llir))):
        yield f"an atomic {kind} adds in the order of arrival"


def mode_bits(code: Code) -> Iterator[str]:
    """Rounding to nearest even, subnormals kept, in every instruction."""
    if code.target.runtime == "cuda":
        for name in code.instructions:
            if ".ftz" in name:
                yield f"{name} flushes subnormals"
            if re.search(r"\.r[zmp]\.(?:ftz\.)?f(?:32|16)|\.r[zmp]\.bf16", name):
                yield f"{name} does not round to nearest even"
        return
    for field, value in (
        ("round_mode_32", 0),
        ("round_mode_16_64", 0),
        ("denorm_mode_32", 3),
        ("denorm_mode_16_64", 3),
    ):
        got = re.findall(rf"\.amdhsa_float_{field} (\d+)", code.assembly)
        if got != [str(value)]:
            yield f"float_{field} is {', '.join(got) or 'absent'}, must be {value}"
    for name in ("s_setreg_b32", "s_setreg_imm32_b32", "s_round_mode", "s_denorm_mode"):
        if code.instructions[name]:
            yield f"{name} changes the mode inside the kernel"


def no_spills(code: Code) -> Iterator[str]:
    """No value leaves the registers for scratch or local memory."""
    if code.resources.scratch:
        yield f"{code.resources.scratch} bytes of scratch per thread ({code.resources.registers} registers)"


_NO_CONTRACTION = Rule("no-contraction", "no multiplication is fused with an addition", no_contraction)
_NO_APPROXIMATION = Rule("no-approximation", "no hardware approximation outside IEEE sequences", no_approximation)
_MATRIX = Rule("matrix-instruction", "the profile's matrix instruction and no other", matrix_instruction)
_ASCENDING = Rule("ascending-k", "consecutive K within an instruction", ascending_k)
_ATOMICS = Rule("no-float-atomics", "no floating-point atomic addition", no_float_atomics)
_MODE = Rule("mode-bits", "round to nearest even, subnormals kept", mode_bits)
_SPILLS = Rule("no-spills", "no scratch memory", no_spills)

#: Runtime -> its rules.
RULES: dict[str, tuple[Rule, ...]] = {
    "hip": (
        _NO_CONTRACTION,
        _NO_APPROXIMATION,
        _MATRIX,
        _ASCENDING,
        Rule("kpack", "kpack is 1", kpack_is_one),
        _ATOMICS,
        _MODE,
        _SPILLS,
    ),
    "cuda": (_NO_CONTRACTION, _NO_APPROXIMATION, _MATRIX, _ASCENDING, _ATOMICS, _MODE, _SPILLS),
}
