"""An object store, through fsspec: objects are put and got whole, and nothing can be renamed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distribute_jax._errors import ArgumentError, MissingPackageError
from distribute_jax._tree import error_text

_CLIENTS = {
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "s3": "s3fs",
    "s3a": "s3fs",
    "az": "adlfs",
    "abfs": "adlfs",
}
"""The packages through which fsspec reaches a store."""


@dataclass(frozen=True)
class Bucket:
    """A prefix in an object store; names of objects are given from there.

    Every method raises an ``OSError`` where the store refuses, whatever its client raises.
    """

    url: str
    """Such as ``gs://bucket/run``."""
    store: Any
    """fsspec's file system."""
    root: str
    """The prefix, as the file system calls it."""

    def put(self, name: str, data: bytes) -> None:
        """Puts an object, over an older one: others see the old one or the new one, whole."""
        with _asked():
            self._make_folder(name)
            self.store.pipe_file(self._path(name), data)

    def put_file(self, name: str, file: Path) -> None:
        """Puts the content of a file."""
        with _asked():
            self._make_folder(name)
            self.store.put_file(str(file), self._path(name))

    def get(self, name: str) -> bytes:
        """Gives an object.

        Raises:
            FileNotFoundError: there is none.
        """
        with _asked():
            data: bytes = self.store.cat_file(self._path(name))
        return data

    def get_file(self, name: str, file: Path) -> None:
        """Copies an object to a file."""
        with _asked():
            self.store.get_file(self._path(name), str(file))

    def names(self, folder: str = "") -> list[str]:
        """Gives the names of all objects below a folder, from there."""
        with _asked():
            self.store.invalidate_cache()  # other processes put objects too
            try:
                found = self.store.find(self._path(folder))
            except FileNotFoundError:
                return []
        start = len(self._path(folder)) + 1
        return [path[start:] for path in found if path[start:]]

    def remove(self, name: str) -> None:
        """Removes an object, if it is there."""
        with _asked():
            try:
                self.store.rm_file(self._path(name))
            except FileNotFoundError:
                return

    def remove_all(self, folder: str) -> None:
        """Removes every object below a folder."""
        for name in self.names(folder):
            self.remove(f"{folder}/{name}")

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}".rstrip("/")

    def _make_folder(self, name: str) -> None:
        if "file" in self.store.protocol:  # in a store there are none, and S3 would make the bucket
            self.store.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)


def bucket_of(method: str, url: str) -> Bucket:
    """Finds the client of a store.

    Raises:
        ArgumentError: fsspec knows no such store, or it refuses the URL.
        MissingPackageError: the client is not installed.
    """
    import fsspec

    scheme = url.partition("://")[0]
    try:
        store, root = fsspec.core.url_to_fs(url)
    except ImportError as error:
        package = _CLIENTS.get(scheme, "")
        line = f"pip install {package}" if package else f"Its client is missing: {error}"
        raise MissingPackageError(
            f"{method} got {url}, and the client of {scheme}:// is not installed. Install it: {line}"
        ) from error
    except Exception as error:  # what a client says of a URL or of credentials
        raise ArgumentError(
            f"{method} got {url}, which cannot be opened: {error_text(error)}. Give a path, or a URL such as "
            "gs://bucket/run or s3://bucket/run."
        ) from error
    return Bucket(url.rstrip("/"), store, root.rstrip("/"))


@contextmanager
def _asked() -> Iterator[None]:
    """Has what a client raises arrive as what a file system raises."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error_text(error)}") from error
