"""The manifest of a checkpoint, a JSON file: its leaves, and the digests of all files and arrays."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from distribute_jax import _frames
from distribute_jax._errors import CheckpointDamagedError, CheckpointError
from distribute_jax._messages import listed
from distribute_jax.checkpoint._leaves import (
    ARRAY,
    ITERATOR,
    KEY,
    PYTHON,
    Spec,
    digest_of,
    python_value,
)

MANIFEST = "manifest.json"
ARRAYS = "arrays-"
"""Prefix of the folder with the arrays; a token follows."""
WHOLE, PARTS = "whole-0", "parts-"
"""Below it: the folder that process 0 writes by Orbax; prefix of those that each process writes as bytes."""

_FORMAT = 1
_FOLDER = re.compile(r"[a-z]+-[0-9a-f]+")
"""Names of folders; another name could lead out of the checkpoint."""
_PART = re.compile(r"[0-9]+(_[0-9]+)*")
_MAX_KEY_SIZE = 64
_PACKAGES = ("distribute-jax", "jax", "flax", "orbax-checkpoint", "numpy")


@dataclass(frozen=True)
class Part:
    """A box of a leaf, written by one process."""

    folder: str
    name: str
    start: tuple[int, ...]
    """The index of its first element in the stored array."""
    shape: tuple[int, ...]
    sha256: str

    @property
    def box(self) -> tuple[slice, ...]:
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.shape, strict=True))


@dataclass(frozen=True)
class Record:
    """The entry of one leaf in the manifest."""

    spec: Spec
    sha256: str
    """The digest of the value, or of the digests of the parts; equal for leaves with equal contents."""
    text: Any = None
    """The value as JSON data, if the leaf is not an array."""
    dtype: str = ""
    """The dtype of the stored array; empty without one."""
    shape: tuple[int, ...] = ()
    """The shape of the stored array; for random keys, of their data."""
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint, with digests by which damage is detected."""

    step: int | None
    """None for a checkpoint that was not saved by a manager."""
    arrays: str
    """The folder with the arrays, beside the manifest."""
    files: Mapping[str, str]
    """The sha256 of every file below that folder."""
    leaves: tuple[Record, ...]
    made_by: Mapping[str, Any]
    """Versions, strategy and number of devices: for people who read it."""


def made_by(devices: int) -> dict[str, Any]:
    """Returns the versions of packages, the strategy of the open scope, and the number of devices."""
    top = _frames.entered()
    return {
        "strategy": None if top is None else type(top.strategy).__name__,
        "replicas": devices,
        "versions": {"python": platform.python_version(), **{p: _version(p) for p in _PACKAGES}},
    }


@functools.cache  # it reads a file
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # imported from its source tree
        return "not installed"


def make_record(spec: Spec, dtype: str, parts: Sequence[Part]) -> Record:
    ordered = tuple(sorted(parts, key=lambda part: part.start))
    # The data of random keys has more dims than the array of keys.
    shape = (*spec.shape, *ordered[0].shape[len(spec.shape) :])
    alone = len(ordered) == 1
    sha256 = ordered[0].sha256 if alone else digest_of([(p.start, p.sha256) for p in ordered])
    return Record(spec, sha256, None, dtype, shape, ordered)


def manifest_text(manifest: Manifest) -> str:
    """Returns the content of the manifest's file, which has a digest of itself."""
    content = {"format": _FORMAT, **asdict(manifest)}
    return json.dumps({"sha256": _digest(content), "content": content}, indent=1)


def _digest(content: Any) -> str:
    plain = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(plain.encode()).hexdigest()


def parse_manifest(folder: object, text: bytes) -> Manifest:
    """Parses the file of a manifest, and compares it with its digest."""
    try:
        whole = json.loads(text)
        content: dict[str, Any] = {**whole["content"]}
        is_intact = whole["sha256"] == _digest(content)
        number = content.pop("format")
    except _PARSE_ERRORS as error:
        raise CheckpointDamagedError(
            f"{folder}/{MANIFEST} cannot be read ({error!r:.80})"
        ) from error
    if not is_intact:
        raise CheckpointDamagedError(
            f"{folder}/{MANIFEST} is not what was written (its sha256 differs)"
        )
    if number != _FORMAT:
        raise CheckpointError(
            f"{folder} has format {number!r}; this release reads {_FORMAT}. Restore it with the release "
            "that saved it."
        )
    try:
        manifest = Manifest(leaves=tuple(map(_record, content.pop("leaves"))), **content)
        _check_names(manifest)
    except _PARSE_ERRORS as error:
        raise CheckpointDamagedError(
            f"{folder}/{MANIFEST} does not describe a checkpoint ({error!r:.120})"
        ) from error
    return manifest


_PARSE_ERRORS = (
    *(ValueError, TypeError, LookupError),
    *(AttributeError, ArithmeticError, RecursionError),
)
"""Errors of parsing JSON that has not the structure of a manifest."""


def _check_names(manifest: Manifest) -> None:
    """Raises for a name that could lead out of the checkpoint."""
    parts = [part for record in manifest.leaves for part in record.parts]
    files = [file.partition("/") for file in manifest.files]
    folders = {manifest.arrays, *(part.folder for part in parts), *(file[0] for file in files)}
    wrong = [name for name in folders if not _FOLDER.fullmatch(name)]
    wrong += [part.name for part in parts if not _PART.fullmatch(part.name)]
    wrong += [file for _, _, file in files if {"", ".", ".."} & {*file.split("/")} or "\0" in file]
    if wrong:
        raise ValueError(f"no checkpoint has the name {wrong[0]!r:.60}")


def _record(saved: Mapping[str, Any]) -> Record:
    spec = Spec(**_with_shapes(saved["spec"]))
    parts = tuple(map(parse_part, saved["parts"]))
    record = Record(**_with_shapes(saved) | {"spec": spec, "parts": parts})
    is_right = _is_consistent_array(record) if record.dtype else _is_consistent_value(record)
    if not is_right:
        raise ValueError(f"the entry of {spec.path} contradicts itself")
    return record


def _is_consistent_array(record: Record) -> bool:
    """True if the parts add up to the shape, which bounds the memory that is allocated."""
    spec, shape = record.spec, record.shape
    inner = shape[len(spec.shape) :]
    if spec.kind == KEY:
        fits = record.dtype == "uint32" and math.prod(inner) <= _MAX_KEY_SIZE
    else:
        fits = spec.kind == ARRAY and record.dtype == spec.dtype and not inner
    boxes = [(*zip(part.start, part.shape, shape, strict=True),) for part in record.parts]
    return (
        fits
        and shape[: len(spec.shape)] == spec.shape
        and all(start + size <= whole for box in boxes for start, size, whole in box)
        and sum(math.prod(part.shape) for part in record.parts) == math.prod(shape)
    )


def _is_consistent_value(record: Record) -> bool:
    """True if the value has the type of the leaf, or the leaf is an iterator."""
    spec = record.spec
    if spec.kind != PYTHON or record.parts:
        return spec.kind == ITERATOR and not record.parts
    return type(python_value(spec, record.text)).__name__ == spec.dtype


def parse_part(saved: Mapping[str, Any]) -> Part:
    return Part(**_with_shapes(saved) | {"start": _sizes(saved["start"])})


def _with_shapes(saved: Mapping[str, Any]) -> dict[str, Any]:
    return {**saved, "shape": _sizes(saved["shape"])}  # JSON has lists


def _sizes(numbers: Sequence[int]) -> tuple[int, ...]:
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{numbers!r:.60} are not sizes")
    return tuple(numbers)


def digests(
    folder: Path, names: Iterable[str] | None = None, largest: int | None = None
) -> dict[str, str]:
    """Returns the sha256 of all files below a folder, or of those named, by their relative paths.

    Files above ``largest`` bytes are not read; their digest is empty.
    """
    paths = sorted(folder.rglob("*")) if names is None else [folder / name for name in names]
    return {
        path.relative_to(folder).as_posix(): _digest_of_file(path, largest)
        for path in paths
        if path.is_file()
    }


def _digest_of_file(path: Path, largest: int | None) -> str:
    if largest is not None and path.stat().st_size > largest:
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_files(folder: object, digests: Mapping[str, str], expected: Mapping[str, str]) -> None:
    """Raises if digests differ, before Orbax reads damaged files: its threads would outlive its error."""
    faults = [
        f"{name}: {'other bytes than were written' if name in digests else 'missing'}"
        for name, digest in expected.items()
        if digests.get(name) != digest
    ]
    if faults:
        raise CheckpointDamagedError(f"{folder} is not what was written:\n{listed(faults)}")
