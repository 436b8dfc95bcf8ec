"""Names and objects of TensorFlow, Keras, PyTorch, Flax or Lightning: what to type instead."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

_FLAX = "layers and models are Flax's, flax.nnx or flax.linen"
_OPTIMIZERS = "optimizers are optax's, as optax.adam(1e-3), or Keras's names in Model.compile"
_SCHEDULES = "optax's schedules, as optax.adam(optax.cosine_decay_schedule(1e-3, 1000))"
_GRADIENTS = "nnx.value_and_grad(loss_fn)(model) computes gradients"
_SAVING = "dj.Model(module).load(folder) reads what Model.save wrote"
_DDP = "build the model under dj.MirroredStrategy().scope()"
_READS_AHEAD = "strategy.distribute_dataset reads ahead by itself, see dj.InputOptions"
_BEFORE = "call it on the dataset that strategy.distribute_dataset gets"
_OF_DATA = (
    *("apply", "batch", "cache", "concatenate", "enumerate", "filter", "interleave", "map"),
    *("padded_batch", "rebatch", "repeat", "shard", "shuffle", "skip", "take", "unbatch"),
    *("window", "zip"),
)
_OPTIONS = "strategy.distribute_dataset(data, dj.InputOptions(…))"
_MIRRORED = "dj.MirroredStrategy; dj.MultiWorkerMirroredStrategy for several machines"
_SHARDED = "dj.FullyShardedStrategy"
_EQUAL = "nothing: what is made in strategy.scope() is equal on all replicas"
_SEED = "nnx.Rngs(seed), and shuffle(seed=seed) of the data"
_RANK = "jax.process_index(), or in a step dj.get_replica_context().replica_id_in_sync_group"
_WORLD = "strategy.num_replicas_in_sync, or jax.process_count()"
_ARRAYS = "dj.data.from_arrays((x, y)), as from_tensor_slices; a tf.data.Dataset is taken as it is"
_FILES = "dj.data.from_files reads files; a tf.data.Dataset is taken as it is"
_PLACED = "JAX places a model: make it in dj.OneDeviceStrategy('cpu:0').scope()"
_VALUES = "nothing: gradients are values that nnx.grad returns"
_BUILT = "nothing: a Flax module has its weights when it is made"
_CODE = "nothing: your code builds the module, and Model.save writes its arrays"
_STEP = "compute it in train_step, or call super().train_step(batch)"
_OF_MODULE = "the layers are attributes of model.module"
_PAIRS = "it compares examples of a batch, of which no replica has all; see docs/losses.md"
_EXTENDED = "strategy.extended has it"
_WEIGHTS = "nnx.state(model.module, nnx.Param), or model.get_weights()"
_STREAM = "fit reads ahead by itself, see dj.InputOptions"
_SKLEARN = "pass a function of (y_true, y_pred), or compute it from model.predict(x)"
_STATE = "self.total = nnx.metrics.MetricState(jnp.zeros(()))"
_SESSIONS = "nothing: it belongs to the sessions of TensorFlow 1"

ABSENT: dict[str, dict[str, str]] = {
    "dj": {
        "AUTOTUNE": _READS_AHEAD,
        "Accelerator": _DDP,
        "CollectiveAllReduceStrategy": "dj.MultiWorkerMirroredStrategy",
        "DDPStrategy": _MIRRORED,
        "DataLoader": "strategy.distribute_dataset takes a torch DataLoader as it is",
        "DataParallel": _MIRRORED,
        "Dataset": _ARRAYS,
        "DeepSpeedStrategy": _SHARDED,
        "DeviceMesh": "strategy.mesh, which the strategy makes of its devices",
        "DistributedDataParallel": _DDP,
        "FSDP": _SHARDED,
        "FSDPStrategy": _SHARDED,
        "Fabric": "strategy.run with a step of your own",
        "GradientTape": _GRADIENTS,
        "Input": _FLAX,
        "LayoutMap": "dj.ModelParallelStrategy(model=…, rules=…)",
        "LightningDataModule": "strategy.distribute_dataset takes any iterable of batches",
        "LightningModule": "dj.Model(module), with compile and fit",
        "Mesh": "jax.sharding.Mesh",
        "ModelParallel": "dj.ModelParallelStrategy(model=…, rules=…)",
        "Module": "nnx.Module",
        "NamedSharding": "jax.sharding.NamedSharding",
        "Param": "nnx.Param",
        "PartitionSpec": "jax.sharding.PartitionSpec",
        "Rngs": "nnx.Rngs",
        "Sequential": "nnx.Sequential",
        "Tensor": "jax.Array",
        "TrainState": "flax.training.train_state.TrainState; strategy.create makes one",
        "Trainer": "dj.Model has fit, evaluate and predict",
        "activations": "jax.nn has them",
        "all_gather": "dj.get_replica_context().all_gather(value, axis=0) in a step",
        "all_reduce": 'dj.get_replica_context().all_reduce("sum", value) in a step',
        "backend": "jax.numpy; model.learning_rate = rate sets a rate",
        "barrier": "nothing: processes wait for each other where they combine values",
        "broadcast": _EQUAL,
        "config": "jax.config; dj.simulate(8) simulates devices",
        "constant": "jnp.asarray(value)",
        "cuda": "dj.MirroredStrategy() uses all local GPUs, and jax.devices() lists them",
        "device": _PLACED,
        "device_count": _WORLD,
        "distribute": "its names are here, as dj.MirroredStrategy",
        "distribution": "dj.MirroredStrategy, and other strategies",
        "function": "strategy.run compiles the step",
        "get_rank": _RANK,
        "get_world_size": _WORLD,
        "init_process_group": "making a dj.MultiWorkerMirroredStrategy connects the processes",
        "initializers": "nnx.initializers",
        "jit": "strategy.run compiles the step",
        "keras": "dj.Model, dj.losses, dj.metrics and dj.callbacks have its names; " + _FLAX,
        "layers": _FLAX,
        "load": _SAVING,
        "load_model": _SAVING,
        "load_state_dict": _SAVING,
        "manual_seed": _SEED,
        "mixed_precision": 'compile(dtype_policy="mixed_bfloat16"), or dj.DTypePolicy',
        "models": _FLAX + "; " + _SAVING,
        "multi_process_runner": "dj.testing.LocalCluster",
        "nn": _FLAX,
        "no_grad": _VALUES,
        "ops": "jax.numpy, jax.nn and jax.lax",
        "optimizers": _OPTIMIZERS,
        "pmap": "strategy.run runs a step on every replica",
        "pmean": 'dj.get_replica_context().all_reduce("mean", value) in a step',
        "psum": 'dj.get_replica_context().all_reduce("sum", value) in a step',
        "random": _SEED,
        "regularizers": "dj.AddedLoss, sown by a module, or optax.adamw",
        "replicate": _EQUAL,
        "save": "Model.save, or dj.CheckpointManager",
        "saved_model": "Model.export writes a program that JAX alone runs, Model.save the arrays",
        "seed_everything": _SEED,
        "set_distribution": "dj.experimental_set_strategy(strategy)",
        "shard": "strategy.distribute_dataset divides batches",
        "shard_map": "strategy.run runs a step on every replica",
        "train": "dj.CheckpointManager saves and restores",
        "unreplicate": "nothing: an array that is equal on all replicas reads as one",
        "utils": "dj.DatasetCreator, dj.SidecarEvaluator and dj.unpack_x_y_sample_weight",
    },
    "dj.callbacks": {
        "BaseLogger": "History, which fit returns",
        "CallbackList": "fit(callbacks=[…]) takes a list",
        "GradientAccumulationScheduler": "compile(gradient_accumulation_steps=n)",
        "ModelSummary": "model.summary()",
        "OrbaxCheckpoint": "ModelCheckpoint, or BackupAndRestore to resume",
        "ProgbarLogger": "fit(verbose=1) shows a bar",
        "RemoteMonitor": "LambdaCallback(on_epoch_end=function)",
        "RichProgressBar": "fit(verbose=1) shows a bar",
        "StochasticWeightAveraging": "compile(use_ema=True), and SwapEMAWeights",
        "TQDMProgressBar": "fit(verbose=1) shows a bar",
        "WandbCallback": "WandbLogger",
        "WandbMetricsLogger": "WandbLogger",
        "experimental": "BackupAndRestore is in dj.callbacks",
    },
    "dj.data": {
        "AUTOTUNE": _READS_AHEAD,
        "DataLoader": "strategy.distribute_dataset takes a torch DataLoader as it is",
        "Dataset": "dj.data.from_arrays(…), as from_tensor_slices; a tf.data.Dataset is taken as it is",
        "DistributedSampler": "strategy.distribute_dataset divides batches",
        "Options": _OPTIONS,
        "TFRecordDataset": _FILES,
        "TensorDataset": _ARRAYS,
        "TextLineDataset": _FILES,
        "experimental": "dj.AutoShardPolicy is an argument of dj.InputOptions",
    },
    "dj.experimental": {
        "CollectiveHints": "dj.experimental.CommunicationOptions",
        "ParameterServerStrategy": "dj.ParameterServerStrategy",
        "PreemptionWatcher": "dj.experimental.PreemptionCheckpointHandler",
        "coordinator": "dj.coordinator",
        "rpc": "dj.coordinator",
    },
    "dj.losses": {
        "BCELoss": "BinaryCrossentropy()",
        "BCEWithLogitsLoss": "BinaryCrossentropy(from_logits=True)",
        "CTC": "a function that calls optax.ctc_loss",
        "Circle": _PAIRS,
        "CrossEntropyLoss": "SparseCategoricalCrossentropy(from_logits=True)",
        "Dice": _PAIRS,
        "HuberLoss": "Huber()",
        "KLDivLoss": "KLDivergence()",
        "L1Loss": "MeanAbsoluteError()",
        "MAE": "mean_absolute_error",
        "MSE": "mean_squared_error",
        "MSELoss": "MeanSquaredError()",
        "Reduction": 'the names themselves: reduction="sum_over_batch_size", "sum" or None',
        "Tversky": _PAIRS,
        "bce": "binary_crossentropy",
        "ctc": "a function that calls optax.ctc_loss",
        "deserialize": "dj.losses.get(name)",
        "kld": "kl_divergence",
        "logcosh": "log_cosh",
        "mae": "mean_absolute_error",
        "mse": "mean_squared_error",
        "serialize": "the name itself: dj.losses.get(name)",
    },
    "dj.metrics": {
        "BinaryIoU": _SKLEARN,
        "ConcordanceCorrelation": _SKLEARN,
        "F1Score": _SKLEARN,
        "FBetaScore": _SKLEARN,
        "IoU": _SKLEARN,
        "MeanIoU": _SKLEARN,
        "MeanRelativeError": _SKLEARN,
        "OneHotIoU": _SKLEARN,
        "PearsonCorrelation": _SKLEARN,
        "PrecisionAtRecall": _SKLEARN,
        "R2Score": _SKLEARN,
        "RecallAtPrecision": _SKLEARN,
        "SensitivityAtSpecificity": _SKLEARN,
        "SpecificityAtSensitivity": _SKLEARN,
        "get": "compile(metrics=[name]) takes names",
    },
    "dj.tpu.experimental": {"shutdown_tpu_system": "nothing: a TPU is free when its program ends"},
    "dj.metrics.Metric": {
        "add_variable": _STATE,
        "add_weight": _STATE,
        "reset_states": "reset_state()",
    },
    "jax.Array": {
        "backward": _GRADIENTS,
        "clone": "nothing: an array does not change",
        "contiguous": "nothing: JAX lays arrays out",
        "cpu": "nothing: JAX places the step",
        "cuda": "nothing: JAX places the step",
        "detach": "jax.lax.stop_gradient(x)",
        "expand": "jnp.broadcast_to(x, shape)",
        "float": "x.astype(jnp.float32)",
        "get_shape": "x.shape",
        "long": "x.astype(jnp.int32)",
        "numpy": "np.asarray(x), outside of the step",
        "permute": "x.transpose(0, 2, 1)",
        "requires_grad": _VALUES,
        "to": "x.astype(dtype); JAX places the step",
        "unsqueeze": "jnp.expand_dims(x, axis)",
    },
    "dj.Optimizer": {
        "apply": "update(model, grads)",
        "build": _BUILT,
        "compute_gradients": _GRADIENTS,
        "get_gradients": _GRADIENTS,
        "get_weights": "nnx.state(optimizer)",
        "iterations": "step",
        "lr": "learning_rate",
        "minimize": _GRADIENTS + "; then update(model, grads)",
        "param_groups": "learning_rate",
        "set_weights": "nnx.update(optimizer, state)",
        "state": "opt_state",
        "state_dict": "nnx.state(optimizer)",
        "variables": "nnx.state(optimizer)",
        "weights": "nnx.state(optimizer)",
        "zero_grad": _VALUES,
    },
    "dj.Model": {
        "add": "nnx.Sequential(layer, …) takes the layers",
        "add_loss": "dj.AddedLoss, sown by a module",
        "add_metric": "compile(metrics=[…])",
        "build": _BUILT,
        "call": "the forward pass is __call__ of the module",
        "compute_loss": _STEP,
        "compute_metrics": _STEP,
        "count_params": "model.summary()",
        "cpu": _PLACED,
        "cuda": _PLACED,
        "distribute_strategy": "strategy",
        "eval": "nothing: evaluate and predict set the mode; model.module.eval() for calls of your own",
        "evaluate_generator": "evaluate takes generators",
        "fit_generator": "fit takes generators",
        "forward": "model(x)",
        "freeze": "compile(trainable='^head') freezes all other weights",
        "from_config": _CODE,
        "get_config": _CODE,
        "get_layer": _OF_MODULE,
        "layers": "the layers are attributes of model.module",
        "load_state_dict": "load_weights(folder)",
        "log": "return a dict of numbers from train_step",
        "metrics": "model.evaluate(x, y, return_dict=True) has their values by name",
        "metrics_names": "the keys of model.evaluate(x, y, return_dict=True)",
        "named_parameters": _WEIGHTS,
        "non_trainable_variables": "nnx.state(model.module, nnx.Not(nnx.Param))",
        "non_trainable_weights": "nnx.state(model.module, nnx.Not(nnx.Param))",
        "parameters": _WEIGHTS,
        "predict_classes": "model.predict(x).argmax(-1)",
        "predict_generator": "predict takes generators",
        "predict_proba": "predict(x)",
        "reset_metrics": "nothing: every epoch and evaluation starts them",
        "reset_states": "nothing: every epoch and evaluation starts its metrics",
        "state_dict": "nnx.state(model.module), or save_weights(folder)",
        "to": _PLACED,
        "to_json": _CODE,
        "train": "fit; model.module.train() for calls of your own",
        "trainable": "compile(trainable='^head') freezes all other weights",
        "trainable_variables": _WEIGHTS,
        "trainable_weights": _WEIGHTS,
        "variables": "nnx.state(model.module)",
        "weights": _WEIGHTS,
        "zero_grad": _VALUES,
    },
    "dj.Model.learning_rate": {
        "assign": "model.learning_rate = rate",
        "numpy": "nothing: it is a float",
        "value": "nothing: it is a float",
    },
    "dj.DistributedDataset": dict.fromkeys(_OF_DATA, _BEFORE)
    | {
        "as_numpy_iterator": "strategy.gather(value, axis=0) of each value",
        "options": _OPTIONS,
        "prefetch": _READS_AHEAD,
        "with_options": _OPTIONS,
    },
    "dj.data.ArrayDataset": {
        "cache": "the arrays are in memory",
        "cardinality": "len(dataset)",
        "concatenate": "from_arrays of joined arrays",
        "filter": "select the rows before: from_arrays(x[mask])",
        "padded_batch": "pad the arrays before, or map a function that pads",
        "prefetch": _READS_AHEAD,
        "shard": "nothing: strategy.distribute_dataset divides batches",
        "skip": "from_arrays(x[n:])",
        "take": "from_arrays(x[:n])",
        "unbatch": "leave batch out",
        "with_options": _OPTIONS,
        "zip": "from_arrays((x, y))",
    },
    "dj.ReplicaContext": {"devices": "nothing: JAX places the step; see strategy.mesh"},
    "dj.Strategy": {
        "batch_reduce": "strategy.extended.batch_reduce_to",
        "broadcast": _EQUAL,
        "configure": _SESSIONS,
        "device_mesh": "mesh",
        "experimental_run_v2": "run",
        "global_rank": _RANK,
        "group": _SESSIONS,
        "is_global_zero": "dj.is_chief()",
        "local_rank": _RANK,
        "num_replicas": "num_replicas_in_sync",
        "num_towers": "num_replicas_in_sync",
        "reduce_to": _EXTENDED,
        "root_device": "mesh.devices",
        "update": _EXTENDED,
        "value_container": _EXTENDED,
        "worker_devices": _EXTENDED,
        "world_size": _WORLD,
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
        "dirpath": "filepath",
        "every_n_epochs": "save_freq, in batches, or a callback of your own",
        "every_n_train_steps": "save_freq",
        "filename": "filepath, as 'folder/{epoch:02d}'",
        "period": "save_freq, in batches, or a callback of your own",
        "save_format": "leave it out: a checkpoint is a folder",
        "save_last": "leave it out, or BackupAndRestore to resume",
        "save_top_k": "save_best_only=True",
    },
    "dj.callbacks.TensorBoard": {
        "log_every_n_steps": "update_freq",
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
        kind = type(self).__name__
        for cls in type(self).__mro__ if not is_ours(type(self).__init__) else ():
            init = inspect.unwrap(vars(cls).get("__init__", object.__init__))
            if is_ours(init) and name in init.__code__.co_names:
                raise AttributeError(
                    f"{kind!r} object has no attribute {name!r}, which {cls.__name__}.__init__ sets. Call "
                    f"super().__init__() first in {kind}.__init__."
                )
        raise missing(owner, f"{kind!r} object", name, self)

    return answer


def is_ours(member: Any) -> bool:
    """Returns whether a class or function is one of this library."""
    return str(getattr(member, "__module__", "")).partition(".")[0] == __package__


_FRAMEWORKS = {
    "keras": "Keras",
    "lightning": "Lightning",
    "pytorch_lightning": "Lightning",
    "tensorflow": "TensorFlow",
    "tf_keras": "Keras",
    "torch": "PyTorch",
    "torchmetrics": "TorchMetrics",
}
_KINDS = {
    "Callback": "dj.callbacks",
    "LRScheduler": _SCHEDULES,
    "Layer": _FLAX,
    "LearningRateSchedule": _SCHEDULES,
    "Loss": "dj.losses",
    "Metric": "dj.metrics",
    "Module": _FLAX,
    "Optimizer": _OPTIMIZERS,
    "RaggedTensor": "value.to_tensor()",
    "SparseTensor": "tf.sparse.to_dense(value)",
    "Strategy": "dj",
    "Tensor": "np.asarray(value)",
    "Variable": "np.asarray(value)",
    "_Loss": "dj.losses",
}
"""By the name of a base class: what to type, or where a class of the same name may be."""


def framework_of(module: Any) -> str:
    """Returns the framework of a module's name, if it cannot compute with JAX's arrays, or an empty str."""
    framework = _FRAMEWORKS.get(str(module).partition(".")[0], "")
    computes_with_jax = framework == "Keras" and "keras.src.backend.jax" in sys.modules
    return "" if computes_with_jax else framework


def is_foreign(value: Any) -> bool:
    """Returns whether a value is of a framework that cannot compute with JAX's arrays."""
    return any(framework_of(cls.__module__) for cls in type(value).__mro__)


def foreign(value: Any) -> str:
    """Describes an object or class of another framework, with what to type; empty for any other value."""
    kind = value if isinstance(value, type) else type(value)
    for cls in kind.__mro__:
        framework = _FRAMEWORKS.get(str(cls.__module__).partition(".")[0])
        if framework and cls.__name__ in _KINDS:
            return f"{kind.__name__} of {framework} (instead: {_here(kind, _KINDS[cls.__name__])})"
    return ""


def _here(kind: type, place: str) -> str:
    """Returns what has the name of a class, or of a base of it, at a place."""
    is_module = place.partition(".")[0] == "dj"
    module = import_module(place.replace("dj", str(__package__), 1)) if is_module else None
    for cls in kind.__mro__ if is_module else ():
        instead = ABSENT[place].get(cls.__name__, cls.__name__)
        if hasattr(module, instead.partition("(")[0]):
            return f"{place}.{instead}"
    return place
