"""Of an engine's exception the line that tells is shown."""

from __future__ import annotations

import pytest

from diffcheck.base.errors import telling_line


def raised(*messages: str) -> BaseException:
    """An exception with the others as its causes, innermost last."""
    error: BaseException | None = None
    for message in reversed(messages):
        new = RuntimeError(message)
        new.__cause__ = error
        error = new
    assert error is not None
    return error


@pytest.mark.parametrize(
    ("messages", "line"),
    [
        (("block 7 is gone\nmore",), "block 7 is gone"),
        (
            (
                "1 validation error for ModelConfig\n  Value error, rope_type yarn needs a factor [type=value_error]\n"
                "    For further information visit https://errors.pydantic.dev",
            ),
            "rope_type yarn needs a factor",
        ),
        (
            ("2 validation errors for VllmConfig\nblock_size\n  Input should be 16 [type=literal, input_value=3]",),
            "block_size: Input should be 16",
        ),
        (("Engine core initialization failed. See root cause above.", "no such backend"), "no such backend"),
        (("",), "RuntimeError"),
    ],
)
def test_the_line_that_tells(messages: tuple[str, ...], line: str) -> None:
    assert telling_line(raised(*messages)) == line
