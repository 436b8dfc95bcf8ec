"""``Variable``: an ``nnx.Variable`` with TensorFlow's rules for several replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from distribute_jax import _frames
from distribute_jax._checks import converting, is_function
from distribute_jax._errors import ArgumentError, ArgumentTypeError, ContextError
from distribute_jax._frames import in_replica_context
from distribute_jax._jax_private import at_top_level, uncommitted
from distribute_jax._mesh import DATA, num_replicas, on_host, outside_mesh, put, replicated
from distribute_jax._messages import is_donated
from distribute_jax._values import DistributedValues, PerReplica, reading
from distribute_jax.variables import _rules
from distribute_jax.variables._access import (
    check_current_strategy,
    for_current_strategy,
    for_this_thread,
    inside_run,
    readable_raw,
)
from distribute_jax.variables._rules import (
    SCATTERS,
    VariableAggregation,
    VariableSynchronization,
    cast,
    check_kinds,
    check_rows,
    initial_array,
    note_created,
    per_replica_error,
    scatter,
)

_NONE = VariableAggregation.NONE
_SUM = VariableAggregation.SUM
_ON_READ = VariableSynchronization.ON_READ
_MISSING = object()


def _compared(name: str) -> Callable[[Variable, Any], Any]:
    return lambda self, other: getattr(self.get_value(), name)(other)


class Variable(nnx.Variable[Any]):
    """State with a rule for how the writes of several replicas are combined.

    It is an ``nnx.Variable``: make it an attribute of a module, or capture it in the step. ``v[...] = x``
    is ``assign``. Its rules depend on whether the code runs inside ``run``:

    - ``ON_WRITE`` (the default): mirrored. Inside ``run`` a write immediately combines the values of the
      replicas by the aggregation: SUM, MEAN, or that of replica 0. With aggregation NONE the replicas
      must write the same value, which is proved. Outside of ``run`` a write sets the value everywhere.
    - ``ON_READ``: each replica keeps a local value inside ``run``; nothing is communicated. Outside of
      ``run`` a read returns the aggregate, and ``assign(x)`` sets components whose aggregate is x; under
      SUM it divides x among the replicas. Under SUM replica 0 starts with the initial value, the others
      with 0.

    Args:
        value: the initial value, a number or an array (global view), or a function that returns it; also
            as ``initial_value=``, as in TensorFlow.
        trainable: whether optimizers should train it; None means True for ON_WRITE, False for
            ON_READ. Kept as metadata, for filters.
        synchronization: when replicas are combined.
        aggregation: how they are combined.
        name: a name for messages; the components of the other replicas are ``name/replica_1``, ….
        dtype: of the value; None for that of ``value``.
        **metadata: further metadata of the ``nnx.Variable``.

    Raises:
        ValueError: a MEAN of integers, ``synchronization=NONE``, or an unknown kind.

    Example:
        >>> import distribute_jax as dj
        >>> total = dj.Variable(10.0, aggregation=dj.VariableAggregation.SUM)
        >>> def step(x):
        ...     return total.assign_add(x)
        >>> float(dj.OneDeviceStrategy("cpu:0").run(step, args=(3.0,)))
        13.0

    Source: https://www.tensorflow.org/api_docs/python/tf/Variable
    """

    def __init__(
        self,
        value: Any = _MISSING,
        trainable: bool | None = None,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation = VariableAggregation.NONE,
        name: str = "Variable",
        *,
        dtype: Any = None,
        initial_value: Any = _MISSING,
        **metadata: Any,
    ) -> None:
        if (value is _MISSING) is (initial_value is _MISSING):
            raise ArgumentTypeError(
                "dj.Variable takes one initial value: dj.Variable(0.0) or dj.Variable(initial_value=0.0)."
            )
        value = initial_value if value is _MISSING else value
        value = value() if is_function(value) else value
        if isinstance(value, DistributedValues):
            raise per_replica_error(name)
        array = initial_array(value, name)
        if dtype is not None:
            with converting(f"dj.Variable {name!r}: dtype", dtype, "a dtype"):
                dtype = jnp.dtype(dtype)
            array = cast(array, dtype, name)
        synchronization, aggregation = check_kinds(synchronization, aggregation, array.dtype)
        if trainable is None:
            trainable = synchronization is not _ON_READ
        super().__init__(
            array,
            trainable=trainable,
            synchronization=synchronization,
            aggregation=aggregation,
            name=name,
            **metadata,
        )

    def create_value(self, value: Any) -> Any:
        """Returns the initial raw value: for ON_READ one component for each replica."""
        if inside_run():
            raw = _rules.first_replica(value)
            if self.is_on_read and self.aggregation is _SUM:
                raw = jnp.where(jax.lax.axis_index(DATA) == 0, raw, jnp.zeros_like(raw))
            note_created(self, raw)
            return raw
        if not self.is_on_read:
            in_scope = _frames.entered() is not None and at_top_level()
            # An uncommitted copy is placed by the scope; a committed array would stay where it is.
            return _rules.uncommitted_copy(value) if in_scope else value
        mesh = _frames.current().strategy.mesh
        stacked = _rules.initial_components(value, num_replicas(mesh), self.aggregation)
        return _rules.place(stacked, mesh)

    def __copy__(self, memo: Any = None) -> Any:
        """Returns a variable with a copy of the array, since a step donates what it writes."""
        with outside_mesh():
            copied: Any = self.copy(jax.tree.map(jnp.copy, self._raw()))
        return copied

    __deepcopy__ = __copy__

    @property
    def is_on_read(self) -> bool:
        """True if each replica keeps a local value."""
        return bool(self.get_metadata("synchronization") is _ON_READ)

    # Reading

    def get_value(self, *, index: Any = ...) -> Any:
        """Returns the value: inside ``run`` that of this replica, outside of it the aggregate."""
        raw = for_current_strategy(self._raw())
        if not hasattr(raw, "shape"):  # not an array, but what a tree function stored
            return raw
        if self.is_on_read and not in_replica_context():
            raw = jax.lax.all_gather(raw, DATA) if inside_run() else for_this_thread(raw)
            raw = _rules.combine(raw, self.aggregation, self.name)
        if index is Ellipsis:
            return raw
        with converting(f"Variable {self.name!r}: index", index, "an index of its array"):
            return raw[index]

    def read_value(self) -> Any:
        """Returns the value, as ``v[...]`` does."""
        return self.get_value()

    def numpy(self) -> np.ndarray[Any, Any]:
        """Returns the value as a NumPy array; only outside of ``run``."""
        value = self.get_value()
        with reading(value):
            return on_host(value)

    def __bool__(self) -> bool:  # Flax's is that of the number of rows
        return bool(self.get_value())

    # TensorFlow's variables have these, Flax's only equality.
    __lt__, __le__, __gt__, __ge__ = map(_compared, ("__lt__", "__le__", "__gt__", "__ge__"))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """Makes NumPy functions read the result of ``numpy()``, never the components."""
        value = self.numpy()
        return value.astype(value.dtype if dtype is None else dtype, copy=bool(copy))

    @property
    def values(self) -> tuple[jax.Array, ...]:
        """The components of this process in replica order; in ``merge_call`` those of all replicas.

        Raises:
            RuntimeError: read inside ``run``, where a replica has one component, ``v[...]``.
        """
        self._require_all_components("values")
        raw = self._raw()
        if inside_run():
            n = self._components()
            return tuple(jax.lax.all_gather(raw, DATA)) if self.is_on_read else (raw,) * n
        if self.is_on_read:
            mesh = _rules.mesh_of(raw)
            if mesh is None:
                return tuple(_rules.uncommitted_copy(raw))
            return PerReplica(raw, mesh).values
        if isinstance(raw, PerReplica):  # a step returned the variable
            return raw.values
        cores, each = _rules.devices_and_replicas(raw)
        with outside_mesh():
            # If a replica has several cores, the copy of the first one.
            shards = [
                s.data for s in replicated(raw).addressable_shards[::cores] for _ in range(each)
            ]
            # Copies: a shard would be deleted with the array that the next step donates.
            return tuple(uncommitted(jnp.copy(shard)) for shard in shards)

    @property
    def component_names(self) -> tuple[str, ...]:
        """The names of all replicas' components: ``v``, ``v/replica_1``, …."""
        self._require_all_components("component_names")
        if self.is_on_read or inside_run():
            replicas = self._components()
        else:
            raw = self._raw()
            cores, each = _rules.devices_and_replicas(raw)
            replicas = len(raw.sharding.device_set) // cores * each
        return (self.name, *(f"{self.name}/replica_{i}" for i in range(1, replicas)))

    def _require_all_components(self, what: str) -> None:
        if in_replica_context():
            raise ContextError(
                f"{what} of variable {self.name!r} was read inside run, where a replica has only its "
                "component: read it as v[...]. merge_call and code outside of run have all components."
            )

    def _raw(self) -> Any:
        """Returns the raw value; that of an ON_READ variable as stacked components."""
        stored = readable_raw(self)
        raw = _rules.from_result(stored) if self.is_on_read else stored
        if raw is not stored and at_top_level():
            self.set_raw_value(raw)
        return raw

    # Writing

    def set_value(self, value: Any, *, index: Any = ...) -> None:
        """Assigns the value, or a part of it; see the class."""
        check_current_strategy(self._raw(), self.name)
        if index is not Ellipsis:
            value = cast(value, self._raw().dtype, self.name)
        if index is Ellipsis:
            self.assign(value)
        elif self.is_on_read and not in_replica_context():
            self.assign(self.get_value().at[index].set(value))
        elif self.aggregation in (_SUM, VariableAggregation.MEAN) and in_replica_context():
            raise NotImplementedError(
                f"Assigning a part of {self.name!r} inside run is not defined for aggregation "
                f"{self.aggregation.name}: the replicas' parts cannot be combined. Use "
                "scatter_add, or assign the whole value."
            )
        else:
            with converting(
                f"Variable {self.name!r}: index, value", (index, value), "of its array"
            ):
                new = self._raw().at[index].set(value)
            self.assign(new)

    def assign(self, value: Any) -> Any:
        """Sets the value.

        Args:
            value: a number or an array of the variable's shape: this replica's inside ``run``.

        Returns:
            Inside ``run`` this replica's new value; outside of it the variable.

        Raises:
            ValueError: the shape differs, numbers that the dtype cannot hold, such as 0.5 for an
                integer, or a per-replica value outside of ``run``.
            RuntimeError: in the scope of another strategy than the variable's.
        """
        value = self._converted(value)
        if in_replica_context():
            return self._store(value if self.is_on_read else self._over_replicas(value))
        if self.is_on_read:
            self._check_assignable("assign")
            components = _rules.divide(value, self._components(), self.aggregation)
            # In merge_call each replica stores its component.
            return self._store(components[jax.lax.axis_index(DATA)] if inside_run() else components)
        return self._store(value)

    def assign_add(self, delta: Any) -> Any:
        """Adds to the value; see ``assign``."""
        return self._assign_change("assign_add", delta)

    def assign_sub(self, delta: Any) -> Any:
        """Subtracts from the value; see ``assign``."""
        return self._assign_change("assign_sub", delta)

    def scatter(self, op: str, indices: Any, updates: Any) -> Any:
        """Changes rows of the value: ``v[indices] op= updates``; duplicate indices apply one after another.

        Inside ``run`` the changes of all replicas are combined by the aggregation, as one dense change:
        under SUM a row is multiplied or divided by the sum of the replicas' factors, each of which
        is the product of the replica's updates for that row. Integers are divided toward zero.

        Args:
            op: ``"add"``, ``"sub"``, ``"mul"``, ``"div"``, ``"min"``, ``"max"`` or ``"update"``.
            indices: int array of shape (k,), along dim 0 of the variable (this replica's). Inside ``run``
                they are traced: indices out of range have no effect, as everywhere in JAX.
            updates: array of shape (k, …) or one that broadcasts to it (this replica's).

        Returns:
            As ``assign``.

        Raises:
            NotImplementedError: an ON_READ variable; min, max or update under SUM or MEAN.
            ValueError: an unknown ``op``, updates that the dtype cannot hold, indices that are not integers
                or not rows of the variable, or shapes that do not fit.
        """
        if op not in SCATTERS:
            raise ArgumentError(f"scatter: op must be one of {', '.join(SCATTERS)}; got op={op!r}.")
        if self.is_on_read:
            raise NotImplementedError(
                f"{self.name!r} is an ON_READ variable, and scatter_{op} is not defined for it. Use "
                "assign_add inside run, or an ON_WRITE variable."
            )
        combines = self.aggregation in (_SUM, VariableAggregation.MEAN) and in_replica_context()
        if combines and op in ("min", "max", "update"):
            raise NotImplementedError(
                f"scatter_{op} inside run is not defined for aggregation {self.aggregation.name} "
                f"({self.name!r}). Use ONLY_FIRST_REPLICA, or NONE with equal updates."
            )
        raw = self._raw()
        check_current_strategy(raw, self.name)
        updates = cast(updates, raw.dtype, self.name)
        rows = check_rows(indices, updates, raw.shape, f"scatter_{op} of {self.name!r}")
        if op not in ("min", "max", "update"):
            self._check_arithmetic(f"scatter_{op}")
        new = scatter(raw, op, rows, updates, self._over_replicas if combines else None)
        return self._store(
            new if combines or not in_replica_context() else self._over_replicas(new)
        )

    def scatter_add(self, indices: Any, updates: Any) -> Any:
        """Adds to rows; see ``scatter``."""
        return self.scatter("add", indices, updates)

    def scatter_sub(self, indices: Any, updates: Any) -> Any:
        """Subtracts from rows; see ``scatter``."""
        return self.scatter("sub", indices, updates)

    def scatter_mul(self, indices: Any, updates: Any) -> Any:
        """Multiplies rows; see ``scatter``."""
        return self.scatter("mul", indices, updates)

    def scatter_div(self, indices: Any, updates: Any) -> Any:
        """Divides rows; see ``scatter``."""
        return self.scatter("div", indices, updates)

    def scatter_min(self, indices: Any, updates: Any) -> Any:
        """Lowers rows to the updates; see ``scatter``."""
        return self.scatter("min", indices, updates)

    def scatter_max(self, indices: Any, updates: Any) -> Any:
        """Raises rows to the updates; see ``scatter``."""
        return self.scatter("max", indices, updates)

    def scatter_update(self, indices: Any, updates: Any) -> Any:
        """Replaces rows; see ``scatter``."""
        return self.scatter("update", indices, updates)

    def _assign_change(self, method: str, value: Any) -> Any:
        delta = self._converted(value)
        self._check_arithmetic(method)
        delta = -delta if method == "assign_sub" else delta
        if in_replica_context():
            change = delta if self.is_on_read else self._over_replicas(delta)
            return self._store(self._raw() + change)
        if not self.is_on_read:
            return self._store(self._raw() + delta)
        self._check_assignable(method)
        if self.aggregation is _SUM and self._components() > 1:
            raise ArgumentError(
                f"SyncOnReadVariable {self.name!r} does not support `{method}` in cross-replica context "
                "when aggregation is set to `VariableAggregation.SUM`. Use assign, or call it inside run."
            )
        return self._store(self._raw() + delta)

    def _converted(self, value: Any) -> jax.Array:
        """Returns a value as an array of the variable's dtype; raises if its shape is another one."""
        if isinstance(value, DistributedValues):
            raise per_replica_error(self.name)
        if isinstance(value, nnx.Variable):
            value = value.get_value()
        raw = self._raw()
        check_current_strategy(raw, self.name)
        array = cast(value, raw.dtype, self.name)
        shape = raw.shape[1:] if self.is_on_read and not inside_run() else raw.shape
        if array.shape != shape:
            raise ArgumentError(
                f"Variable {self.name!r} has shape {shape} and was assigned shape {array.shape}. The "
                "shapes must be equal; use jnp.broadcast_to, or create another variable."
            )
        return array

    def _over_replicas(self, value: jax.Array) -> jax.Array:
        """Combines the values of all replicas by the aggregation."""
        if self.aggregation is _NONE:
            return value
        if self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return _rules.first_replica(value)
        op = "sum" if self.aggregation is _SUM else "mean"
        total: jax.Array = _frames.current().replica.all_reduce(op, value)
        return total.astype(value.dtype)

    def _store(self, raw: Any) -> Any:
        old = self._raw()
        if at_top_level() and isinstance(old, jax.Array):
            # A copy, since the array may belong to another variable, and will be donated; with the
            # sharding of the old value, so that components are on their replicas.
            with outside_mesh():
                raw = put(jnp.copy(raw), old.sharding)
        self.set_raw_value(raw)
        return raw if in_replica_context() else self

    def _components(self) -> int:
        return int(jax.lax.psum(1, DATA) if inside_run() else self._raw().shape[0])

    def _check_arithmetic(self, method: str) -> None:
        if self._raw().dtype == jnp.bool_:
            raise ArgumentError(
                f"Variable {self.name!r} has dtype bool, for which {method} is not defined. Use assign."
            )

    def _check_assignable(self, method: str) -> None:
        if self.aggregation is _NONE and self._components() > 1:
            raise ArgumentError(
                f"The ON_READ variable {self.name!r} has aggregation=NONE, so {method} in cross-replica "
                "context is not defined. Assign it inside run, or give it another aggregation."
            )

    def __getattr__(self, name: str) -> Any:
        """Returns metadata, or an attribute of the value."""
        if not name.startswith("_") and not self.has_metadata(name):
            return getattr(self.get_value(), name)
        return super().__getattr__(name)


def on_replicas(variable: Variable, mesh: Mesh) -> jax.Array:
    """Returns the raw value of an ON_READ variable with one component for each replica of a mesh."""
    return _rules.reshard(_rules.from_result(readable_raw(variable)), mesh, variable.aggregation)


def mesh_of_components(variable: Variable) -> Mesh | None:
    """Returns the mesh with one component of an ON_READ variable on each replica; None without one."""
    return _rules.mesh_of(_rules.from_result(variable.get_raw_value()))


def components_for(variable: Variable, value: Any) -> jax.Array:
    """Returns components whose aggregate is ``value``, sharded as the current ones, donated or not."""
    old = variable.get_raw_value()
    old = old if is_donated(old) else _rules.from_result(old)
    new = _rules.divide(jnp.asarray(value, old.dtype), old.shape[0], variable.aggregation)
    with outside_mesh():
        placed: jax.Array = put(new, old.sharding)
    return placed


def aggregated(variable: Variable, components: jax.Array) -> jax.Array | None:
    """Returns the aggregate of components of a variable; None for aggregation NONE."""
    if variable.aggregation is _NONE:
        return None
    return _rules.combine(components, variable.aggregation, variable.name)
