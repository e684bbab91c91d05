"""Files of strangers: plain, bounded, and read without running anything that is in them."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diffcheck.base.documents import MIB, DocumentError, parse_json, read_bounded
from diffcheck.base.errors import InputError

#: Bytes of the largest file of tensors, and of the largest tensor, that is read.
TENSOR_LIMIT = 16 * 1024 * MIB
#: Bytes of the largest text.
TEXT_LIMIT = 512 * MIB
#: Entries of a folder that are looked at.
FILES_LIMIT = 200_000
_SAFE = "a .pt file is read as tensors and plain data only; save the dump again without anything else in it"


def load_pt(path: Path) -> Any:
    """What ``torch.save`` wrote, of tensors, numbers, text, lists and dicts alone: ``torch.load(weights_only=True)``.

    Raises:
        InputError: not such a file, one that holds other objects, is compressed or too large.
    """
    import torch

    check_plain(path, TENSOR_LIMIT)
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise InputError(f"{path}: is no file of torch.save ({error})", "give what the dump wrote, uncut") from None
    # torch.save compresses nothing: what is compressed here was made to grow.
    if any(e.compress_type != zipfile.ZIP_STORED for e in entries) or sum(e.file_size for e in entries) > TENSOR_LIMIT:
        raise InputError(f"{path}: is compressed, which torch.save never does", "give what the dump wrote")
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        # Its unpickler raises whatever the bytes lead it to.
        first = next((line.strip() for line in str(error).splitlines() if "GLOBAL" in line or "nsupported" in line), "")
        told = first or (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"{path}: cannot be read safely: {told[:200]}", _SAFE) from None


def load_tensors(path: Path) -> dict[str, Any]:
    """The tensors of a safetensors file.

    Raises:
        InputError: it is damaged or too large.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    check_plain(path, TENSOR_LIMIT)
    try:
        return dict(load_file(path))
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{path}: {error}", "give what the dump wrote, uncut") from None


def load_json(path: Path) -> Any:
    """Raises:
    InputError: not JSON, or too large.
    """
    check_plain(path, TEXT_LIMIT)
    try:
        return parse_json(read_bounded(path, TEXT_LIMIT), literals=True)
    except DocumentError as error:
        raise InputError(f"{path}: {error}", "give what the dump wrote, uncut") from None


def load_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, object) of each line of a JSONL file.

    Raises:
        InputError: a line is no JSON object; it is named.
    """
    check_plain(path, TEXT_LIMIT)
    try:
        text = read_bounded(path, TEXT_LIMIT)
    except DocumentError as error:
        raise InputError(f"{path}: {error}", "split the file") from None
    for number, line in enumerate(text.split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            data = parse_json(line, literals=True)
        except DocumentError as error:
            raise InputError(f"{where}: {error}", "one JSON object a line, in UTF-8") from None
        if not isinstance(data, dict):
            raise InputError(f"{where}: is no JSON object", "one JSON object a line, in UTF-8")
        yield where, data


def check_plain(path: Path, limit: int) -> None:
    """Raises:
    InputError: no file, a link, or larger than ``limit`` bytes.
    """
    if path.is_symlink():
        raise InputError(f"{path}: is a link, which may lead anywhere", "give the file itself")
    if not path.is_file():
        raise InputError(f"{path}: no such file", "give what the dump wrote")
    if (size := path.stat().st_size) > limit:
        raise InputError(f"{path}: {size:,} bytes, more than the {limit:,} that are read", "import a part of the dump")


def inside(folder: Path, name: object, what: str) -> Path:
    """The path of a file that a dump names, which must lie in the dump's own folder.

    Raises:
        InputError: the name leads elsewhere, or is none.
    """
    text = name.removeprefix("./") if isinstance(name, str) else ""
    if not text or text in (".", "..") or "/" in text or "\\" in text or "\0" in text:
        raise InputError(f"{what}: {name!r} is no name of a file in {folder}", "the dump is damaged or foreign")
    return folder / text


def listed(folder: Path, pattern: str) -> list[Path]:
    """Entries of a folder that match, in order of name.

    Raises:
        InputError: there are too many.
    """
    found = []
    for path in folder.glob(pattern):
        found.append(path)
        if len(found) > FILES_LIMIT:
            raise InputError(f"{folder}: more than {FILES_LIMIT:,} files", "import a part of the dump")
    return sorted(found)


def plain_tensor(value: Any, where: str) -> Any:
    """``value``, if it is a dense tensor no larger than what is read.

    Raises:
        InputError: it is none. A few bytes on disk can claim to be a tensor of any size.
    """
    import torch

    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_quantized:
        raise InputError(f"{where}: is no dense tensor", "the dump is damaged or foreign")
    if value.numel() * value.element_size() > TENSOR_LIMIT or value.numel() > max(
        1, value.untyped_storage().nbytes() // max(1, value.element_size())
    ):
        raise InputError(
            f"{where}: a tensor of {tuple(value.shape)} over fewer values", "the dump is damaged or foreign"
        )
    return value.detach()
