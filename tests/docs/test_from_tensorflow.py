"""The tables of docs/from_tensorflow.md: every name is there, and takes what they say."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import distribute_jax as dj

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "from_tensorflow.md"
WORDS = {"same", "changed", "absent", "new"}

PUBLIC = [
    "CrossDeviceOps", "DistributedDataset", "DistributedIterator", "DistributedValues",
    "HierarchicalCopyAllReduce", "InputContext", "InputOptions", "InputReplicationMode",
    "MirroredStrategy", "MultiWorkerMirroredStrategy", "NcclAllReduce", "OneDeviceStrategy",
    "ParameterServerStrategy", "ReduceOp", "ReductionToOneDevice", "ReplicaContext",
    "RunOptions", "Server", "Strategy", "TPUStrategy", "cluster_resolver", "coordinator",
    "experimental_set_strategy", "get_replica_context", "get_strategy", "has_strategy",
    "in_cross_replica_context", "experimental.CentralStorageStrategy",
    "experimental.CollectiveHints", "experimental.CommunicationImplementation",
    "experimental.CommunicationOptions", "experimental.MultiWorkerMirroredStrategy",
    "experimental.ParameterServerStrategy", "experimental.PreemptionCheckpointHandler",
    "experimental.PreemptionWatcher", "experimental.TPUStrategy",
    "experimental.TerminationConfig", "experimental.ValueContext", "experimental.coordinator",
    "experimental.partitioners", "experimental.rpc",
]  # fmt: skip
"""What `tf.distribute` and `tf.distribute.experimental` list in TensorFlow 2.21."""


class Row(NamedTuple):
    """One line of a table."""

    theirs: str
    ours: list[str]
    word: str


def rows() -> list[Row]:
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 3 and cells[2] and set(cells[2]) != {"-"}:
            word = re.split(r"\W", cells[2])[0]
            found.append(Row(cells[0], re.findall(r"`dj\.([\w.]+)`", cells[1]), word))
    return found


def named(path: str) -> Any:
    """Returns what a dotted name of the library stands for; a property or field as it is."""
    value: Any = dj
    for part in path.split("."):
        # Modules load some of their names when they are read; a class's properties are not called.
        read = getattr if inspect.ismodule(value) else inspect.getattr_static
        value = read(value, part)
    return value


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.theirs or row.ours[0])
def test_each_row_says_what_is_there(row: Row):
    """The names exist, an absent one has none, and `same` takes the same arguments."""
    assert row.word in WORDS
    assert bool(row.ours) == (row.word != "absent")
    things = [named(path) for path in row.ours]
    arguments = re.search(r"\((.*)\)", row.theirs)
    if row.word == "same" and arguments and arguments[1]:
        known = inspect.signature(things[0]).parameters
        assert [name for name in arguments[1].split(", ") if name not in known] == []


@pytest.mark.parametrize(
    "name",
    [
        name
        for row in rows()
        if row.word == "absent"
        for name in re.findall("`([^`]+)`", row.theirs)
    ],
)
def test_an_absent_name_is_absent_and_answered(name: str):
    """A name that comes leaves its row; whoever types it until then is told what to write."""
    ours = name.removeprefix("tf.")
    assert f"| `dj.{ours}` |" in (DOCS / "absent_names.md").read_text(encoding="utf-8")
    with pytest.raises(AttributeError):
        named(ours)


def test_every_name_of_tensorflow_is_in_a_row():
    """None is forgotten: those of the module, and of what it calls experimental."""
    text = " ".join(row.theirs for row in rows())
    missing = [name for name in PUBLIC if not re.search(rf"`{re.escape(name)}[`(.]", text)]
    assert missing == []


@pytest.mark.parametrize("page", sorted(DOCS.glob("from_*.md")), ids=lambda page: page.name)
def test_names_in_the_text_exist(page: Path):
    """Every `dj.…` of the pages for those who come from elsewhere."""
    for path in set(re.findall(r"\bdj((?:\.\w+)+)", page.read_text(encoding="utf-8"))):
        assert named(path[1:]) is not None, path
