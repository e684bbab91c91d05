"""Whether a patch changed anything: the live model before it and after it, by content."""

from __future__ import annotations

import enum
import hashlib
import sys
import types
from typing import Any

#: Compared by identity: two functions of one name may compute different things.
_CODE = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    type,
    staticmethod,
    classmethod,
    property,
)
_PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum)
#: Where torch keeps what a module owns: a name that was not there is read by nobody.
_OWNED = frozenset({"_parameters", "_buffers", "_modules"})
#: Deeper than any model; what lies below counts by its type.
_DEPTH = 80


class ModelState:
    """Everything that a patch may change, as it was when this was made: the values of tensors, settings and functions
    that ``model`` reaches, the methods of its classes, the functions of imported modules, torch's own settings.
    """

    def __init__(self, model: Any) -> None:
        # Keeps what is compared by identity alive, so that no identity is given out again.
        self._kept: list[Any] = []
        self._names: dict[int, frozenset[Any]] = {}
        self._functions = _functions()
        self._settings = _settings()
        self._digest = _Walk(self._kept, self._names, known=None).digest(model)

    def is_changed(self, model: Any) -> bool:
        """Whether anything that could be read is another now. A new attribute that no class and no module had before,
        as a misspelt name makes one, is read by nobody and does not count.
        """
        now = _functions()
        return (
            any(now.get(where) is not function for where, function in self._functions.items())
            or _settings() != self._settings
            or _Walk([], {}, known=self._names).digest(model) != self._digest
        )


class _Walk:
    """Digests of an object's content; an object that contains itself is cut where it comes back."""

    def __init__(
        self, kept: list[Any], names: dict[int, frozenset[Any]], known: dict[int, frozenset[Any]] | None
    ) -> None:
        self._kept, self._names, self._known = kept, names, known
        self._done: dict[int, bytes] = {}
        self._open: set[int] = set()

    def digest(self, value: Any, depth: int = 0) -> bytes:
        if isinstance(value, _PLAIN):
            return f"{type(value).__qualname__} {value!r}".encode()
        number = id(value)
        if number in self._done:
            return self._done[number]
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if number in self._open or depth > _DEPTH:
            return kind.encode()
        self._kept.append(value)
        self._open.add(number)
        found = hashlib.blake2b(kind.encode())
        for part in self._parts(value, depth + 1):
            found.update(len(part).to_bytes(8, "little") + part)
        self._open.discard(number)
        self._done[number] = found.digest()
        return self._done[number]

    def _parts(self, value: Any, depth: int) -> list[bytes]:
        if isinstance(value, types.ModuleType):
            return []
        if isinstance(value, _CODE):
            code = getattr(value, "__code__", None)
            return [
                str(id(value)).encode(),
                str(id(code)).encode(),
                repr(getattr(value, "__defaults__", None)).encode(),
            ]
        if (content := _array(value)) is not None:
            return content
        if isinstance(value, dict):
            # The model itself is a dict where it is only weights: they are read by the names that it had.
            return self._entries(value, dict.fromkeys(value, depth > 1), depth)
        if isinstance(value, list | tuple):
            return [self.digest(item, depth) for item in value]
        if isinstance(value, set | frozenset):
            return sorted(self.digest(item, depth) for item in value)
        inside = getattr(value, "__dict__", None)
        if not isinstance(inside, dict):
            return []
        in_class = {name for base in type(value).__mro__ for name in vars(base)}
        parts = self._entries(inside, {name: name in in_class for name in inside}, depth)
        return parts + self._methods(type(value))

    def _entries(self, entries: dict[Any, Any], counts_new: dict[Any, bool], depth: int) -> list[bytes]:
        """Args:
        counts_new: name -> whether it is read even if it was not there before.
        """
        self._kept.append(entries)
        self._names[id(entries)] = frozenset(entries)
        before = None if self._known is None else self._known.get(id(entries))
        parts = []
        for name, item in list(entries.items()):
            if before is not None and name not in before and not counts_new[name]:
                continue
            parts.append(self.digest(name, depth))
            if name in _OWNED and isinstance(item, dict):
                parts += self._entries(item, dict.fromkeys(item, False), depth)
            else:
                parts.append(self.digest(item, depth))
        return parts

    def _methods(self, kind: type) -> list[bytes]:
        """The functions of a class, and of those that it is made of."""
        parts = []
        for base in kind.__mro__:
            for name, item in sorted(vars(base).items()):
                if isinstance(item, _CODE) and base is not object:
                    self._kept.append(item)
                    parts.append(f"{name} {id(item)} {id(getattr(item, '__code__', None))}".encode())
        return parts


def _array(value: Any) -> list[bytes] | None:
    """Type, shape and digest of a torch or NumPy array's bytes; None if ``value`` is neither."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        head = f"{value.dtype} {tuple(value.shape)}".encode()
        if value.is_meta:
            return [head]
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return [head, hashlib.sha256(data).digest()]
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        head = f"{value.dtype} {value.shape}".encode()
        return [head, repr(value).encode() if value.dtype.hasobject else hashlib.sha256(value.tobytes()).digest()]
    return None


def _functions() -> dict[tuple[str, str], Any]:
    """(module, name) -> function or class, of every imported module."""
    found = {}
    for module, opened in list(sys.modules.items()):
        for name, item in list(getattr(opened, "__dict__", {}).items()):
            # By its type alone: some objects answer any other question with a warning.
            if issubclass(type(item), _CODE):
                found[module, name] = item
    return found


def _settings() -> list[Any]:
    """Settings of torch that change what it computes."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    return [
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mkldnn.enabled,
        torch.backends.cuda.matmul.allow_tf32,
    ]
