"""The name that the user's code has for the axis of the replicas; after the trace it is the mesh's."""

from __future__ import annotations

from typing import Any

from jax.extend import core as jex_core

from distribute_jax._mesh import DATA
from distribute_jax.program.proof._marks import ClosedJaxpr

_NAMES = ("axes", "axis_name")
"""The parameters in which JAX's collectives name axes."""


def with_mesh_axis(jaxpr: ClosedJaxpr, name: str) -> ClosedJaxpr:
    """Returns a traced step in which every collective over the user's axis is over that of the mesh."""
    return jaxpr if name == DATA else _Renaming(name).closed(jaxpr)


class _Renaming:
    """Goes through a jaxpr and those inside it; one that stands in several places stays one."""

    def __init__(self, old: str) -> None:
        self._old = old
        self._known: dict[int, tuple[Any, Any]] = {}

    def closed(self, closed: Any) -> Any:
        return closed.replace(jaxpr=self._jaxpr(closed.jaxpr))

    def _jaxpr(self, jaxpr: Any) -> Any:
        if id(jaxpr) not in self._known:
            new = jaxpr.replace(
                eqns=[self._equation(eqn) for eqn in jaxpr.eqns], effects=self._effects(jaxpr)
            )
            self._known[id(jaxpr)] = jaxpr, new  # held, so that its id stays its own
        return self._known[id(jaxpr)][1]

    def _equation(self, eqn: Any) -> Any:
        params = {
            key: self._axis(value) if key in _NAMES else self._value(value)
            for key, value in eqn.params.items()
        }
        return eqn.replace(params=params, effects=self._effects(eqn))

    def _effects(self, of: Any) -> Any:
        return {type(e)(DATA) if getattr(e, "name", None) == self._old else e for e in of.effects}

    def _axis(self, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(self._axis(one) for one in value)
        return DATA if value == self._old else value

    def _value(self, value: Any) -> Any:
        if isinstance(value, jex_core.ClosedJaxpr):
            return self.closed(value)
        if isinstance(value, jex_core.Jaxpr):
            return self._jaxpr(value)
        if type(value) in (tuple, list):
            return type(value)(map(self._value, value))
        return value
