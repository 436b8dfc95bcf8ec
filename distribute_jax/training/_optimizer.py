"""``Optimizer``: sums gradients over the replicas, then updates; accumulation and loss scaling."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from distribute_jax import _context
from distribute_jax._errors import ArgumentError
from distribute_jax._lazy import answering
from distribute_jax._messages import leaf_text, promoting
from distribute_jax.collectives._markers import unreduced
from distribute_jax.training._keras_optimizers import learning_rate, set_learning_rate
from distribute_jax.variables import Variable, VariableAggregation, VariableSynchronization


class Optimizer(nnx.Optimizer[Any]):
    """An ``nnx.Optimizer`` that behaves as Keras's optimizers do under a strategy.

    ``update`` sums the gradients over the replicas before the optax transformation sees them, so
    that clipping by the global norm, say, works on the gradient of the global batch. It equals
    ``nnx.Optimizer`` with an explicit ``all_reduce("sum", grads)``. The loss is then that of
    ``dj.compute_average_loss``, divided by the global batch.

    Args:
        model: the module whose variables are updated.
        tx: an ``optax.GradientTransformation``.
        wrt: which variables, as for ``nnx.Optimizer``.
        gradient_accumulation_steps: how many batches make one update, with the mean of their
            gradients. They are added up on each replica by itself; one reduction follows the last.
            ``step`` counts updates.
        clip_global_norm: the largest norm of the gradient that ``tx`` sees.
        loss_scale: for float16: ``"dynamic"``, or a fixed factor, of the loss that ``scale_loss``
            gives. An update whose gradients are not finite is skipped, and halves a dynamic scale.

    Raises:
        ValueError: an option that is none of these.

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

    __module__ = "distribute_jax"

    if not TYPE_CHECKING:
        __getattr__ = answering("Optimizer")

    def __init__(
        self,
        model: Any,
        tx: Any,
        *,
        wrt: Any = nnx.Param,
        gradient_accumulation_steps: int = 1,
        clip_global_norm: float | None = None,
        loss_scale: float | str | None = None,
        **kwargs: Any,
    ) -> None:
        """Makes the optimizer's state; see the class for the arguments."""
        _check(model, tx)
        if clip_global_norm is not None:
            if isinstance(clip_global_norm, str) or not clip_global_norm > 0:
                raise ArgumentError(
                    f"clip_global_norm={clip_global_norm!r}: the largest norm is a number above 0."
                )
            tx = optax.chain(optax.clip_by_global_norm(clip_global_norm), tx)
        super().__init__(model, tx, wrt=wrt, **kwargs)
        steps = checked_accumulation(gradient_accumulation_steps)
        params = jax.tree.leaves(nnx.state(model, wrt), is_leaf=_is_variable)
        self.accumulation = nnx.data(Accumulation(params, steps) if steps > 1 else None)
        self.loss_scale = nnx.data(LossScale(loss_scale) if loss_scale is not None else None)

    @property
    def learning_rate(self) -> float:
        """The learning rate, where it is part of the state, as in what ``Model.compile`` made."""
        return learning_rate(self)

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        set_learning_rate(self, rate)

    def scale_loss(self, loss: jax.Array) -> jax.Array:
        """Gives the loss whose gradients ``update`` takes: scaled where there is a ``loss_scale``.

        Args:
            loss: this replica's part of the loss.
        """
        return loss if self.loss_scale is None else self.loss_scale.up(loss)

    def update(
        self, model: Any, grads: Any, /, *, skip_gradients_aggregation: bool = False, **kwargs: Any
    ) -> Any:
        """Updates model and optimizer from this replica's gradients.

        Args:
            model: the module given to the constructor.
            grads: the gradients of this replica's share of the loss, as ``nnx.grad`` gives them.
            skip_gradients_aggregation: whether the gradients were summed over the replicas already.
            **kwargs: for optax transformations that take more.

        Returns:
            What optax added to the parameters (with newer Flax; None with older, and where an update
            may be skipped).

        Raises:
            OutOfSyncError: when the step is traced for several replicas, and the gradients are equal
                on all of them already, so that summing would make them N times too large.
            ValueError: gradients that were summed already are to be accumulated; the transformation
                needs an argument that was not given.
        """
        if self.loss_scale is not None:
            grads = self.loss_scale.down(grads)
        if self.accumulation is None:
            if not skip_gradients_aggregation:
                grads = _summed(grads)
            return self._apply(model, grads, kwargs)
        if skip_gradients_aggregation:
            raise ArgumentError(
                "Optimizer.update(skip_gradients_aggregation=True) got gradients that were summed over "
                "the replicas, and gradient_accumulation_steps adds them up before that. Leave one of "
                "the two out."
            )
        leaves, treedef = jax.tree.flatten(grads)
        is_last, means = self.accumulation.add(leaves)
        mean = jax.tree.unflatten(treedef, means)

        def apply(optimizer: Optimizer, model: Any) -> None:
            optimizer._apply(model, _summed(mean), kwargs)

        return when(is_last, apply, [(self, _own_state), (model, self.wrt)])

    @promoting
    def _apply(self, model: Any, grads: Any, kwargs: dict[str, Any]) -> Any:
        """Updates from gradients that are those of the global batch, if they are finite."""
        if self.loss_scale is None:
            with explained():
                return super().update(model, grads, **kwargs)
        finite = all_finite(grads)

        def update(optimizer: Optimizer, model: Any) -> None:
            with explained():
                super().update(model, grads, **kwargs)

        when(finite, update, [(self, _own_state), (model, self.wrt)])
        self.loss_scale.note(finite)
        return None


def _check(model: Any, tx: Any) -> None:
    if not jax.tree.leaves(model, is_leaf=_is_node) or not all(
        map(_is_node, jax.tree.leaves(model, is_leaf=_is_node))
    ):
        raise ArgumentError(
            f"dj.Optimizer(model, tx) got {leaf_text(model)} as the model. Pass the nnx.Module whose "
            "variables it updates: dj.Optimizer(model, optax.adam(1e-3))."
        )
    if not callable(getattr(tx, "update", None)):
        raise ArgumentError(
            f"dj.Optimizer(model, tx) got {leaf_text(tx)} as tx. Pass an optax transformation: "
            "dj.Optimizer(model, optax.adam(1e-3))."
        )


def _is_node(leaf: Any) -> bool:
    return isinstance(leaf, (nnx.Pytree, nnx.Variable))


def _summed(grads: Any) -> Any:
    replica = _replica()
    if replica is None:
        return grads
    leaves, treedef = jax.tree.flatten(grads)
    if replica.num_replicas_in_sync > 1:
        leaves = unreduced(leaves)
    return jax.tree.unflatten(treedef, replica.all_reduce("sum", leaves))


def _replica() -> Any:
    """Gives the replica context inside ``run``; elsewhere there is nothing to sum."""
    top = _context.entered()
    return top.replica if top is not None else None


def _own_state(path: Any, variable: Any) -> bool:
    """Tells what an update may change of the optimizer: all but the gradients that are added up."""
    del path
    return not isinstance(variable, PartialGradient) and variable.type is not PartialGradient


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)


class PartialGradient(Variable):
    """What one replica has added up of one gradient; the whole is the sum over the replicas."""

    is_optimizer_state = True


class Accumulation(nnx.Module):
    """Adds up this replica's gradients, and says when they are to be applied.

    Nothing is sent between the replicas until then, so k batches cost one reduction.

    Args:
        params: the variables whose gradients are added up.
        steps: how many batches make one update.
    """

    def __init__(self, params: Sequence[nnx.Variable[Any]], steps: int) -> None:
        self.steps = steps
        self.batches = nnx.OptState(jnp.zeros((), jnp.int32))
        self.sums = nnx.List([
            PartialGradient(
                jnp.zeros_like(param.get_raw_value()),
                trainable=False,
                synchronization=VariableSynchronization.ON_READ,
                aggregation=VariableAggregation.SUM,
                name=f"gradient_{i}",
            )
            for i, param in enumerate(params)
        ])  # fmt: skip

    def add(self, gradients: Sequence[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
        """Adds this replica's gradients of a batch.

        Returns:
            Whether this batch completes an update, and this replica's mean gradient over its batches.
        """
        count = self.batches[...] + 1
        is_last = count == self.steps
        self.batches[...] = jnp.where(is_last, 0, count)
        totals = [total[...] + new for total, new in zip(self.sums, gradients, strict=True)]
        for variable, total in zip(self.sums, totals, strict=True):
            variable[...] = jnp.where(is_last, jnp.zeros_like(total), total)
        return is_last, [total / self.steps for total in totals]


def checked_accumulation(steps: Any) -> int:
    """Refuses what is no number of batches."""
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ArgumentError(
            f"gradient_accumulation_steps={steps!r}: it is the number of batches of one update, an int "
            "of at least 1."
        )
    return steps


INITIAL = 2.0**15
GROWTH_STEPS = 2000
"""Updates without overflow after which a dynamic scale doubles. Both numbers are Keras's."""


class LossScale(nnx.Module):
    """The factor of the loss, halved where a gradient overflows.

    Args:
        scale: a fixed factor, or ``"dynamic"``.

    Source: https://keras.io/api/optimizers/loss_scale_optimizer/
    """

    def __init__(self, scale: float | str) -> None:
        if scale != "dynamic" and not (isinstance(scale, (int, float)) and scale > 0):
            raise ArgumentError(
                f'loss_scale={scale!r}: it is a number above 0, "dynamic", or None for no scaling.'
            )
        self.is_dynamic = scale == "dynamic"
        first = INITIAL if isinstance(scale, str) else scale
        self.scale = nnx.OptState(jnp.asarray(first, jnp.float32))
        self.good_steps = nnx.OptState(jnp.zeros((), jnp.int32))

    def up(self, loss: jax.Array) -> jax.Array:
        """Scales a loss."""
        return loss * self.scale[...].astype(loss.dtype)

    def down(self, gradients: Any) -> Any:
        """Gives the gradients of the loss before it was scaled."""
        return jax.tree.map(lambda g: g / self.scale[...].astype(g.dtype), gradients)

    def note(self, finite: jax.Array) -> None:
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


def all_finite(tree: Any) -> jax.Array:
    """Tells whether every number of a tree is finite."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


def when(
    condition: jax.Array, action: Callable[..., Any], parts: Sequence[tuple[Any, Any]]
) -> None:
    """Does ``action`` on objects if the condition holds, and leaves them as they are if not.

    Args:
        condition: a bool, the same on every replica.
        action: changes the objects that it is given, in place.
        parts: each object, with a filter for the variables that the action may change.
    """
    split: list[Any] = [nnx.split(node, of, ...) for node, of in parts]
    olds = [old for _, old, _ in split]

    def done(olds: list[Any]) -> list[Any]:
        made = [
            nnx.merge(graphdef, old, rest)
            for (graphdef, _, rest), old in zip(split, olds, strict=True)
        ]
        action(*made)
        news = [nnx.state(node, of) for node, (_, of) in zip(made, parts, strict=True)]
        kept: list[Any] = jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), news, olds)
        return kept

    news = jax.lax.cond(condition, done, lambda olds: olds, olds)
    for (node, _), new in zip(parts, news, strict=True):
        nnx.update(node, new)


_MISSING = re.compile(
    r"(?:(\w+)\.<locals>\.)?\w+\(\) missing \d+ required keyword-only arguments?: (.+)"
)

_NEEDS = (
    "The optimizer's optax transformation {name} needs {wanted} for each update, beside the gradients. "
    "Model.fit, whose step has gradients alone, cannot give {them}.{remedy} In a loop of your own, "
    "give what the global batch has: optimizer.update(model, grads, {call})."
)
_PLATEAU = (
    " To lower the learning rate on a plateau: optimizer=optax.inject_hyperparams(optax.sgd)("
    "learning_rate=0.1) and fit(callbacks=[dj.callbacks.ReduceLROnPlateau()])."
)
_SEARCH = (
    " Without a search along the line it needs none of them: optax.lbfgs(learning_rate=0.1, "
    "linesearch=None)."
)


@contextmanager
def explained() -> Iterator[None]:
    """Says what to do where a transformation is called without an argument that it needs.

    Raises:
        ArgumentError: in place of Python's ``TypeError``.
    """
    try:
        yield
    except TypeError as error:
        found = _MISSING.search(str(error))
        if found is None:
            raise
        raise ArgumentError(_text(found[1] or "", re.findall(r"'(\w+)'", found[2]))) from error


def _text(name: str, wanted: list[str]) -> str:
    remedy = ""
    if name == "reduce_on_plateau":
        remedy = _PLATEAU
    elif "value_fn" in wanted:
        remedy = _SEARCH
    return _NEEDS.format(
        name=name,
        wanted=", ".join(f"{one}=" for one in wanted),
        them="it" if len(wanted) == 1 else "them",
        remedy=remedy,
        call=", ".join(f"{one}=…" for one in wanted),
    )
