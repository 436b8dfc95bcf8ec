"""Names that TensorFlow, Keras, Flax or Lightning have and this library does not: what to type instead."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

_FLAX = "layers and models are Flax's, flax.nnx or flax.linen"
_OPTIMIZERS = "optimizers are optax's, as optax.adam(1e-3), or Keras's names in Model.compile"
_GRADIENTS = "nnx.value_and_grad(loss_fn)(model) computes gradients"
_SAVING = "dj.Model(module).load(folder) reads what Model.save wrote"
_DDP = "build the model under dj.MirroredStrategy().scope()"
_READS_AHEAD = "strategy.distribute_dataset reads ahead by itself, see dj.InputOptions"
_BEFORE = "call it on the dataset that strategy.distribute_dataset gets"
_OF_DATA = ("batch", "filter", "map", "repeat", "shuffle", "skip", "take")
_WEIGHTS = "nnx.state(model.module, nnx.Param), or model.get_weights()"
_STREAM = "fit reads ahead by itself, see dj.InputOptions"
_SKLEARN = "pass a function of (y_true, y_pred), or compute it from model.predict(x)"
_SESSIONS = "nothing: it belongs to the sessions of TensorFlow 1"

ABSENT: dict[str, dict[str, str]] = {
    "dj": {
        "Accelerator": _DDP,
        "DataLoader": "strategy.distribute_dataset takes a torch DataLoader as it is",
        "DistributedDataParallel": _DDP,
        "GradientTape": _GRADIENTS,
        "LightningModule": "dj.Model(module), with compile and fit",
        "Module": "nnx.Module",
        "Sequential": "nnx.Sequential",
        "Trainer": "dj.Model has fit, evaluate and predict",
        "distribute": "its names are here, as dj.MirroredStrategy",
        "function": "strategy.run compiles the step",
        "init_process_group": "making a dj.MultiWorkerMirroredStrategy connects the processes",
        "jit": "strategy.run compiles the step",
        "keras": "dj.Model, dj.losses, dj.metrics and dj.callbacks have its names; " + _FLAX,
        "layers": _FLAX,
        "load_model": _SAVING,
        "models": _FLAX + "; " + _SAVING,
        "nn": _FLAX,
        "optimizers": _OPTIMIZERS,
        "pmap": "strategy.run runs a step on every replica",
        "pmean": 'dj.get_replica_context().all_reduce("mean", value) in a step',
        "psum": 'dj.get_replica_context().all_reduce("sum", value) in a step',
        "saved_model": "Model.export writes a program that JAX alone runs, Model.save the arrays",
        "set_distribution": "dj.experimental_set_strategy(strategy)",
        "train": "dj.CheckpointManager saves and restores",
    },
    "dj.callbacks": {
        "ProgbarLogger": "fit(verbose=1) shows a bar",
        "RemoteMonitor": "LambdaCallback(on_epoch_end=function)",
    },
    "dj.data": {
        "Dataset": "dj.data.from_arrays(…), as from_tensor_slices; a tf.data.Dataset is taken as it is",
    },
    "dj.experimental": {
        "CollectiveHints": "dj.experimental.CommunicationOptions",
        "ParameterServerStrategy": "dj.ParameterServerStrategy",
        "PreemptionWatcher": "dj.experimental.PreemptionCheckpointHandler",
        "coordinator": "dj.coordinator",
        "rpc": "dj.coordinator",
    },
    "dj.losses": {
        "Reduction": 'the names themselves: reduction="sum_over_batch_size", "sum" or None',
        "deserialize": "dj.losses.get(name)",
    },
    "dj.metrics": {
        "F1Score": _SKLEARN,
        "FBetaScore": _SKLEARN,
        "MeanIoU": _SKLEARN,
        "R2Score": _SKLEARN,
    },
    "dj.tpu.experimental": {
        "shutdown_tpu_system": "nothing: a TPU is free when its program ends",
    },
    "dj.metrics.Metric": {"reset_states": "reset_state()"},
    "dj.Optimizer": {
        "iterations": "step",
        "lr": "learning_rate",
        "minimize": _GRADIENTS + "; then update(model, grads)",
        "variables": "nnx.state(optimizer)",
    },
    "dj.Model": {
        "fit_generator": "fit takes generators",
        "layers": "the layers are attributes of model.module",
        "metrics_names": "the keys of model.evaluate(x, y, return_dict=True)",
        "trainable": "compile(trainable='^head') freezes all other weights",
        "trainable_variables": _WEIGHTS,
        "trainable_weights": _WEIGHTS,
        "variables": "nnx.state(model.module)",
        "weights": _WEIGHTS,
    },
    "dj.DistributedDataset": dict.fromkeys(_OF_DATA, _BEFORE) | {"prefetch": _READS_AHEAD},
    "dj.data.ArrayDataset": {
        "cache": "the arrays are in memory",
        "prefetch": _READS_AHEAD,
        "take": "from_arrays(x[:n])",
    },
    "dj.ReplicaContext": {"devices": "nothing: JAX places the step; see strategy.mesh"},
    "dj.Strategy": {
        "configure": _SESSIONS,
        "experimental_run_v2": "run",
        "group": _SESSIONS,
    },
}
"""By the module or class that is asked."""

KEYWORDS: dict[str, dict[str, str]] = {
    "dj.Model.compile": {
        "auto_scale_loss": 'dtype_policy="mixed_float16" scales the loss',
        "jit_compile": "leave it out: the step is always compiled",
        "run_eagerly": "leave it out: the step is always compiled; jax.disable_jit() runs one eagerly",
    },
    "dj.Model.fit": {
        "dataset": "x=dataset",
        "epoch": "epochs",
        "max_epochs": "epochs",
        "max_queue_size": _STREAM,
        "nb_epoch": "epochs",
        "num_epochs": "epochs",
        "use_multiprocessing": _STREAM,
        "workers": _STREAM,
    },
    "dj.callbacks.ModelCheckpoint": {
        "period": "save_freq, in batches, or a callback of your own",
        "save_format": "leave it out: a checkpoint is a folder",
    },
    "dj.callbacks.TensorBoard": {
        "profile_batch": "dj.callbacks.ProfilerCallback",
        "write_graph": "leave it out: there is no graph",
        "write_images": "leave it out, or write them with dj.summary",
    },
}
"""By the function or class that gets them."""


def missing(owner: str, subject: str, name: str, obj: Any = None) -> AttributeError:
    """Returns the error for an attribute that is not there, with what to type where that is known."""
    instead = ABSENT.get(owner, {}).get(name)
    text = f"{subject} has no attribute {name!r}" + (f". Instead: {instead}" if instead else "")
    return AttributeError(text, name=name, obj=obj)


def answering(owner: str) -> Callable[[Any, str], Any]:
    """Returns a ``__getattr__`` for a class."""

    def answer(self: Any, name: str) -> Any:
        # Python also comes here for the AttributeError of a property that failed.
        if hasattr(type(self), name):
            return object.__getattribute__(self, name)
        raise missing(owner, f"{type(self).__name__!r} object", name, self)

    return answer


P = ParamSpec("P")
R = TypeVar("R")


def answering_keywords(owner: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function answer for keywords of other libraries."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name in KEYWORDS[owner]:
                    raise TypeError(
                        f"{owner} has no argument {name!r}. Instead: {KEYWORDS[owner][name]}"
                    )
            return function(*args, **kwargs)

        return call

    return decorate
