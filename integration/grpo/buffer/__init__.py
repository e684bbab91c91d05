"""The data buffer: every sample's life in one SQLite file."""

from integration.grpo.buffer.buffer import Buffer, sample_id, sample_seed
from integration.grpo.buffer.file import DataBufferError

__all__ = ["Buffer", "DataBufferError", "sample_id", "sample_seed"]
