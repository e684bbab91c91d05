"""The side of a worker process: reads requests as JSON lines, answers with progress, results and errors.

A process of its own can be killed, can run out of memory and can patch what it likes without harming the rest, and its
chatter goes to a log file. Started by `diffcheck.base.workers`; the answers go to the descriptor named by
``RLK_REPLY_FD``.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from diffcheck.base.errors import EngineError, RlkError, missing, telling_line
from diffcheck.base.files import disk_error
from diffcheck.base.progress import Progress


class _Replies:
    """The answering side. Only rank 0 of a tensor-parallel group speaks, except for errors."""

    def __init__(self) -> None:
        self._stream = os.fdopen(int(os.environ["RLK_REPLY_FD"]), "w", buffering=1)
        self._speaks = int(os.environ.get("RANK", "0")) == 0
        #: Number of the request being answered, so that a late answer is not taken for that of the next one.
        self.request = 0

    def send(self, message: dict[str, Any]) -> None:
        if self._speaks or "error" in message:
            self._stream.write(json.dumps({**message, "request": self.request}) + "\n")

    def progress(self, what: str, done: int, total: int) -> None:
        self.send({"progress": [what, done, total]})


class Served(Protocol):
    """What answers requests, once it is open."""

    def handle(self, request: dict[str, Any]) -> dict[str, Any]: ...

    def close(self) -> None: ...


def serve(open_served: Callable[[Any, Progress], Served]) -> None:
    """Answer requests until end of input: first ``{"open": options}``, then whatever `Served.handle` knows.

    Args:
        open_served: makes the server from the options and a way to tell progress.
    """
    # The parent's way to interrupt: unwinds through every writer, which then leaves nothing half-written.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    replies = _Replies()
    served: Served | None = None
    try:
        for line in sys.stdin:
            request = json.loads(line)
            replies.request += 1
            try:
                if "open" in request:
                    served = open_served(request["open"], replies.progress)
                    replies.send({"result": {}})
                elif served is None:
                    raise EngineError("the engine was not opened")
                else:
                    replies.send({"result": served.handle(request)})
            except Exception as error:
                replies.send({"error": describe_error(error)})
                if served is None or not isinstance(error, RlkError):
                    # The engine's state is unknown after a foreign exception: end, rather than answer wrongly later.
                    break
    except (KeyboardInterrupt, BrokenPipeError):
        pass
    finally:
        if served is not None:
            # The process ends here. vLLM collects garbage three times on its way out: spare it the search.
            gc.freeze()
            served.close()


def end() -> NoReturn:
    """End the process. Unloading an engine's libraries takes seconds and frees nothing that its end does not."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def describe_error(error: Exception) -> dict[str, Any]:
    """``error``, being handled, as JSON: ``cause``, ``remedy``, ``exit_code`` and ``trace``."""
    trace = traceback.format_exc()
    if isinstance(error, RlkError):
        return {"cause": error.cause, "remedy": error.remedy, "exit_code": int(error.exit_code), "trace": trace}
    if isinstance(error, MemoryError) or "out of memory" in str(error).lower():
        remedy = "use a smaller --layers range, fewer samples, or --level digest"
        return {
            "cause": f"the engine ran out of memory: {telling_line(error)}",
            "remedy": remedy,
            "exit_code": 2,
            "trace": trace,
        }
    if "address already in use" in str(error).lower() or "eaddrinuse" in str(error).lower():
        remedy = "another run holds the port: wait for it, or set MASTER_PORT to a free one"
        return {"cause": f"port in use: {telling_line(error)}", "remedy": remedy, "exit_code": 2, "trace": trace}
    if isinstance(error, ImportError):
        cause, remedy = missing(error)
        return {"cause": cause, "remedy": remedy, "exit_code": 2, "trace": trace}
    if isinstance(error, OSError) or "I/O error" in str(error):
        return {**disk_error(error)._asdict(), "exit_code": 2, "trace": trace}
    remedy = "run again with --debug for the stack trace and the engine's own log"
    return {"cause": f"{type(error).__name__}: {telling_line(error)}", "remedy": remedy, "exit_code": 2, "trace": trace}
