"""``Optimizer``: sums gradients over the replicas, then updates; gradient accumulation and loss scaling."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from distribute_jax._absent import attribute_error, getattr_with_hints
from distribute_jax._checks import check_int, check_number, converting, refuse, refusing
from distribute_jax._errors import ArgumentError, ArgumentTypeError, DistributeError, log_once
from distribute_jax._mesh import put
from distribute_jax._messages import promoting
from distribute_jax.collectives._markers import unreduced
from distribute_jax.program._skipped_steps import (
    Guard,
    Unconditional,
    cond_if_sound,
    current_replica,
    first_flagged_replica,
    first_marked,
    one_hot_flag,
)
from distribute_jax.strategies import get_strategy
from distribute_jax.training._objective import variables
from distribute_jax.variables import Variable, VariableAggregation, VariableSynchronization


class Optimizer(nnx.Optimizer[Any]):
    """An ``nnx.Optimizer`` that behaves like Keras's optimizers under a strategy.

    ``update`` sums the gradients over the replicas before the optax transformation sees them, so
    that clipping by the global norm, for example, uses the gradient of the global batch. It equals
    ``nnx.Optimizer`` with an explicit ``all_reduce("sum", grads)``. Use ``dj.compute_average_loss`` for the
    loss, which divides by the size of the global batch.

    Args:
        model: the module whose variables are updated.
        tx: an ``optax.GradientTransformation``.
        wrt: which variables, as for ``nnx.Optimizer``.
        gradient_accumulation_steps: how many batches make one update, with the mean of their
            gradients. Each replica accumulates its gradients, which are summed over the replicas once, after
            the last of these batches; in the scope of a ``ParameterServerStrategy`` the servers accumulate
            them. ``step`` counts updates.
        clip_global_norm: the largest norm of the gradient that ``tx`` sees.
        loss_scale: for float16: ``"dynamic"``, or a fixed factor, by which ``scale_loss`` multiplies.
            An update whose gradients are not finite is skipped, and halves a dynamic scale.
        skip_nonfinite: whether a step whose gradients are not finite, or too large to be squared, is
            skipped: no state that it writes changes, on any replica, including the statistics of batch
            norms and metrics. A warning is logged with the step and the replica, and ``skipped_steps``
            counts. With gradient accumulation each batch counts as a step. Outside ``run`` only the update
            is skipped.
        max_consecutive: how many steps in a row may be skipped. If more are, nothing changes any more, and
            ``StepsSkippedError`` is raised a few steps later.

    Raises:
        ValueError: an invalid option.

    Example:
        >>> import distribute_jax as dj, jax.numpy as jnp, optax
        >>> from flax import nnx
        >>> strategy = dj.OneDeviceStrategy("cpu:0")
        >>> with strategy.scope():
        ...     model = nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0))
        ...     optimizer = dj.Optimizer(model, optax.sgd(0.5))
        >>> def step(x):
        ...     loss = lambda m: dj.compute_average_loss(m(x)[:, 0])
        ...     optimizer.update(model, nnx.grad(loss)(model))
        >>> before = float(model.kernel[0, 0])
        >>> strategy.run(step, args=(jnp.ones((2, 1)),))
        >>> round(before - float(model.kernel[0, 0]), 4)
        0.5

    Source: https://keras.io/api/optimizers/ and
    https://flax.readthedocs.io/en/latest/api_reference/flax.nnx/training/optimizer.html
    """

    if not TYPE_CHECKING:
        __getattr__ = getattr_with_hints("dj.Optimizer")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("lr", "iterations"):  # Keras's names, which would have no effect
            raise attribute_error("dj.Optimizer", "'Optimizer' object", name, self)
        super().__setattr__(name, value)

    def __init__(
        self,
        model: Any,
        tx: Any,
        *,
        wrt: Any = nnx.Param,
        gradient_accumulation_steps: int = 1,
        clip_global_norm: float | None = None,
        loss_scale: float | str | None = None,
        skip_nonfinite: bool = False,
        max_consecutive: int = 20,
    ) -> None:
        _check_arguments(model, tx)
        with converting("dj.Optimizer: wrt", wrt, "a filter of NNX, such as nnx.Param"):
            nnx.state(model, wrt)
        if clip_global_norm is not None:
            check_number("clip_global_norm", clip_global_norm)
            tx = optax.chain(optax.clip_by_global_norm(clip_global_norm), tx)
        super().__init__(model, tx, wrt=wrt)
        self.step = UpdateCount(self.step[...])
        steps = gradient_accumulation_steps
        check_int("gradient_accumulation_steps", steps)
        params = jax.tree.leaves(
            nnx.state(model, wrt), is_leaf=lambda x: isinstance(x, nnx.Variable)
        )
        self.accumulation = nnx.data(Accumulation(params, steps) if steps > 1 else None)
        self.loss_scale = nnx.data(LossScale(loss_scale) if loss_scale is not None else None)
        check_int("max_consecutive", max_consecutive, 0)
        self.guard = nnx.data(Guard(_NOT_FINITE, max_consecutive) if skip_nonfinite else None)

    @property
    def skipped_steps(self) -> int:
        """How many steps ``skip_nonfinite`` has skipped."""
        return 0 if self.guard is None else self.guard.skipped

    @property
    def learning_rate(self) -> float:
        """The learning rate, if it is part of the state, as in optimizers that ``Model.compile`` made.

        With a schedule it is the rate of the last update.
        """
        return LearningRate(self._rate[...])

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        check_number("learning_rate", rate, at_least=0)
        variable = self._rate
        if self._rates("hyperparams_states"):
            raise ArgumentError(
                "The learning rate of this optimizer follows a schedule, which sets it at each update. "
                "Compile with a number, as optax.adam(1e-3), to set it."
            )
        old = variable.get_raw_value()  # same dtype and sharding, so nothing is compiled again
        variable.set_raw_value(put(np.asarray(rate, old.dtype), old.sharding))

    @property
    def _rate(self) -> Any:
        rates = self._rates("hyperparams")
        if len(rates) != 1:
            raise ArgumentError(
                "The learning rate of this optimizer is not part of its state, so it can be neither read nor "
                "set. In your own loop write dj.Optimizer(model, optax.inject_hyperparams(optax.adam)("
                "learning_rate=1e-3)). Compile with an optimizer of optax or a chain of them, with Keras's "
                "name, or for your own transformation as in the loop."
            )
        return rates[0]

    def _rates(self, kind: str) -> list[Any]:
        return [
            variable
            for path, variable in variables(self).items()
            if kind in path and path[path.index(kind) + 1 :][:1] == ("learning_rate",)
        ]

    def scale_loss(self, loss: jax.Array) -> jax.Array:
        """Returns the loss whose gradients ``update`` takes: scaled if there is a ``loss_scale``.

        Args:
            loss: this replica's part of the loss.
        """
        return loss if self.loss_scale is None else self.loss_scale.multiply(loss)

    def update(
        self, model: Any, grads: Any, /, *, skip_gradients_aggregation: bool = False, **kwargs: Any
    ) -> Any:
        """Updates model and optimizer from this replica's gradients.

        Args:
            model: the module that was passed to the constructor.
            grads: the gradients of this replica's part of the loss, from ``nnx.grad``.
            skip_gradients_aggregation: whether the gradients are already summed over the replicas.
            **kwargs: for optax transformations that take more arguments.

        Returns:
            The updates that optax added to the parameters; None with an older Flax, or if an update may be
            skipped.

        Raises:
            OutOfSyncError: when the step is traced for several replicas and the gradients are already
                equal on all of them, so that summing would make them N times too large.
            ValueError: ``skip_gradients_aggregation`` with accumulation; the transformation needs an
                argument that was not passed.
        """
        if isinstance(grads, nnx.Module) and not isinstance(model, nnx.Module):
            raise ArgumentTypeError(
                "Optimizer.update(model, grads): the module comes first. Swap them."
            )
        if self.loss_scale is not None:
            grads = self.loss_scale.divide(grads)
        if self.accumulation is None:
            replica: Any = -1
            if not skip_gradients_aggregation:
                grads, replica = _sum_over_replicas(grads, find_bad=self.guard is not None)
            return self._apply(model, grads, kwargs, self.guard, replica)
        if skip_gradients_aggregation:
            raise ArgumentError(
                "gradient_accumulation_steps adds gradients up before they are summed over the replicas, so "
                "it cannot be used with skip_gradients_aggregation=True."
            )
        leaves, treedef = jax.tree.flatten(grads)
        if self.guard is not None:
            is_bad, replica = first_flagged_replica(~_finite(leaves))
            self.guard.judge(~is_bad, replica)
        if not (is_local := self.accumulation.is_local):
            leaves = _sum_over_replicas(leaves)[0]
        is_last, means = self.accumulation.add(leaves)
        mean = jax.tree.unflatten(treedef, means)

        def apply(optimizer: Optimizer, model: Any) -> None:
            optimizer._apply(model, _sum_over_replicas(mean)[0] if is_local else mean, kwargs)

        return update_if(is_last, apply, [(self, _is_updated), (model, self.wrt)])

    def apply_gradients(self, grads: Any, model: Any = None, **kwargs: Any) -> Any:
        """Calls ``update(model, grads)``: Keras's name, without its pairs.

        Args:
            grads: the gradients of this replica's part of the loss, from ``nnx.grad``.
            model: the module that was passed to the constructor.
            **kwargs: as for ``update``.

        Raises:
            TypeError: pairs of gradients and variables, as Keras takes.
        """
        if not _is_node(model):
            raise ArgumentTypeError(
                "apply_gradients takes the gradients of nnx.grad and the module that they belong to, not "
                "pairs of gradients and variables: write apply_gradients(grads, model)."
            )
        return self.update(model, grads, **kwargs)

    @promoting
    def _apply(
        self,
        model: Any,
        grads: Any,
        kwargs: dict[str, Any],
        guard: Guard | None = None,
        replica: Any = -1,
    ) -> Any:
        """Updates from gradients of the global batch, if they are finite or nothing checks it."""

        def update(optimizer: Optimizer, model: Any) -> Any:
            with _explaining_errors(model, grads, self.wrt):
                return super().update(model, grads, **kwargs)

        if self.loss_scale is None and self.guard is None:
            return update(self, model)
        is_applied = is_finite = _finite(jax.tree.leaves(grads))
        if guard is not None:
            is_applied = guard.judge(is_finite, replica)
        parts = [(self, _is_updated), (model, self.wrt)]
        update_if(is_applied, update, parts, jax.lax.cond if guard is None else cond_if_sound)
        if self.loss_scale is not None:
            self.loss_scale.adjust(is_finite)
        return None


@contextmanager
def _explaining_errors(model: Any, grads: Any, wrt: Any) -> Iterator[None]:
    """Explains an update that failed for a missing keyword or for gradients of another model."""
    try:
        yield
    except (TypeError, ValueError, IndexError, AttributeError) as error:
        name, _, words = str(error).partition("() missing ")
        if isinstance(error, TypeError) and "required keyword-only argument" in words:
            raise ArgumentError(
                _NEEDS_ARGUMENT.format(name.split(".")[0], words.partition(": ")[2])
            ) from error
        is_other_error = isinstance(error, DistributeError)
        with suppress(Exception):  # a model that has no state
            structures: list[Any] = list(map(jax.tree.structure, (grads, nnx.state(model, wrt))))
            is_other_error = is_other_error or structures[0] == structures[1]
        if is_other_error:
            raise
        refuse("Optimizer.update: grads", "those of the model, as of nnx.grad", grads, error)


_NEEDS_ARGUMENT = (
    "{} of optax needs {} at each update, and got none. In a step of your own pass what the global batch "
    "has, as optimizer.update(model, grads, value=loss). Model.fit passes none: "
    "optax.lbfgs(learning_rate=0.1, linesearch=None) needs none, and dj.callbacks.ReduceLROnPlateau lowers "
    "the learning rate on a plateau."
)


def _check_arguments(model: Any, tx: Any) -> None:
    with converting("dj.Optimizer: model", model, "an nnx.Module"):
        nodes = jax.tree.leaves(model, is_leaf=_is_node)
    if not nodes or not all(map(_is_node, nodes)):
        refuse("dj.Optimizer: model", "an nnx.Module, of a dj.Model its module", model)
    if not all(callable(getattr(tx, name, None)) for name in ("init", "update")):
        refuse("dj.Optimizer: tx", "an optax transformation, as optax.adam(1e-3)", tx)


def _is_node(leaf: Any) -> bool:
    return isinstance(leaf, (nnx.Pytree, nnx.Variable))


_DIVIDED_BY_SHARE = (
    "dj.Optimizer sums gradients over the replicas, and compute_average_loss divided by the batch of one "
    "replica: the gradients are %s times too large. Leave global_batch_size out."
)
_NOT_FINITE = "the gradients{of} are not finite"


def _finite(leaves: Sequence[jax.Array]) -> jax.Array:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(_row_probes(leaf))) for leaf in leaves]))


def _row_probes(leaf: jax.Array) -> jax.Array:
    """Returns one number per row that is finite if the row's numbers, and their squares, are.

    An infinite square would stay in an optimizer's second moments, and the weight never change again.
    Squares of float16 overflow too early, so only its numbers are checked: 0 times infinity is NaN. On a CPU
    XLA's matrix product reads an array in a third of the time that a reduction to one bool takes.
    """
    finfo: Any = jnp.finfo
    largest = float(finfo(leaf.dtype).max)
    factor = largest**0.5 if largest > 1e30 else 0.0
    if leaf.ndim < 2:
        return leaf * jnp.asarray(factor, leaf.dtype)
    rows = leaf.reshape(math.prod(leaf.shape[:-1]), leaf.shape[-1])
    return jnp.full(len(rows), factor, leaf.dtype) @ rows


def _sum_over_replicas(grads: Any, *, find_bad: bool = False) -> tuple[Any, Any]:
    """Sums gradients over the replicas inside ``run``; outside there is nothing to sum.

    Also returns, with ``find_bad``, the first replica whose gradients are not finite, else -1.
    """
    replica = current_replica()
    if replica is None:
        return grads, -1
    leaves, treedef = jax.tree.flatten(grads)
    # Sent with the gradients, the flag needs no extra collective.
    marks = [one_hot_flag(replica, ~_finite(leaves), leaves[0].dtype)] if find_bad else []
    if replica.divides_by_share:
        log_once(_DIVIDED_BY_SHARE, replica.num_replicas_in_sync)
    if replica.num_replicas_in_sync > 1:
        leaves = unreduced(leaves)
    sums = replica.all_reduce("sum", [*leaves, *marks])
    first_bad = first_marked(sums[-1])[1] if find_bad else -1
    return jax.tree.unflatten(treedef, sums[: len(leaves)]), first_bad


def _is_updated(path: Any, variable: Any) -> bool:
    """Filters the optimizer state that an update may change: all but the accumulated gradients."""
    del path
    return not isinstance(variable, PartialGradient) and variable.type is not PartialGradient


class LearningRate(float):
    """A float that answers the methods of Keras's variable with what to write."""

    if not TYPE_CHECKING:
        __getattr__ = getattr_with_hints("dj.Model.learning_rate")


class UpdateCount(nnx.OptState):
    """The number of updates; calling it, as PyTorch's ``optimizer.step()``, raises."""

    if not TYPE_CHECKING:
        __call__ = refusing(
            "optimizer.step counts the updates. To make one, write optimizer.update(model, grads)."
        )


class PartialGradient(Variable):
    """The sum of gradients of a parameter, over replicas and batches."""

    is_optimizer_state = True


class Accumulation(nnx.Module):
    """Accumulates gradients: this replica's, so that several batches need one reduction.

    On parameter servers, whose workers come and go, it accumulates the sums over all replicas.
    """

    def __init__(self, params: Sequence[nnx.Variable[Any]], steps: int) -> None:
        self.steps, self.is_local = steps, get_strategy()._keeps_local_values
        self.batches = nnx.OptState(jnp.zeros((), jnp.int32))
        kind: dict[str, Any] = {}
        if self.is_local:
            kind["synchronization"] = VariableSynchronization.ON_READ
            kind["aggregation"] = VariableAggregation.SUM
        self.sums = nnx.List([
            PartialGradient(
                jnp.zeros_like(param.get_raw_value()), trainable=False, name=f"gradient_{i}", **kind
            )
            for i, param in enumerate(params)
        ])  # fmt: skip

    def add(self, gradients: Sequence[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
        """Returns whether this batch completes an update, and the mean gradients of its batches."""
        count = self.batches[...] + 1
        is_last = count == self.steps
        self.batches[...] = jnp.where(is_last, 0, count)
        totals = [total[...] + new for total, new in zip(self.sums, gradients, strict=True)]
        for variable, total in zip(self.sums, totals, strict=True):
            variable[...] = jnp.where(is_last, jnp.zeros_like(total), total)
        return is_last, [total / self.steps for total in totals]


_INITIAL_SCALE = 2.0**15  # as in Keras
_GROWTH_STEPS = 2000
"""The number of updates without overflow after which a dynamic scale doubles, as in Keras."""


class LossScale(nnx.Module):
    """The factor of the loss: fixed, or ``"dynamic"``, which is halved if a gradient overflows."""

    def __init__(self, scale: float | str) -> None:
        if scale != "dynamic":
            check_number('loss_scale, if not "dynamic",', scale)
        self.fixed = None if isinstance(scale, str) else float(scale)
        first = _INITIAL_SCALE if isinstance(scale, str) else scale
        self.scale = Unconditional(jnp.asarray(first, jnp.float32))
        self.good_steps = Unconditional(jnp.zeros((), jnp.int32))

    def multiply(self, loss: jax.Array) -> jax.Array:
        finfo: Any = jnp.finfo
        largest = float(finfo(loss.dtype).max)
        if self.fixed is not None and self.fixed > largest:
            raise ArgumentError(
                f"loss_scale={self.fixed:g} is above {largest:g}, the largest number of the loss's "
                f"{loss.dtype}: every gradient would overflow. Use a smaller one, or a loss in float32."
            )
        return loss * self.scale[...].astype(loss.dtype)

    @promoting
    def divide(self, gradients: Any) -> Any:
        # Not in the dtype of the gradients: the scale can exceed the range of float16.
        return jax.tree.map(lambda g: (g / self.scale[...]).astype(g.dtype), gradients)

    def adjust(self, finite: jax.Array) -> None:
        """Halves the scale after an overflow, and doubles it after many updates without one."""
        if self.fixed is not None:
            return
        good = jnp.where(finite, self.good_steps[...] + 1, 0)
        grows = good >= _GROWTH_STEPS
        scale = self.scale[...]
        self.scale[...] = jnp.where(
            finite, jnp.where(grows, scale * 2, scale), jnp.maximum(scale / 2, 1)
        )
        self.good_steps[...] = jnp.where(grows, 0, good)


def update_if(
    condition: jax.Array,
    action: Callable[..., Any],
    parts: Sequence[tuple[Any, Any]],
    cond: Callable[..., Any] = jax.lax.cond,
) -> None:
    """Runs ``action``, which changes objects in place, if the condition is True.

    The condition must be equal on all replicas. ``parts`` are pairs of an object and a filter of its
    variables that the action may change.
    """
    split: list[Any] = [nnx.split(node, of, ...) for node, of in parts]
    olds = [old for _, old, _ in split]

    def run(olds: list[Any]) -> list[Any]:
        leaves, treedef = jax.tree.flatten(olds)
        nodes = [
            nnx.merge(graphdef, old, rest)
            for (graphdef, _, rest), old in zip(split, olds, strict=True)
        ]
        action(*nodes)
        news = [nnx.state(node, of) for node, (_, of) in zip(nodes, parts, strict=True)]
        # Flax makes a State of a list, as of the accumulators of optax.sm3.
        pairs = zip(jax.tree.leaves(news), leaves, strict=True)
        return jax.tree.unflatten(treedef, [jnp.asarray(new, old.dtype) for new, old in pairs])

    news = cond(condition, run, lambda olds: olds, olds)
    for (node, _), new in zip(parts, news, strict=True):
        nnx.update(node, new)
