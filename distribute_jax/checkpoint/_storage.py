"""Stores checkpoints on a disk or in an object store, which the path or URL of a directory selects."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from distribute_jax._errors import (
    ArgumentError,
    CheckpointDamagedError,
    CheckpointError,
    CheckpointFileError,
    MissingPackageError,
)
from distribute_jax._messages import error_line, error_text
from distribute_jax.checkpoint._manifest import ARRAYS, MANIFEST, check_files, digests

try:
    import fcntl
except ImportError:  # not a POSIX system: checkpoints are saved without locks
    fcntl = None  # type: ignore[assignment]

DAMAGED = "damaged"
"""Suffix of checkpoints that were set aside."""
_LOCK = "lock"
_MAX_MANIFEST_BYTES = 1 << 28
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)


@dataclass(frozen=True)
class DiskDirectory:
    """A folder on a disk, in which each checkpoint is a folder.

    Paths of files are relative to it. A draft is a checkpoint that is being written, identified by its name
    and a token; it becomes a checkpoint when it is committed. The methods raise ``OSError``.
    """

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def path_of(self, name: str) -> str:
        return str(self.path / name)

    def names(self) -> list[str]:
        """Returns the names of possible checkpoints; in an object store, of those with a manifest."""
        try:
            # Not Path.iterdir: its is_dir misses the old step and the new one where another program saves.
            return [entry.name for entry in os.scandir(self.path) if entry.is_dir()]
        except FileNotFoundError:
            return []

    def exists(self, name: str) -> bool:
        """Returns True if there may be a checkpoint of this name."""
        try:
            return (self.path / name).exists()
        except OSError:  # no permission, or a path too long: reading it raises the error
            return True

    def check_free(self, name: str, *, overwrite: bool) -> None:
        folder = self.path / name
        if not folder.exists():
            return
        if not folder.is_dir():
            raise CheckpointFileError(
                f"{folder} is a file. A checkpoint is a folder: give another path."
            )
        names = [path.name for path in folder.iterdir()]
        if not all(n in (MANIFEST, _LOCK) or n.startswith(ARRAYS) for n in names):
            raise CheckpointFileError(
                f"{folder} is a folder with other files in it, which a checkpoint would be mixed up with. "
                "Give the path of a folder that does not exist yet."
            )
        if not overwrite and names:
            raise CheckpointError(f"{folder} exists. Save to another path, or with overwrite=True.")

    def prepare(self, name: str) -> None:
        """Creates the directory, and removes drafts of killed programs whose names match an expression."""
        self.path.mkdir(parents=True, exist_ok=True)
        pattern = re.compile(rf"\.{name}\.[0-9a-f]{{8}}\.saving")
        for path in [path for path in self.path.iterdir() if pattern.fullmatch(path.name)]:
            try:
                lock = os.open(path / _LOCK, os.O_RDWR)
            except OSError:  # killed before it was locked
                shutil.rmtree(path, ignore_errors=True)
                continue
            if _lock(lock):  # otherwise another program is writing there
                shutil.rmtree(path, ignore_errors=True)
            os.close(lock)

    @contextmanager
    def draft(self, name: str, token: str) -> Iterator[None]:
        """Creates a draft, in the process that commits it, and locks it against other programs."""
        new = self._draft(name, token)
        lock = _create_locked(new)
        try:
            yield
        finally:
            os.close(lock)
            _remove_tree(new)

    def _draft(self, name: str, token: str) -> Path:
        return self.path / self.draft_folder(name, token)

    def draft_folder(self, name: str, token: str) -> str:
        """Returns the folder of a draft in which the processes write notes for the chief."""
        return f".{name}.{token}.saving"

    def write_arrays(
        self, name: str, token: str, folder: str, fill: Callable[[Path], None]
    ) -> dict[str, str]:
        """Adds a folder of arrays, written by ``fill``, to a draft; returns the sha256 of each file."""
        arrays = self._draft(name, token) / (ARRAYS + token)
        arrays.mkdir(exist_ok=True)
        fill(arrays / folder)
        sync_all(arrays / folder)
        return {f"{folder}/{file}": d for file, d in digests(arrays / folder).items()}

    def commit(self, name: str, token: str, manifest: str) -> None:
        """Makes a draft the checkpoint; at every moment the old or the new one is there, complete."""
        new, folder = self._draft(name, token), self.path / name
        arrays = new / (ARRAYS + token)
        arrays.mkdir(exist_ok=True)
        (new / MANIFEST).write_text(manifest, encoding="utf-8")
        for path in (arrays, new / MANIFEST, new):
            sync(path)
        if folder.exists() and any(folder.iterdir()):
            self._replace(folder, new, arrays.name)
        else:
            new.rename(folder)
        sync(self.path)

    def _replace(self, folder: Path, new: Path, arrays: str) -> None:
        """Moves the new arrays beside the old ones, then the manifest, which names those that count."""
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(lock, wait=True)
            (new / arrays).rename(folder / arrays)
            sync(folder)
            os.replace(new / MANIFEST, folder / MANIFEST)
            sync(folder)
            for old in folder.glob(f"{ARRAYS}*"):
                if old.name != arrays:
                    shutil.rmtree(old, ignore_errors=True)
        finally:
            os.close(lock)

    def read(self, path: str) -> bytes:
        opened = os.open(self._resolve(path), os.O_RDONLY | _NONBLOCK)  # a pipe would block forever
        with open(opened, "rb") as file:
            status = os.fstat(opened)
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_MANIFEST_BYTES:
                raise CheckpointDamagedError(f"{self.path / path} is not a file of a checkpoint")
            return file.read()

    def _resolve(self, path: str) -> Path:
        """Returns the full path; raises if a part of it below the directory is a link."""
        whole = self.path / path
        for part in [whole, *whole.parents][: len(Path(path).parts)]:
            if part.is_symlink():
                raise CheckpointDamagedError(f"{part} is a link, which is not followed")
        return whole

    def write(self, path: str, data: bytes) -> None:
        """Writes a small file, and creates the directory."""
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / path).write_bytes(data)

    def remove_file(self, path: str) -> None:
        (self.path / path).unlink(missing_ok=True)

    @contextmanager
    def arrays(
        self, name: str, folder: str, files: Mapping[str, str], largest: int | None = None
    ) -> Iterator[Path]:
        """Yields a local folder of arrays; raises if a file is missing, differs or exceeds ``largest``."""
        arrays = self._resolve(f"{name}/{folder}")
        for path in arrays.rglob("*"):
            if not stat.S_ISREG(mode := path.lstat().st_mode) and not stat.S_ISDIR(mode):
                raise CheckpointDamagedError(f"{path} is neither a file nor a folder")
        check_files(arrays, digests(arrays, files, largest), files)
        yield arrays

    def remove(self, name: str) -> None:
        """Removes a checkpoint; nobody sees a part of it."""
        removed = self._draft(name, secrets.token_hex(4))
        try:
            (self.path / name).rename(removed)
        except FileNotFoundError:  # another program removed it
            return
        shutil.rmtree(removed, ignore_errors=True)

    def set_aside(self, name: str) -> str | None:
        """Renames a damaged checkpoint; returns its new name, or None without permission."""
        for i in range(1, 1000):
            aside = self.path / (f"{name}.{DAMAGED}" + (f"-{i}" if i > 1 else ""))
            if not aside.exists():
                break
        try:
            (self.path / name).rename(aside)
        except OSError:
            return None
        return aside.name

    def damaged_names(self) -> list[str]:
        """Returns the names of checkpoints that were set aside, in this and earlier runs."""
        return sorted(
            name
            for name in self.names()
            if is_step_name(name.partition(".")[0]) and name.partition(".")[2].startswith(DAMAGED)
        )

    def free_bytes(self) -> int:
        """Returns how many bytes are free; None for an object store."""
        # Unlike Path.exists, os.path.exists does not raise for a path that is too long.
        path = next(p for p in (self.path, *self.path.parents) if os.path.exists(p))
        return shutil.disk_usage(path).free


def is_step_name(name: str) -> bool:
    return name.isascii() and name.isdecimal() and str(int(name)) == name


def _create_locked(path: Path) -> int:
    for _ in range(100):
        try:
            path.mkdir()
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        except (FileExistsError, FileNotFoundError):  # another program's `prepare` removed it
            if not path.parent.is_dir():
                raise
        except OSError:  # no rights, or no descriptors are left
            with suppress(FileNotFoundError):
                path.rmdir()
            raise
        else:
            if _lock(lock) and path.is_dir():  # not removed before it was locked
                return lock
            os.close(lock)
        time.sleep(0.005)
    raise OSError(
        f"no folder in {path.parent} could be locked, because another program removes them"
    )


def _remove_tree(folder: Path) -> None:
    """Removes a folder, with one descriptor at a time, also if Orbax's threads still write to it."""
    for _ in range(40):
        if not folder.exists():
            return
        for path, _, files in os.walk(folder, topdown=False):
            with suppress(OSError):
                for name in files:
                    os.unlink(os.path.join(path, name))
                os.rmdir(path)
        time.sleep(0.05)


def _lock(lock: int, *, wait: bool = False) -> bool:
    """Locks an open file; returns True also on a file system without locks."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        return not isinstance(error, BlockingIOError)
    return True


def sync_all(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def sync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


_ASIDE = f"{DAMAGED}.json"
"""The new name of a damaged step's manifest, since a store cannot rename a folder."""


@dataclass(frozen=True)
class BucketDirectory:
    """A prefix in an object store, below which each checkpoint has a prefix; see ``DiskDirectory``."""

    path: str
    """The URL, such as ``gs://bucket/run``."""
    store: Any
    """fsspec's file system."""
    root: str
    """The prefix without the scheme, as the file system expects it."""

    def __str__(self) -> str:
        return self.path

    def path_of(self, name: str) -> str:
        return f"{self.path}/{name}"

    def names(self) -> list[str]:
        return self._names_with(MANIFEST)

    def _names_with(self, file: str) -> list[str]:
        paths = (name.split("/") for name in self.files())
        return [parts[0] for parts in paths if parts[1:] == [file]]

    def exists(self, name: str) -> bool:
        return MANIFEST in self.files(name)

    def check_free(self, name: str, *, overwrite: bool) -> None:
        if not overwrite and self.exists(name):
            raise CheckpointError(
                f"{self.path_of(name)} exists. Save to another URL, or with overwrite=True."
            )

    def prepare(self, name: str) -> None:
        """Does nothing: a store has no folders, and what is left over is removed with its step."""

    @contextmanager
    def draft(self, name: str, token: str) -> Iterator[None]:
        """Objects below the name of the checkpoint, which no manifest names yet."""
        try:
            yield
        except BaseException:
            self._remove_all(self.draft_folder(name, token))
            raise

    def draft_folder(self, name: str, token: str) -> str:
        return f"{name}/{ARRAYS}{token}"

    def write_arrays(
        self, name: str, token: str, folder: str, fill: Callable[[Path], None]
    ) -> dict[str, str]:
        """Writes the files to a temporary folder of this machine, and uploads them."""
        with tempfile.TemporaryDirectory(prefix="distribute_jax-") as temporary:
            local = Path(temporary) / folder
            fill(local)
            files = digests(local)
            for file in files:
                path = self._path(f"{self.draft_folder(name, token)}/{folder}/{file}")
                with _os_errors():
                    self.store.put_file(str(local / file), path)
        return {f"{folder}/{file}": digest for file, digest in files.items()}

    def commit(self, name: str, token: str, manifest: str) -> None:
        """Writes one object, which a store does atomically."""
        self.write(f"{name}/{MANIFEST}", manifest.encode())
        for file in self.files(name):
            if file.startswith(ARRAYS) and not file.startswith(f"{ARRAYS}{token}/"):
                self.remove_file(f"{name}/{file}")

    def read(self, path: str) -> bytes:
        with _os_errors():
            data: bytes = self.store.cat_file(self._path(path))
        return data

    def write(self, path: str, data: bytes) -> None:
        with _os_errors():
            self.store.pipe_file(self._path(path), data)

    def remove_file(self, path: str) -> None:
        with suppress(FileNotFoundError), _os_errors():
            self.store.rm_file(self._path(path))

    def files(self, folder: str = "") -> list[str]:
        """Returns the names of all objects below a folder, from there."""
        start = len(self._path(folder)) + 1
        with suppress(FileNotFoundError), _os_errors():
            self.store.invalidate_cache()  # other processes add objects too
            return [path[start:] for path in self.store.find(self._path(folder)) if path[start:]]
        return []

    def _remove_all(self, folder: str) -> None:
        for name in self.files(folder):
            self.remove_file(f"{folder}/{name}")

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}".rstrip("/")

    @contextmanager
    def arrays(
        self, name: str, folder: str, files: Mapping[str, str], largest: int | None = None
    ) -> Iterator[Path]:
        """Downloads the files to a temporary folder of this machine."""
        with tempfile.TemporaryDirectory(prefix="distribute_jax-") as temporary:
            root = Path(temporary)
            for file in files:
                local = root / file
                local.parent.mkdir(parents=True, exist_ok=True)
                try:
                    with _os_errors():
                        self.store.get_file(self._path(f"{name}/{folder}/{file}"), str(local))
                except FileNotFoundError:
                    local.unlink(missing_ok=True)  # check_files reports it
            where = f"{self.path_of(name)}/{folder}"
            check_files(where, digests(root, files, largest), files)
            yield root

    def remove(self, name: str) -> None:
        """Removes the manifest first: without it, there is no such checkpoint."""
        self.remove_file(f"{name}/{MANIFEST}")
        self._remove_all(name)

    def set_aside(self, name: str) -> str | None:
        try:
            self.write(f"{name}/{_ASIDE}", self.read(f"{name}/{MANIFEST}"))
            self.remove_file(f"{name}/{MANIFEST}")
        except OSError:
            return None
        return f"{name}/{_ASIDE}"

    def damaged_names(self) -> list[str]:
        return sorted(f"{name}/{_ASIDE}" for name in self._names_with(_ASIDE) if is_step_name(name))

    def free_bytes(self) -> None:
        """Returns None: a store has no limit that it reports."""


def bucket_directory(method: str, url: str) -> BucketDirectory:
    import fsspec

    scheme = url.partition("://")[0]
    # Only on a disk are there folders to make; S3 would make the bucket.
    options = {"auto_mkdir": True} if scheme in ("file", "local") else {}
    try:
        store, root = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        raise MissingPackageError(
            f"{method} got {url}, and the client of {scheme}:// is not installed. {error}"
        ) from error
    except Exception as error:  # of any client, about the URL or the credentials
        raise ArgumentError(
            f"{method} got {url}, which cannot be opened: {error_text(error)}. Give a path, or a URL such as "
            "gs://bucket/run or s3://bucket/run."
        ) from error
    return BucketDirectory(url.rstrip("/"), store, root.rstrip("/"))


@contextmanager
def _os_errors() -> Iterator[None]:
    """Raises any error of a store's client as an OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(error_line(error)) from error


Directory: TypeAlias = DiskDirectory | BucketDirectory
"""Both have the same methods, which ``DiskDirectory`` documents."""
