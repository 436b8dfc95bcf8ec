"""Checkpoints in an object store: the manifest, which is put last and removed first, makes one count."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from distribute_jax._errors import CheckpointDamagedError, CheckpointError
from distribute_jax.checkpoint import _disk
from distribute_jax.checkpoint._bucket import Bucket
from distribute_jax.checkpoint._names import ARRAYS, DAMAGED, MANIFEST, check_files, is_step

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
