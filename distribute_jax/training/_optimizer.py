"""``Optimizer``: sums the gradients over the replicas, then updates as ``nnx.Optimizer`` does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import optax
from flax import nnx

from distribute_jax import _context
from distribute_jax._errors import ArgumentError
from distribute_jax._fitting import promoting
from distribute_jax._instead import answering
from distribute_jax._tree import leaf_text
from distribute_jax.collectives._unreduced import unreduced
from distribute_jax.training._accumulation import (
    Accumulation,
    PartialGradient,
    checked_accumulation,
)
from distribute_jax.training._extra_arguments import explained
from distribute_jax.training._learning_rate import learning_rate, set_learning_rate
from distribute_jax.training._loss_scale import LossScale, all_finite
from distribute_jax.training._when import when


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
