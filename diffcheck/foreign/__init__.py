"""Dumps of other projects, made samples or traces of ours. Their files are bounded and never unpickled."""

from diffcheck.foreign.run import FORMATS, Imported, import_dump

__all__ = ["FORMATS", "Imported", "import_dump"]
