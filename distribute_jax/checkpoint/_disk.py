"""What POSIX offers for files that are either there whole or not at all: locks, syncs, renames."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # not a POSIX system: there saving goes without locks
    fcntl = None  # type: ignore[assignment]

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
