"""Training state that survives a kill.

DVC deletes a stage's outputs before it runs it again, and a queued experiment's copy of the repository is gone after a
failure: so a run keeps its state outside of the repository, in the user's cache folder (``ASSIGN_AND_ADD_STATE``
overrides), under a key made of everything that the bytes of the result depend on. A run of the same key takes it up.
"""

import hashlib
import io
import itertools
import json
import os
import pickle
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from platformdirs import user_cache_path

DIGEST = hashlib.sha256().digest_size


def state_root() -> Path:
    """The folder that holds the states of all unfinished runs."""
    return Path(os.environ.get("ASSIGN_AND_ADD_STATE") or user_cache_path("assign-and-add"))


def key_of(facts: dict[str, Any], files: list[Path]) -> str:
    """A short hash of facts (JSON) and of the contents of files."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for file in files:
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:32]


class State:
    """One run's folder: a state file, and whatever else the run keeps there until it is finished."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = folder / "state.pt"

    def save(self, content: dict[str, Any]) -> None:
        """Replace the state file by `content` (tensors, numbers, lists, dictionaries), whole or not at all."""
        buffer = io.BytesIO()
        torch.save(content, buffer)
        data = buffer.getvalue()
        partial = self._file.with_suffix(".partial")
        with partial.open("wb") as file:
            file.write(hashlib.sha256(data).digest() + data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, self._file)

    def load(self) -> dict[str, Any] | None:
        """The saved content, or None if there is none. A damaged file is named and set aside."""
        if not self._file.exists():
            return None
        data = self._file.read_bytes()
        if hashlib.sha256(data[DIGEST:]).digest() == data[:DIGEST]:
            with suppress(RuntimeError, pickle.UnpicklingError, EOFError):
                return torch.load(io.BytesIO(data[DIGEST:]), weights_only=True)
        self.set_aside("its contents do not match their checksum")
        return None

    def set_aside(self, why: str) -> None:
        """Move everything in the folder out of the way, and say so on standard error."""
        aside = self.folder.with_name(f"damaged-{self.folder.name}")  # a name that `claim` does not look at
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(self.folder, aside)
        self.folder.mkdir()
        print(f"training state damaged ({why}): set aside as {aside}, starting over", file=sys.stderr)

    def remove(self) -> None:
        """Forget the run."""
        shutil.rmtree(self.folder)


@contextmanager
def claim(key: str) -> Iterator[State]:
    """Take the state of a key for this process alone, for as long as the context lasts.

    Two runs of one key at once get two folders: a lock goes with each, and the operating system drops it when its
    process dies. Among the folders that nobody holds, one with a saved state comes first.
    """
    root = state_root()
    root.mkdir(parents=True, exist_ok=True)
    saved = sorted(int(file.parent.name.rpartition("-")[2]) for file in root.glob(f"{key}-*/state.pt"))
    for n in itertools.chain(saved, (n for n in itertools.count() if n not in saved)):
        lock = FileLock(root / f"{key}-{n}.lock")
        try:
            lock.acquire(blocking=False)
        except Timeout:
            continue
        try:
            folder = root / f"{key}-{n}"
            folder.mkdir(exist_ok=True)
            yield State(folder)
        finally:
            lock.release()
        return
