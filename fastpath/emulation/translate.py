"""Decoded gfx942 instructions into the records that machine.c executes; whatever is not known is refused by name.

tinygrad's tables, generated from AMD's machine-readable ISA, decode; nothing of its own emulation is used.
"""

from __future__ import annotations

import re
import struct
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tinygrad.renderer.amd import decode_inst

#: Fields of `instruction` in machine.h, in order; all int32, then three uint64.
FIELDS = (
    *("code", "form", "dst", "sdst", "src0", "src1", "src2", "neg", "abs", "opsel", "opsel_hi", "neg_hi"),
    *("dpp", "row_mask", "bank_mask", "bound", "dst_sel", "dst_unused", "sel0", "sel1", "sext0", "sext1"),
    *("space", "bytes", "extend", "offset", "offset1", "addr", "data", "data1", "base", "soffset", "glc", "target"),
    *("size", "place"),
)
RECORD = np.dtype([*((name, np.int32) for name in FIELDS), ("constant", np.uint64, 3)])
PLAIN, DPP, SDWA = range(3)
BUFFER, GLOBAL, SCRATCH, FLAT = range(4)
ZERO, SIGN, LOW, HIGH = range(4)
FIRST_VECTOR, ACCUMULATORS, LITERAL, VCC = 256, 512, 1024, 106
_FLOATS = {240: 0.5, 241: -0.5, 242: 1.0, 243: -1.0, 244: 2.0, 245: -2.0, 246: 4.0, 247: -4.0}
_INVERSE_2_PI = 0x3E22F983
_ATOMICS = ("swap", "cmpswap", "add", "sub", "smin", "umin", "smax", "umax", "and", "or", "xor", "add_f32")
_ACCESS = {
    "ubyte": (1, ZERO), "sbyte": (1, SIGN), "ushort": (2, ZERO), "sshort": (2, SIGN), "dword": (4, ZERO),
    "dwordx2": (8, ZERO), "dwordx3": (12, ZERO), "dwordx4": (16, ZERO), "dwordx8": (32, ZERO), "dwordx16": (64, ZERO),
    "short_d16": (2, LOW), "short_d16_hi": (2, HIGH), "ubyte_d16": (1, LOW), "ubyte_d16_hi": (1, HIGH),
    "byte": (1, ZERO), "short": (2, ZERO), "byte_d16_hi": (1, HIGH),
}  # fmt: skip
_LOCAL = {
    "b8": (1, ZERO), "b16": (2, ZERO), "b32": (4, ZERO), "b64": (8, ZERO), "b96": (12, ZERO), "b128": (16, ZERO),
    "u8": (1, ZERO), "i8": (1, SIGN), "u16": (2, ZERO), "i16": (2, SIGN),
    "b16_d16_hi": (2, HIGH), "b8_d16_hi": (1, HIGH), "u16_d16": (2, LOW), "u16_d16_hi": (2, HIGH),
}  # fmt: skip
#: Matrix instruction -> rows, K, and 0 bfloat16, 1 float16, 2 float32.
_MATRIX = {
    "v_mfma_f32_16x16x16_bf16": (16, 16, 0),
    "v_mfma_f32_32x32x8_bf16": (32, 8, 0),
    "v_mfma_f32_16x16x16_f16": (16, 16, 1),
    "v_mfma_f32_32x32x8_f16": (32, 8, 1),
    "v_mfma_f32_16x16x4_f32": (16, 4, 2),
    "v_mfma_f32_32x32x2_f32": (32, 2, 2),
}
#: Operations of one operand of 64 bits.
_WIDE_ONLY = ("v_mov_b64", "v_rcp_f64", "v_cvt_f32_f64")
#: Which operands are of 64 bits.
_DOUBLE = {
    "v_fma_f64": (True, True, True), "v_mul_f64": (True, True, False), "v_add_f64": (True, True, False),
    "v_div_fmas_f64": (True, True, True), "v_div_fixup_f64": (True, True, True), "v_ldexp_f64": (True, False, False),
    "v_rcp_f64": (True, False, False), "v_cvt_f32_f64": (True, False, False),
}  # fmt: skip
#: The operand that these read from a place of their own.
_WIDE_FIRST = ("v_lshlrev_b64", "v_lshrrev_b64", "v_ashrrev_i64")


class TranslationError(ValueError):
    """An instruction, or a use of it, that the machine does not implement; the message names it."""


@lru_cache(maxsize=1 << 16)
def _decode_long(data: bytes) -> Any:
    return decode_inst(data, "cdna")


#: First words of instructions without a second one.
_short: dict[bytes, Any] = {}


def _decode(data: bytes) -> Any:
    if data[:4] in _short:
        return _short[data[:4]]
    inst = _decode_long(data)
    if inst.size() == 4:
        _short[data[:4]] = inst
    return inst


def decode(text: bytes) -> list[tuple[int, Any]]:
    """Every instruction with its byte offset.

    Raises:
        TranslationError: bytes that are no instruction.
    """
    found, at = [], 0
    while at < len(text):
        try:
            inst = _decode(text[at : at + 8])
        except (ValueError, AssertionError) as error:
            raise TranslationError(f"byte {at}: {text[at : at + 8].hex()}: {error}") from None
        found.append((at, inst))
        at += inst.size()
    return found


def mnemonic(inst: Any) -> str:
    """The instruction's name without the suffix of its encoding."""
    return re.sub(r"_(e32|e64)$", "", str(inst.op_name).lower())


def translate(text: bytes, codes: dict[str, int]) -> NDArray[Any]:
    """Records of `RECORD` for a kernel's machine code.

    Args:
        codes: operation -> number, of the built machine.

    Raises:
        TranslationError: an unknown instruction or use.
    """
    decoded = decode(text)
    positions = {at: index for index, (at, _) in enumerate(decoded)}
    records = np.zeros(len(decoded), RECORD)
    for name in ("dst", "sdst", "src0", "src1", "src2", "addr", "data", "base", "soffset"):
        records[name] = -1
    for index, (at, inst) in enumerate(decoded):
        try:
            values = _Instruction(at, inst, text, positions).values()
        except (KeyError, AttributeError) as error:
            raise TranslationError(f"byte {at}: {inst}: {type(error).__name__}: {error}") from None
        operation = values.pop("operation")
        if operation not in codes:
            raise TranslationError(f"byte {at}: {inst}: no operation {operation}")
        records["code"][index] = codes[operation]
        records["place"][index] = at
        for name, value in values.items():
            records[name][index] = value
    return records


class _Instruction:
    """One instruction on its way to a record."""

    def __init__(self, at: int, inst: Any, text: bytes, positions: dict[int, int]) -> None:
        self.at, self.inst, self.positions = at, inst, positions
        self.kind, self.name = type(inst).__name__, mnemonic(inst)
        self.literal = struct.unpack_from("<I", text, at + 4)[0] if inst.size() == 8 and "_LIT" in self.kind else None
        self.record: dict[str, Any] = {"constant": [0, 0, 0]}

    def refuse(self, why: str) -> TranslationError:
        return TranslationError(f"byte {self.at}: {self.inst}: {why}")

    def field(self, name: str) -> int:
        """A field's raw bits."""
        field = getattr(type(self.inst), name)
        return int((self.inst._raw >> field.lo) & field.mask)

    def has(self, name: str) -> bool:
        return hasattr(type(self.inst), name)

    def values(self) -> dict[str, Any]:
        base = self.kind.split("_")[0]
        getattr(self, f"_{base.lower()}")()
        return self.record

    def source(self, k: int, encoded: int, wide: bool = False) -> None:
        """Operand k from its 9-bit encoding; constants become values of the operand's width."""
        constant: int | None = None
        if 128 <= encoded <= 192:
            constant = encoded - 128
        elif 193 <= encoded <= 208:
            constant = (192 - encoded) & (2**64 - 1)
        elif encoded in _FLOATS or encoded == 248:
            if wide and (encoded == 248 or not self.name.endswith("_f64")):
                raise self.refuse("a floating-point constant of 64 bits")
            if wide:
                constant = struct.unpack("<Q", struct.pack("<d", _FLOATS[encoded]))[0]
            else:
                exact = struct.unpack("<I", struct.pack("<f", _FLOATS.get(encoded, 0.0)))[0]
                constant = _INVERSE_2_PI if encoded == 248 else exact
        elif encoded == 255:
            if self.literal is None:
                raise self.refuse("a literal without its word")
            constant = self.literal << 32 if wide and self.name.endswith("_f64") else self.literal
            if wide and "_i64" in self.name and constant >> 31:
                constant |= 0xFFFFFFFF << 32
        elif 209 <= encoded <= 239 or encoded in (249, 250, 254):
            raise self.refuse(f"source {encoded}")
        self.record[f"src{k}"] = encoded if constant is None else LITERAL
        if constant is not None:
            self.record["constant"][k] = constant

    # --- scalar ---

    def _sop1(self) -> None:
        self.record |= {"operation": self.name, "sdst": self.field("sdst")}
        self.source(0, self.field("ssrc0"), "b64" in self.name or "i64" in self.name)
        if self.name in ("s_getpc_b64", "s_setpc_b64", "s_swappc_b64"):
            raise self.refuse("indirect jumps are not executed")

    def _sop2(self) -> None:
        wide = self.name.endswith(("b64", "i64", "u64"))
        self.record |= {"operation": self.name, "sdst": self.field("sdst")}
        self.source(0, self.field("ssrc0"), wide)
        self.source(1, self.field("ssrc1"), wide and not re.match(r"s_(lsh|ash|bfe)", self.name))
        if wide and re.match(r"s_(lsh|ash|bfe)", self.name):
            self._narrow_amount(1)

    def _narrow_amount(self, k: int) -> None:
        # the machine reads a pair; an amount's own register is its low half, which is all that counts
        if self.record[f"src{k}"] in range(FIRST_VECTOR) and self.record[f"src{k}"] >= 127:
            raise self.refuse("a 32-bit amount in the last scalar register")

    def _sopc(self) -> None:
        wide = self.name.endswith("64")
        self.record["operation"] = self.name
        self.source(0, self.field("ssrc0"), wide)
        self.source(1, self.field("ssrc1"), wide)

    def _sopk(self) -> None:
        immediate = self.field("simm16")
        signed = immediate - 65536 if immediate >> 15 and not self.name.endswith("_u32") else immediate
        name, target = self.name, self.field("sdst")
        self.record["constant"] = [signed & 0xFFFFFFFF] * 3
        if name.startswith("s_cmpk_"):
            self.record |= {"operation": name.replace("cmpk", "cmp"), "src0": target, "src1": LITERAL}
        elif name in ("s_movk_i32", "s_cmovk_i32", "s_addk_i32", "s_mulk_i32"):
            self.record |= {"operation": name, "sdst": target, "src0": LITERAL, "src1": LITERAL}
        else:
            raise self.refuse("not executed")

    def _sopp(self) -> None:
        self.record["operation"] = self.name
        if "branch" in self.name:
            immediate = self.field("simm16")
            to = self.at + 4 + 4 * (immediate - 65536 if immediate >> 15 else immediate)
            if to not in self.positions:
                raise self.refuse(f"a jump to byte {to}, where no instruction begins")
            self.record["target"] = self.positions[to]

    def _smem(self) -> None:
        access = self.name.removeprefix("s_load_")
        if self.name in ("s_dcache_inv", "s_dcache_wb"):
            self.record["operation"] = "cache_control"
            return
        if access not in _ACCESS or not self.name.startswith("s_load_"):
            raise self.refuse("not executed")
        offset = self.field("offset")
        self.record |= {
            "operation": "scalar_load",
            "sdst": self.field("sdata"),
            "base": 2 * self.field("sbase"),
            "bytes": _ACCESS[access][0],
            "offset": (offset - (1 << 21) if offset >> 20 else offset) if self.field("imm") else 0,
            "soffset": self.field("soffset") if self.field("soffset_en") else -1,
        }
        if not self.field("imm") and not self.field("soffset_en"):
            self.record["soffset"] = offset & 0x7F

    # --- vector ---

    def _vector(self, name: str, sources: list[int], wide: tuple[bool, bool, bool] = (False, False, False)) -> None:
        for k, encoded in enumerate(sources):
            self.source(k, encoded, wide[k])
        self.record["operation"] = name

    def _variant(self) -> None:
        """Modifiers of DPP and SDWA; source 0 is then a vector register."""
        if self.kind.endswith("_DPP16"):
            self.record |= {
                "form": DPP,
                "dpp": self.field("dpp"),
                "row_mask": self.field("row_mask"),
                "bank_mask": self.field("bank_mask"),
                "bound": self.field("bc"),
                "neg": self.field("src0_neg") | self.field("src1_neg") << 1,
                "abs": self.field("src0_abs") | self.field("src1_abs") << 1,
            }
        elif "_SDWA" in self.kind:
            self.record |= {
                "form": SDWA,
                "sel0": self.field("src0_sel"),
                "sel1": self.field("src1_sel"),
                "sext0": self.field("src0_sext"),
                "sext1": self.field("src1_sext"),
                "dst_sel": self.field("dst_sel") if self.has("dst_sel") else 6,
                "dst_unused": self.field("dst_unused") if self.has("dst_unused") else 0,
                "neg": self.field("src0_neg") | self.field("src1_neg") << 1,
                "abs": self.field("src0_abs") | self.field("src1_abs") << 1,
            }
            if (self.has("omod") and self.field("omod")) or (self.has("clmp") and self.field("clmp")):
                raise self.refuse("an output modifier")

    def _first(self) -> int:
        if self.kind.endswith("_DPP16"):
            return FIRST_VECTOR + self.field("vsrc0")
        if "_SDWA" in self.kind:
            return self.field("vsrc0") + (0 if self.field("s0") else FIRST_VECTOR)
        return self.field("src0")

    def _second(self) -> int:
        scalar = "_SDWA" in self.kind and self.field("s1")
        return self.field("vsrc1") + (0 if scalar else FIRST_VECTOR)

    def _vop1(self) -> None:
        self._variant()
        name = self.name
        if name == "v_nop":
            self.record["operation"] = name
            return
        self._vector(name, [self._first()], (name in _WIDE_ONLY, False, False))
        if name == "v_readfirstlane_b32":
            self.record["sdst"] = self.field("vdst")
            if self.record["src0"] < FIRST_VECTOR or self.record["src0"] == LITERAL:
                raise self.refuse("a scalar source")
            return
        self.record["dst"] = self.field("vdst")
        if name == "v_accvgpr_mov_b32":
            self.record["src0"] += ACCUMULATORS - FIRST_VECTOR
            self.record["dst"] += ACCUMULATORS - FIRST_VECTOR
        if (name in _WIDE_ONLY or name == "v_cvt_f64_f32") and self.record.get("form"):
            raise self.refuse("DPP or SDWA of 64 bits")

    def _vop2(self) -> None:
        self._variant()
        name, first, second = self.name, self._first(), self._second()
        self.record["dst"] = self.field("vdst")
        if name in ("v_fmac_f32", "v_fmac_f64"):
            wide = (name == "v_fmac_f64",) * 3
            self._vector(name.replace("fmac", "fma"), [first, second, FIRST_VECTOR + self.record["dst"]], wide)
            if all(wide) and self.record.get("form"):
                raise self.refuse("DPP or SDWA of 64 bits")
        elif name == "v_fmamk_f32":
            self._vector("v_fma_f32", [first, 255, second])
        elif name == "v_fmaak_f32":
            self._vector("v_fma_f32", [first, second, 255])
        elif name == "v_cndmask_b32":
            self._vector(name, [first, second, VCC])
        elif re.fullmatch(r"v_(add|sub|subrev|addc|subb|subbrev)_co_u32", name):
            self._vector(name, [first, second, VCC])
            self.record["sdst"] = VCC
        else:
            self._vector(name, [first, second])

    def _vopc(self) -> None:
        self._variant()
        wide = self.name.endswith("64")
        name = self.name.replace("v_cmpx_", "v_cmp_")
        self._vector(name, [self._first(), self._second()], (wide, wide, False))
        sdwa = "_SDWA" in self.kind and self.field("sd")
        self.record |= {"sdst": self.field("sdst") if sdwa else VCC, "size": int("v_cmpx_" in self.name)}
        if wide and self.record.get("form"):
            raise self.refuse("DPP or SDWA of 64 bits")

    def _vop3(self) -> None:
        if self.kind == "VOP3_SDST" or self.name.startswith("v_cmp"):
            return self._vop3_compare()
        name = self.name
        sources = [self.field("src0"), self.field("src1"), self.field("src2")]
        if self.field("omod") or self.field("clmp"):
            raise self.refuse("an output modifier")
        if self.field("opsel"):
            raise self.refuse("op_sel of a 16-bit operation")
        self.record |= {"neg": self.field("neg"), "abs": self.field("abs"), "dst": self.field("vdst")}
        wide = (False, False, False)
        if name in _DOUBLE:
            wide = _DOUBLE[name]
        elif name in _WIDE_FIRST:
            wide = (False, True, False)
        elif name == "v_lshl_add_u64":
            wide = (True, False, True)
        if name in ("v_readlane_b32", "v_readfirstlane_b32"):
            self.record["sdst"] = self.record.pop("dst")
        if name in ("v_fmac_f32", "v_fmac_f64"):
            name, sources[2] = name.replace("fmac", "fma"), FIRST_VECTOR + self.record["dst"]
            wide = _DOUBLE.get(name, wide)
        count = sum(self.inst.operands.get(f"src{k}") is not None for k in range(3)) or 3
        if name in ("v_fma_f32", "v_fma_f64", "v_cndmask_b32"):
            count = 3
        self._vector(name, sources[:count], wide)
        return None

    def _vop3_compare(self) -> None:
        wide = self.name.endswith("64")
        self.record |= {"neg": self.field("neg"), "abs": self.field("abs"), "sdst": self.field("vdst")}
        self._vector(
            self.name.replace("v_cmpx_", "v_cmp_"), [self.field("src0"), self.field("src1")], (wide, wide, False)
        )
        self.record["size"] = int("v_cmpx_" in self.name)
        if self.field("clmp") or (
            wide and not self.name.endswith("_f64") and (self.record["neg"] or self.record["abs"])
        ):
            raise self.refuse("a modifier")

    def _vop3sd(self) -> None:
        name = self.name
        if self.field("omod") or self.field("clmp"):
            raise self.refuse("an output modifier")
        self.record |= {"neg": self.field("neg"), "dst": self.field("vdst"), "sdst": self.field("sdst")}
        sources = [self.field("src0"), self.field("src1"), self.field("src2")]
        needs_third = name not in ("v_add_co_u32", "v_sub_co_u32", "v_subrev_co_u32")
        self._vector(name, sources[: 3 if needs_third else 2], self._of_pairs(name))

    def _of_pairs(self, name: str) -> tuple[bool, bool, bool]:
        is_double = name == "v_div_scale_f64"
        return is_double, is_double, is_double or name.startswith("v_mad_")

    def _vop3p(self) -> None:
        name = self.name
        if name.startswith("v_mfma"):
            return self._matrix()
        if name.startswith("v_accvgpr"):
            source = self.field("src0")
            reads = name == "v_accvgpr_read"
            self._vector("v_mov_b32", [source + ACCUMULATORS - FIRST_VECTOR if reads else source])
            self.record["dst"] = self.field("vdst") + (0 if reads else ACCUMULATORS - FIRST_VECTOR)
            return None
        if self.field("clmp") or not name.startswith("v_pk_") or not name.endswith(("_f32", "_b32")):
            raise self.refuse("not executed")
        high = self.field("opsel_hi") | self.field("opsel_hi2") << 2
        self.record |= {
            "dst": self.field("vdst"), "neg": self.field("neg"), "neg_hi": self.field("neg_hi"),
            "opsel": self.field("opsel"), "opsel_hi": high,
        }  # fmt: skip
        count = 3 if name == "v_pk_fma_f32" else 2
        sources = [self.field("src0"), self.field("src1"), self.field("src2")][:count]
        self._vector(name, sources)
        if any(source in range(128, FIRST_VECTOR) and source > 208 and source not in _FLOATS for source in sources):
            raise self.refuse("a packed operand that is no register or constant")
        return None

    def _matrix(self) -> None:
        if self.name not in _MATRIX:
            raise self.refuse("a matrix instruction without a model")
        if self.field("cbsz") or self.field("abid") or self.field("blgp"):
            raise self.refuse("operands permuted or negated")
        rows, inner, kind = _MATRIX[self.name]
        shift = ACCUMULATORS - FIRST_VECTOR
        acc, of_result = self.field("acc"), self.field("acc_cd")
        self._vector("v_mfma", [self.field("src0"), self.field("src1"), self.field("src2")])
        for k, is_accumulator in enumerate((acc & 1, acc >> 1 & 1, of_result)):
            if is_accumulator and FIRST_VECTOR <= self.record[f"src{k}"] < LITERAL:
                self.record[f"src{k}"] += shift
        self.record |= {
            "dst": self.field("vdst") + (shift if of_result else 0),
            "size": rows | inner << 8 | kind << 16,
        }

    # --- memory ---

    def _mubuf(self) -> None:
        match = re.fullmatch(r"buffer_(load|store|atomic)_(\w+)", self.name)
        if self.name in ("buffer_wbl2", "buffer_inv"):
            self.record["operation"] = "cache_control"
            return
        if match is None or self.field("lds") or self.field("idxen"):
            raise self.refuse("not executed")
        vdata = self.field("vdata") + (ACCUMULATORS - FIRST_VECTOR if self.field("acc") else 0)
        self._access(match[1], match[2], vdata, vdata)
        self.record |= {
            "space": BUFFER,
            "addr": self.field("vaddr") if self.field("offen") else -1,
            "base": 4 * self.field("srsrc"),
            "offset": self.field("offset"),
            "glc": self.field("sc0"),
        }
        soffset = self.field("soffset")
        self.record["soffset"] = soffset
        if soffset >= 128:
            self.source(0, soffset)
            self.record["soffset"] = LITERAL

    def _access(self, what: str, width: str, dst: int, data: int) -> None:
        if what == "atomic":
            double = width.endswith("_x2")
            operation = width.removesuffix("_x2")
            if operation not in _ATOMICS:
                raise self.refuse("not executed")
            self.record |= {
                "operation": "vector_atomic", "size": _ATOMICS.index(operation), "bytes": 8 if double else 4,
                "dst": dst, "data": data,
            }  # fmt: skip
            return
        if width not in _ACCESS or _ACCESS[width][0] > 16:
            raise self.refuse("not executed")
        self.record["bytes"], self.record["extend"] = _ACCESS[width]
        self.record |= {"operation": f"vector_{what}", "dst": dst, "data": data}

    def _global(self) -> None:
        self._flat_family(GLOBAL)

    def _scratch(self) -> None:
        self._flat_family(SCRATCH)

    def _flat(self) -> None:
        self._flat_family(FLAT)

    def _flat_family(self, space: int) -> None:
        match = re.fullmatch(r"(?:global|scratch|flat)_(load|store|atomic)_(\w+)", self.name)
        if match is None:
            raise self.refuse("not executed")
        shift = ACCUMULATORS - FIRST_VECTOR if self.field("acc") else 0
        if shift and self.field("saddr") != 127 and space == GLOBAL and self.field("saddr") > 105:
            raise self.refuse("an unknown address")
        self._access(match[1], match[2], self.field("vdst") + shift, self.field("data") + shift)
        offset, saddr = self.field("offset"), self.field("saddr")
        bits = 12 if space == FLAT else 13
        if space != FLAT and offset >> (bits - 1):
            offset -= 1 << bits
        has_vector = space != SCRATCH or bool(self.field("sve"))
        self.record |= {
            "space": space,
            "addr": self.field("addr") if has_vector else -1,
            "base": -1 if saddr == 127 else saddr,
            "offset": offset,
            "glc": self.field("sc0"),
        }

    def _ds(self) -> None:
        name, first, second = self.name, self.field("offset0"), self.field("offset1")
        shift = ACCUMULATORS - FIRST_VECTOR if self.field("acc") else 0
        self.record |= {
            "addr": self.field("addr"), "data": self.field("data0") + shift, "data1": self.field("data1") + shift,
            "dst": self.field("vdst") + shift, "offset": first | second << 8,
        }  # fmt: skip
        if self.field("gds"):
            raise self.refuse("global data share")
        if name in ("ds_bpermute_b32", "ds_permute_b32", "ds_swizzle_b32"):
            self.record |= {"operation": name, "form": PLAIN}
            return
        match = re.fullmatch(r"ds_(read|write)(2|2st64|)_(\w+)", name)
        if match is None or match[3] not in _LOCAL:
            raise self.refuse("not executed")
        width, extend = _LOCAL[match[3]]
        kind = "load" if match[1] == "read" else "store"
        self.record |= {"operation": f"local_{kind}{'2' if match[2] else ''}", "bytes": width, "extend": extend}
        if match[2]:
            unit = width * (64 if match[2] == "2st64" else 1)
            self.record |= {"offset": first * unit, "offset1": second * unit}
