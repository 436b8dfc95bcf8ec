"""Checkpoints on a disk: a rename makes a checkpoint count."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from distribute_jax._errors import CheckpointError, CheckpointFileError
from distribute_jax.checkpoint import _disk
from distribute_jax.checkpoint._names import ARRAYS, DAMAGED, MANIFEST, check_files, is_step


@dataclass(frozen=True)
class DiskDraft:
    """See ``Draft``: a folder beside the checkpoint, under a name that counts for nothing."""

    folder: Path
    """Where the checkpoint will be."""
    new: Path
    arrays: str

    def write(self, folder: str, fill: Callable[[Path], None]) -> dict[str, str]:
        """See ``Draft``."""
        arrays = self.new / self.arrays
        arrays.mkdir(exist_ok=True)
        fill(arrays / folder)
        _disk.sync_all(arrays / folder)
        return {f"{folder}/{name}": d for name, d in _disk.digests(arrays / folder).items()}

    def hand_in(self, process: int, text: str) -> None:
        """See ``Draft``; the text appears at once, so that nobody reads half of it."""
        unfinished = self.new / f"{process}.unfinished"
        unfinished.write_text(text, encoding="utf-8")
        _disk.sync(unfinished)
        unfinished.rename(self.new / f"{process}.part")

    def handed_in(self, process: int) -> bytes:
        """See ``Draft``."""
        part = self.new / f"{process}.part"
        content = part.read_bytes()
        part.unlink()
        return content

    def commit(self, manifest: str) -> None:
        """See ``Draft``: at every moment the old checkpoint or the new one is there, whole."""
        (self.new / self.arrays).mkdir(exist_ok=True)
        _disk.sync(self.new / self.arrays)
        unfinished = self.new / f"{MANIFEST}.part"
        unfinished.write_text(manifest, encoding="utf-8")
        _disk.sync(unfinished)
        unfinished.rename(self.new / MANIFEST)
        _disk.sync(self.new)
        if self.folder.exists() and any(self.folder.iterdir()):
            self._replace()
        else:
            self.new.rename(self.folder)
        _disk.sync(self.folder.parent)

    def _replace(self) -> None:
        """Moves new arrays beside the old ones, then the manifest, which decides which ones count."""
        with _disk.locked(self.folder):
            (self.new / self.arrays).rename(self.folder / self.arrays)
            _disk.sync(self.folder)
            os.replace(self.new / MANIFEST, self.folder / MANIFEST)
            _disk.sync(self.folder)
            for old in self.folder.glob(f"{ARRAYS}*"):
                if old.name != self.arrays:
                    shutil.rmtree(old, ignore_errors=True)


@dataclass(frozen=True)
class DiskDirectory:
    """See ``Directory``."""

    path: Path

    def __str__(self) -> str:
        """Gives its path."""
        return str(self.path)

    @property
    def place(self) -> Path:
        """See ``Directory``."""
        return self.path

    def path_of(self, name: str) -> str:
        """See ``Directory``."""
        return str(self.path / name)

    def names(self) -> list[str]:
        """See ``Directory``."""
        try:
            return [path.name for path in self.path.iterdir() if path.is_dir()]
        except FileNotFoundError:
            return []

    def holds(self, name: str) -> bool:
        """See ``Directory``."""
        return (self.path / name).exists()

    def check_free(self, name: str, *, overwrite: bool) -> None:
        """See ``Directory``."""
        folder = self.path / name
        if not folder.exists():
            return
        if not folder.is_dir():
            raise CheckpointFileError(
                f"{folder} is a file. A checkpoint is a folder: give another path."
            )
        found = [path.name for path in folder.iterdir()]
        if not all(n in (MANIFEST, "lock") or n.startswith(ARRAYS) for n in found):
            raise CheckpointFileError(
                f"{folder} is a folder with other files in it, which a checkpoint would be mixed up with. "
                "Give the path of a folder that does not exist yet."
            )
        if not overwrite and found:
            raise CheckpointError(f"{folder} exists. Save to another path, or with overwrite=True.")

    def prepare(self, name: str) -> None:
        """See ``Directory``."""
        self.path.mkdir(parents=True, exist_ok=True)
        _disk.remove_left_over(self.path, name)

    @contextmanager
    def draft(self, name: str, token: str) -> Iterator[DiskDraft]:
        """See ``Directory``."""
        with _disk.temporary_folder(self.path, name, token) as new:
            yield DiskDraft(self.path / name, new, ARRAYS + token)

    def joined(self, name: str, token: str) -> DiskDraft:
        """See ``Directory``."""
        new = _disk.temporary_path(self.path, name, token)
        return DiskDraft(self.path / name, new, ARRAYS + token)

    def read(self, name: str, file: str) -> bytes:
        """See ``Directory``."""
        return (self.path / name / file).read_bytes()

    @contextmanager
    def arrays(self, name: str, folder: str, files: Mapping[str, str]) -> Iterator[Path]:
        """See ``Directory``."""
        arrays = self.path / name / folder
        check_files(arrays, _disk.digests(arrays, files), files)
        yield arrays

    def remove(self, name: str) -> None:
        """See ``Directory``."""
        _disk.remove(self.path / name)

    def set_aside(self, name: str) -> str | None:
        """See ``Directory``."""
        for i in range(1, 1000):
            aside = self.path / (f"{name}.{DAMAGED}" + (f"-{i}" if i > 1 else ""))
            if not aside.exists():
                break
        try:
            (self.path / name).rename(aside)
        except OSError:
            return None
        return aside.name

    def were_set_aside(self) -> list[str]:
        """See ``Directory``."""
        ours = re.compile(rf"(\d+)\.{DAMAGED}.*")
        found = [m for name in self.names() if (m := ours.fullmatch(name)) and is_step(m[1])]
        return sorted(m[0] for m in found)

    def free_bytes(self) -> int:
        """See ``Directory``."""
        return _disk.free_bytes(self.path)

    def write_probe(self, name: str, text: str) -> None:
        """See ``Directory``."""
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / name).write_text(text, encoding="utf-8")

    def read_probe(self, name: str) -> str | None:
        """See ``Directory``."""
        try:
            return (self.path / name).read_text(encoding="utf-8")
        except OSError:
            return None

    def remove_probe(self, name: str) -> None:
        """See ``Directory``."""
        (self.path / name).unlink(missing_ok=True)
