"""What ``compile`` sets up: loss, metrics, optimizer, and the dtype policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from distribute_jax._errors import ArgumentError
from distribute_jax._messages import PyTree
from distribute_jax.training._keras_optimizers import optimizer as named_optimizer
from distribute_jax.training._objective import Objective
from distribute_jax.training._optimizer import Optimizer
from distribute_jax.training._tracker import Tracker
from distribute_jax.training._weights import is_trained
from distribute_jax.variables import Variable


def made_setup(
    module: nnx.Module,
    optimizer: Any,
    *,
    loss: Any = None,
    metrics: Any = None,
    weighted_metrics: Any = None,
    loss_weights: Any = None,
    steps_per_execution: int | str = 1,
    gradient_accumulation_steps: int = 1,
    clip_global_norm: float | None = None,
    dtype_policy: str | None = None,
    verify: str | None = None,
) -> Setup:
    """Checks the arguments of ``compile`` and makes the parts; see there."""
    check_steps(steps_per_execution)
    if verify not in (None, "first"):
        raise ArgumentError(
            f'compile(verify={verify!r}): it is None, or "first" to run the first batch on one device too.'
        )
    objective = Objective(loss, loss_weights)
    policy = DTypePolicy(dtype_policy or "float32")
    tracker = Tracker(objective, metrics, weighted_metrics)
    return Setup(
        call=own_call(module),
        objective=objective,
        optimizer=made_optimizer(
            module,
            optimizer,
            accumulation=gradient_accumulation_steps,
            clip=clip_global_norm,
            policy=policy,
        ),
        tracker=tracker,
        tested=nnx.clone(tracker),
        policy=policy,
        steps_per_execution=steps_per_execution,
        verify=verify,
    )


def made_optimizer(
    module: nnx.Module, given: Any, *, accumulation: int, clip: float | None, policy: DTypePolicy
) -> Optimizer:
    """Makes the optimizer, or takes one of ours as it is.

    Args:
        module: what it updates.
        given: a transformation, a name, or a ``dj.Optimizer`` of this module.
        accumulation: batches of one update.
        clip: the largest norm of the gradient.
        policy: float16 needs a scaled loss.
    """
    if not isinstance(given, nnx.Optimizer):
        scale = "dynamic" if policy.compute_dtype == jnp.float16 else None
        return Optimizer(
            module,
            named_optimizer(given),
            wrt=is_trained if _has_trained_variables(module) else nnx.Param,
            gradient_accumulation_steps=accumulation,
            clip_global_norm=clip,
            loss_scale=scale,
        )
    if not isinstance(given, Optimizer):
        raise ArgumentError(
            "compile got an nnx.Optimizer, which does not sum the gradients of the replicas. Pass its "
            "optax transformation, compile(optax.adam(1e-3)), or a dj.Optimizer."
        )
    if accumulation != 1 or clip is not None:
        raise ArgumentError(
            "compile got a dj.Optimizer, and gradient_accumulation_steps or clip_global_norm beside "
            "it. Give these to dj.Optimizer, or pass its optax transformation to compile."
        )
    return given


def _has_trained_variables(module: nnx.Module) -> bool:
    return any(
        isinstance(variable, Variable) and is_trained(path, variable)
        for path, variable in nnx.iter_graph(module)
    )


def check_steps(steps: int | str) -> None:
    """Refuses what is no number of steps."""
    if steps == "auto":
        return
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ArgumentError(
            f'compile(steps_per_execution={steps!r}): it is an int of at least 1, or "auto".'
        )


def own_call(module: nnx.Module) -> Any:
    """Gives the user's own ``__call__``, a Linen module's behind Flax's bridge."""
    inner: Any = module.to_nnx__module if isinstance(module, nnx.bridge.ToNNX) else module
    return type(inner).__call__


@dataclass
class Setup:
    """A compiled model's parts, all of which its steps read."""

    call: Callable[..., Any]
    """The module's own ``__call__``, whose keywords say how it wants to know the mode."""
    objective: Objective
    """The losses."""
    optimizer: Optimizer
    """What updates the module."""
    tracker: Tracker
    """Loss and metrics of training."""
    tested: Tracker
    """Loss and metrics of evaluation."""
    policy: DTypePolicy
    """In which precision the module computes."""
    steps_per_execution: int | str
    """Batches in one dispatch, or ``"auto"``."""
    verify: str | None = None
    """Whether the first batch of each kind is also run on one device."""
    class_weight: tuple[tuple[int, float], ...] = ()
    """Class and weight, for the ``fit`` that is running."""

    @contextmanager
    def weighing_classes(self, weights: tuple[tuple[int, float], ...]) -> Iterator[None]:
        """Uses class weights for a block, and then again those before."""
        before, self.class_weight = self.class_weight, weights
        try:
            yield
        finally:
            self.class_weight = before


_COMPUTE = {
    "float32": None,
    "mixed_bfloat16": jnp.bfloat16,
    "bfloat16": jnp.bfloat16,
    "mixed_float16": jnp.float16,
    "float16": jnp.float16,
}


@dataclass(frozen=True)
class DTypePolicy:
    """The dtype of a module's computation; its weights and the loss stay as they are.

    Args:
        name: ``"float32"`` (nothing is cast), ``"mixed_bfloat16"`` or ``"mixed_float16"``.

    Source: https://keras.io/api/mixed_precision/policy/
    """

    name: str = "float32"

    def __post_init__(self) -> None:
        """Refuses other names."""
        if self.name not in _COMPUTE:
            raise ArgumentError(
                f"dtype_policy={self.name!r} is none. Choose one of {', '.join(_COMPUTE)}."
            )

    @property
    def compute_dtype(self) -> Any:
        """The dtype of the computation; None where nothing is cast."""
        return _COMPUTE[self.name]

    @contextmanager
    def computing(self, module: nnx.Module) -> Iterator[None]:
        """Lets a module compute with its weights in the policy's dtype, for the block."""
        if self.compute_dtype is None:
            yield
            return
        weights = [v for path, v in nnx.iter_graph(module) if is_trained(path, v)]
        values = [v.get_raw_value() for v in weights]
        for variable, value in zip(weights, values, strict=True):
            variable.set_raw_value(self._cast(value))
        try:
            yield
        finally:
            for variable, value in zip(weights, values, strict=True):
                variable.set_raw_value(value)

    def cast_input(self, tree: PyTree) -> PyTree:
        """Casts floating inputs to the policy's dtype."""
        return tree if self.compute_dtype is None else jax.tree.map(self._cast, tree)

    def cast_output(self, tree: PyTree) -> PyTree:
        """Casts outputs back, so that the loss is computed in float32."""
        if self.compute_dtype is None:
            return tree
        return jax.tree.map(
            lambda x: x.astype(jnp.float32) if x.dtype == self.compute_dtype else x, tree
        )

    def _cast(self, value: Any) -> Any:
        floating = jnp.issubdtype(jnp.asarray(value).dtype, jnp.floating)
        return jnp.asarray(value).astype(self.compute_dtype) if floating else value
