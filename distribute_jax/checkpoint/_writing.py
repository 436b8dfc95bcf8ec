"""Writes a checkpoint: each process its arrays, and the chief a manifest, which makes it complete."""

from __future__ import annotations

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

from distribute_jax._errors import CheckpointError, CheckpointFileError
from distribute_jax._tree import error_text
from distribute_jax.checkpoint._arrays import write_arrays, write_bytes
from distribute_jax.checkpoint._content import Content, Piece
from distribute_jax.checkpoint._directory import Directory, Draft
from distribute_jax.checkpoint._leaf import digest_of
from distribute_jax.checkpoint._manifest import (
    Manifest,
    Part,
    part_in,
    record_of,
    record_of_text,
    text_of,
)
from distribute_jax.checkpoint._names import PARTS, WHOLE
from distribute_jax.checkpoint._relay import SEEN_SECONDS, Relay


def write_checkpoint(
    directory: Directory, name: str, content: Content, prepare: Callable[[], None]
) -> None:
    """Writes a checkpoint so that at every moment the old one or the new one is there, whole.

    All processes of a job call it, in a thread beside the training: each writes its pieces, and the chief
    commits when all have.

    Args:
        directory: where.
        name: of the checkpoint.
        content: what this process writes.
        prepare: called before, by the process that commits.

    Raises:
        CheckpointFileError: the file system refuses, on this process or, for the chief, on another one;
            what was there is as it was.
    """
    relay = Relay(content.token)
    with _explained(directory, name, content):
        if relay.process != 0:
            _help(directory, name, content, relay)
            return
        with relay.led():
            prepare()
            with directory.draft(name, content.token) as draft:
                relay.open()
                _lead(draft, directory.path_of(name), content, relay)


def _lead(draft: Draft, where: str, content: Content, relay: Relay) -> None:
    try:
        handed = [_written(draft, content, 0)]
    except Exception:
        relay.await_others()  # they write into the folder that goes now
        raise
    for process, sha256 in relay.collected(where).items():
        handed.append(_handed_in(draft, process, sha256, relay, where))
    draft.commit(text_of(_manifest(draft.arrays, content, handed)))


def _help(directory: Directory, name: str, content: Content, relay: Relay) -> None:
    if not relay.is_open():
        return
    try:
        with _explained(directory, name, content):
            draft = directory.joined(name, content.token)
            text = json.dumps(_written(draft, content, relay.process))
            draft.hand_in(relay.process, text)
    except Exception as error:
        relay.failed(error)
        raise
    relay.done(hashlib.sha256(text.encode()).hexdigest())


@contextmanager
def _explained(directory: Directory, name: str, content: Content) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        free = directory.free_bytes()
        left = "" if free is None else f", and {free} are free there"
        raise CheckpointFileError(
            f"The checkpoint {directory.path_of(name)} could not be written: {_reason(error)}\nIt needs "
            f"{content.bytes} bytes{left}. Nothing of it was left behind, and older checkpoints are as they "
            "were. Make room, or save to another directory."
        ) from error


def _reason(error: Exception) -> str:
    """Gives the kind of an error and the end of its text, where Orbax says what the system said."""
    text = error_text(error)
    return f"{type(error).__name__}: {text if len(text) < 300 else '… ' + text[-200:]}"


def _written(draft: Draft, content: Content, process: int) -> dict[str, Any]:
    """Writes what a process has, and gives what the chief has to know of it, plain data."""
    by_orbax = [piece for piece in content.pieces if piece.is_whole and process == 0]
    rest = [piece for piece in content.pieces if not (piece.is_whole and process == 0)]
    files: dict[str, str] = {}
    parts: list[Any] = []
    for folder, pieces, fill in (
        (WHOLE, by_orbax, write_arrays),
        (f"{PARTS}{process}", rest, write_bytes),
    ):
        named = {_name_of(piece): piece.data for piece in pieces if piece.data.size}
        if named:
            files |= draft.write(folder, partial(fill, named=named))
        parts += [[p.leaf, p.data.dtype.name, asdict(_part_of(p, folder))] for p in pieces]
    return {"files": files, "parts": parts}


def _name_of(piece: Piece) -> str:
    return "_".join(map(str, [piece.leaf] if piece.is_whole else [piece.leaf, *piece.start]))


def _part_of(piece: Piece, folder: str) -> Part:
    sha256 = digest_of(piece.data)
    return Part(folder, _name_of(piece), piece.start, piece.data.shape, sha256)


def _handed_in(draft: Draft, process: int, sha256: str, relay: Relay, where: str) -> dict[str, Any]:
    """Reads what another process has handed in, once this host sees it."""
    deadline = time.monotonic() + SEEN_SECONDS
    while True:
        try:
            text = draft.handed_in(process)
        except FileNotFoundError:
            text = b""
        if hashlib.sha256(text).hexdigest() == sha256:
            handed: dict[str, Any] = json.loads(text)
            return handed
        if time.monotonic() > deadline:
            raise CheckpointFileError(
                f"The checkpoint {where} could not be written: {relay.name_of(process)} has written its "
                f"part, which {relay.name_of(0)} does not find. Give all processes a directory that all of "
                "them see."
            )
        time.sleep(0.05)


def _manifest(arrays: str, content: Content, handed: Sequence[Mapping[str, Any]]) -> Manifest:
    parts: dict[int, list[Part]] = defaultdict(list)
    dtypes: dict[int, str] = {}
    for leaf, dtype, part in (entry for one in handed for entry in one["parts"]):
        parts[leaf].append(part_in(part))
        dtypes[leaf] = dtype
    leaves = [
        record_of(spec, dtypes[i], parts[i])
        if i in parts
        else record_of_text(spec, content.texts[i])
        for i, spec in enumerate(content.specs)
    ]
    files = {name: digest for one in handed for name, digest in one["files"].items()}
    return Manifest(content.step, arrays, files, tuple(leaves), content.made_by)
