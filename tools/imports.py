"""The imports of the four packages, read from the source: between files, and between rooms.

A room is a folder right under a package, or a file that stands there by itself. `tests/test_layers.py` forbids circles
with it; `python -m tools.imports` draws the picture of `docs/architecture.md`.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Top floor first.
LAYERS = ("integration", "diffcheck", "fastpath", "reference")

Graph = dict[str, set[str]]


def files(layers: Collection[str] = LAYERS) -> dict[str, Path]:
    """Module name -> its file."""
    found = {}
    for layer in layers:
        for path in sorted((ROOT / layer).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(module, names taken from it) of every import of a file, wherever it stands: inside a function, too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module, tuple(alias.name for alias in node.names)


def between_files(modules: Mapping[str, Path]) -> Graph:
    """Module -> modules among ``modules`` that it imports. ``from package import module`` imports the module."""
    graph: Graph = {}
    for name, path in modules.items():
        graph[name] = set()
        for module, taken in imported(path):
            inner = {f"{module}.{one}" for one in taken} & set(modules)
            if len(inner) < len(taken) or not taken:
                inner.add(module)
            graph[name] |= inner & set(modules)
        graph[name].discard(name)
    return graph


def room(module: str) -> str:
    """``diffcheck.capture`` of ``diffcheck.capture.vllm.taps``."""
    return ".".join(module.split(".")[:2])


def between_rooms(graph: Graph) -> Graph:
    """Room -> rooms that its files import."""
    rooms: Graph = {}
    for module, targets in graph.items():
        here = rooms.setdefault(room(module), set())
        here |= {room(target) for target in targets} - {room(module)}
    return rooms


def circles(graph: Graph) -> list[list[str]]:
    """Every set of nodes that reach each other (strongly connected, Tarjan 1972), but single ones."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        number[node] = lowest[node] = len(number)
        stack.append(node)
        for target in sorted(graph[node]):
            if target not in number:
                visit(target)
                lowest[node] = min(lowest[node], lowest[target])
            elif target in stack:
                lowest[node] = min(lowest[node], number[target])
        if lowest[node] == number[node]:
            at = stack.index(node)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for node in graph:
        if node not in number:
            visit(node)
    return found


def reduced(graph: Graph) -> Graph:
    """Without what follows from the rest: an import that a longer way implies. The graph must have no circle."""
    reach: Graph = {}

    def reached(node: str) -> set[str]:
        if node not in reach:
            reach[node] = set().union(*({target} | reached(target) for target in graph[node]))
        return reach[node]

    return {n: {t for t in ts if not any(t in reached(other) for other in ts - {t})} for n, ts in graph.items()}


def _heights(graph: Graph) -> dict[str, int]:
    """Longest way down from each node: what imports nothing stands on the ground."""
    found: dict[str, int] = {}

    def height(node: str) -> int:
        if node not in found:
            found[node] = 1 + max(map(height, graph[node]), default=-1)
        return found[node]

    for node in graph:
        height(node)
    return found


def draw(path: Path) -> None:
    """The rooms by floor, whatever imports another above it, as an SVG file."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "imports"
    from matplotlib import pyplot

    whole = between_rooms(between_files(files()))
    places: dict[str, tuple[float, float]] = {}
    base = 0.0
    figure, axes = pyplot.subplots(figsize=(15, 14))
    for layer, shade in zip(reversed(LAYERS), ("#eef3ee", "#eeeef6", "#f6f1e8", "#f4ecec"), strict=True):
        mine = {n: {t for t in ts if t in whole and t.startswith(f"{layer}.")} for n, ts in whole.items()}
        mine = {n: ts for n, ts in mine.items() if n.startswith(f"{layer}.")}
        heights = _heights(mine)
        levels = max(heights.values()) + 1
        for level in range(levels):
            names = sorted(n for n in mine if heights[n] == level)
            for i, name in enumerate(names):
                places[name] = (i + 0.5) / len(names), base + level + 0.5
        axes.axhspan(base, base + levels, color=shade, zorder=0)
        axes.text(-0.02, base + levels / 2, layer, rotation=90, va="center", ha="right", fontsize=14)
        base += levels
    for name, targets in sorted(reduced(whole).items()):
        for target in sorted(targets):
            if name in places and target in places:
                axes.annotate(
                    "", places[target], places[name], arrowprops={"arrowstyle": "->", "color": "#8898a8", "lw": 0.6}
                )
    for name, place in places.items():
        box = {"boxstyle": "round", "facecolor": "white", "edgecolor": "#445566"}
        axes.text(*place, name.partition(".")[2], ha="center", va="center", fontsize=9, bbox=box)
    axes.set(xlim=(-0.04, 1), ylim=(0, base))
    axes.axis("off")
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    draw(ROOT / "docs" / "images" / "imports.svg")
