"""In every format and profile, on special values too: outputs are values of the format the contract rounds them to."""

from __future__ import annotations

import numpy as np
import pytest

from reference.contract import CONTRACTS, fields, profile, profiles
from reference.formats import FORMATS
from reference.rounding import round_to
from reference.vectors.cases import cases, run
from tests.reference.exact import assert_same_bits

NOT_ROUNDED = {("rope", "cos"), ("rope", "sin"), ("logsumexp", "maximum"), ("logsumexp", "total")}


@pytest.mark.parametrize("name", profiles.names())
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("operator", sorted(CONTRACTS))
def test_outputs_have_the_contracted_format(operator: str, dtype: str, name: str) -> None:
    contract = profile(name).contract(operator, dtype)
    path = "rounding.output" if "rounding.output" in fields(type(contract)) else None
    for case in cases(operator, dtype):
        inputs = {key: value.copy() for key, value in case.inputs.items()}
        outputs = run(case, contract)
        assert all(np.array_equal(inputs[k], v, equal_nan=v.dtype.kind == "f") for k, v in case.inputs.items())
        for key, value in outputs.items():
            if path and value.dtype == np.float32 and (operator, key) not in NOT_ROUNDED:
                assert_same_bits(value, round_to(value, FORMATS[str(contract.get(path))]))


@pytest.mark.parametrize("operator", sorted(CONTRACTS))
def test_the_same_call_gives_the_same_bits(operator: str) -> None:
    contract = profile("strict-v1").contract(operator)
    for case in cases(operator, "bfloat16"):
        for key, value in run(case, contract).items():
            again = run(case, contract)[key]
            assert np.array_equal(value, again, equal_nan=value.dtype.kind == "f")
