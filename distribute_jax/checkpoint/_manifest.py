"""The manifest of a checkpoint, written last: its files, their names and their digests."""

from __future__ import annotations

import hashlib
import json
import math
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
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
"""How the name of a folder with arrays begins; a token follows."""
WHOLE, PARTS = "whole-0", "parts-"
"""Below it: what process 0 writes by Orbax, and how the name begins of what each writes as bytes."""
DAMAGED = "damaged"
"""What is added to the name of what was set aside."""

_FORMAT = 1
_FOLDER = re.compile(r"[a-z]+-[0-9a-f]+")
"""What folders are called; anything else could lead out of the checkpoint."""
_PART = re.compile(r"[0-9]+(_[0-9]+)*")
"""What parts are called."""
_MOST_NUMBERS_OF_A_KEY = 64
_PACKAGES = ("distribute-jax", "jax", "flax", "orbax-checkpoint", "numpy")


@dataclass(frozen=True)
class Part:
    """A box of a leaf, which one process wrote."""

    folder: str
    """Where it is, below the folder with the arrays."""
    name: str
    start: tuple[int, ...]
    """Where the box begins in the stored numbers of the leaf."""
    shape: tuple[int, ...]
    sha256: str
    """A digest of its numbers."""

    @property
    def box(self) -> tuple[slice, ...]:
        """The slices of the leaf that it is."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.shape, strict=True))


@dataclass(frozen=True)
class Record:
    """What the manifest says of one leaf."""

    spec: Spec
    sha256: str
    """A digest of the text or of the digests of the parts; equal where two leaves hold the same."""
    text: Any = None
    """The value itself, where the leaf is not an array."""
    dtype: str = ""
    """The dtype of the stored numbers; empty where there are none."""
    shape: tuple[int, ...] = ()
    """The shape of the stored numbers: of a random key, that of its data."""
    parts: tuple[Part, ...] = ()
    """The boxes that its numbers were written in."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds, and how to tell that it is all there."""

    step: int | None
    """The step, or None for a checkpoint that a manager has not saved."""
    arrays: str
    """The folder with the arrays, beside the manifest."""
    files: Mapping[str, str]
    """The sha256 of every file below that folder."""
    leaves: tuple[Record, ...]
    made_by: Mapping[str, Any]
    """Versions, open scope and number of replicas: for people, nothing depends on them."""


def made_by(devices: int) -> dict[str, Any]:
    """Returns what is saving: versions of packages, the open scope, and over how many devices."""
    top = _frames.entered()
    return {
        "strategy": None if top is None else type(top.strategy).__name__,
        "replicas": devices,
        "versions": {"python": platform.python_version(), **{p: _version(p) for p in _PACKAGES}},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # used from its source tree
        return "not installed"


def record_of(spec: Spec, dtype: str, parts: Sequence[Part]) -> Record:
    """Returns the entry of a leaf from its parts."""
    ordered = tuple(sorted(parts, key=lambda part: part.start))
    # Of a random key, the dims behind its own are those of the data of each.
    shape = (*spec.shape, *ordered[0].shape[len(spec.shape) :])
    alone = len(ordered) == 1
    sha256 = ordered[0].sha256 if alone else digest_of([(p.start, p.sha256) for p in ordered])
    return Record(spec, sha256, None, dtype, shape, ordered)


def text_of(manifest: Manifest) -> str:
    """Returns the text of the file, with a digest of itself."""
    content = {"format": _FORMAT, **asdict(manifest)}
    return json.dumps({"sha256": _digest(content), "content": content}, indent=1)


def _digest(content: Any) -> str:
    plain = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(plain.encode()).hexdigest()


def manifest_in(folder: object, text: bytes) -> Manifest:
    """Reads the text of a manifest and checks it against its digest."""
    try:
        whole = json.loads(text)
        content: dict[str, Any] = {**whole["content"]}
        is_intact = whole["sha256"] == _digest(content)
        number = content.pop("format")
    except _NOT_A_MANIFEST as error:
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
    except _NOT_A_MANIFEST as error:
        raise CheckpointDamagedError(
            f"{folder}/{MANIFEST} does not describe a checkpoint ({error!r:.120})"
        ) from error
    return manifest


_NOT_A_MANIFEST = (
    *(ValueError, TypeError, LookupError),
    *(AttributeError, ArithmeticError, RecursionError),
)
"""What goes wrong where JSON has another structure than a manifest."""


def _check_names(manifest: Manifest) -> None:
    """Raises for a name that no checkpoint has, and that could lead out of it."""
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
    parts = tuple(map(part_in, saved["parts"]))
    record = Record(**_with_shapes(saved) | {"spec": spec, "parts": parts})
    is_right = _holds_numbers(record) if record.dtype else _holds_text(record)
    if not is_right:
        raise ValueError(f"the entry of {spec.path} contradicts itself")
    return record


def _holds_numbers(record: Record) -> bool:
    """Returns whether the parts are those of an array or a key: nothing larger is ever allocated."""
    spec, shape = record.spec, record.shape
    inner = shape[len(spec.shape) :]
    if spec.kind == KEY:
        fits = record.dtype == "uint32" and math.prod(inner) <= _MOST_NUMBERS_OF_A_KEY
    else:
        fits = spec.kind == ARRAY and record.dtype == spec.dtype and not inner
    boxes = [(*zip(part.start, part.shape, shape, strict=True),) for part in record.parts]
    return (
        fits
        and shape[: len(spec.shape)] == spec.shape
        and all(start + size <= whole for box in boxes for start, size, whole in box)
        and sum(math.prod(part.shape) for part in record.parts) == math.prod(shape)
    )


def _holds_text(record: Record) -> bool:
    """Returns whether the text is that of a Python value of the type, or of an iterator."""
    spec = record.spec
    if spec.kind != PYTHON or record.parts:
        return spec.kind == ITERATOR and not record.parts
    return type(python_value(spec, record.text)).__name__ == spec.dtype


def part_in(saved: Mapping[str, Any]) -> Part:
    """Reads the entry of a part."""
    return Part(**_with_shapes(saved) | {"start": _sizes(saved["start"])})


def _with_shapes(saved: Mapping[str, Any]) -> dict[str, Any]:
    return {**saved, "shape": _sizes(saved["shape"])}  # JSON has lists


def _sizes(numbers: Sequence[int]) -> tuple[int, ...]:
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{numbers!r:.60} are not sizes")
    return tuple(numbers)


def is_step(name: str) -> bool:
    """Returns whether a name is that of a step."""
    return name.isascii() and name.isdecimal() and str(int(name)) == name


def check_files(folder: object, digests: Mapping[str, str], expected: Mapping[str, str]) -> None:
    """Raises before Orbax reads bytes that it did not write: its threads would outlive the error."""
    faults = [
        f"{name}: {'other bytes than were written' if name in digests else 'missing'}"
        for name, digest in expected.items()
        if digests.get(name) != digest
    ]
    if faults:
        raise CheckpointDamagedError(f"{folder} is not what was written:\n{listed(faults)}")
