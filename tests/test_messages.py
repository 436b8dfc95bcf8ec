"""Integers that need more bits than JAX has are refused at every entry point; extras are named."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import distribute_jax as dj
from distribute_jax._messages import check_int_range

BIG = 2**40


def inside(strategy: dj.Strategy, act: Callable[[Any], Any]) -> Any:
    return strategy.run(lambda: act(dj.get_replica_context()))


ENTRIES: dict[str, Callable[[dj.Strategy, Any], Any]] = {
    "all_reduce": lambda s, x: inside(s, lambda c: c.all_reduce("sum", {"a": x})),
    "all_reduce by default": lambda s, x: dj.get_replica_context().all_reduce("mean", x),
    "all_gather": lambda s, x: inside(s, lambda c: c.all_gather(x, axis=0)),
    "reduce": lambda s, x: s.reduce("mean", x, axis=None),
    "gather": lambda s, x: s.gather(x, axis=0),
    "merge_call": lambda s, x: inside(
        s, lambda c: c.merge_call(lambda current, y: current.reduce("mean", y), args=(x,))
    ),
    "from function": lambda s, x: s.experimental_distribute_values_from_function(lambda c: x),
    "variable": lambda s, x: dj.Variable(x),
    "assume_mirrored": lambda s, x: inside(s, lambda c: dj.assume_mirrored(x)),
    "argument": lambda s, x: s.run(lambda y: y, args=(x,)),
}


@pytest.mark.parametrize("value", [BIG, -BIG, 10**400, np.array([1, BIG]), np.uint64(2**63)])
@pytest.mark.parametrize("entry", ENTRIES)
def test_an_integer_that_does_not_fit_is_refused(s2: dj.Strategy, entry: str, value: Any):
    with pytest.raises(dj.ArgumentError, match=r"(does|do) not fit .*jax_enable_x64"):
        ENTRIES[entry](s2, value)


def test_a_result_that_does_not_fit_is_refused(s2: dj.Strategy):
    with pytest.raises(ValueError, match=r"result of its step, got int64\[1\], which does not fit"):
        s2.run(lambda: np.array([BIG]))


@pytest.mark.parametrize(
    "value",
    [2**31 - 1, -(2**31), True, np.array([2**32 - 1], np.uint64), np.zeros(0, int), 1e30, "a"],
)
def test_other_values_are_returned_as_they_are(value: Any):
    assert check_int_range(value, "it") is value


def test_x64_mode_accepts_64_bits():
    with jax.enable_x64(True):
        assert check_int_range(BIG, "it") == BIG
        with pytest.raises(ValueError, match="does not fit int64"):
            check_int_range(2**63, "it")


RESOLVERS: Any = dj.cluster_resolver
MISSING: dict[str, tuple[str, Callable[[], Any]]] = {
    "google.auth": ("gcp", lambda: RESOLVERS.TPUClusterResolver("t", "z", "p").cluster_spec()),
    "kubernetes": ("kubernetes", lambda: RESOLVERS.KubernetesClusterResolver().cluster_spec()),
    "matplotlib.figure": ("plot", lambda: dj.callbacks.History().plot()),
    "ray": ("ray", lambda: dj.ParameterServerStrategy(engine="ray")),
    "ray of a server": ("ray", lambda: dj.Server({"chief": ["a:1"], "worker": ["b:1"]}, "worker", 0)),
    "requests": ("gcp", lambda: RESOLVERS.TPUClusterResolver("t", "z", "p").cluster_spec()),
    "tensorboardX.event_file_writer": ("tensorboard", lambda: dj.summary.create_file_writer("logs")),
}  # fmt: skip


@pytest.mark.parametrize("package", MISSING)
def test_a_package_that_is_not_installed_is_named_with_its_extra(package: str, monkeypatch: Any):
    monkeypatch.setitem(sys.modules, package.split()[0], None)
    extra, call = MISSING[package]
    with pytest.raises(dj.MissingPackageError, match=rf"install 'distribute-jax\[{extra}\]'"):
        call()
