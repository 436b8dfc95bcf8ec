"""Everything is restored bitwise, into the objects that were passed."""

from __future__ import annotations

import collections
import json
import math
import pickle
import struct
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

import distribute_jax as dj
from distribute_jax.checkpoint import load, save

DTYPES = [
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (4, 8, 16, 32, 64)),
    *("bool", "float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2"),
]


def arrays_of(dtype: str) -> list[np.ndarray]:
    """Arrays of every bit pattern that eight random bytes give, 0-d, empty and transposed ones too."""
    random = np.random.default_rng(0)
    high = {"bool": 2, "int4": 8, "uint4": 16}.get(dtype, 256)
    raw = random.integers(0, high, 24 * np.dtype(dtype).itemsize, np.uint8).view(dtype)
    return [raw, raw.reshape(2, 3, 4).T, raw[0].reshape(()), raw[:0].reshape(0, 3)]


def bits(value: Any) -> Any:
    """Returns bytes, dtype and shape of an array; type and exact value of a Python value."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return ("key", str(jax.random.key_impl(value)), bits(jax.random.key_data(value)))
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        host = np.asarray(value)
        return (host.dtype.name, host.shape, host.tobytes())
    return (type(value), struct.pack("d", value) if isinstance(value, float) else value)


def emptied(tree: Any) -> Any:
    """Returns the tree with other values of the same types."""

    def other(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.split(leaf)[0] if leaf.ndim == 0 else leaf[::-1]
        return (
            leaf * 0
            if isinstance(leaf, jax.Array)
            else type(leaf)()
            if not_array(leaf)
            else blank(leaf)
        )

    return jax.tree.map(other, tree, is_leaf=lambda x: x is None)


def not_array(leaf: Any) -> bool:
    """Returns whether a leaf is a Python value."""
    return not isinstance(leaf, (np.ndarray, np.generic))


def blank(leaf: Any) -> Any:
    """An array of the same kind without the numbers."""
    zeros = np.zeros_like(np.asarray(leaf))
    return zeros if isinstance(leaf, np.ndarray) else zeros[()]


VALUES = {
    "arrays": {dtype: arrays_of(dtype) for dtype in DTYPES},
    "special": np.uint32([0x7FA00001, 0xFFC12345, 0x80000000, 0x7F800000, 1]).view(np.float32),
    "python": [True, 0, -(10**30), 0.1, -0.0, math.inf, math.nan, 1j, "ü/\n\ud800", "", None],
    "scalars": [np.float32(0.1), np.bool_(True)],
    "big endian": np.arange(3.0, dtype=">f4"),
}
NAMES = ["a.b", "a/b", "a", "ü", "", "..", "a b", "0", "x" * 300, "['a']"]


def test_every_value_is_restored_bitwise(tmp_path: Path) -> None:
    """NumPy arrays of every dtype and rank, NaNs with payloads, and Python values, exactly."""
    tree = emptied(VALUES)
    save(tmp_path / "new folder ü" / "all.1", VALUES)
    assert load(tmp_path / "new folder ü" / "all.1", tree) is tree
    flat = lambda t: jax.tree.leaves(t, is_leaf=lambda x: x is None)  # noqa: E731
    assert list(map(bits, flat(tree))) == list(map(bits, flat(VALUES)))
    assert tree["big endian"].dtype == np.dtype(">f4")
    assert type(tree["scalars"][0]) is np.float32


def test_names_that_collide_in_paths_are_kept_apart(tmp_path: Path) -> None:
    """Dots, slashes, unicode and brackets in keys of dicts and of modules."""

    def made(start: int) -> Any:
        numbered = {name: jnp.asarray(start + i) for i, name in enumerate(NAMES)}
        nested = {"a": {"b": jnp.asarray(start + 50)}, "a.b": {"": jnp.asarray(start + 51)}}
        module = nnx.Dict({name: nnx.Param(jnp.asarray(start - i)) for i, name in enumerate(NAMES)})
        return {"plain": numbered, "nested": nested, "module": module, "list": nnx.List([module])}

    tree = made(0)
    save(tmp_path / "c", made(100))
    load(tmp_path / "c", tree)
    assert [int(tree["plain"][name]) for name in NAMES] == list(range(100, 100 + len(NAMES)))
    assert [int(tree["module"][name][...]) for name in NAMES] == list(
        range(100, 100 - len(NAMES), -1)
    )
    assert (int(tree["nested"]["a"]["b"]), int(tree["nested"]["a.b"][""])) == (150, 151)


class Everything(nnx.Module):
    """A module with each kind of state that NNX has."""

    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(seed, dropout=seed + 1)
        self.linear = nnx.Linear(2, 3, rngs=rngs, param_dtype=jnp.bfloat16)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.array = jnp.full(2, seed)
        self.host = np.full(2, seed)
        self.key = jax.random.key(seed, impl="rbg")
        self.nested = nnx.Variable({"a": jnp.full(2, seed), "b": [jnp.full((), seed)]})
        self.own = dj.Variable(float(seed))
        self.tied = self.linear.kernel
        self.size = seed


def test_nnx_objects_are_changed_in_place(tmp_path: Path) -> None:
    """Modules, an optimizer, metrics, streams and single variables, whoever else holds them."""

    def made(seed: int) -> dict[str, Any]:
        model = Everything(seed)
        metrics = nnx.MultiMetric(loss=nnx.metrics.Average(), acc=dj.metrics.Accuracy())
        metrics.update(values=jnp.full(3, seed), logits=jnp.ones((2, 3)), labels=jnp.zeros(2, int))
        objects = {
            "model": model,
            "optimizer": nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param),
            "metrics": metrics,
            "rngs": nnx.Rngs(seed),
            "variable": nnx.Variable(jnp.full((), seed)),
            "state": nnx.state(nnx.Linear(1, 1, rngs=nnx.Rngs(seed))),
        }
        objects["rngs"]()
        return objects

    state = lambda tree: list(map(bits, jax.tree.leaves(tree)))  # noqa: E731
    old, new = made(1), made(2)
    kernel = new["model"].linear.kernel
    objects = list(new.values())
    with dj.CheckpointManager(tmp_path) as manager:
        manager.save(7, old)
        assert manager.restore_latest(new) == 7
    assert state(new) == state(old)
    assert [a is b for a, b in zip(new.values(), objects, strict=True)] == [True] * len(objects)
    assert new["model"].linear.kernel is kernel is new["model"].tied
    assert new["model"].size == 2, "what is not an array belongs to the code"
    assert jax.random.uniform(new["rngs"]()) == jax.random.uniform(old["rngs"]())


class Pair(NamedTuple):
    """A pytree of the user."""

    left: Any
    right: Any


def test_other_entries_of_the_dict_are_replaced_in_it(tmp_path: Path) -> None:
    """A Linen TrainState with optax state, tuples, and a count that became an array meanwhile."""
    linear = linen.Dense(3)

    def made(seed: int) -> dict[str, Any]:
        kernel = jnp.asarray(np.full((2, 3), seed, np.float32))
        params = {"params": {"kernel": kernel, "bias": kernel[0]}}
        state = TrainState.create(apply_fn=linear.apply, params=params, tx=optax.adam(1e-3))
        return {"state": state, "pair": Pair(seed, (None, [np.arange(seed)[:1]])), "step": seed}

    old, new = made(1), made(2)
    fresh = new["state"]
    grads = jax.tree.map(jnp.ones_like, old["state"].params)
    old["state"] = jax.jit(lambda state: state.apply_gradients(grads=grads))(old["state"])
    save(tmp_path / "c", old)
    assert load(tmp_path / "c", new) is new
    assert list(map(bits, jax.tree.leaves(new))) == list(map(bits, jax.tree.leaves(old)))
    assert jax.tree.structure(new["pair"]) == jax.tree.structure(old["pair"])
    assert fresh.step == 0
    assert isinstance(new["state"].step, jax.Array)
    save(tmp_path / "c", made(3))  # the count is a Python number again, the target an array
    load(tmp_path / "c", new)
    assert bits(new["state"].step) == bits(jnp.int32(0))


def test_a_pytree_that_is_not_a_dict_is_returned_by_load_and_refused_by_restore_latest(
    tmp_path: Path,
) -> None:
    """It cannot be changed in place, and doing nothing would lose the training state."""
    save(tmp_path / "1", [np.arange(3), nnx.Variable(jnp.ones(2))])
    variable = nnx.Variable(jnp.zeros(2))
    numbers, same = load(tmp_path / "1", [np.zeros(3, int), variable])
    assert (numbers.tolist(), same, variable[...].tolist()) == ([0, 1, 2], variable, [1, 1])
    with pytest.raises(dj.CheckpointError, match=r'tree = \{"state": state\}'):
        dj.CheckpointManager(tmp_path / "m").restore_latest([np.zeros(3)])


def test_an_ordered_dict_keeps_its_order_and_objects(tmp_path: Path) -> None:
    """Only entries with plain leaves are replaced."""
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    tree = collections.OrderedDict(step=1, nothing={}, model=model, mixed=[model, 2.0])
    save(tmp_path / "1", tree)
    tree.update(step=5)
    load(tmp_path / "1", tree)
    assert list(tree) == ["step", "nothing", "model", "mixed"]
    assert tree["model"] is model is tree["mixed"][0]
    assert tree["step"] == 1


NOT_SAVED: dict[str, tuple[Any, str]] = {
    "a function": ({"f": len}, r"\['f'\]: a builtins.builtin_function_or_method"),
    "text arrays": ({"t": np.array(["a"])}, r"\['t'\]: a NumPy array of dtype <U1"),
    "masked arrays": ({"m": np.ma.array([1.0], mask=[1])}, r"\['m'\]: a masked array"),
    "objects": ({"o": [np.array([None])]}, r"\['o'\]\[0\]: a NumPy array of dtype object"),
    "a subclass of int": ({"n": collections.Counter}, r"\['n'\]: a builtins.type"),
    "dates": ({"d": np.datetime64("2020-01-01")}, r"\['d'\]: a NumPy array of dtype datetime64"),
    "mixed keys": ({"d": {1: 2, "a": 3}}, r"must be of one type that sorts"),
}


@pytest.mark.parametrize("case", NOT_SAVED)
def test_what_cannot_be_saved_is_listed_with_its_path(case: str, tmp_path: Path) -> None:
    """Also under on_error="warn": it is not a fault of the disk. Nothing is written."""
    tree, message = NOT_SAVED[case]
    manager = dj.CheckpointManager(tmp_path, on_error="warn")
    with pytest.raises(dj.CheckpointError, match=message):
        manager.save(1, {"fine": 1, **tree})
    assert list(tmp_path.iterdir()) == []


def test_per_replica_values_and_donated_arrays_are_refused(
    s2: dj.MirroredStrategy, tmp_path: Path
) -> None:
    """The first have several values, the second none."""
    each = s2.run(lambda: dj.get_replica_context().replica_id_in_sync_group * jnp.ones(2))
    with pytest.raises(dj.CheckpointError, match=r"\['each'\]: .*PerReplica"):
        save(tmp_path / "c", {"each": each})
    gone = jnp.ones(2)
    gone.delete()
    with pytest.raises(dj.DonatedError, match=r"\['gone'\]"):
        save(tmp_path / "c", {"gone": gone})


def test_saving_inside_run_or_jit_is_refused(tmp_path: Path) -> None:
    """There the values are traced."""
    one = dj.OneDeviceStrategy("cpu:0")
    for call in (
        lambda: save(tmp_path / "c", {"x": 1}),
        lambda: load(tmp_path / "c", {"x": 1}),
        lambda: dj.CheckpointManager(tmp_path).save(1, {"x": 1}),
        lambda: dj.CheckpointManager(tmp_path).restore_latest({"x": 1}),
    ):
        with pytest.raises(dj.ContextError, match="inside a function given to"):
            one.run(call)
        with pytest.raises(dj.ContextError, match="JAX is tracing"):
            jax.jit(call)()
    assert not (tmp_path / "c").exists()


def test_the_manifest_says_what_the_checkpoint_holds(
    s4: dj.MirroredStrategy, tmp_path: Path
) -> None:
    """Paths, dtypes, shapes and digests for people and other programs."""
    with s4.scope():
        save(tmp_path / "c", {"w": jnp.ones((2, 3), jnp.bfloat16)})
    content = json.loads((tmp_path / "c" / "manifest.json").read_text())["content"]
    (leaf,) = content["leaves"]
    assert leaf["spec"]["path"] == "['w']"
    assert (leaf["dtype"], leaf["shape"], len(leaf["sha256"])) == ("bfloat16", [2, 3], 64)
    assert content["made_by"]["strategy"] == "MirroredStrategy"
    assert content["made_by"]["replicas"] == 4
    assert content["made_by"]["versions"]["jax"] == jax.__version__


def test_nothing_is_pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a checkpoint must not run code from it."""

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("pickled")

    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refused)
    tree = {"model": nnx.Linear(1, 1, rngs=nnx.Rngs(0)), "x": np.ones(2), "text": "a"}
    save(tmp_path / "c", tree)
    assert load(tmp_path / "c", {**tree, "text": "b"})["text"] == "a"
