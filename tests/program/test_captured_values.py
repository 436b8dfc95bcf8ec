"""Whatever a step captures is seen when it changes, however it is held."""

from __future__ import annotations

import argparse
import contextvars
import dataclasses
import functools
import threading
import types
import weakref
from collections import ChainMap, UserDict, deque
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distribute_jax as dj

Way = tuple[Callable[[], Any], Callable[[Any], None]]


def _namespace() -> Way:
    held = argparse.Namespace(rate=1.0)
    return lambda: held.rate, lambda new: setattr(held, "rate", new)


def _simple_namespace() -> Way:
    held = types.SimpleNamespace(optimizer=types.SimpleNamespace(rate=1.0))
    return lambda: held.optimizer.rate, lambda new: setattr(held.optimizer, "rate", new)


def _class_attribute() -> Way:
    class Config:
        rate: Any = 1.0

    return lambda: Config.rate, lambda new: setattr(Config, "rate", new)


def _class_attribute_of_the_base() -> Way:
    class Base:
        rate: Any = 1.0

    class Config(Base):
        pass

    return lambda: Config.rate, lambda new: setattr(Config, "rate", new)


def _class_attribute_of_an_object() -> Way:
    class Config:
        rate: Any = 1.0

    held = Config()
    return lambda: held.rate, lambda new: setattr(held, "rate", new)


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


def _slots() -> Way:
    @dataclasses.dataclass(slots=True)
    class Config:
        rate: Any = 1.0

    held = Config()
    return lambda: held.rate, lambda new: setattr(held, "rate", new)


def _user_dict() -> Way:
    held = UserDict(rate=1.0)
    return lambda: held["rate"], lambda new: held.update(rate=new)


def _chain_map() -> Way:
    below = {"rate": 1.0}
    held = ChainMap({}, below)
    return lambda: held["rate"], lambda new: below.update(rate=new)


def _deque() -> Way:
    held = deque([1.0])
    return lambda: held[0], lambda new: held.__setitem__(0, new)


def _set() -> Way:
    held = {1.0}

    def change(new: Any) -> None:
        held.clear()
        held.add(new)

    return lambda: sum(held), change


def _bytearray() -> Way:
    held = bytearray([1])
    return lambda: held[0], lambda new: held.__setitem__(0, int(new))


def _read_only_view() -> Way:
    below = {"rate": 1.0}
    held = types.MappingProxyType(below)
    return lambda: held["rate"], lambda new: below.update(rate=new)


def _function_attribute() -> Way:
    def helper() -> Any:
        return helper.rate  # type: ignore[attr-defined]

    helper.rate = 1.0  # type: ignore[attr-defined]
    return helper, lambda new: setattr(helper, "rate", new)


class Plain:
    """Holds what it is given."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


def _written_name() -> Way:
    held = Plain(rate=1.0)
    return lambda: getattr(held, "rate"), lambda new: setattr(held, "rate", new)  # noqa: B009


def _computed_name() -> Way:
    held, which = Plain(learning_rate=1.0), "learning"
    return (
        lambda: getattr(held, which + "_rate"),
        lambda new: setattr(held, "learning_rate", new),
    )


def _all_attributes() -> Way:
    held = Plain(rate=1.0)
    return lambda: sum(vars(held).values()), lambda new: setattr(held, "rate", new)


class Forwarding:
    """Looks its attributes and items up elsewhere."""

    def __init__(self) -> None:
        self._store = {"rate": 1.0}

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["_store"][name]

    def __getitem__(self, name: str) -> Any:
        return self._store[name]


def _forwarded_attribute() -> Way:
    held = Forwarding()
    return lambda: held.rate, lambda new: held._store.update(rate=new)


def _forwarded_item() -> Way:
    held = Forwarding()
    return lambda: held["rate"], lambda new: held._store.update(rate=new)


def _context_variable() -> Way:
    held: contextvars.ContextVar[Any] = contextvars.ContextVar("rate")
    held.set(1.0)
    return lambda: held.get(), lambda new: (held.set(new), None)[1]


def _thread_local() -> Way:
    held = threading.local()
    held.rate = 1.0
    return lambda: held.rate, lambda new: setattr(held, "rate", new)


def _weak_reference() -> Way:
    held = Plain(rate=1.0)
    ref = weakref.ref(held)
    return lambda: ref().rate, lambda new: setattr(held, "rate", new)  # type: ignore[union-attr]


def _partial_of_an_object() -> Way:
    held = Plain(rate=1.0)
    return functools.partial(lambda h: h.rate, held), lambda new: setattr(held, "rate", new)


def _argument_of_a_partial() -> Way:
    held = functools.partial(lambda rate: rate, 1.0)

    def change(new: Any) -> None:
        held.__setstate__((held.func, (new,), {}, None))  # type: ignore[attr-defined]

    return held, change


def _default() -> Way:
    def read(rate: Any = 1.0) -> Any:
        return rate

    return read, lambda new: setattr(read, "__defaults__", (new,))


WAYS = {
    name.removeprefix("_").replace("_", " "): make
    for name, make in list(globals().items())
    if name.startswith("_") and isinstance(make, types.FunctionType)
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["number", "array", "large array"])
def test_a_changed_value_is_never_stale(s2: dj.MirroredStrategy, way: str, kind: str):
    """A number or array that a step reads is read again after it changed, wherever it is kept."""
    make: dict[str, Callable[[float], Any]] = {
        "number": lambda x: x,
        "array": jnp.float32,
        "large array": lambda x: np.full(20_000, x, np.float32),
    }
    if kind != "number" and way in {"set", "bytearray"}:
        kind = "number"  # the only thing that these can hold
    read, change = WAYS[way]()
    change(make[kind](2.0))

    def step() -> jax.Array:
        return jnp.max(jnp.asarray(read(), jnp.float32))

    assert float(s2.run(step)) == 2.0
    change(make[kind](3.0))
    assert float(s2.run(step)) == 3.0
    change(make[kind](2.0))
    assert float(s2.run(step)) == 2.0


@pytest.mark.parametrize("way", ["namespace", "class attribute", "slots", "thread local"])
def test_an_array_that_changes_does_not_recompile(s2: dj.MirroredStrategy, way: str):
    """A new array in the place of the old one is an input of the same program."""
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
    """A step that needs the value of an array in a partial is told so, rather than made stale."""

    def step(scale: jax.Array) -> jax.Array:
        return jnp.float32(float(scale))

    with pytest.raises(dj.TracedValueError, match="needs the value"):
        s2.run(functools.partial(step, scale=jnp.float32(2.0)))


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
    with (
        jax.numpy_dtype_promotion("strict"),
        pytest.raises(Exception, match="promotion"),
    ):
        s2.run(step, args=args)
