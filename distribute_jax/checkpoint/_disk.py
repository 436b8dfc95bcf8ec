"""Checkpoints on a disk: a rename makes one complete; with POSIX locks, syncs and renames."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from distribute_jax._errors import CheckpointError, CheckpointFileError
from distribute_jax.checkpoint._manifest import ARRAYS, DAMAGED, MANIFEST, check_files, is_step

try:
    import fcntl
except ImportError:  # not a POSIX system: there saving goes without locks
    fcntl = None  # type: ignore[assignment]


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
        sync_all(arrays / folder)
        return {f"{folder}/{name}": d for name, d in digests(arrays / folder).items()}

    def hand_in(self, process: int, text: str) -> None:
        """See ``Draft``; the text appears at once, so that nobody reads half of it."""
        unfinished = self.new / f"{process}.unfinished"
        unfinished.write_text(text, encoding="utf-8")
        sync(unfinished)
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
        sync(self.new / self.arrays)
        unfinished = self.new / f"{MANIFEST}.part"
        unfinished.write_text(manifest, encoding="utf-8")
        sync(unfinished)
        unfinished.rename(self.new / MANIFEST)
        sync(self.new)
        if self.folder.exists() and any(self.folder.iterdir()):
            self._replace()
        else:
            self.new.rename(self.folder)
        sync(self.folder.parent)

    def _replace(self) -> None:
        """Moves new arrays beside the old ones, then the manifest, which decides which ones count."""
        with locked(self.folder):
            (self.new / self.arrays).rename(self.folder / self.arrays)
            sync(self.folder)
            os.replace(self.new / MANIFEST, self.folder / MANIFEST)
            sync(self.folder)
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
        remove_left_over(self.path, name)

    @contextmanager
    def draft(self, name: str, token: str) -> Iterator[DiskDraft]:
        """See ``Directory``."""
        with temporary_folder(self.path, name, token) as new:
            yield DiskDraft(self.path / name, new, ARRAYS + token)

    def joined(self, name: str, token: str) -> DiskDraft:
        """See ``Directory``."""
        new = temporary_path(self.path, name, token)
        return DiskDraft(self.path / name, new, ARRAYS + token)

    def read(self, name: str, file: str) -> bytes:
        """See ``Directory``."""
        return (self.path / name / file).read_bytes()

    @contextmanager
    def arrays(self, name: str, folder: str, files: Mapping[str, str]) -> Iterator[Path]:
        """See ``Directory``."""
        arrays = self.path / name / folder
        check_files(arrays, digests(arrays, files), files)
        yield arrays

    def remove(self, name: str) -> None:
        """See ``Directory``."""
        remove(self.path / name)

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
        return free_bytes(self.path)

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


_LOCK = "lock"
_ENDING = "saving"
_PAUSE = 0.005


@contextmanager
def temporary_folder(parent: Path, name: str, token: str) -> Iterator[Path]:
    """Gives an empty folder beside where ``name`` will be, and removes it unless it was renamed.

    Whoever holds its lock is at work in it, so that two programs may save into one directory.
    """
    path = temporary_path(parent, name, token)
    held = _made(path)
    try:
        yield path
    finally:
        os.close(held)
        shutil.rmtree(path, ignore_errors=True)


def temporary_path(parent: Path, name: str, token: str) -> Path:
    """Gives where that folder is; a token is 8 hexadecimal digits that nobody else has."""
    return parent / f".{name}.{token}.{_ENDING}"


def _made(path: Path) -> int:
    for _ in range(100):
        try:
            path.mkdir()
            held: int | None = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        except (FileExistsError, FileNotFoundError):
            if not path.parent.is_dir():
                raise
            held = None  # another program removes what looked left over, before it was locked
        if held is not None and _locked(held):
            return held
        if held is not None:
            os.close(held)
        time.sleep(_PAUSE)
    raise OSError(
        f"no folder in {path.parent} could be locked, because another program removes them"
    )


def _locked(held: int, *, wait: bool = False) -> bool:
    """Locks an open file; a file system without locks counts as one without other programs."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(held, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Waits until no other program changes a checkpoint, and keeps others away for the block."""
    held = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _locked(held, wait=True)
        yield
    finally:
        os.close(held)


def remove_left_over(parent: Path, name: str) -> None:
    """Removes temporary folders of programs that were killed; ``name`` is a regular expression."""
    ours = re.compile(rf"\.{name}\.[0-9a-f]{{8}}\.{_ENDING}")
    for path in [path for path in parent.iterdir() if ours.fullmatch(path.name)]:
        try:
            held = os.open(path / _LOCK, os.O_RDWR)
        except OSError:  # killed before it was locked
            shutil.rmtree(path, ignore_errors=True)
            continue
        if _locked(held):
            shutil.rmtree(path, ignore_errors=True)
        os.close(held)


def remove(folder: Path) -> None:
    """Removes a folder, so that it is never seen half removed."""
    going = temporary_path(folder.parent, folder.name, secrets.token_hex(4))
    try:
        folder.rename(going)
    except FileNotFoundError:  # another program removed it
        return
    shutil.rmtree(going, ignore_errors=True)


def digests(folder: Path, names: Iterable[str] | None = None) -> dict[str, str]:
    """Gives the sha256 of the files below a folder, by their paths from there: of all, or of those named."""
    paths = sorted(folder.rglob("*")) if names is None else [folder / name for name in names]
    return {path.relative_to(folder).as_posix(): _digest(path) for path in paths if path.is_file()}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_all(folder: Path) -> None:
    """Returns when every file and folder from here downwards is on the disk itself."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def sync(path: Path) -> None:
    """Returns when one file, or the list of one folder's files, is on the disk itself."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def free_bytes(path: Path) -> int:
    """Gives how many bytes are free on the file system where a path is or will be."""
    there = next((p for p in (path, *path.absolute().parents) if p.exists()), Path("/"))
    return shutil.disk_usage(there).free
