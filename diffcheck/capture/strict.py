"""The door through which a strict path enters a real engine's adapter.

This layer knows no strict path: a package that has one names it under the entry point group `GROUP`, one entry point
per engine, whose object has the functions that the engine's adapter calls. See `integration.vllm.plugin` and
`integration.megatron.plugin`.
"""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from typing import Any

from diffcheck.base.errors import EngineError, InputError
from diffcheck.capture.plan import EngineOptions

GROUP = "rlk.strict"
#: By it a strict path chooses its profile in an engine that nobody started through here.
VARIABLE = "RLK_PROFILE"


def strict_path(options: EngineOptions) -> Any | None:
    """The strict path of the engine that ``options`` names, made ready for its profile; None for a native run.

    Raises:
        InputError: an unknown profile, or one that no engine can follow.
        EngineError: no strict path is installed for the engine, or not for its release.
    """
    if options.profile is None:
        # A native run stays one, whatever the user's shell asks of plain vLLM.
        os.environ.pop(VARIABLE, None)
        return None
    for entry in entry_points(group=GROUP, name=options.engine):
        path = entry.load()
        try:
            path.prepare(options.profile)
        except ValueError as error:
            raise InputError(f"{options.engine}: {error}", "see rlk-diff contract list") from None
        except RuntimeError as error:
            raise EngineError(f"{options.engine}: {error}", "see rlk-diff doctor") from None
        return path
    raise EngineError(
        f"{options.engine}: profile {options.profile!r} needs a strict path, and none is installed",
        "install this project with its integration package (make setup)",
    )
