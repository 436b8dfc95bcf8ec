"""Stores checkpoints in an object store, by fsspec; a checkpoint is complete once its manifest is written."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distribute_jax._errors import ArgumentError, CheckpointError, MissingPackageError
from distribute_jax._messages import error_text
from distribute_jax.checkpoint import _disk
from distribute_jax.checkpoint._manifest import ARRAYS, DAMAGED, MANIFEST, check_files, is_step_name

_ASIDE = f"{DAMAGED}.json"
"""The new name of a damaged step's manifest, since a store cannot rename a folder."""


@dataclass(frozen=True)
class BucketDirectory:
    """A prefix in an object store, below which each checkpoint has a prefix; see ``DiskDirectory``."""

    place: str
    """The URL, such as ``gs://bucket/run``."""
    store: Any
    """fsspec's file system."""
    root: str
    """The prefix without the scheme, as the file system expects it."""

    def __str__(self) -> str:
        return self.place

    def path_of(self, name: str) -> str:
        return f"{self.place}/{name}"

    def names(self) -> list[str]:
        return self._names_with(MANIFEST)

    def _names_with(self, file: str) -> list[str]:
        paths = (name.split("/") for name in self.files())
        return [parts[0] for parts in paths if parts[1:] == [file]]

    def holds(self, name: str) -> bool:
        return MANIFEST in self.files(name)

    def check_free(self, name: str, *, overwrite: bool) -> None:
        if not overwrite and self.holds(name):
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
            self._remove_all(self.notes_folder(name, token))
            raise

    def notes_folder(self, name: str, token: str) -> str:
        return f"{name}/{ARRAYS}{token}"

    def write_arrays(
        self, name: str, token: str, folder: str, fill: Callable[[Path], None]
    ) -> dict[str, str]:
        """Writes the files to a temporary folder of this machine, and uploads them."""
        with tempfile.TemporaryDirectory(prefix="distribute_jax-") as temporary:
            local = Path(temporary) / folder
            fill(local)
            files = _disk.digests(local)
            for file in files:
                path = self._path(f"{self.notes_folder(name, token)}/{folder}/{file}")
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
            check_files(
                f"{self.path_of(name)}/{folder}", _disk.digests(root, files, largest), files
            )
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
        raise OSError(f"{type(error).__name__}: {error_text(error)}") from error
