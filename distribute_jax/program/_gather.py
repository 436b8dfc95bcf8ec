"""Fully sharded state: inserts all-gathers into a traced step, at the equations that read divided arrays.

The traced step knows nothing of shares. Elementwise operations (a cast) and transpositions run on the share,
so that the gather moves less. In the body of a scan over layers, or of a rematerialised block, the gather is
in the body, so that one layer is whole at a time; ``reshard_after_forward`` decides what is gathered twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr
from jax.sharding import NamedSharding, PartitionSpec

from distribute_jax._mesh import DATA, share_axis
from distribute_jax.collectives._markers import unreduced_p
from distribute_jax.program._jaxprs import (
    INLINED,
    ClosedJaxpr,
    Override,
    Values,
    called_body,
    consts_and_carries,
    initial_values,
    inputs_of,
    is_literal,
    name,
    open_jaxpr,
    run_equations,
    run_with,
    run_with_body,
    value_of,
    variables,
)
from distribute_jax.program._placement import Axes, data_dim, names_of


class ShareSpec(NamedTuple):
    """How an array is divided over the replicas, and over the devices of each."""

    dim: int
    """The dim that is divided over the replicas."""
    axes: Axes
    """The mesh axes that divide the other dims over the devices of a replica."""
    shares: int
    """The number of shares; if there are more replicas, each group of so many has a copy."""

    @classmethod
    def of(cls, sharding: NamedSharding, ndim: int) -> ShareSpec | None:
        """Returns the spec of a sharding; None if it does not divide the array over the replicas."""
        if (dim := data_dim(sharding.spec)) is None:
            return None
        axes = [*sharding.spec, *[None] * (ndim - len(sharding.spec))]
        axes[dim] = None
        return cls(dim, tuple(axes), sharding.mesh.shape[share_axis(sharding.mesh)])

    def scatter(self, array: Any) -> Share:
        """Reduce-scatters an array over the replicas."""
        local = self._by_parts(jax.lax.psum_scatter, array, scatter_dimension=self.dim)
        if (groups := self._groups()) is not None:
            local = jax.lax.psum(local, DATA, axis_index_groups=groups.T.tolist())
        return Share(local, self)

    def gather(self, local: Any) -> Any:
        """All-gathers the shares of the replicas."""
        return self._by_parts(jax.lax.all_gather, local, axis=self.dim)

    def inside(self) -> ShareSpec | None:
        """Returns the spec of one of stacked layers; None if the stack is divided along its layers."""
        return self._replace(dim=self.dim - 1, axes=self.axes[1:]) if self.dim > 0 else None

    def stacked(self) -> ShareSpec:
        """Returns the spec of such arrays when they are stacked."""
        return self._replace(dim=self.dim + 1, axes=(None, *self.axes))

    def _groups(self) -> np.ndarray[Any, Any] | None:
        """Returns the replica ids of each group that has a copy; None for one group."""
        replicas = np.arange(jax.lax.axis_size(DATA)).reshape(-1, self.shares)
        return replicas if len(replicas) > 1 else None

    def _by_parts(self, collective: Callable[..., Any], array: Any, **dims: int) -> Any:
        """Runs a collective device by device: XLA would gather the array over the replica's devices first."""
        groups = self._groups()
        ids = None if groups is None else groups.tolist()
        run = functools.partial(
            collective, axis_name=DATA, tiled=True, **dims, axis_index_groups=ids
        )
        if names := {name for of_dim in self.axes for name in names_of(of_dim)}:
            spec = PartitionSpec(*self.axes)
            run = jax.shard_map(
                run, in_specs=(spec,), out_specs=spec, axis_names=names, check_vma=False
            )
        return run(array)


@dataclass(frozen=True, eq=False)
class Share:
    """One replica's share of an array."""

    local: Any
    spec: ShareSpec

    def whole(self, after: Any = None) -> Any:
        """Gathers the array once ``after`` is computed, so that at most one gather runs ahead of its use."""
        local = self.local
        if after is not None:
            local, _ = jax.lax.optimization_barrier((local, after))
        return self.spec.gather(local)


_UNARY = {"convert_element_type", "copy", "name", "neg", "reduce_precision", "stop_gradient"}
_WITH_SCALAR = {"add", "div", "mul", "sub"}


class Gathering:
    """Runs the equations of one replica, some operands of which are shares."""

    def __init__(self, total: int, reshard: bool | None = None) -> None:
        """Starts with nothing gathered.

        ``total`` is the number of divided elements. ``reshard`` is the strategy's ``reshard_after_forward``:
        with True an array is gathered at every equation that reads it; with None once, and again in each
        scan and rematerialised block; with False once.
        """
        self._total, self._reshard = total, reshard
        self._previous: Any = None
        self._gathered: dict[int, tuple[Share, Any]] = {}

    def run(
        self,
        jaxpr: Jaxpr,
        eqns: Sequence[Any],
        values: Values,
        wanted: Iterable[Any],
        scattered: Mapping[Any, ShareSpec] = MappingProxyType({}),
    ) -> None:
        """Runs equations, and adds their results to the values.

        ``scattered`` are stacked results of scans that are reduce-scattered next, with the spec of the sum:
        the reduce-scatter moves into the scan, so that whole gradients are never stacked.
        """
        needed = variables([*wanted, *inputs_of(eqns)])  # a set would put carries in any order

        def override_of(eqn: Any) -> Override:
            scatters = name(eqn) == "scan" and not scattered.keys().isdisjoint(eqn.outvars)
            if scatters or any(isinstance(values.get(v), Share) for v in variables(eqn.invars)):
                return functools.partial(self._apply, jaxpr, eqn, needed, scattered)
            return None

        run_with(jaxpr, eqns, values, needed, override_of)

    def whole(self, values: Sequence[Any]) -> list[Any]:
        """Returns the values with every share gathered."""
        outs = [self._whole(x) if isinstance(x, Share) else x for x in values]
        arrays = [x for x in values if isinstance(x, jax.core.Tracer)]
        if ready := [x for x in arrays if jnp.issubdtype(x.dtype, jnp.inexact)]:
            self._previous = min(ready, key=lambda x: x.size)
        return outs

    def _whole(self, share: Share) -> Any:
        if self._reshard:
            return share.whole(self._previous)
        if id(share) not in self._gathered:
            self._gathered[id(share)] = share, share.whole()
        return self._gathered[id(share)][1]

    def _body(self, body: Any, args: Sequence[Any]) -> list[Any]:
        values, jaxpr = initial_values(body, args), open_jaxpr(body)
        self.run(jaxpr, jaxpr.eqns, values, jaxpr.outvars)
        return [value_of(v, values) for v in jaxpr.outvars]

    def _apply(
        self,
        jaxpr: Jaxpr,
        eqn: Any,
        needed: list[Any],
        scattered: Mapping[Any, ShareSpec],
        *args: Any,
    ) -> list[Any]:
        """Returns the results of an equation that has shares among its operands."""
        body, kind = called_body(eqn), name(eqn)
        if body is not None and kind in INLINED:
            return self._body(body, args)
        if kind in {"checkpoint", "scan"} and self._reshard is False:
            args = tuple(self.whole(args))
        if body is not None and kind == "checkpoint":
            return self._remat(eqn, args)
        if kind == "scan":
            return self._scan(eqn, args, needed, scattered)
        args = tuple(self._gathered.get(id(x), (x, x))[1] for x in args)
        if (share := self._run_on_share(eqn, args)) is not None:
            return [share]
        pairs = zip(eqn.invars, self.whole(args), strict=True)
        values = {v: x for v, x in pairs if not is_literal(v)}
        run_equations(jaxpr, [eqn], values, eqn.outvars)
        return [values.get(v) for v in eqn.outvars]

    def _run_on_share(self, eqn: Any, args: Sequence[Any]) -> Share | None:
        """Returns the result computed from the share alone; None if the equation needs the whole array."""
        shares = [x for x in args if isinstance(x, Share)]
        if len(shares) != 1 or len(eqn.outvars) != 1:
            return None
        [share], kind = shares, name(eqn)
        # Only literals: a computed scalar may differ between replicas.
        pairs = zip(eqn.invars, args, strict=True)
        literals = all(x is share or is_literal(v) for v, x in pairs)
        if kind in _UNARY or (kind in _WITH_SCALAR and literals):
            local = [x.local if x is share else x for x in args]
            return Share(eqn.primitive.bind(*local, **eqn.params), share.spec)
        if kind == "transpose":
            order = eqn.params["permutation"]
            axes = tuple(share.spec.axes[i] for i in order)
            spec = share.spec._replace(dim=order.index(share.spec.dim), axes=axes)
            return Share(jax.lax.transpose(share.local, order), spec)
        if kind == "reshape" and eqn.params.get("dimensions") is None:
            return _reshaped(share, eqn.invars[0].aval.shape, eqn.params["new_sizes"])
        return None

    def _remat(self, eqn: Any, args: Sequence[Any]) -> list[Any]:
        """Runs a rematerialised block with its gathers inside, so that they are rematerialised too."""
        local, specs = _split_shares(args)
        out_specs: list[ShareSpec | None] = []

        def body(*operands: Any) -> list[Any]:
            inner = Gathering(self._total)
            outs = inner._body(eqn.params["jaxpr"], _join_shares(operands, specs))
            outs, out_specs[:] = _split_shares(outs)
            return outs

        return _join_shares(run_with_body(eqn, body, local), out_specs)

    def _scan(
        self, eqn: Any, args: Sequence[Any], needed: list[Any], scattered: Mapping[Any, ShareSpec]
    ) -> list[Any]:
        """Runs a scan over layers that gathers parameters and reduce-scatters gradients layer by layer."""
        num_consts, num_carry = consts_and_carries(eqn)
        first = num_consts + num_carry
        consts, carry, xs = args[:num_consts], self.whole(args[num_consts:first]), args[first:]
        gathered = sum(x.local.size * x.spec.shares for x in consts if isinstance(x, Share))
        # More than half of the state is the model itself, in a loop that accumulates gradients.
        if gathered <= self._total / 2:
            consts = self.whole(consts)
        xs = [self._whole(x) if isinstance(x, Share) and x.spec.dim == 0 else x for x in xs]
        local, specs = _split_shares(xs)
        out_specs: list[ShareSpec | None] = []

        def stacked(v: Any, y: Any) -> Any:
            spec = scattered.get(v)
            of_layer = spec and spec.inside()
            return of_layer.scatter(y) if of_layer else y if v in needed else None

        def one(carry: Any, xs: Any) -> Any:
            layer = _join_shares(xs, [spec and spec.inside() for spec in specs])
            inner = Gathering(self._total)
            outs = inner._body(eqn.params["jaxpr"], [*consts, *carry, *layer])
            ys = list(map(stacked, eqn.outvars[num_carry:], outs[num_carry:]))
            ys, of_layers = _split_shares(ys)
            out_specs[:] = [spec and spec.stacked() for spec in of_layers]
            return inner.whole(outs[:num_carry]), ys

        params = {key: eqn.params[key] for key in ("reverse", "length", "unroll")}
        carry, ys = jax.lax.scan(one, carry, local, **params)
        return [*carry, *_join_shares(ys, out_specs)]


def _reshaped(share: Share, old: Sequence[int], new: Sequence[int]) -> Share | None:
    """Returns the share of a reshaped array if the share is contiguous along a new dim."""
    before, shares = prod(old[: share.spec.dim]), share.spec.shares
    # XLA decides how a replica's devices divide the new dims.
    for dim, size in enumerate(new if not any(share.spec.axes) else ()):
        if size and prod(new[:dim]) == before and size % shares == 0:
            local = jax.lax.reshape(share.local, [*new[:dim], size // shares, *new[dim + 1 :]])
            return Share(local, ShareSpec(dim, (None,) * len(new), shares))
    return None


def _split_shares(values: Sequence[Any]) -> tuple[list[Any], list[ShareSpec | None]]:
    """Returns the arrays of values, and the spec of those that are shares."""
    local = [x.local if isinstance(x, Share) else x for x in values]
    return local, [x.spec if isinstance(x, Share) else None for x in values]


def _join_shares(arrays: Sequence[Any], specs: Sequence[ShareSpec | None]) -> list[Any]:
    """Returns the values of which ``_split_shares`` returned the arrays and specs."""
    return [x if spec is None else Share(x, spec) for x, spec in zip(arrays, specs, strict=True)]


def inline_forwarded(body: Any) -> Any:
    """Returns a jaxpr that reads an operand instead of a result that only forwards it.

    ``nnx.scan`` and ``nnx.remat`` return every variable that they take, most of them unchanged. The markers
    of ``dj.Optimizer`` are for the proof, which is complete by now.
    """
    jaxpr, same = body.jaxpr, _forwarded(body.jaxpr)

    def read(atoms: Sequence[Any]) -> list[Any]:
        return [v if is_literal(v) else same.get(v, v) for v in atoms]

    others = (eqn for eqn in jaxpr.eqns if eqn.primitive is not unreduced_p)
    eqns = [eqn.replace(invars=read(eqn.invars)) for eqn in others]
    return ClosedJaxpr(jaxpr.replace(eqns=eqns, outvars=read(jaxpr.outvars)), body.consts)


def _forwarded(jaxpr: Jaxpr) -> dict[Any, Any]:
    """Returns the operand that each forwarded result equals."""
    same: dict[Any, Any] = {}
    for eqn in jaxpr.eqns:
        for out, i in zip(eqn.outvars, _forwarded_inputs(eqn), strict=False):
            if i is not None and not is_literal(v := eqn.invars[i]):
                same[out] = same.get(v, v)
    return same


def _forwarded_inputs(eqn: Any) -> list[int | None]:
    """Returns for each result the index of the operand that it forwards; None for a new value."""
    if eqn.primitive is unreduced_p:
        return list(range(len(eqn.invars)))
    is_scan = name(eqn) == "scan"
    body = eqn.params["jaxpr"] if is_scan else called_body(eqn)
    if body is None or not (is_scan or name(eqn) in {*INLINED, "checkpoint"}):
        return []
    jaxpr = open_jaxpr(body)
    inside, at = _forwarded(jaxpr), {v: i for i, v in enumerate(jaxpr.invars)}
    outs = [None if is_literal(v) else at.get(inside.get(v, v)) for v in jaxpr.outvars]
    if is_scan:
        num_consts, num_carry = consts_and_carries(eqn)
        for k, i in enumerate(outs):  # a carry forwards itself, a stacked result what is scanned
            same = (
                i == num_consts + k
                if k < num_carry
                else i is not None and i >= num_consts + num_carry
            )
            outs[k] = i if same else None
    return outs
