"""Processes that work for this one: start them, send requests, get results, and always end them."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from diffcheck.base.errors import EngineDiedError, EngineError, ExitCode, RlkError
from diffcheck.base.progress import Progress
from diffcheck.base.stopping import child_command

#: Environment in which the engines are started; what the user has set already wins. vLLM's engine stays in the process
#: that hooks it, nothing is fetched or compiled behind the back of a comparison, and ranks meet on this host alone.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    # Threads that spin between two small operators starve each other when engines share cores: 16 times slower,
    # measured on 2 cores with 3 busy processes.
    "OMP_WAIT_POLICY": "PASSIVE",
}

#: Characters of a temporary folder in which sockets still can have names.
_LONGEST_ROOT = 40


class Workers:
    """Context manager around worker processes, one a rank, that answer one request at a time.

    Args:
        name: of what they run, for messages.
        module: run with ``python -m``; see `diffcheck.base.serving.serve`.
        ranks: processes; all get every request, and the first one answers.
        log: file for everything they print; a temporary one by default.
    """

    def __init__(self, name: str, module: str, ranks: int, progress: Progress, log: Path | None = None) -> None:
        self.name = name
        self._module = module
        self._progress = progress
        #: Where the engine leaves its sockets and other files; it ends with the engine.
        self._scratch = _scratch(name)
        self._is_log_ours, self._is_log_read = log is None, False
        self.log = log or self._scratch.with_suffix(".log")
        self._processes: list[subprocess.Popen[str]] = []
        self._replies: list[_Lines] = []
        self._pending: deque[str] = deque()
        self._requests = 0
        port = os.environ.get("MASTER_PORT") or str(_free_port())
        try:
            for rank in range(ranks):
                self._start(rank, ranks, port)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order."""
        return [process.pid for process in self._processes]

    @property
    def are_alive(self) -> bool:
        """Whether no process has ended."""
        return all(process.poll() is None for process in self._processes)

    def _start(self, rank: int, ranks: int, port: str) -> None:
        read, write = os.pipe()
        environment = {
            **ENVIRONMENT,
            **os.environ,
            "RLK_REPLY_FD": str(write),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_PORT": port,
            "TMPDIR": str(self._scratch),
        }
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                child_command(sys.executable, self._module),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=(write,),
                text=True,
                # A group of its own: Ctrl-C reaches only the parent, which then ends the engine in order.
                start_new_session=True,
            )
        os.close(write)
        self._processes.append(process)
        self._replies.append(_Lines(read))

    def send(self, request: dict[str, Any]) -> None:
        """Pass a request on to every rank.

        Raises:
            EngineDiedError: a worker is gone.
        """
        self._requests += 1
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
            except (BrokenPipeError, ValueError):
                raise self._died() from None

    def receive(self) -> dict[str, Any]:
        """The answer to the last request.

        Raises:
            RlkError: as the worker raised it, with its remedy and exit code.
            EngineDiedError: a worker is gone.
        """
        while True:
            message = json.loads(self._next_line())
            if message["request"] != self._requests:
                # Several ranks report the same failure; the first one ended that request.
                continue
            if "progress" in message:
                self._progress(*message["progress"])
            elif "error" in message:
                raise self._error(message["error"])
            else:
                result: dict[str, Any] = message["result"]
                return result

    def _next_line(self) -> str:
        with selectors.DefaultSelector() as selector:
            for stream in self._replies:
                selector.register(stream, selectors.EVENT_READ)
            while not self._pending:
                for key, _ in selector.select():
                    lines = key.fileobj.read()  # type: ignore[union-attr]
                    if lines is None:
                        raise self._died()
                    self._pending.extend(lines)
        return self._pending.popleft()

    def _error(self, error: dict[str, Any]) -> RlkError:
        self._is_log_read = True
        return told_error(self.name, error, self.log)

    def _died(self) -> EngineDiedError:
        self._is_log_read = True
        codes = [process.poll() for process in self._processes]
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                codes.append(process.wait(timeout=2))
        if -signal.SIGKILL in codes:
            cause, remedy = (
                "was killed, most likely for want of memory",
                "use fewer samples, --layers, or --level digest",
            )
        else:
            code = next((c for c in codes if c), 0)
            cause, remedy = f"ended unexpectedly (exit code {code})", f"read its log: {self.log}"
        error = EngineDiedError(f"{self.name} {cause}", remedy)
        error.add_note(_tail(self.log))
        return error

    def close(self, *, hurry: bool = False) -> None:
        """End them: politely first, then by force, their children included.

        Args:
            hurry: do not wait for the request in progress; it is told to stop.
        """
        for process in self._processes:
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
            if hurry:
                process.terminate()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=3 if hurry else 10)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for stream in self._replies:
            stream.close()
        self._processes, self._replies = [], []
        shutil.rmtree(self._scratch, ignore_errors=True)
        # Kept where an error names it.
        if self._is_log_ours and not self._is_log_read:
            self.log.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(hurry=kind is not None)


def told_error(name: str, error: dict[str, Any], log: Path) -> EngineError:
    """An error as `diffcheck.base.serving.describe_error` told it, of the engine ``name``."""
    cause = error["cause"]
    # An engine that says who it is need not be named again.
    told = cause if cause.lower().startswith((f"{name.lower()} ", f"{name.lower()}:")) else f"{name}: {cause}"
    exception = EngineError(told, error["remedy"], ExitCode(error["exit_code"]))
    exception.add_note(error["trace"])
    exception.add_note(f"engine log: {log}")
    return exception


class _Lines:
    """Lines of a pipe, read without a buffer of which a selector could not know that it holds another line."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""

    def fileno(self) -> int:
        return self._descriptor

    def read(self) -> list[str] | None:
        """Complete lines that have arrived (perhaps none yet), or None at the end of the stream."""
        data = os.read(self._descriptor, 1 << 16)
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.decode() for line in lines]

    def close(self) -> None:
        os.close(self._descriptor)


def _scratch(name: str) -> Path:
    """A new temporary folder, whose path leaves room for the names of sockets in it: a socket's has 107 characters."""
    root = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix=f"rlk-{name}-", dir=root if len(root) <= _LONGEST_ROOT else "/tmp"))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _tail(path: Path, lines: int = 30) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
