"""Checkpoints in an object store, through fsspec: the manifest, written last, makes one complete."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distribute_jax._errors import (
    ArgumentError,
    CheckpointDamagedError,
    CheckpointError,
    MissingPackageError,
)
from distribute_jax._messages import error_text
from distribute_jax.checkpoint import _disk
from distribute_jax.checkpoint._manifest import ARRAYS, DAMAGED, MANIFEST, check_files, is_step

_ASIDE = f"{DAMAGED}.json"
"""What the manifest of a damaged step is called; there is no renaming of a whole folder."""


@dataclass(frozen=True)
class BucketDraft:
    """See ``Draft``: objects below the name of the checkpoint, where no manifest names them yet."""

    bucket: Bucket
    name: str
    arrays: str

    def write(self, folder: str, fill: Callable[[Path], None]) -> dict[str, str]:
        """See ``Draft``; the files lie on this machine's disk until they are put."""
        with tempfile.TemporaryDirectory(prefix="distribute_jax-") as here:
            local = Path(here) / folder
            fill(local)
            found = _disk.digests(local)
            for file in found:
                self.bucket.put_file(f"{self.name}/{self.arrays}/{folder}/{file}", local / file)
        return {f"{folder}/{file}": digest for file, digest in found.items()}

    def hand_in(self, process: int, text: str) -> None:
        """See ``Draft``."""
        self.bucket.put(self._part(process), text.encode())

    def handed_in(self, process: int) -> bytes:
        """See ``Draft``."""
        content = self.bucket.get(self._part(process))
        self.bucket.remove(self._part(process))
        return content

    def _part(self, process: int) -> str:
        return f"{self.name}/{self.arrays}/{process}.part"

    def commit(self, manifest: str) -> None:
        """See ``Draft``: one object is put, which a store does whole or not at all."""
        self.bucket.put(f"{self.name}/{MANIFEST}", manifest.encode())
        for file in self.bucket.names(self.name):
            if file.startswith(ARRAYS) and not file.startswith(f"{self.arrays}/"):
                self.bucket.remove(f"{self.name}/{file}")


@dataclass(frozen=True)
class BucketDirectory:
    """See ``Directory``."""

    bucket: Bucket

    def __str__(self) -> str:
        """Gives its URL."""
        return self.bucket.url

    @property
    def place(self) -> str:
        """See ``Directory``."""
        return self.bucket.url

    def path_of(self, name: str) -> str:
        """See ``Directory``."""
        return f"{self.bucket.url}/{name}"

    def names(self) -> list[str]:
        """See ``Directory``."""
        return self._with(MANIFEST)

    def _with(self, file: str) -> list[str]:
        """Gives the names that have a certain object."""
        found = (name.split("/") for name in self.bucket.names())
        return [parts[0] for parts in found if parts[1:] == [file]]

    def holds(self, name: str) -> bool:
        """See ``Directory``."""
        return MANIFEST in self.bucket.names(name)

    def check_free(self, name: str, *, overwrite: bool) -> None:
        """See ``Directory``."""
        if not overwrite and self.holds(name):
            raise CheckpointError(
                f"{self.path_of(name)} exists. Save to another URL, or with overwrite=True."
            )

    def prepare(self, name: str) -> None:
        """See ``Directory``: there is nothing to make, and what is left over goes with its step."""

    @contextmanager
    def draft(self, name: str, token: str) -> Iterator[BucketDraft]:
        """See ``Directory``."""
        draft = self.joined(name, token)
        try:
            yield draft
        except BaseException:
            self.bucket.remove_all(f"{name}/{draft.arrays}")
            raise

    def joined(self, name: str, token: str) -> BucketDraft:
        """See ``Directory``."""
        return BucketDraft(self.bucket, name, ARRAYS + token)

    def read(self, name: str, file: str) -> bytes:
        """See ``Directory``."""
        return self.bucket.get(f"{name}/{file}")

    @contextmanager
    def arrays(self, name: str, folder: str, files: Mapping[str, str]) -> Iterator[Path]:
        """See ``Directory``: the files are copied to this machine's disk."""
        with tempfile.TemporaryDirectory(prefix="distribute_jax-") as here:
            for file in files:
                local = Path(here) / file
                if not local.resolve().is_relative_to(Path(here).resolve()):
                    raise CheckpointDamagedError(f"{self.path_of(name)} names the file {file!r}")
                local.parent.mkdir(parents=True, exist_ok=True)
                try:
                    self.bucket.get_file(f"{name}/{folder}/{file}", local)
                except FileNotFoundError:
                    local.unlink(missing_ok=True)  # which the comparison says
            found = _disk.digests(Path(here))
            check_files(f"{self.path_of(name)}/{folder}", found, files)
            yield Path(here)

    def remove(self, name: str) -> None:
        """See ``Directory``: from the manifest's removal on, there is no such checkpoint."""
        self.bucket.remove(f"{name}/{MANIFEST}")
        self.bucket.remove_all(name)

    def set_aside(self, name: str) -> str | None:
        """See ``Directory``: its manifest gets another name."""
        try:
            content = self.bucket.get(f"{name}/{MANIFEST}")
            self.bucket.put(f"{name}/{_ASIDE}", content)
            self.bucket.remove(f"{name}/{MANIFEST}")
        except OSError:
            return None
        return f"{name}/{_ASIDE}"

    def were_set_aside(self) -> list[str]:
        """See ``Directory``."""
        return sorted(f"{name}/{_ASIDE}" for name in self._with(_ASIDE) if is_step(name))

    def free_bytes(self) -> None:
        """See ``Directory``: a store does not say."""

    def write_probe(self, name: str, text: str) -> None:
        """See ``Directory``."""
        self.bucket.put(name, text.encode())

    def read_probe(self, name: str) -> str | None:
        """See ``Directory``."""
        try:
            return self.bucket.get(name).decode(errors="replace")
        except OSError:
            return None

    def remove_probe(self, name: str) -> None:
        """See ``Directory``."""
        self.bucket.remove(name)


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
