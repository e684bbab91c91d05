"""The conformance vectors on disk are what the operators give, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from reference.contract import CONTRACTS, profile, profiles
from reference.vectors import DATA, read_vectors, vector_files
from reference.vectors.__main__ import main
from reference.vectors.cases import run, run_unrounded
from tests.reference.exact import assert_same_bits

INDEX = json.loads((DATA / "index.json").read_text())
FILES = sorted({path for files in INDEX["profiles"].values() for path in files.values()})


def test_regenerate_bit_for_bit() -> None:
    made = dict(vector_files())
    on_disk = {str(p.relative_to(DATA)): p.read_bytes() for p in DATA.rglob("*") if p.is_file()}
    assert sorted(made) == sorted(on_disk)
    assert [name for name in made if made[name] != on_disk[name]] == []


def test_every_profile_and_operator_has_a_file_with_its_contracts() -> None:
    assert sorted(INDEX["profiles"]) == sorted(profiles.names())
    for name, files in INDEX["profiles"].items():
        assert sorted(files) == sorted(CONTRACTS)
        for operator, path in files.items():
            contracts = {contract for _, contract, _, _ in read_vectors(DATA / path)}
            assert contracts == {profile(name).contract(operator, dtype) for dtype in ("bfloat16", "float32")}


@pytest.mark.parametrize("path", FILES)
def test_stored_inputs_give_stored_outputs(path: str) -> None:
    """From the file alone: inputs, attributes and contract as a reader finds them."""
    count = 0
    for case, contract, expected, unrounded in read_vectors(DATA / path):
        for given, got in ((expected, run(case, contract)), (unrounded, run_unrounded(case, contract))):
            assert set(given) == set(got)
            for name, array in got.items():
                if array.dtype == np.float32:
                    assert_same_bits(array, given[name])
                else:
                    assert np.array_equal(array, given[name])
                count += array.size
    assert count >= 24


def test_they_are_small() -> None:
    assert sum(p.stat().st_size for p in DATA.rglob("*") if p.is_file()) < 3_000_000


def test_check_finds_a_changed_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path)]) == 0
    assert main(["--out", str(tmp_path), "--check"]) == 0
    victim = tmp_path / "strict-v1" / "fma32-seq" / "swiglu.safetensors"
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(content)
    (tmp_path / "left-over.safetensors").write_bytes(b"")
    assert main(["--out", str(tmp_path), "--check"]) == 1
    assert capsys.readouterr().out.split("\n")[-4:-1] == [
        f"{len(FILES)} files and the index, 2 differ",
        "  strict-v1/fma32-seq/swiglu.safetensors",
        "  left-over.safetensors",
    ]
    with pytest.raises(ValueError, match="not a file of conformance vectors"):
        victim.write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
        list(read_vectors(victim))
