"""Per-replica values, and the record of which arrays are mirrored."""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from distribute_jax._absent import attribute_error, framework_of
from distribute_jax._checks import checked, refusing
from distribute_jax._errors import (
    DonatedError,
    PerReplicaAttributeError,
    PerReplicaError,
    PerReplicaTypeError,
    StepFailedError,
)
from distribute_jax._jax_private import (
    ARRAY,
    UNNOTED,
    at_top_level,
    note_all,
    note_on,
    uncommitted,
)
from distribute_jax._mesh import (
    cores_per_replica,
    num_replicas,
    outside_mesh,
    put,
    replicas_per_device,
    split_sharding,
    transfers_are_guarded,
)
from distribute_jax._messages import error_line, error_text, is_donated, is_key, leaf_text, on_bits


class Layout(enum.Enum):
    """How the replicas' parts are arranged in one global array."""

    STACKED = "stacked"
    """Along a leading dim of size N: results of ``run``."""
    JOINED = "joined"
    """One after the other along dim 0: batches."""


_HOW_TO_COMBINE = """\
Use strategy.reduce('sum', value, axis=None) or strategy.gather(value, axis=0) for one array, \
strategy.reduce('mean', value) for an average, strategy.experimental_local_results(value) for a tuple of \
them, or reduce it in the step: dj.get_replica_context().all_reduce('sum', x). A step is not called \
directly: strategy.run(step, args=(value,)) calls it with the part of each replica."""


@checked
def _no_arithmetic(self: NotAnArray, *_: object) -> NoReturn:
    raise self._arithmetic_error()


@checked
def _no_array(self: NotAnArray, *_: object, **__: object) -> NoReturn:
    raise self._conversion_error(sys._getframe(2).f_globals.get("__name__"))


class NotAnArray:
    """A value that stands for arrays, and raises errors of its class where it is used like one."""

    def _arithmetic_error(self) -> Exception:
        return self._conversion_error(None)

    def _conversion_error(self, caller: str | None) -> Exception:
        raise NotImplementedError(f"{type(self).__name__}._conversion_error is not defined")

    def __format__(self, spec: str) -> str:
        """Formats as ``str`` does; a format of numbers, such as ``.3f``, is a TypeError."""
        return format(str(self), spec) if not spec or spec[-1] == "s" else _no_arithmetic(self)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _no_arithmetic
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _no_arithmetic
    __pow__ = __rpow__ = __matmul__ = __rmatmul__ = __neg__ = __pos__ = __abs__ = __round__ = (
        _no_arithmetic
    )
    __lt__ = __le__ = __gt__ = __ge__ = __getitem__ = __iter__ = _no_arithmetic
    __array__ = __float__ = __int__ = __bool__ = __index__ = __len__ = _no_array


_ARRAY_ATTRIBUTES = frozenset(
    {"numpy", "item", "tolist", "shape", "ndim", "size", "astype", "mean", "sum", "min", "max", "T"}
)
"""Attributes that arrays have and per-replica values lack."""

_MAX_SHOWN_NUMBERS = 64
"""How many numbers a repr may show."""


class DistributedValues(NotAnArray):
    """The base class of values that hold one part for each replica.

    Outside ``run`` such a value is only passed around: it takes part in no arithmetic, and it is never
    turned into an array implicitly, since it does not say how to combine the parts.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/DistributedValues
    """

    # Of pytrees alone: for others jax.numpy fails before it calls this, with words about tracing.
    __jax_array__ = _no_array

    if not TYPE_CHECKING:
        __reduce__ = refusing(
            "A value of several replicas cannot be pickled. Keep strategy.gather(value, axis=0), one array, "
            "or strategy.experimental_local_results(value), a tuple of them."
        )

    @property
    def values(self) -> tuple[jax.Array, ...]:
        """This process's parts in replica order, each on its device, uncommitted, without padding."""
        raise NotImplementedError(f"{type(self).__name__}.values is not defined")

    def __repr__(self) -> str:
        """As TensorFlow's, ``PerReplica:{0: …, 1: …}``; only shapes if it is large or traced."""
        if not at_top_level() or self._size() > _MAX_SHOWN_NUMBERS:
            return self._described()
        try:
            shown = [v if is_key(v) else np.asarray(v) for v in self.values]
            parts = ", ".join(f"{i}: {v!r}" for i, v in enumerate(shown))
        except jax.errors.JaxRuntimeError as error:
            parts = f"unreadable, {step_of(self) or 'its step'} failed: {error_text(error)}"
        except Exception as error:
            parts = f"unreadable, {error_line(error)}"
        return f"PerReplica:{{{parts}}}"

    def __getattr__(self, name: str) -> NoReturn:
        if name not in _ARRAY_ATTRIBUTES:
            raise attribute_error("jax.Array", f"{type(self).__name__!r} object", name, self)
        raise PerReplicaAttributeError(
            f"{self._described()} has no {name!r}: it holds one value for each replica.\n{_HOW_TO_COMBINE}"
        )

    def _described(self) -> str:
        return type(self).__name__

    def _size(self) -> int:
        return 0

    def _arithmetic_error(self) -> Exception:
        return PerReplicaTypeError(
            f"{self._described()} holds one value for each replica, so it cannot be used like one array "
            f"here.\n{_HOW_TO_COMBINE}"
        )

    def _conversion_error(self, caller: str | None) -> Exception:
        graph = " Leave @tf.function out: strategy.run compiles the step." * bool(
            framework_of(caller)
        )
        return PerReplicaError(
            f"{self._described()} holds one value for each replica and cannot be turned into one "
            f"array.{graph}\n{_HOW_TO_COMBINE}"
        )


Share = Literal["", "part", "mean", "nonlinear"]


class PerReplica(DistributedValues):
    """One global array whose parts belong to the replicas, divided along the mesh axis ``"data"``.

    Making one moves no data. ``run`` splits exactly the values of this class among its arguments; each
    replica gets every other array in full.

    Attributes:
        array: ``global_array``, but of NumPy while a small batch of one device is on the host: the call of a
            step transfers it faster than ``device_put`` does.
        layout: ``STACKED``, dim 0 has size N, or ``JOINED``, dim 0 is divided into N equal shares.
        mesh: the mesh of the strategy that made it.
        counts: the real examples of each replica where shares are padded; None where all is real.
        ambiguous: why it is not known which rows are real, or None.
        step: the name of the step that returned it, or None; copies made by tree functions forget it.
        share: what each replica's part is known to be: ``"part"`` of a mean, which is the sum over the
            replicas; a ``"mean"`` over its examples; ``"nonlinear"``, computed from such means; or ``""``.

    Source: https://www.tensorflow.org/api_docs/python/tf/types/experimental/distributed/PerReplica
    """

    def __init__(
        self,
        array: jax.Array | np.ndarray[Any, Any],
        mesh: Mesh,
        *,
        layout: Layout = Layout.STACKED,
        counts: tuple[int, ...] | None = None,
        ambiguous: str | None = None,
        step: str | None = None,
        share: Share = "",
    ) -> None:
        self.array = array
        self.mesh = mesh
        self.layout = layout
        self.counts = counts
        self.ambiguous = ambiguous
        self.step = step
        self.share = share

    @property
    def global_array(self) -> jax.Array:
        """The array of all replicas (global view), sharded over ``"data"``."""
        if isinstance(self.array, np.ndarray):
            with outside_mesh():
                self.array = put(self.array, split_sharding(self.mesh))
        return cast("jax.Array", self.array)

    @property
    def program_input(self) -> Any:
        """What compiled programs take: ``array``, unless JAX's guard would refuse to transfer it."""
        return self.global_array if transfers_are_guarded() else self.array

    @property
    def values(self) -> tuple[jax.Array, ...]:
        """This process's parts in replica order, each on its device, uncommitted, without padding."""
        self.check_rows_known()
        with reading(self), outside_mesh():
            shards = _local_shards(self.global_array, self.mesh)
            return tuple(uncommitted(self._real_part(i, shard)) for i, shard in shards)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of every part."""
        return self.array.dtype

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of one replica's part, padding included."""
        shape = self.array.shape
        if self.layout is Layout.STACKED:
            return shape[1:]
        return (shape[0] // num_replicas(self.mesh), *shape[1:])

    def _described(self) -> str:
        if not hasattr(self.array, "shape"):  # made by jax.tree.map, as of shapes
            return f"PerReplica of {self.array!r:.60}"
        shape = ",".join(map(str, self.part_shape))
        return f"PerReplica of {num_replicas(self.mesh)} × {self.dtype}[{shape}]"

    def _size(self) -> int:
        return int(getattr(self.array, "size", _MAX_SHOWN_NUMBERS + 1))

    def check_rows_known(self) -> None:
        """Raises if it is not known which rows of a result are real examples."""
        if self.ambiguous is not None:
            raise PerReplicaError(self.ambiguous)

    def _real_part(self, replica: int, shard: jax.Array) -> jax.Array:
        part = shard[0] if self.layout is Layout.STACKED else shard
        return part if self.counts is None else part[: self.counts[replica]]


class UnevenPerReplica(PerReplica):
    """A per-replica value made on the host from arrays of different shapes, one for each replica."""

    def __init__(self, parts: Sequence[jax.Array], mesh: Mesh) -> None:
        self.parts = tuple(parts)
        self.mesh = mesh
        self.layout = Layout.JOINED
        self.counts = None
        self.ambiguous = None
        self.step = None
        self.share: Share = ""

    @property
    def values(self) -> tuple[jax.Array, ...]:
        """This process's parts in replica order."""
        return self.parts

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the first part."""
        return self.parts[0].dtype

    def _described(self) -> str:
        return f"PerReplica of {', '.join(map(leaf_text, self.parts))}"

    def _size(self) -> int:
        return sum(part.size for part in self.parts)


def _local_shards(array: jax.Array, mesh: Mesh) -> list[tuple[int, jax.Array]]:
    """Returns (replica, shard) for each replica of this process, with the shard on its first core."""
    if len(array.devices()) < min(mesh.size, 2):  # jax.device_put moved it
        return list(enumerate(jnp.split(array, num_replicas(mesh))))
    share, cores = array.shape[0] // num_replicas(mesh), cores_per_replica(mesh)
    each = replicas_per_device(mesh)
    shards: dict[int, jax.Array] = {}
    for place, shard in enumerate(array.addressable_shards):
        first = (shard.index[0].start or 0) // share if share else place // cores * each
        shards.setdefault(first, shard.data)
    return [
        (first + i, shard if each == 1 else shard[i * share : (i + 1) * share])
        for first, shard in sorted(shards.items(), key=lambda item: item[0])
        for i in range(each)
    ]


# Copies made by tree functions forget the step. This way JAX reads the attributes in C.
jax.tree_util.register_dataclass(PerReplica, ["array"], ["mesh", "layout", "counts", "ambiguous"])
jax.tree_util.register_pytree_node(
    UnevenPerReplica,
    lambda value: (value.parts, value.mesh),
    lambda mesh, parts: UnevenPerReplica(parts, mesh),
)


def copied_here(array: jax.Array) -> jax.Array:
    """Returns a copy with the same sharding, computed without the other processes."""
    with outside_mesh():
        if array.is_fully_addressable:
            return jnp.copy(array)
        if is_key(array):
            return on_bits(copied_here, array)
        shards = [jnp.copy(shard.data) for shard in array.addressable_shards]
        return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


_STEP = "_distribute_jax_step"
"""The note of the step that proved an array mirrored."""


class _MirroredType(type):
    def __instancecheck__(cls, value: object) -> bool:
        return note_on(value, _STEP) is not UNNOTED


class Mirrored(metaclass=_MirroredType):
    """The type, for ``isinstance``, of a result that ``run`` proved equal on all replicas.

    Such a result is an ordinary ``jax.Array``, replicated over the strategy's mesh, so there is
    nothing to construct.

    Source: https://www.tensorflow.org/api_docs/python/tf/types/experimental/distributed/Mirrored
    """


def mark_mirrored(array: jax.Array, step: str | None) -> jax.Array:
    """Records, for the lifetime of the array, that a step proved it equal on all replicas."""
    note_all([array], _STEP, step)
    return array


def mark_all_mirrored(arrays: Iterable[jax.Array], step: str) -> None:
    """Records it for several arrays."""
    note_all(arrays, _STEP, step)


@contextmanager
def reading(value: Any) -> Iterator[None]:
    """Turns the error of a failed step into one that names the step, in a block that reads its result.

    Steps run in the background; this does not wait for them.
    """
    array = getattr(value, "global_array", value)
    if is_donated(array):
        raise DonatedError(
            f"{leaf_text(array)} was donated to a call, which reused its memory, so it can no longer be "
            "read. Use what that call returned, or pass it dj.snapshot(value)."
        )
    try:
        if type(array) is ARRAY and array.is_ready():
            array.block_until_ready()
        yield
    except jax.errors.JaxRuntimeError as error:
        step = step_of(value) or "The step that returned a value"
        raise StepFailedError(
            f"{step}, or a step whose results it used, failed while it ran, so its results cannot "
            f"be read. The reason: {error_text(error)}"
        ) from error


def step_of(value: Any) -> str | None:
    """Returns the name of the step that returned a value, if it is known."""
    step = note_on(value, _STEP)
    return getattr(value, "step", None) if step is UNNOTED else step
