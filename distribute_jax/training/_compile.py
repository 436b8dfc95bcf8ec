"""What ``compile`` sets up: loss, metrics, optimizer, and the dtype policy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from distribute_jax._checks import check_choice, check_int, converting
from distribute_jax._errors import ArgumentError, warn_user
from distribute_jax._interrupts import interrupts_held_back
from distribute_jax._messages import PyTree, listed
from distribute_jax.training import _keras_optimizers as keras
from distribute_jax.training._objective import Objective
from distribute_jax.training._optimizer import Optimizer
from distribute_jax.training._tracker import Tracker
from distribute_jax.training._weights import is_trained, weight_variables
from distribute_jax.variables import Variable


class Setup:
    """What ``compile`` decided; its steps read it. The arguments are those of ``compile``."""

    class_weight: tuple[tuple[int, float], ...] = ()
    """Pairs of class and weight during a ``fit`` with ``class_weight``."""

    def __init__(
        self,
        module: nnx.Module,
        optimizer: Any,
        loss: Any = None,
        metrics: Any = None,
        weighted_metrics: Any = None,
        loss_weights: Any = None,
        steps_per_execution: int | str = 1,
        dtype_policy: str | None = None,
        verify: str | None = None,
        trainable: Any = None,
        average: tuple[float, int | None] | None = None,
        **options: Any,
    ) -> None:
        if steps_per_execution != "auto":
            check_int('compile(steps_per_execution), if not "auto",', steps_per_execution)
        check_choice("compile(verify)", verify, (None, "first", "off"))
        self.steps_per_execution, self.verify = steps_per_execution, verify
        inner: Any = module.to_nnx__module if isinstance(module, nnx.bridge.ToNNX) else module
        self.call = type(inner).__call__
        if isinstance(loss, str) and loss.lower() in keras.KERAS:
            raise ArgumentError(f"compile(optimizer, loss): {loss!r} is an optimizer. Swap them.")
        self.objective = Objective(loss, loss_weights)
        self.policy = DTypePolicy(dtype_policy or "float32")
        self.use_ema, self.has_averages = average is not None, False
        self.optimizer = self._build_optimizer(module, optimizer, trainable, average, options)
        self.trained = None if trainable is None else self.optimizer.wrt
        self.tracker = Tracker(self.objective, metrics, weighted_metrics)
        self.test_tracker = nnx.clone(self.tracker)

    def _build_optimizer(
        self,
        module: nnx.Module,
        optimizer: Any,
        trainable: Any,
        average: Any,
        options: dict[str, Any],
    ) -> Optimizer:
        """Returns the ``Optimizer`` passed, or makes one from a transformation or a name."""
        if not isinstance(optimizer, nnx.Optimizer):
            tx = keras.optimizer(optimizer)
            return Optimizer(
                module,
                tx if average is None else optax.chain(tx, keras.averaging(*average)),
                wrt=_trainable_filter(module, trainable),
                loss_scale="dynamic" if self.policy.compute_dtype == jnp.float16 else None,
                **options,
            )
        if not isinstance(optimizer, Optimizer):
            raise ArgumentError(
                "compile got an nnx.Optimizer, which does not sum the gradients of the replicas. Pass its "
                "optax transformation, compile(optax.adam(1e-3)), or a dj.Optimizer."
            )
        if (average, trainable) != (None, None) or options != _DEFAULT_OPTIONS:
            raise ArgumentError(
                "compile got a dj.Optimizer, whose arguments are gradient_accumulation_steps, "
                "clip_global_norm, skip_nonfinite and wrt (here trainable). Pass its optax transformation, "
                "also for use_ema."
            )
        return optimizer

    def swap_averages(self, module: nnx.Module, *, averages: bool, keep: bool = False) -> None:
        """Swaps the module's weights for their moving averages, or back; with ``keep`` for good."""
        if not self.use_ema or averages is self.has_averages:
            return
        if np.asarray(self.optimizer.step[...]):  # before the first update there is no average
            with interrupts_held_back():  # which would leave some of the weights swapped
                keras.swap_averages(module, self.optimizer, keep=keep)
                self.has_averages = averages and not keep

    @contextmanager
    def weighing_classes(self, weights: tuple[tuple[int, float], ...]) -> Iterator[None]:
        before, self.class_weight = self.class_weight, weights
        try:
            yield
        finally:
            self.class_weight = before


_DEFAULT_OPTIONS = {
    "gradient_accumulation_steps": 1,
    "clip_global_norm": None,
    "skip_nonfinite": False,
}
"""Arguments of ``compile`` that are passed on to ``Optimizer``, with their defaults."""


def _trainable_filter(module: nnx.Module, trainable: Any) -> Any:
    """Returns a filter of the weights to train: all of them, or those that ``trainable`` selects."""
    has_variables = any(
        isinstance(variable, Variable) and is_trained(path, variable)
        for path, variable in nnx.iter_graph(module)
    )
    all_weights = is_trained if has_variables else nnx.Param
    if trainable is None:
        for path, node in nnx.iter_graph(module):
            if isinstance(node, nnx.Module) and vars(node).get("trainable") is False:
                warn_user(
                    f"{'.'.join(map(str, ('module', *path)))}.trainable = False freezes no weights of Flax. "
                    "Name the weights to train, as in compile(trainable='^head')."
                )
        return all_weights
    selects = trainable
    if isinstance(trainable, str):
        search = re.compile(trainable).search
        selects = lambda path, _: search(".".join(map(str, path))) is not None  # noqa: E731
    with converting("compile(trainable)", trainable, "a regular expression, or a filter of Flax"):
        trained = nnx.All(all_weights, selects)
        selected = nnx.to_flat_state(nnx.state(module, trained))
    if not selected:
        names = listed([name for name, _ in weight_variables(module)])
        raise ArgumentError(f"compile(trainable={trainable!r}) selects no weight of:\n{names}")
    return trained


_COMPUTE = {
    "float32": None,
    "mixed_bfloat16": jnp.bfloat16,
    "bfloat16": jnp.bfloat16,
    "mixed_float16": jnp.float16,
    "float16": jnp.float16,
}


@dataclass(frozen=True)
class DTypePolicy:
    """The dtype in which a module computes; the dtypes of weights and loss do not change.

    Args:
        name: ``"float32"`` (nothing is cast), ``"mixed_bfloat16"`` or ``"mixed_float16"``.

    Source: https://keras.io/api/mixed_precision/policy/
    """

    name: str = "float32"

    def __post_init__(self) -> None:
        check_choice("dtype_policy", self.name, tuple(_COMPUTE))

    @property
    def compute_dtype(self) -> Any:
        """The dtype of the computation; None if nothing is cast."""
        return _COMPUTE[self.name]

    @contextmanager
    def computing(self, module: nnx.Module) -> Iterator[None]:
        """Casts a module's weights to the policy's dtype for the block."""
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
        """Casts inputs to the dtype in which the layers compute."""
        return tree if self.compute_dtype is None else jax.tree.map(self._cast, tree)

    def cast_output(self, tree: PyTree) -> PyTree:
        """Casts outputs back to float32, in which the loss is computed."""
        if self.compute_dtype is None:
            return tree
        return jax.tree.map(
            lambda x: x.astype(jnp.float32) if x.dtype == self.compute_dtype else x, tree
        )

    def _cast(self, value: Any) -> Any:
        floating = jnp.issubdtype(jnp.asarray(value).dtype, jnp.floating)
        return jnp.asarray(value).astype(self.compute_dtype) if floating else value
