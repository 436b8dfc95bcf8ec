"""What a step captures: inputs, values that are compared, values that are read once, and what is refused.

The table is in docs/captured.md.
"""

from __future__ import annotations

import argparse
import array
import contextvars
import dataclasses
import functools
import operator
import threading
import types
import weakref
from collections import ChainMap, UserDict, UserString, deque
from collections.abc import Callable
from functools import partial, partialmethod
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import long
from flax import nnx

import distribute_jax as dj

Way = tuple[Callable[[], Any], Callable[[Any], None]]


def captured(held: Any, owner: Any = None) -> Way:
    """The attribute of what a closure captures, or of an owner that it comes from."""
    return lambda: held.rate, partial(setattr, owner or held, "rate")


def _class_method() -> Way:
    class Config:
        rate: Any = 1.0

        @classmethod
        def get(cls) -> Any:
            return cls.rate

    return lambda: Config.get(), lambda new: setattr(Config, "rate", new)


def _replaced_method() -> Way:
    class Config:
        def get(self) -> Any:
            return 1.0

    held = Config()
    return lambda: held.get(), lambda new: setattr(Config, "get", lambda self: new)


def _set() -> Way:
    held = {1.0}

    return lambda: sum(held), lambda new: (held.clear(), held.add(new))[1]


def _function_attribute() -> Way:
    def helper() -> Any:
        return helper.rate  # type: ignore[attr-defined]

    helper.rate = 1.0  # type: ignore[attr-defined]
    return helper, lambda new: setattr(helper, "rate", new)


class Decorated:
    """A decorator that is a class, and names what it wraps."""

    def __init__(self, function: Callable[[], Any]) -> None:
        functools.update_wrapper(self, function)
        self.rate: Any = 1.0

    def __call__(self) -> Any:
        return self.rate


class Plain:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class Forwarding:
    """Looks its attributes and items up elsewhere."""

    def __init__(self) -> None:
        self._store = {"rate": 1.0}

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["_store"][name]

    def __getitem__(self, name: str) -> Any:
        return self._store[name]


class Single(type):
    """A class of classes with one object each."""

    objects: dict[type, Any] = {}  # noqa: RUF012

    def __call__(cls) -> Any:
        if cls not in Single.objects:
            Single.objects[cls] = super().__call__()
        return Single.objects[cls]


def _single_object() -> Way:
    class Config(metaclass=Single):
        rate: Any = 1.0

    return lambda: Config().rate, lambda new: setattr(Config(), "rate", new)


def _replaced_dict() -> Way:
    held = Plain(rate=1.0)
    return lambda: held.rate, lambda new: setattr(held, "__dict__", {"rate": new})


def _replaced_class() -> Way:
    held = Plain()
    made = partial(type, "Other", (Plain,))
    return lambda: held.rate, lambda new: setattr(held, "__class__", made({"rate": new}))


def _argument_of_a_partial() -> Way:
    held = functools.partial(lambda rate: rate, 1.0)

    return held, lambda new: held.__setstate__((held.func, (new,), {}, None))  # type: ignore[attr-defined]


def _default() -> Way:
    def read(rate: Any = 1.0) -> Any:
        return rate

    return read, lambda new: setattr(read, "__defaults__", (new,))


def _read_only_view() -> Way:
    below = {"rate": 1.0}
    held = types.MappingProxyType(below)
    return lambda: held["rate"], lambda new: below.update(rate=new)


def _function_made_by_exec() -> Way:
    scope: dict[str, Any] = {"rate": 1.0}
    exec("def read(): return rate", scope)
    return scope["read"], partial(scope.__setitem__, "rate")


class Rated:
    rate = 1.0

    def _times(self, factor: float) -> float:
        return factor * self.rate

    once = functools.partialmethod(_times, 1.0)
    by_class = functools.singledispatchmethod(_times)


@functools.singledispatch
def rate_by_class(held: Any) -> float:
    return 0.0


rate_by_class.register(Rated, lambda held: held.rate)
vars(Rated)["by_class"].register(float, lambda self, factor: factor * self.rate)


class Renaming:
    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, "_" + name if name == "rate" else name)


def rate_of(held: Any, read: Callable[[Any], Any], owner: Any = None) -> Way:
    return partial(read, held), partial(setattr, owner or held, "rate")


def item_of(held: Any, read: Callable[[Any], Any], owner: Any = None) -> Way:
    return partial(read, held), partial((owner or held).__setitem__, "rate")


WAYS: dict[str, Callable[[], Way]] = {
    "class attribute": lambda: captured(type("Config", (), {})),
    "class attribute of the base": lambda: captured(
        type("Config", (base := type("Base", (), {}),), {}), base
    ),
    "class attribute of an object": lambda: captured(type("Config", (), {"rate": 1.0})()),
    "slots": lambda: captured(dataclasses.make_dataclass("Config", ["rate"], slots=True)(1.0)),
    "namespace": lambda: rate_of(argparse.Namespace(), lambda held: held.rate),
    "written name": lambda: rate_of(Plain(), lambda held: getattr(held, "rate")),  # noqa: B009
    "computed name": lambda: rate_of(Plain(), lambda held: getattr(held, "RATE".lower())),
    "all attributes": lambda: rate_of(Plain(), lambda held: sum(vars(held).values())),
    "partial of an object": lambda: rate_of(Plain(), partial(lambda held: held.rate)),
    "renamed by its class": lambda: (
        partial(lambda held: held.rate, at := Renaming()),
        partial(setattr, at, "_rate"),
    ),
    "user dict": lambda: item_of(UserDict(), lambda held: held["rate"]),
    "forwarded attribute": lambda: item_of(
        made := Forwarding(), lambda held: held.rate, made._store
    ),
    "forwarded item": lambda: item_of(made := Forwarding(), lambda held: held["rate"], made._store),
    "chain map": lambda: item_of(ChainMap({}, at := {"rate": 1.0}), lambda held: held["rate"], at),
    "nested": lambda: rate_of(
        Plain(a=(at := types.SimpleNamespace())), lambda held: held.a.rate, at
    ),
    "decorator of a class": lambda: rate_of(Decorated(lambda: None), lambda held: held()),
} | {
    name.removeprefix("_").replace("_", " "): make
    for name, make in list(globals().items())
    if name.startswith("_") and isinstance(make, types.FunctionType)
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["number", "array", long("large array")])
def test_a_changed_value_is_never_stale(s2: dj.MirroredStrategy, way: str, kind: str):
    """A number or array in anything that run follows is read again after it changed."""
    make: dict[str, Callable[[float], Any]] = {
        "number": lambda x: x,
        "array": jnp.float32,
        "large array": lambda x: np.full(20_000, x, np.float32),
    }
    if way == "set":
        kind = "number"  # arrays are not hashable
    read, change = WAYS[way]()
    change(make[kind](2.0))

    def step() -> jax.Array:
        return jnp.max(jnp.asarray(read(), jnp.float32))

    assert float(s2.run(step)) == 2.0
    change(make[kind](3.0))
    assert float(s2.run(step)) == 3.0
    change(make[kind](2.0))
    assert float(s2.run(step)) == 2.0


@pytest.mark.parametrize("way", ["namespace", "class attribute", "slots"])
def test_an_array_that_changes_does_not_recompile(s2: dj.MirroredStrategy, way: str):
    """A new array in place of the old one is an input of the same program."""
    read, change = WAYS[way]()
    traces = []
    change(jnp.float32(1.0))

    def step() -> jax.Array:
        traces.append(1)
        return read() * 2

    for value in (1.0, 2.0, 3.0):
        change(jnp.float32(value))
        assert float(s2.run(step)) == 2 * value
    assert len(traces) <= 2  # the list of traces is itself captured, and changed once


def test_an_argument_of_a_partial_is_an_input_even_where_python_reads_it(s2: dj.MirroredStrategy):
    """A step that needs the value of an array in a partial is refused, rather than stale."""

    def step(scale: jax.Array) -> jax.Array:
        return jnp.float32(float(scale))

    with pytest.raises(dj.TracedValueError, match=r"(?s)needs the value.*jax\.debug\.print\("):
        s2.run(functools.partial(step, scale=jnp.float32(2.0)))


def test_a_loop_without_a_derivative_keeps_the_error_of_jax(s2: dj.MirroredStrategy):
    """It names a static start and stop, as the error of a slice does, but needs no value."""

    def loss(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda x: x < 5, lambda x: 2 * x, x)

    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work") as caught:
        s2.run(jax.grad(loss), args=(jnp.float32(1.0),))
    assert not isinstance(caught.value, dj.DistributeError)


def test_zero_and_minus_zero_are_two_programs(s2: dj.MirroredStrategy):
    """A captured 0.0 that becomes -0.0 is seen, though the two are equal."""
    held = Plain(zero=0.0)

    def step() -> jax.Array:
        return 1.0 / jnp.float32(held.zero)

    assert float(s2.run(step)) == float("inf")
    held.zero = -0.0
    assert float(s2.run(step)) == float("-inf")


def test_another_promotion_rule_is_another_program(s2: dj.MirroredStrategy):
    """JAX's strict promotion, switched on after the first call, refuses the step it should."""

    def step(x: jax.Array, y: jax.Array) -> jax.Array:
        return x + y

    args = (jnp.int32(1), jnp.float32(2.0))
    assert float(s2.run(step, args=args)) == 3.0
    with jax.numpy_dtype_promotion("strict"), pytest.raises(Exception, match="promotion"):
        s2.run(step, args=args)


def _replaced(make: Callable[[Any], Any], read: Callable[[Any], Any]) -> Way:
    held: dict[str, Any] = {}
    return lambda: read(held["it"]), lambda new: held.update(it=make(new))


class Settings:
    scale = 1.0


class Config(dict[str, float]):
    def item(self) -> float:
        return self["rate"]

    def setting(self) -> float:
        return Settings.scale


def _attribute_that_may_be_missing() -> Way:
    held = Plain()
    return (
        lambda: getattr(held, "rate", 2.0),
        lambda new: vars(held).clear() if new == 2.0 else setattr(held, "rate", new),
    )


def _partial_method() -> Way:
    cls = type("Held", (), {})
    times = lambda _, rate: rate  # noqa: E731
    return (
        partial(operator.methodcaller("rate"), cls()),
        lambda new: setattr(cls, "rate", partialmethod(times, new)),
    )


def _dropout(rate: float) -> Any:
    return nnx.graphdef(nnx.Dropout(rate / 4, deterministic=True))


@pytest.mark.parametrize(
    "way",
    [
        lambda: _replaced(lambda x: flax.core.freeze({"rate": x}), lambda it: it["rate"]),
        lambda: _replaced(_dropout, lambda it: nnx.merge(it, nnx.State({})).rate * 4),
        lambda: rate_of(type("Number", (float,), {})(1.0), lambda held: held.rate),
        lambda: rate_of(Config(), lambda held: held.rate),
        lambda: item_of(Config(), lambda held: held.item()),
        lambda: (Config(base=1.0).setting, partial(setattr, Settings, "scale")),
        lambda: (partial(len, at := UserString("")), lambda x: setattr(at, "data", "x" * int(x))),
        lambda: (partial(min, at := array.array("d", [1.0])), partial(at.__setitem__, 0)),
        lambda: (partial(min, at := bytearray(1)), lambda new: at.__setitem__(0, int(new))),
        lambda: item_of(np.array([at := {"rate": 1.0}]), lambda held: held[0]["rate"], at),
        lambda: item_of((at := {"rate": 1.0}).values(), max, at),
        lambda: rate_of(Rated(), operator.methodcaller("_times", 1.0)),
        lambda: rate_of(Rated(), lambda held: held.once()),
        lambda: rate_of(Rated(), rate_by_class),
        lambda: rate_of(Rated(), lambda held: held.by_class(1.0)),
        _attribute_that_may_be_missing,
        _partial_method,
    ],
)
def test_a_number_in_slots_buffers_subclasses_and_new_attributes_is_seen(
    s2: dj.MirroredStrategy, way: Callable[[], Way]
):
    """What a library's object, a buffer or a new attribute holds is watched, as a dict is."""
    read, change = way()
    for value in (2.0, 3.0, 2.0):
        change(value)
        assert float(s2.run(lambda: jnp.float32(read()))) == value


# Holders that are not followed.


def _deque() -> Way:
    held = deque([1.0])
    return lambda: held[0], lambda new: held.__setitem__(0, new)


def _context_variable() -> Way:
    held: contextvars.ContextVar[Any] = contextvars.ContextVar("rate")
    held.set(1.0)
    return lambda: held.get(), lambda new: (held.set(new), None)[1]


def _weak_reference() -> Way:
    held = Plain(rate=1.0)
    ref = weakref.ref(held)
    return lambda: ref().rate, lambda new: setattr(held, "rate", new)  # type: ignore[union-attr]


NOT_FOLLOWED = {
    "deque": _deque,
    "context variable": _context_variable,
    "thread local": lambda: captured(threading.local()),
    "weak reference": _weak_reference,
}


@pytest.mark.parametrize("way", NOT_FOLLOWED)
def test_a_number_in_a_holder_that_is_not_followed_is_read_once(s2: dj.MirroredStrategy, way: str):
    """As under jax.jit: the value of the first call stays."""
    read, change = NOT_FOLLOWED[way]()
    change(2.0)

    def step() -> jax.Array:
        return jnp.float32(read())

    assert float(s2.run(step)) == 2.0
    change(3.0)
    assert float(s2.run(step)) == 2.0


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        *((way, "array") for way in NOT_FOLLOWED),
        *((way, "numpy") for way in ("deque", "context variable")),
        ("deque", "module"),
        *(long(way, "module") for way in NOT_FOLLOWED if way != "deque"),
        *(long(way, "variable") for way in NOT_FOLLOWED),
    ],
)
def test_an_array_in_a_holder_that_is_not_followed_is_refused(
    s2: dj.MirroredStrategy, way: str, kind: str
):
    """It never becomes a silent constant, however small."""
    make: dict[str, Callable[[], Any]] = {
        "array": lambda: jnp.float32(2.0),
        "numpy": lambda: np.ones(3),
        "variable": lambda: nnx.Variable(jnp.float32(2.0)),
        "module": lambda: nnx.Linear(1, 1, rngs=nnx.Rngs(0)),
    }
    read, change = NOT_FOLLOWED[way]()
    change(make[kind]())

    def step() -> jax.Array:
        value = read()
        return value(jnp.ones(1)).sum() if kind == "module" else jnp.asarray(value[...]) * 2

    message = "is not followed" if kind == "numpy" else "args"
    with pytest.raises(dj.StaleCaptureError, match=message):
        s2.run(step)


# Variables and arrays are bound by identity.


def _counters(number: int = 3) -> list[nnx.Variable[Any]]:
    return [nnx.Variable(jnp.array(float(i))) for i in range(number)]


class Layers(nnx.Module):
    """A dict of layers of equal shapes, with unsorted keys: Flax sorts it in its transformations."""

    def __init__(self) -> None:
        self.layers = nnx.data(
            {
                "second": nnx.Linear(4, 4, rngs=nnx.Rngs(1)),
                "first": nnx.Linear(4, 4, rngs=nnx.Rngs(0)),
            }
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layers["second"](nnx.relu(self.layers["first"](x)))


def test_layers_in_a_dict_are_never_swapped(strategy: dj.Strategy):
    """Flax flattens the module while the step is traced, and rebuilds the dict in sorted order."""
    with strategy.scope():
        net = Layers()
    x = jnp.arange(8.0).reshape(2, 4)
    before = list(net.layers)

    def loss(m: Layers, x: jax.Array) -> jax.Array:
        return jnp.mean(m(x) ** 2)

    def step(x: jax.Array) -> list[jax.Array]:
        return [
            nnx.value_and_grad(loss)(net, x)[0],
            nnx.cond(x.sum() > 0, loss, lambda m, x: m(x).sum() * 0, net, x),
            nnx.remat(loss)(net, x),
        ]

    expected = float(loss(net, x))
    for _ in range(3):
        np.testing.assert_allclose(strategy.run(step, args=(x,)), [expected] * 3, rtol=1e-5)
    assert list(net.layers) == before


class WithDefault(nnx.Module):
    def __init__(self, rngs: nnx.Rngs = nnx.Rngs(0)) -> None:  # noqa: B008
        self.linear = nnx.Linear(2, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x)


def test_what_only_the_constructor_of_a_module_reads_is_not_captured(
    s2: dj.MirroredStrategy, caplog: pytest.LogCaptureFixture
):
    """A default ``nnx.Rngs`` of ``__init__``, which the step does not call, belongs to no strategy."""
    for strategy in (s2, dj.OneDeviceStrategy("cpu:3")):
        with strategy.scope():
            model = WithDefault(nnx.Rngs(1))
        result = strategy.run(lambda x, model=model: model(x), args=(jnp.ones((4, 2)),))
        np.testing.assert_allclose(result, model(jnp.ones((4, 2))), rtol=1e-6)
    assert not caplog.records


def test_layers_in_a_dict_train_as_on_one_device(strategy: dj.Strategy):
    x = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)

    def loss(m: Layers, x: jax.Array) -> jax.Array:
        return ((m(x) - x) ** 2).sum(1)

    plain = Layers()
    plain_optimizer = nnx.Optimizer(plain, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def train(net: Layers, optimizer: nnx.Optimizer[Layers]) -> jax.Array:
        value, gradients = nnx.value_and_grad(lambda m: loss(m, x).mean())(net)
        optimizer.update(net, gradients)
        return value

    with strategy.scope():
        net = Layers()
        optimizer = dj.Optimizer(net, optax.sgd(0.1))

    def step(x: jax.Array) -> jax.Array:
        part, gradients = nnx.value_and_grad(lambda m: dj.compute_average_loss(loss(m, x)))(net)
        optimizer.update(net, gradients)
        return dj.get_replica_context().all_reduce("sum", part)

    for batch in strategy.distribute_dataset([x] * 4):
        expected = train(plain, plain_optimizer)
        np.testing.assert_allclose(strategy.run(step, args=(batch,)), expected, rtol=1e-5)


def _rotate(held: list[Any]) -> None:
    held[0][...] += 100
    held.append(held.pop(0))


def _shorten(held: list[Any]) -> None:
    if len(held) > 2:
        held.pop(0)
    held[0][...] += 10


def _reverse(held: list[Any]) -> None:
    held.reverse()
    held[0][...] += 1


def _insert(held: list[Any]) -> None:
    if len(held) < 4:
        held.insert(0, held[-1])
    held[0][...] += 1


@pytest.mark.parametrize("also_held", [False, True])
@pytest.mark.parametrize("change", [_rotate, _shorten, _reverse, _insert])
def test_a_list_that_changes_while_it_is_traced_writes_the_right_variables(
    s2: dj.MirroredStrategy, change: Callable[[list[Any]], None], also_held: bool
):
    """Three calls do what plain Python does: a list that has changed is traced again.

    It does not matter that the variables are also reached in an order that does not change.
    """
    with s2.scope():
        held = _counters()
    everything, plain = list(held), _counters()
    plain_everything = list(plain)
    also = tuple(everything) if also_held else ()

    def step() -> None:
        assert len(also) in (0, 3)
        change(held)

    for _ in range(3):
        s2.run(step)
        change(plain)
        got = [float(v[...]) for v in everything]
        assert got == [float(v[...]) for v in plain_everything]


def test_a_dict_entry_that_is_removed_and_reinserted_keeps_its_identity(s2: dj.MirroredStrategy):
    with s2.scope():
        held = {"b": nnx.Variable(jnp.zeros(())), "a": nnx.Variable(jnp.zeros(()))}
        arrays = {"b": jnp.array(1.0), "a": jnp.array(2.0)}
        plain = Plain(a=nnx.Variable(jnp.array(1.0)), b=nnx.Variable(jnp.array(10.0)))

    def step() -> tuple[jax.Array, jax.Array]:
        held["b"][...] += 1
        held["b"] = held.pop("b")
        arrays["b"] = arrays.pop("b")
        taken = vars(plain).pop("a")
        read = plain.b[...] * 1
        plain.a = taken
        plain.a[...] += 1
        return arrays["b"] * 1, read

    for times in (1, 2):
        assert [float(x) for x in s2.run(step)] == [1.0, 10.0]
        assert {key: float(v[...]) for key, v in held.items()} == {"a": 0.0, "b": times}
        assert (float(plain.a[...]), float(plain.b[...])) == (1.0 + times, 10.0)


def test_what_a_step_moves_to_another_name_is_traced_again(s2: dj.MirroredStrategy):
    """In the same order of the walk; plain Python alternates between the two names."""
    with s2.scope():
        held, arrays = {"a": nnx.Variable(jnp.zeros(()))}, {"a": jnp.float32(1.0)}
    [counter] = held.values()

    def step() -> jax.Array:
        [name] = held
        other = "b" if name == "a" else "a"
        held[other], arrays[other] = held.pop(name), arrays.pop(name)
        held[other][...] += 1 if name == "a" else 10
        return arrays[other] * (2 if name == "a" else 3)

    assert [float(s2.run(step)) for _ in range(4)] == [2.0, 3.0, 2.0, 3.0]
    assert float(counter[...]) == 22.0


@pytest.mark.parametrize("verify", ["off", "always"])
def test_a_step_may_exchange_layers_of_a_module(s2: dj.MirroredStrategy, verify: Any):
    """As with a target network: the same in each trace, also that for one device."""
    with s2.scope():
        net = Layers()
        net.layers = nnx.data(list(net.layers.values()))
        net.first, net.second = net.layers
    pair = list(net.layers)

    def step() -> None:
        net.first.bias[...] += 1
        net.first, net.second = net.second, net.first

    for expected in ((1, 0), (1, 1), (2, 1)):
        s2.run(step, options=dj.RunOptions(verify=verify))
        assert tuple(float(layer.bias[...][0]) for layer in pair) == expected


def test_an_array_in_two_places_is_replaced_in_one(s2: dj.MirroredStrategy):
    """As weights and the copy that an average or a target network starts with."""
    weights = first = jnp.float32(1.0)
    held = {"weights": weights}

    def step() -> jax.Array:
        return jnp.stack([weights, held["weights"], first])

    assert s2.run(step).tolist() == [1.0, 1.0, 1.0]
    weights = weights + 1
    assert s2.run(step).tolist() == [2.0, 1.0, 1.0]
    held["weights"] = weights * 4
    assert s2.run(step).tolist() == [2.0, 8.0, 1.0]


def test_a_list_of_arrays_may_get_shorter(s2: dj.MirroredStrategy):
    arrays = [jnp.array(1.0), jnp.array(2.0), jnp.array(3.0)]

    def step() -> jax.Array:
        if len(arrays) > 2:
            arrays.pop(0)
        return arrays[0] * 1

    assert float(s2.run(step)) == 2.0
    assert [float(a) for a in arrays] == [2.0, 3.0]
    assert float(s2.run(step)) == 2.0


# NumPy arrays.


@pytest.mark.filterwarnings("ignore:.*compiled 5 times:UserWarning")
@pytest.mark.parametrize("size", [3, 40_000])
def test_a_numpy_array_changed_in_place_is_read_again(s2: dj.MirroredStrategy, size: int):
    """Small or large, in every dtype; also if an array is reached in two ways."""
    dtypes = "float64", "int64", "uint64", "complex128", "float32", "int8", "bool", "float16"
    held = {dtype: np.zeros(size, dtype) for dtype in dtypes}
    again = Plain(**held)

    def step() -> list[jax.Array]:
        return [jnp.asarray(each[dtype])[2] for dtype in dtypes for each in (held, vars(again))]

    for dtype in dtypes:
        for value in (0, 1, 0):
            held[dtype][2] = value
            expected = [value * (dtype == other) for other in dtypes for _ in "ab"]
            assert [complex(x) for x in s2.run(step)] == expected


def test_python_may_count_in_a_numpy_array_while_a_step_is_traced(s2: dj.MirroredStrategy):
    traces = np.zeros(1, np.int64)

    def step() -> jax.Array:
        traces[0] += 1
        return jnp.float32(1)

    s2.run(step)
    assert traces[0] == 1
    s2.run(step)
    assert traces[0] <= 2


def test_numpy_code_on_a_large_captured_array_is_explained(s2: dj.MirroredStrategy):
    """A large array is an input, without numbers yet; a small one works, and so does jax.numpy."""
    table, small = np.ones(20_000), np.ones(9)
    assert float(s2.run(lambda: jnp.float32(np.linalg.norm(small)))) == 3.0
    assert float(s2.run(lambda: jnp.linalg.norm(jnp.asarray(table)[:9]))) == 3.0
    with pytest.raises(dj.TracedValueError, match=r"(?s)NumPy on table.*before the step"):
        s2.run(lambda: jnp.float32(np.linalg.norm(table)))
    with pytest.raises(dj.TracedValueError, match=r"(?s)NumPy on table.*before the step"):
        s2.run(lambda: jnp.float32(table.strides[0]))


class Scaled(np.ndarray):  # type: ignore[type-arg]
    scale: float


@pytest.mark.parametrize("size", [3, 20_000])
def test_attributes_of_a_numpy_array_of_another_class_are_watched(
    s2: dj.MirroredStrategy, size: int
):
    """Such an array stays a constant, since a traced one has neither its attributes nor its operators."""
    held = np.ones(size).view(Scaled)
    masked = np.ma.masked_array(np.ones(size), mask=[True] + (size - 1) * [False])
    for held.scale in (1.0, 2.0):
        total = s2.run(lambda: jnp.asarray(held)[0] * held.scale + masked.filled(0).sum())
        assert float(total) == held.scale + size - 1


# Metadata.


def test_metadata_of_a_variable_is_watched(strategy: dj.Strategy):
    """A layer that is frozen by new metadata no longer changes; also if a mutable value changes."""
    with strategy.scope():
        variable = nnx.Param(jnp.zeros(()), rates=[1.0])

    def step() -> None:
        if variable.get_metadata("trainable", True):
            variable[...] += variable.get_metadata("rates")[0]

    strategy.run(step)
    variable.set_metadata(trainable=False)
    strategy.run(step)
    assert float(variable[...]) == 1.0
    variable.set_metadata({"trainable": True, "rates": [2.0]})
    strategy.run(step)
    variable.get_metadata("rates")[0] = 4.0
    strategy.run(step)
    assert float(variable[...]) == 7.0


def test_a_method_that_is_replaced_on_the_object_hides_that_of_its_class(s2: dj.MirroredStrategy):
    class Head:
        def rate(self) -> float:
            return 1.0

    head = Head()

    def step() -> jax.Array:
        return jnp.float32(head.rate())

    assert float(s2.run(step)) == 1.0
    head.rate = lambda: 2.0  # type: ignore[method-assign]
    assert float(s2.run(step)) == 2.0
    Head.rate = lambda self: 3.0  # type: ignore[method-assign]
    assert float(s2.run(step)) == 2.0
    del head.rate
    assert float(s2.run(step)) == 3.0


def test_iteration_over_attributes_depends_on_their_order(s2: dj.MirroredStrategy):
    held = types.SimpleNamespace(first=jnp.float32(2.0), second=jnp.float32(3.0))

    def step() -> jax.Array:
        first, second = vars(held).values()
        return first**second

    assert float(s2.run(step)) == 8.0
    first = held.first
    del held.first
    held.first = first
    assert float(s2.run(step)) == 9.0


# Functions inside the step whose traces are cached.


@pytest.mark.parametrize("wrap", [jax.jit, *(long(wrap) for wrap in (nnx.jit, jax.checkpoint))])
@pytest.mark.parametrize("first", ["full", "partial"])
def test_a_function_that_is_jitted_in_the_step_sees_the_batch_of_each_call(
    strategy: dj.Strategy, wrap: Callable[..., Any], first: str
):
    """The number of real examples is Python state: a trace for one batch is wrong for another."""
    with strategy.scope():
        teacher = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    average = wrap(lambda losses: dj.compute_average_loss(losses))
    soft = wrap(lambda x: teacher(x[:, None])[:, 0])
    rows = [np.ones(8, np.float32), np.arange(5, dtype=np.float32)]

    def step(x: jax.Array) -> jax.Array:
        parts = average(x), dj.compute_average_loss(soft(x))
        return dj.get_replica_context().all_reduce("sum", parts)

    for x in rows if first == "full" else rows[::-1]:
        (batch,) = strategy.distribute_dataset([x])
        expected = [x.mean(), float(teacher(x[:, None]).mean())]
        np.testing.assert_allclose(strategy.run(step, args=(batch,)), expected, rtol=1e-5)


def test_values_that_an_optax_transformation_closes_over_are_followed(s2: dj.MirroredStrategy):
    """A schedule reads a global; a rate is an array."""
    settings = {"rate": 2.0}
    tx = optax.chain(
        optax.scale_by_schedule(lambda _: settings["rate"]), optax.scale(jnp.array(3.0))
    )
    state = tx.init(jnp.zeros(()))

    def step() -> jax.Array:
        return tx.update(jnp.ones(()), state)[0]

    assert float(s2.run(step)) == 6.0
    settings["rate"] = 3.0
    assert float(s2.run(step)) == 9.0


def test_the_rules_of_a_custom_derivative_are_followed(s2: dj.MirroredStrategy):
    clip = {"at": 2.0}

    @jax.custom_vjp
    def passed(x: jax.Array) -> jax.Array:
        return x

    passed.defvjp(lambda x: (x, None), lambda _, g: (g * clip["at"],))

    def step() -> jax.Array:
        return jax.grad(passed)(jnp.float32(1))

    assert float(s2.run(step)) == 2.0
    clip["at"] = 3.0
    assert float(s2.run(step)) == 3.0


@pytest.mark.exhaustive
@pytest.mark.parametrize("replicas", [4, 1])
@pytest.mark.parametrize("layer", ["SpectralNorm", "WeightNorm"])
def test_layers_of_flax_that_keep_arrays_in_dicts_train(replicas: int, layer: str):
    """Flax writes their plain arrays back unchanged when it differentiates the module."""
    strategy = dj.MirroredStrategy(list(range(replicas)))
    make = lambda: getattr(nnx, layer)(  # noqa: E731
        nnx.Linear(3, 2, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1)
    )
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)

    def train(model: Any, optimizer: Any, x: Any, average: Any, total: Any) -> Any:
        value, gradients = nnx.value_and_grad(lambda m: average((m(x) ** 2).sum(1)))(model)
        optimizer.update(model, total(gradients))
        return total(value)

    plain = make()
    plain_optimizer = nnx.Optimizer(plain, optax.adam(0.01), wrt=nnx.Param)
    on_one = nnx.jit(lambda m, o, x: train(m, o, x, jnp.mean, lambda value: value))
    with strategy.scope():
        model = make()
        optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)

    def step(x: jax.Array) -> jax.Array:
        total = partial(dj.get_replica_context().all_reduce, "sum")
        return train(model, optimizer, x, dj.compute_average_loss, total)

    for batch in strategy.distribute_dataset([x] * 3):
        expected = on_one(plain, plain_optimizer, x)
        np.testing.assert_allclose(strategy.run(step, args=(batch,)), expected, rtol=1e-4)


class Rotary(nnx.Module):
    """A layer with plain arrays, some of them in a dict with unsorted keys."""

    def __init__(self) -> None:
        self.layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.table = jnp.arange(4.0)
        self.shifts = nnx.data({"z": jnp.full(4, 3.0), "a": jnp.full(4, 5.0)})

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layer(x + self.table) + self.shifts["z"] - 2 * self.shifts["a"]


def _apply(model: Rotary, x: jax.Array) -> jax.Array:
    return model(x)


TRANSFORMED: dict[str, Callable[[Rotary, jax.Array], jax.Array]] = {
    "remat": lambda m, x: nnx.remat(_apply)(m, x),
    "jit": lambda m, x: nnx.jit(_apply)(m, x),
    "cond": lambda m, x: nnx.cond(x.sum() > 0, _apply, _apply, m, x),
    "grad of remat": lambda m, x: nnx.value_and_grad(lambda m: nnx.remat(_apply)(m, x).sum())(m)[0],
    "scan": lambda m, x: nnx.scan(
        lambda c, m: (m(c), None), in_axes=(nnx.Carry, None), out_axes=(nnx.Carry, 0), length=2
    )(x, m)[0],
    "vmap": lambda m, x: nnx.vmap(_apply, in_axes=(None, 0))(m, x),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("transform", TRANSFORMED)
def test_plain_arrays_of_a_module_pass_through_the_transformations_of_flax(
    s2: dj.MirroredStrategy, transform: str
):
    """Flax assigns them again unchanged; each keeps its identity, and one that is replaced is read."""
    with s2.scope():
        model = Rotary()
    table, x = model.table, jnp.ones((2, 4))

    def step(x: jax.Array) -> jax.Array:
        return TRANSFORMED[transform](model, x)

    for value in (table, table + 1):
        model.table = value
        result = s2.run(step, args=(x,))
        assert model.table is value
        np.testing.assert_allclose(result, TRANSFORMED[transform](model, x), rtol=1e-5)


def test_an_array_that_the_step_assigns_in_the_place_of_another_is_refused(s2: dj.MirroredStrategy):
    """It has the shape of the old one, and yet other values."""
    with s2.scope():
        model = Rotary()
    table = model.table

    def step(x: jax.Array) -> jax.Array:
        model.table = model.table + 1
        return model(x)

    with pytest.raises(dj.StaleCaptureError, match="assigned table on Rotary"):
        s2.run(step, args=(jnp.ones((2, 4)),))
    assert model.table is table


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_a_variable_that_the_step_removes_is_not_checked(s2: dj.MirroredStrategy):
    """Intermediates of an earlier forward pass that the step pops are removed, as under nnx.jit."""

    class Net(nnx.Module):
        def __init__(self) -> None:
            self.layer = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            h = self.layer(x)
            self.sow(nnx.Intermediate, "seen", h)
            return h

    with s2.scope():
        net = Net()
    net(jnp.ones((2, 3)))

    def step(x: jax.Array) -> jax.Array:
        y = net(x)
        nnx.pop(net, nnx.Intermediate)
        return dj.get_replica_context().all_reduce("sum", jnp.sum(y))

    x = np.ones((8, 3), np.float32)
    expected = float(net.layer(x).sum())
    for batch in s2.distribute_dataset([x] * 2):
        np.testing.assert_allclose(s2.run(step, args=(batch,)), expected, rtol=1e-5)
    assert not hasattr(net, "seen")


def test_a_captured_model_may_be_called_by_its_module(s2: dj.MirroredStrategy):
    with s2.scope():
        model = dj.Model(nnx.Linear(3, 1, rngs=nnx.Rngs(0)))
    x = jnp.ones((2, 3))
    np.testing.assert_allclose(s2.run(lambda x: model.module(x), args=(x,)), model.module(x))
    with s2.scope():
        model.module = nnx.Linear(3, 1, rngs=nnx.Rngs(1))
    np.testing.assert_allclose(s2.run(lambda x: model.module(x), args=(x,)), model.module(x))
    np.testing.assert_allclose(s2.run(lambda x: model(x), args=(x,)), model.module(x))


@pytest.mark.exhaustive
def test_another_weak_type_of_a_captured_array_is_another_program(s2: dj.MirroredStrategy):
    """A weakly typed number takes the dtype of what it meets; a float32 widens it, as under jit."""
    held = Plain(scale=jnp.asarray(2.0))
    with s2.scope():
        variable = nnx.Variable(jnp.asarray(2.0))
    x = jnp.ones(3, jnp.bfloat16)

    def step(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x * held.scale, x * variable[...]

    assert [y.dtype for y in s2.run(step, args=(x,))] == [jnp.bfloat16, jnp.bfloat16]
    held.scale = jnp.float32(2.0)
    with s2.scope():
        variable.set_value(jnp.float32(2.0) * jnp.ones(()))
    assert [y.dtype for y in s2.run(step, args=(x,))] == [jnp.float32, jnp.float32]
    held.scale = jnp.ones(3, jnp.bfloat16)
    assert [y.dtype for y in s2.run(step, args=(x,))] == [jnp.bfloat16, jnp.float32]


def test_an_array_made_in_the_step_with_the_id_of_a_deleted_one_is_no_captured_array(
    s2: dj.MirroredStrategy,
):
    """Python reuses the memory, as of arrays that garbage collection deletes during the trace."""
    old = deque(jnp.arange(3.0) * i for i in range(64))

    def step() -> jax.Array:
        old.clear()
        with jax.ensure_compile_time_eval():
            new = [jnp.arange(3.0) * i for i in range(32)]
        return sum(new)

    assert s2.run(step).tolist() == [0.0, 496.0, 992.0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("holder", ["cell", "attribute", "item"])
@pytest.mark.parametrize("first", [jnp.ones(3), np.ones(20_000)], ids=["jax", "numpy"])
def test_an_array_whose_shape_only_python_reads_is_not_stale(
    s2: dj.MirroredStrategy, holder: str, first: Any
):
    """Python decides by its presence and shape, so that the program has no such input."""
    cell: Any = first
    plain, table = Plain(mask=first), {"mask": first}

    def step() -> jax.Array:
        mask = {"cell": cell, "attribute": plain.mask, "item": table["mask"]}[holder]
        return jnp.float32(-1.0 if mask is None else mask.shape[0])

    for value in (first, None, first, first[:2], 3 * [1.0], first):
        if isinstance(value, list):
            value = jnp.ones((7, 1))
        cell = plain.mask = table["mask"] = value
        assert float(s2.run(step)) == (-1.0 if value is None else value.shape[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize("rows", [4, 3])
def test_a_step_that_moves_what_it_captures_is_compared_as_it_was_called(rows: int):
    """Traces for one device and for other padding start from the same list."""
    s2 = dj.MirroredStrategy([0, 1])
    with s2.scope():
        held = [nnx.Param(jnp.float32(i)) for i in range(3)]

    def step(x):
        held.append(held.pop(0))
        mean = dj.get_replica_context().all_reduce("sum", dj.compute_average_loss(x))
        for i, param in enumerate(held):
            param[...] += mean * (i + 1)

    (batch,) = s2.distribute_dataset([np.ones(rows, np.float32)])
    for expected in ([2.0, 4.0, 3.0], [5.0, 5.0, 5.0], [6.0, 7.0, 8.0]):
        s2.run(step, args=(batch,), options=dj.RunOptions(verify="always"))
        assert [float(param[...]) for param in held] == expected


def test_a_tensor_of_another_library_is_refused(s2: dj.MirroredStrategy):
    """In args, captured or as an attribute: a change in place could not be seen."""
    kind = type("Tensor", (), {"__array__": lambda self: np.ones(3), "__module__": "torch"})
    tensor: Any = kind()
    plain = Plain(mask=tensor)
    steps: dict[str, Callable[..., Any]] = {
        r"args\[0\]: Tensor of PyTorch": lambda x: jnp.sum(np.asarray(x)),
        r"tensor: Tensor of PyTorch": lambda: jnp.sum(np.asarray(tensor)),
        r"plain.mask: Tensor of PyTorch": lambda: jnp.sum(np.asarray(plain.mask)),
    }
    for name, step in steps.items():
        with pytest.raises(dj.StaleCaptureError, match=f"The step gets {name}.*np.asarray"):
            s2.run(step, args=(tensor,) if "args" in name else ())
    assert float(s2.run(lambda x: jnp.sum(x), args=(tensor.__array__(),))) == 3


SHAPES = [{"a": 2}, {"a": 3}, (2,), (2, 1), 2, None]
"""Values of a variable: the sizes of their arrays."""


@pytest.mark.filterwarnings("ignore:.* (made outside of|compiled 5 times):UserWarning")
@pytest.mark.parametrize("reads", [True, False], ids=["array", "structure"])
def test_another_structure_of_a_variable_is_seen(s2: dj.MirroredStrategy, reads: bool):
    """Its arrays in another container, of another number or shape, whether the step takes them or not."""
    with s2.scope():
        held = nnx.Variable(None)

    def step() -> Any:
        value = held.get_raw_value()
        sizes = [x.size for x in jax.tree.leaves(value)]
        total = sum(map(jnp.sum, jax.tree.leaves(value))) if reads else jnp.zeros(())
        return total + 10 * len(sizes) + 100 * sum(sizes) + 1000 * isinstance(value, dict)

    for sizes in [*SHAPES, *reversed(SHAPES)]:
        held.set_value(jax.tree.map(jnp.ones, sizes))
        assert s2.run(step) == step()


@pytest.mark.filterwarnings("ignore:.* made outside of:UserWarning")
@pytest.mark.parametrize("sizes", [3, {"a": 2}], ids=str)
def test_run_steps_sees_another_type_of_a_variable(s2: dj.MirroredStrategy, sizes: Any):
    with s2.scope():
        held = nnx.Variable(jnp.zeros(2))
    iterator = iter(s2.distribute_dataset([np.ones(2, np.float32)] * 6))

    def step(x: jax.Array) -> Any:
        held.set_value(jax.tree.map(lambda old: old + 1, held.get_raw_value()))
        return sum(map(jnp.sum, jax.tree.leaves(held.get_raw_value())))

    assert s2.run_steps(step, iterator, 2).tolist() == [2, 4]
    held.set_value(jax.tree.map(jnp.zeros, sizes))
    size = sum(jax.tree.leaves(sizes))
    assert s2.run_steps(step, iterator, 2).tolist() == [size, 2 * size]
    assert s2.run_steps(step, iterator, 2).tolist() == [3 * size, 4 * size]


@pytest.mark.parametrize(("old", "new"), [(None, 1), (1, None), (1, (1, 1))])
def test_a_step_that_changes_the_number_of_arrays_of_a_variable_is_refused(
    s2: dj.MirroredStrategy, old: Any, new: Any
):
    with s2.scope():
        held = nnx.Variable(jax.tree.map(jnp.zeros, old))
    counts = len(jax.tree.leaves(old)), len(jax.tree.leaves(new))
    with pytest.raises(
        NotImplementedError, match="of the variable held from {} to {}".format(*counts)
    ):
        s2.run(lambda: held.set_value(jax.tree.map(jnp.ones, new)))
