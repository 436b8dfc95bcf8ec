"""``Optimizer``: sums gradients over the replicas, then updates; accumulation and loss scaling."""

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

from distribute_jax._absent import answering, missing
from distribute_jax._checks import check_int, check_number, converting, refuse, refusing
from distribute_jax._errors import ArgumentError, ArgumentTypeError, DistributeError
from distribute_jax._mesh import put
from distribute_jax._messages import leaf_text, promoting
from distribute_jax._user_frames import log_once
from distribute_jax.collectives._markers import unreduced
from distribute_jax.program._undo import (
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
    """An ``nnx.Optimizer`` that behaves as Keras's optimizers do under a strategy.

    ``update`` sums the gradients over the replicas before the optax transformation sees them, so
    that clipping by the global norm, for example, works on the gradient of the global batch. It equals
    ``nnx.Optimizer`` with an explicit ``all_reduce("sum", grads)``. The loss is then that of
    ``dj.compute_average_loss``, divided by the global batch.

    Args:
        model: the module whose variables are updated.
        tx: an ``optax.GradientTransformation``.
        wrt: which variables, as for ``nnx.Optimizer``.
        gradient_accumulation_steps: how many batches make one update, with the mean of their
            gradients. Each replica adds up its gradients, which are summed over the replicas once, after
            the last of these batches; made in the scope of a ``ParameterServerStrategy``, the servers add
            them up. ``step`` counts updates.
        clip_global_norm: the largest norm of the gradient that ``tx`` sees.
        loss_scale: for float16: ``"dynamic"``, or a fixed factor, by which ``scale_loss`` multiplies.
            An update whose gradients are not finite is skipped, and halves a dynamic scale.
        skip_nonfinite: whether a step whose gradients are not finite, or too large to be squared, is
            skipped: none of the state that it writes changes, on no replica, the statistics of batch norms
            and metrics included. A warning is logged with the step and the replica, and ``skipped_steps``
            counts. With gradients that are accumulated a batch counts as a step, and is left out. Outside
            of ``run`` the update alone is skipped.
        max_consecutive: how many steps in a row may be skipped. One more is skipped too, and raises
            ``StepsSkippedError`` a few steps later, until which nothing changes.

    Raises:
        ValueError: an option that is not one of these.

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
        __getattr__ = answering("dj.Optimizer")

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuses Keras's names for what has another name here, which would be without effect."""
        if name in ("lr", "iterations"):
            raise missing("dj.Optimizer", "'Optimizer' object", name, self)
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
        _check(model, tx)
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
        """How many steps were skipped, by ``skip_nonfinite``."""
        return 0 if self.guard is None else self.guard.skipped

    @property
    def learning_rate(self) -> float:
        """The learning rate, where it is part of the state, as in what ``Model.compile`` made.

        Of a schedule it is the one that the last update used.
        """
        return LearningRate(self._rate[...])

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        check_number("learning_rate", rate, at_least=0)
        variable = self._rate
        if self._rates("hyperparams_states"):
            raise ArgumentError(
                "The learning rate of this optimizer follows a schedule, which sets it at each update. "
                "Compile with a number, as optax.adam(1e-3), to set it, or leave out the callback that "
                "sets it."
            )
        old = variable.get_raw_value()  # changed on the devices, so that nothing is compiled again
        variable.set_raw_value(put(np.asarray(rate, old.dtype), old.sharding))

    @property
    def _rate(self) -> Any:
        rates = self._rates("hyperparams")
        if len(rates) != 1:
            raise ArgumentError(
                "The learning rate of this optimizer is not part of its state, so it can be neither read nor "
                "set. Compile with optax.adam(1e-3) or another optimizer of optax or chain of them, with "
                'Keras\'s name, as optimizer="adam", or with optax.inject_hyperparams(make)('
                "learning_rate=1e-3), where make(learning_rate) returns your transformation."
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
            skip_gradients_aggregation: whether the gradients were summed over the replicas already.
            **kwargs: for optax transformations that take more.

        Returns:
            What optax added to the parameters (with newer Flax; None with older, and where an update
            may be skipped).

        Raises:
            OutOfSyncError: when the step is traced for several replicas, and the gradients are equal
                on all of them already, so that summing would make them N times too large.
            ValueError: gradients that were summed already are to be accumulated; the transformation
                needs an argument that was not passed.
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
                grads, replica = _summed(grads, marked=self.guard is not None)
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
            leaves = _summed(leaves)[0]
        is_last, means = self.accumulation.add(leaves)
        mean = jax.tree.unflatten(treedef, means)

        def apply(optimizer: Optimizer, model: Any) -> None:
            optimizer._apply(model, _summed(mean)[0] if is_local else mean, kwargs)

        return when(is_last, apply, [(self, _is_updated), (model, self.wrt)])

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
                "apply_gradients takes the gradients of nnx.grad and the module that they are of, not pairs "
                "of gradients and variables: write apply_gradients(grads, model)."
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
        """Updates from gradients of the global batch, if they are finite."""

        def update(optimizer: Optimizer, model: Any) -> Any:
            with _fitting(model, grads, self.wrt, kwargs):
                return super().update(model, grads, **kwargs)

        if self.loss_scale is None and self.guard is None:
            return update(self, model)
        applied = finite = _finite(jax.tree.leaves(grads))
        if guard is not None:
            applied = guard.judge(finite, replica)
        parts = [(self, _is_updated), (model, self.wrt)]
        when(applied, update, parts, jax.lax.cond if guard is None else cond_if_sound)
        if self.loss_scale is not None:
            self.loss_scale.adjust(finite)
        return None


@contextmanager
def _fitting(model: Any, grads: Any, wrt: Any, kwargs: Any) -> Iterator[None]:
    """Refuses gradients that are not those of the model, or too few keywords, where an update fails."""
    try:
        yield
    except (TypeError, ValueError, IndexError, AttributeError) as error:
        name, _, words = str(error).partition("() missing ")
        if isinstance(error, TypeError) and "required keyword-only argument" in words:
            raise ArgumentError(
                _NEEDS.format(name.split(".")[0], words.partition(": ")[2])
            ) from error
        with converting("Optimizer.update: keywords", kwargs, "trees whose keys can be sorted"):
            jax.tree.leaves(kwargs)
        fits = isinstance(error, DistributeError)
        with suppress(Exception):  # a model that has no state
            each: list[Any] = list(map(jax.tree.structure, (grads, nnx.state(model, wrt))))
            fits = fits or each[0] == each[1]
        if fits:
            raise
        refuse("Optimizer.update: grads", "those of the model, as of nnx.grad", grads, error)


_NEEDS = (
    "{} of optax needs {} at each update, and got none. In a step of your own pass what the global batch "
    "has, as optimizer.update(model, grads, value=loss). Model.fit passes none: "
    "optax.lbfgs(learning_rate=0.1, linesearch=None) needs none, and dj.callbacks.ReduceLROnPlateau lowers "
    "the learning rate on a plateau."
)


def _check(model: Any, tx: Any) -> None:
    with converting("dj.Optimizer: model", model, "an nnx.Module"):
        nodes = jax.tree.leaves(model, is_leaf=_is_node)
    if not nodes or not all(map(_is_node, nodes)):
        raise ArgumentError(
            f"dj.Optimizer: model must be an nnx.Module, of a dj.Model its module; got {leaf_text(model)}."
        )
    if not all(callable(getattr(tx, name, None)) for name in ("init", "update")):
        raise ArgumentError(
            f"dj.Optimizer: tx must be an optax transformation, as optax.adam(1e-3); got {leaf_text(tx)}."
        )


def _is_node(leaf: Any) -> bool:
    return isinstance(leaf, (nnx.Pytree, nnx.Variable))


_DIVIDED_BY_SHARE = (
    "dj.Optimizer sums gradients over the replicas, and compute_average_loss divided by the batch of one "
    "replica: the gradients are %s times too large. Leave global_batch_size out."
)
_NOT_FINITE = "the gradients{of} are not finite"


def _finite(leaves: Sequence[jax.Array]) -> jax.Array:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(_columns(leaf))) for leaf in leaves]))


def _columns(leaf: jax.Array) -> jax.Array:
    """Returns fewer numbers that are finite where those of an array, and their squares, are.

    Squares that are infinite would stay in the second moments of an optimizer, whose weights never change
    again. Those of float16 would be too soon, so its numbers are judged alone: 0 times infinity is NaN.
    XLA's matrix product reads an array in a third of the time of its reduction to one bool on a CPU.
    """
    finfo: Any = jnp.finfo
    largest = float(finfo(leaf.dtype).max)
    factor = largest**0.5 if largest > 1e30 else 0.0
    if leaf.ndim < 2:
        return leaf * jnp.asarray(factor, leaf.dtype)
    rows = leaf.reshape(math.prod(leaf.shape[:-1]), leaf.shape[-1])
    return jnp.full(len(rows), factor, leaf.dtype) @ rows


def _summed(grads: Any, *, marked: bool = False) -> tuple[Any, Any]:
    """Sums gradients over the replicas inside ``run``; elsewhere there is nothing to sum.

    Returned is, if they are to be ``marked``, which replica is the first whose gradients are not finite.
    """
    replica = current_replica()
    if replica is None:
        return grads, -1
    leaves, treedef = jax.tree.flatten(grads)
    # What goes with the gradients needs no other collective.
    marks = [one_hot_flag(replica, ~_finite(leaves), leaves[0].dtype)] if marked else []
    if replica.divides_by_share:
        log_once(_DIVIDED_BY_SHARE, replica.num_replicas_in_sync)
    if replica.num_replicas_in_sync > 1:
        leaves = unreduced(leaves)
    sums = replica.all_reduce("sum", [*leaves, *marks])
    first = first_marked(sums[-1])[1] if marked else -1
    return jax.tree.unflatten(treedef, sums[: len(leaves)]), first


def _is_updated(path: Any, variable: Any) -> bool:
    """Filters what an update may change of the optimizer: not the gradients that are added up."""
    del path
    return not isinstance(variable, PartialGradient) and variable.type is not PartialGradient


class LearningRate(float):
    """A rate that was read, on which Keras's variable has methods."""

    if not TYPE_CHECKING:
        __getattr__ = answering("dj.Model.learning_rate")


class UpdateCount(nnx.OptState):
    """The number of updates, which PyTorch's ``optimizer.step()`` is not."""

    if not TYPE_CHECKING:
        __call__ = refusing(
            "optimizer.step counts the updates. To make one, write optimizer.update(model, grads)."
        )


class PartialGradient(Variable):
    """The sum of gradients of a parameter, over replicas and batches."""

    is_optimizer_state = True


class Accumulation(nnx.Module):
    """Adds up gradients of some parameters: this replica's, so that several batches need one reduction.

    Workers come and go, so what parameter servers add up are sums of all replicas.
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


INITIAL = 2.0**15  # as in Keras
GROWTH_STEPS = 2000
"""Updates without overflow after which a dynamic scale doubles, as in Keras."""


class LossScale(nnx.Module):
    """The factor of the loss: a fixed one, or ``"dynamic"``, which is halved if a gradient overflows."""

    def __init__(self, scale: float | str) -> None:
        if scale != "dynamic":
            check_number('loss_scale, if not "dynamic",', scale)
        self.is_dynamic = scale == "dynamic"
        first = INITIAL if isinstance(scale, str) else scale
        self.scale = Unconditional(jnp.asarray(first, jnp.float32))
        self.good_steps = Unconditional(jnp.zeros((), jnp.int32))

    def multiply(self, loss: jax.Array) -> jax.Array:
        return loss * self.scale[...].astype(loss.dtype)

    def divide(self, gradients: Any) -> Any:
        """Returns the gradients of the loss without the scale."""
        return jax.tree.map(lambda g: g / self.scale[...].astype(g.dtype), gradients)

    def adjust(self, finite: jax.Array) -> None:
        """Halves the scale after an overflow, and doubles it after many updates without one."""
        if not self.is_dynamic:
            return
        good = jnp.where(finite, self.good_steps[...] + 1, 0)
        grows = good >= GROWTH_STEPS
        scale = self.scale[...]
        self.scale[...] = jnp.where(
            finite, jnp.where(grows, scale * 2, scale), jnp.maximum(scale / 2, 1)
        )
        self.good_steps[...] = jnp.where(grows, 0, good)


def when(
    condition: jax.Array,
    action: Callable[..., Any],
    parts: Sequence[tuple[Any, Any]],
    cond: Callable[..., Any] = jax.lax.cond,
) -> None:
    """Runs ``action``, which changes objects in place, if the condition holds on all replicas.

    ``parts`` holds each object, with a filter for the variables that the action may change.
    """
    split: list[Any] = [nnx.split(node, of, ...) for node, of in parts]
    olds = [old for _, old, _ in split]

    def run(olds: list[Any]) -> list[Any]:
        nodes = [
            nnx.merge(graphdef, old, rest)
            for (graphdef, _, rest), old in zip(split, olds, strict=True)
        ]
        action(*nodes)
        news = [nnx.state(node, of) for node, (_, of) in zip(nodes, parts, strict=True)]
        cast: list[Any] = jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), news, olds)
        return cast

    news = cond(condition, run, lambda olds: olds, olds)
    for (node, _), new in zip(parts, news, strict=True):
        nnx.update(node, new)
