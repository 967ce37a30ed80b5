"""Reads safetensors files without torch: what tensors a file holds, and where their bytes are."""

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PREFIX = struct.calcsize("<Q")


class BadTensorFile(ValueError):
    """A file that is no whole safetensors file; the message says why."""


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A safetensors file's header.

    `tensors` maps a name to its dtype, shape and data_offsets, which count from `data`.
    """

    path: Path
    tensors: dict[str, dict[str, Any]]
    data: int

    @classmethod
    def open(cls, path: Path) -> "TensorFile":
        """Raises BadTensorFile for anything that is no safetensors file, and OSError."""
        with path.open("rb") as file:
            try:
                (length,) = struct.unpack("<Q", file.read(_PREFIX))
                tensors = json.loads(file.read(length))
            except (struct.error, ValueError, OverflowError, MemoryError) as error:
                raise BadTensorFile(f"{path} is no safetensors file ({error})") from error
        if not isinstance(tensors, dict):
            raise BadTensorFile(f"{path} is no safetensors file (its header is no object)")
        tensors.pop("__metadata__", None)
        return cls(path, tensors, _PREFIX + length)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(entry["shape"]) for name, entry in self.tensors.items()}

    def require_whole(self) -> None:
        """Raises BadTensorFile where the file is shorter or longer than its header says."""
        promised = self.data + max((entry["data_offsets"][1] for entry in self.tensors.values()), default=0)
        size = self.path.stat().st_size
        if size != promised:
            raise BadTensorFile(f"{self.path} has {size} bytes where its header promises {promised}; it is truncated")

    def read(self, name: str) -> bytes:
        """One tensor's bytes, little-endian."""
        start, end = self.tensors[name]["data_offsets"]
        with self.path.open("rb") as file:
            file.seek(self.data + start)
            return file.read(end - start)
