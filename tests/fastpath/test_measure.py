"""The measurement kit: its models tell units apart, its digests are the reference's, its files compare."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
from triton.compiler import ASTSource

from fastpath.machine_code.code import GPU_TARGETS
from fastpath.measure import advice, compare, primitives, units
from fastpath.measure.operands import KINDS, Operands, operands
from reference.dot import UNITS
from reference.formats import FORMATS, canonical_nan, encode
from tests.fastpath.interpreter import in_interpreter

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.float8_e4m3fnuz: "*fp8e4b8",
}
INSTRUCTION = {
    ("sm_90", "bfloat16", "4 warps"): "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16",
    ("sm_90", "tfloat32", "1 warp"): "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32",
    ("gfx942", "bfloat16", "16x16"): "v_mfma_f32_16x16x16_bf16",
    ("gfx942", "tfloat32", "32x32"): "v_mfma_f32_32x32x4_xf32",
    ("gfx942", "float8_e4m3fnuz", "16x16"): "v_mfma_f32_16x16x32_fp8_fp8",
}


@pytest.mark.parametrize("name", units.STORAGE)
@pytest.mark.parametrize("kind", KINDS)
def test_operands_are_values_of_their_format(kind: str, name: str) -> None:
    fmt = FORMATS[name]
    given = operands(kind, fmt, 2, 16, 32)
    for part in (given.a, given.b):
        encode(part, fmt)
        assert (part != part.flat[0]).any()
    again = operands(kind, fmt, 2, 16, 32)
    assert all(
        np.array_equal(x, y, equal_nan=True) for x, y in zip(vars(given).values(), vars(again).values(), strict=True)
    )


@pytest.mark.parametrize(
    ("arch", "name", "unit"),
    [
        ("sm_90", "bfloat16", "hopper-k16"),
        ("gfx942", "bfloat16", "mfma-cdna3-g8"),
        ("gfx942", "bfloat16", "fma32-seq"),
        ("gfx942", "float8_e4m3fnuz", "mfma-cdna3-g8"),
    ],
)
def test_a_unit_is_told_from_every_other(arch: str, name: str, unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of one model, as if a device had given them, refute all others; a stated one that fails is explained."""
    fmt = FORMATS[name]

    def bits_of_unit(given: Operands, *_: Any) -> tuple[Any, dict[str, str]]:
        results = [UNITS[unit].accumulate(a, b, c, fmt) for a, b, c in zip(given.a, given.b, given.c, strict=True)]
        return canonical_nan(np.stack(results)), {}

    monkeypatch.setattr(units, "launch", bits_of_unit)
    route = units.ROUTES["cuda" if arch == "sm_90" else "hip"][0]
    found = units.measure_unit(arch, name, route)
    assert found["accumulations"] >= 10**7
    assert [model for model in found["reproduced_by"] if not model.startswith("exact sum of 1")] == [unit]
    for model in found["models"]:
        assert model["reproduces"] or len(model["first"]["a"]) == units.inner(fmt)
    report = {"units": [found], "primitives": [], "conformance": {}}
    told = advice.findings(report)
    assert bool(told) == (unit != units.expected_model(arch, name, route))
    if told:
        assert "choose fma32-seq" in told[0]["change"] and "first at a = ['0x" in told[0]["what"]


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_probes_compile_to_the_instruction_they_probe(arch: str) -> None:
    target = GPU_TARGETS[arch]
    names = units.steps_kernel.arg_names
    for name in units.reachable(arch):
        fmt = FORMATS[name]
        for route in units.ROUTES[target.backend]:
            kind = TYPES[units.STORAGE[name]]
            constants = {
                "SIZE": 64,
                "ROWS": 16 if route.options["num_warps"] == 1 else 64,
                "K": units.inner(fmt),
                "STEPS": 1,
                "PRECISION": "tf32" if name == "tfloat32" else "ieee",
            }
            source = ASTSource(
                fn=units.steps_kernel,
                signature={"a": kind, "b": kind, "c": "*fp32", "out": "*fp32", **dict.fromkeys(constants, "constexpr")},
                constexprs={(names.index(key),): value for key, value in constants.items()},
                attrs={(i,): [["tt.divisibility", 16]] for i in range(4)},
            )
            compiled = triton.compile(source, target=target, options={"enable_fp_fusion": False, **route.options})
            used = units.instructions(dict(compiled.asm))
            assert len(used) == 1, (name, route.name, used)
            assert used[0] == INSTRUCTION.get((arch, name, route.name), used[0])


@pytest.mark.parametrize("name", primitives.FUNCTIONS)
def test_stored_digests_are_the_reference_s(name: str) -> None:
    """One block each, a different one; all of them under `exhaustive` in tests/reference."""
    block = 120 + list(primitives.FUNCTIONS).index(name)
    index = np.arange(block << 24, (block + 1) << 24, dtype=np.uint64)
    result = primitives.FUNCTIONS[name][1](index.astype(np.uint32).view(np.float32))
    assert primitives.digest(index, result) == primitives.expected()[name][block]


def test_the_kernel_s_digest_is_numpy_s() -> None:
    done = in_interpreter(
        """
        import numpy as np, torch
        from fastpath.measure.primitives import FUNCTIONS, digest, digest_kernel
        for name, (function, reference) in FUNCTIONS.items():
            sums = torch.zeros(1, dtype=torch.int64)
            digest_kernel[(2,)](sums, FUNCTION=function, LANES=4096)
            index = np.arange(8192, dtype=np.uint64)
            expected = digest(index, reference(index.astype(np.uint32).view(np.float32)))
            assert int(sums[0]) & (1 << 64) - 1 == expected, name
        """
    )
    assert done.returncode == 0, done.stderr


def report() -> dict[str, Any]:
    unit = {
        "format": "bfloat16", "route": "4 warps", "inputs": "i", "outputs": {"normal": "x", "wide": "y"},
        "reproduced_by": ["hopper-k16"], "searched": [],
    }  # fmt: skip
    case = {"name": "rope/float32/normal", "passed": True, "different": 0}
    return {
        "kind": "rlk-measure", "schema": 1, "device": {"runtime": "cuda"}, "units": [unit],
        "primitives": [{"function": "exp", "digest": "d"}], "conformance": {"cases": [case]},
    }  # fmt: skip


def test_compare_names_what_differs() -> None:
    left, right = report(), report()
    assert all(d.equal for d in compare(left, right)) and len(compare(left, right)) == 3
    right["units"][0]["outputs"]["wide"] = "z"
    right["units"][0]["reproduced_by"] = []
    right["primitives"][0]["digest"] = "e"
    right["conformance"]["cases"][0] |= {"passed": False, "different": 5}
    said = [(d.what, d.right) for d in compare(left, right) if not d.equal]
    assert [what.split(":")[0] for what, _ in said] == [
        "unit bfloat16, 4 warps and 4 warps",
        "primitive exp",
        "kernel rope/float32/normal",
    ]
    assert "1 of 2 probes differ (wide)" in said[0][0] and said[0][1] == "no known model" and said[2][1] == "5 differ"


def test_compare_refuses_what_is_no_measurement(tmp_path: Path) -> None:
    from diffcheck.base.errors import RlkError
    from diffcheck.measurements import compare_files

    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(report()))
    for change, words in (({"kind": "x"}, "field kind"), ({"schema": 2}, "field schema"), ({"units": []}, "nothing")):
        other = copy.deepcopy(report()) | change
        other |= {"primitives": [], "conformance": {}} if "units" in change else {}
        bad.write_text(json.dumps(other))
        with pytest.raises(RlkError, match=words) as raised:
            compare_files(good, bad)
        assert raised.value.exit_code == 3
    bad.write_text("{")
    with pytest.raises(RlkError, match="not JSON"):
        compare_files(good, bad)
