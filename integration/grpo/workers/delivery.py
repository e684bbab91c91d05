"""New weights from the trainer to the rollout engine: which versions there are, where they lie, which one is live."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from diffcheck.base.errors import EngineDiedError, EngineError
from integration.grpo.config import GrpoConfig
from integration.grpo.workers.actors import Actor
from integration.grpo.workers.weights import weights_path


class Delivery:
    """The weights of one run between its two engines.

    Through a file the digests are SHA-256 of what the file holds, in memory that both map fingerprints
    (`integration.fingerprint`); either way both engines say what they hold, and are held to it.

    Args:
        folder: of the run's weights.
        announce: is told when a GPU's memory cannot be shared.
    """

    def __init__(self, config: GrpoConfig, folder: Path, announce: Callable[[str], None]) -> None:
        self._config, self._folder, self._announce = config, folder, announce
        #: device or file; of a run that leaves the choice, file once sharing has failed.
        self.transport = "device" if config.shares_memory else "file"
        #: Of each version that is kept: HF name -> digest, and the digest of all.
        self._digests: dict[int, dict[str, str]] = {}
        self._digest: dict[int, str] = {}
        #: Version that the rollout engine holds, and the one that lies in shared memory with the way to it.
        self._live: int | None = None
        self._shared: tuple[int, dict[str, Any]] | None = None

    def attach(self, rollout: Actor, trainer: Actor) -> None:
        """Serve these engines, of whose weights nothing is known yet."""
        self._rollout, self._trainer = rollout, trainer
        self._live, self._shared, self._digests, self._digest = None, None, {}, {}

    def digests(self, version: int) -> dict[str, str]:
        """HF name -> digest of a version that was exported."""
        return self._digests[version]

    def digest(self, version: int) -> str:
        """One digest of all weights of a version that was exported."""
        return self._digest[version]

    def export(self, version: int) -> None:
        """Have the trainer put the weights of ``version`` where the rollout engine can get them; files that nobody
        needs any more are removed.
        """
        path = weights_path(self._folder, version)
        if self.transport == "device":
            found = self._trainer.call("share", version=version, path=str(self._folder / "shared.bin"))
            self._shared = version, found["place"]
        else:
            found = self._trainer.call("export", version=version, path=str(path))
        self._digests[version] = found["digests"]
        # Of one kind all through a run, whatever became of sharing.
        self._digest[version] = found["fingerprint" if self._config.shares_memory else "digest"]
        oldest = max(self._digests) - self._config.staleness
        self._digests = {v: digests for v, digests in self._digests.items() if v >= oldest}
        needed = {weights_path(self._folder, kept) for kept in self._digests}
        for file in set(self._folder.glob("v*.safetensors")) - needed:
            file.unlink()

    def sync(self, version: int) -> None:
        """Have the rollout engine hold ``version``."""
        if self._live == version:
            return
        if self.transport == "device":
            try:
                self._sync_shared(version)
            except EngineDiedError:
                raise
            except EngineError as error:
                if self._config.transport == "device" or "CUDA IPC" not in error.cause:
                    raise
                self._announce(f"{error.cause}: weights go through files from here on")
                self.transport, self._digests = "file", {}
        if self.transport == "file":
            if version not in self._digests:
                self.export(version)
            path = weights_path(self._folder, version)
            self._rollout.call("sync", path=str(path), version=version, digests=self._digests[version])
        self._live = version

    def _sync_shared(self, version: int) -> None:
        if self._shared is None or self._shared[0] != version:
            self.export(version)
        assert self._shared is not None
        self._rollout.call("sync_shared", place=self._shared[1], version=version, digests=self._digests[version])
        # The handle has served: CUDA counts how often it is opened.
        self._shared = None
