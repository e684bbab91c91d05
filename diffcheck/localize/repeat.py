"""What repeats a verdict, and where it was computed: command, versions, seed, digests."""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from pathlib import Path

from diffcheck.base.processor import measured_on, processor_class
from diffcheck.capture.adapter import own_version
from diffcheck.trace.roles import ROLES
from diffcheck.trace.schema import Header

#: A module that is run with -m is no command by its file's name.
_MODULES = {"diffcheck/cli": "python -m diffcheck.cli", "integration/grpo": "python -m integration.grpo"}


def repeat_of(left: Header, right: Header) -> dict[str, object]:
    """What repeats the verdict on two traces; see schema ``verdict``, ``evidence.repeat``."""
    tokens = [(s.get("prompt_token_ids"), s.get("response_token_ids")) for s in left.samples]
    digests = {"model": left.object.weights, "samples": tokens}
    texts = {name: json.dumps(value, sort_keys=True) for name, value in digests.items()}
    named = [header.evidence.get("model") for header in (left, right)]
    return {
        "command": _command(),
        "rlk": own_version(),
        "processor": processor_class(),
        "model": next((name for name in named if isinstance(name, str)), None),
        "seed": (left.object.random_state or {}).get("seed"),
        **{f"{name}_sha256": hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()},
    }


def processor_notes(left: Header, right: Header) -> list[str]:
    """Sentences where a native profile, or two native sides, meet another class of processor than theirs."""
    notes = []
    classes = [_text(header, "processor") for header in (left, right)]
    for header, role in zip((left, right), ROLES, strict=True):
        profile = _text(header, "profile")
        where = measured_on(profile) if header.engine == "reference" and profile else None
        other, ran = (right, classes[1]) if header is left else (left, classes[0])
        if where is None or other.engine == "reference" or ran in ("", where):
            continue
        notes.append(
            f"Profile {profile} of the {role} side was measured on {where}; {other.engine} ran on {ran}, where its "
            "libraries sum in another order: a difference may be the processor's."
        )
    strict = [_text(header, "profile").startswith("strict-") or "strict" in header.evidence for header in (left, right)]
    if all(classes) and classes[0] != classes[1] and not all(strict) and not notes:
        notes.append(
            f"The rollout side ran on {classes[0]}, the train side on {classes[1]}: native libraries sum in another "
            "order on each, and a difference may be the processor's."
        )
    return notes


def _text(header: Header, key: str) -> str:
    value = header.evidence.get(key)
    return value if isinstance(value, str) else ""


def _command() -> str:
    program = Path(sys.argv[0])
    module = _MODULES.get("/".join(program.parts[-3:-1])) if program.name == "__main__.py" else None
    words = shlex.join(sys.argv[1:])
    return f"{module or program.name} {words}".strip()
