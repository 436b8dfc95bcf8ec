"""A checkpoint that does not fit is refused, with a list of every leaf that differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import distribute_jax as dj
from distribute_jax.checkpoint import load, save

LEFT_OUT = object()


def made(**changes: Any) -> dict[str, Any]:
    """A tree of one leaf of each kind, some of them changed or left out."""
    values = {
        "weight": nnx.Param(jnp.ones((2, 3))),
        "key": jax.random.key(0),
        "raw": jax.random.PRNGKey(0),
        "count": 3,
        "rate": 0.5,
        "text": "a",
        "nothing": None,
        **changes,
    }
    return {name: value for name, value in values.items() if value is not LEFT_OUT}


MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "shape": ({"weight": nnx.Param(jnp.ones((3, 2)))}, "float32[2,3] (saved), got float32[3,2]"),
    "dtype": ({"weight": nnx.Param(jnp.ones((2, 3), jnp.bfloat16))}, "(saved), got bfloat16[2,3]"),
    "missing": ({"weight": LEFT_OUT}, "['weight']: expected float32[2,3] (saved), got nothing"),
    "extra": ({"more": np.ones(2)}, "expected nothing (not in the checkpoint), got float64[2]"),
    "key made raw": ({"key": jax.random.PRNGKey(0)}, "expected random key threefry2x32[] (saved)"),
    "raw made key": ({"raw": jax.random.key(0)}, "expected uint32[2] (saved), got random key"),
    "another generator": ({"key": jax.random.key(0, impl="rbg")}, "(saved), got random key rbg[]"),
    "another type": ({"count": "3"}, "['count']: expected a Python int (saved), got a Python str"),
    "a bool": ({"count": True}, "expected a Python int (saved), got a Python bool"),
    "a float": ({"rate": None}, "expected a Python float (saved), got None"),
    "a float in a narrow array": ({"rate": np.float16(0)}, "a Python float (saved)"),
    "a number in an array": ({"count": np.zeros(1, int)}, "a Python int (saved), got int64[1]"),
    "something else": ({"text": len}, "expected a Python str (saved), got a builtins.builtin"),
    "a nest": ({"count": {"a": 1}}, "['count']['a']: expected nothing"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_a_leaf_that_does_not_fit_is_named_with_both_sides(case: str, tmp_path: Path) -> None:
    """Also by ``restore_latest``, which sets nothing aside; the tree does not change."""
    changes, message = MISFITS[case]
    old = {**made(), "rate": 0.1} if "narrow" in case else made()
    with dj.CheckpointManager(tmp_path) as manager:
        manager.save(1, old)
    tree = made(**changes)
    tree["text"] = "untouched" if tree["text"] == "a" else tree["text"]
    before = [id(leaf) for leaf in tree.values()]
    with pytest.raises(dj.CheckpointError) as caught:
        manager.restore_latest(tree)
    assert message in str(caught.value)
    assert type(caught.value) is dj.CheckpointError
    assert [id(leaf) for leaf in tree.values()] == before
    assert manager.all_steps() == [1]


def test_all_leaves_that_do_not_fit_are_listed_up_to_ten(tmp_path: Path) -> None:
    """A model of other widths: ten lines, and the number of the others."""
    save(tmp_path / "c", {str(i): np.zeros(i) for i in range(30)})
    with pytest.raises(dj.CheckpointError, match="nothing was changed") as caught:
        load(tmp_path / "c", {str(i): np.zeros(i if i < 13 else 50) for i in range(31)})
    assert str(caught.value).count("expected") == 10
    assert "… and 8 more" in str(caught.value)


def test_different_saved_values_for_one_variable_are_refused(tmp_path: Path) -> None:
    """Untied weights do not fit into tied ones; equal ones do."""
    tied = nnx.Param(jnp.zeros(2))
    save(tmp_path / "c", {"a": nnx.Param(jnp.ones(2)), "b": nnx.Param(jnp.zeros(2))})
    with pytest.raises(dj.CheckpointError, match="one variable at both places"):
        load(tmp_path / "c", {"a": tied, "b": tied})
    save(tmp_path / "c", {"a": nnx.Param(jnp.ones(2)), "b": nnx.Param(jnp.ones(2))})
    load(tmp_path / "c", {"a": tied, "b": tied})
    assert tied[...].tolist() == [1, 1]


def test_float64_is_not_restored_as_float32(tmp_path: Path) -> None:
    """An array that was made with x64 enabled, restored without it."""
    with jax.enable_x64(True):
        tree = {"x": jnp.asarray(0.1, jnp.float64)}
    save(tmp_path / "c", tree)
    before = tree["x"]
    with pytest.raises(dj.CheckpointError, match="jax_enable_x64"):
        load(tmp_path / "c", tree)
    assert tree["x"] is before
    with jax.enable_x64(True):
        load(tmp_path / "c", tree)
    assert tree["x"].dtype == np.float64


def iterator_of(rows: int, batch: int = 2) -> Any:
    """A pass over some numbers."""
    source = dj.data.from_arrays(np.arange(float(rows))).batch(batch)
    return iter(dj.OneDeviceStrategy("cpu:0").distribute_dataset(source))


def test_an_iterator_of_other_data_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    """Weights, and also an iterator that was restored before the one that refuses."""
    old = {"a": iterator_of(8), "b": iterator_of(8), "w": nnx.Param(jnp.ones(2))}
    for _ in range(3):
        next(old["a"])
    save(tmp_path / "c", old)
    new = {"a": iterator_of(8), "b": iterator_of(8, 4), "w": nnx.Param(jnp.zeros(2))}
    next(new["a"])
    with pytest.raises(
        dj.CheckpointError, match=r"(?s)\['b'\]: iterator.restore got .*Nothing was"
    ):
        load(tmp_path / "c", new)
    assert new["w"][...].tolist() == [0, 0]
    [batch] = dj.get_strategy().experimental_local_results(next(new["a"]))
    assert np.asarray(batch).tolist() == [2, 3]


def test_a_checkpoint_of_a_later_format_is_not_damaged(tmp_path: Path) -> None:
    """The error says which release can read it, and it is not set aside."""
    from distribute_jax.checkpoint import _manifest

    manager = dj.CheckpointManager(tmp_path)
    tree = {"x": 1}
    later = pytest.MonkeyPatch()
    later.setattr(_manifest, "_FORMAT", 2)
    manager.save(1, tree)
    manager.wait()
    later.undo()
    with pytest.raises(dj.CheckpointError, match="has format 2; this release reads 1"):
        manager.restore_latest(tree)
    assert (tmp_path / "1").is_dir()


def test_missing_steps_and_folders_are_errors(tmp_path: Path) -> None:
    """The error of ``restore`` lists the existing steps; that of ``load`` names the folder."""
    manager = dj.CheckpointManager(tmp_path / "none")
    assert manager.restore_latest({}) is None
    assert manager.latest_step() is None
    assert not (tmp_path / "none").exists()
    manager.save(3, {"x": 1})
    with pytest.raises(dj.CheckpointError, match=r"There is no step 4 in .*There are \[3\]"):
        manager.restore(4, {"x": 1})
    with pytest.raises(dj.CheckpointError, match="There is no checkpoint at"):
        load(tmp_path / "other", {"x": 1})
    with pytest.raises(dj.ArgumentTypeError, match="save: path must be a path; got"):
        dj.checkpoint.save({"x": 1}, tmp_path / "other")
