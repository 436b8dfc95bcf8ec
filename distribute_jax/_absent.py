"""What to type instead of names and objects of TensorFlow, Keras, PyTorch, Flax and Lightning."""

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
_READS_AHEAD = "strategy.distribute_dataset reads ahead by itself, see dj.InputOptions"
_OPTIONS = "strategy.distribute_dataset(data, dj.InputOptions(…))"
_EQUAL = "nothing: what is made in strategy.scope() is equal on all replicas"
_RANK = "jax.process_index(), or in a step dj.get_replica_context().replica_id_in_sync_group"
_WORLD = "strategy.num_replicas_in_sync, or jax.process_count()"
_ARRAYS = "dj.data.from_arrays((x, y)), as from_tensor_slices; a tf.data.Dataset is taken as it is"
_PLACED = "make the model in dj.OneDeviceStrategy('gpu:0').scope(), or in that of 'cpu:0'"
_VALUES = "nothing: gradients are values that nnx.grad returns"
_WEIGHTS = "nnx.state(model.module, nnx.Param), or model.get_weights()"
_BUILT = "nothing: a Flax module has its weights when it is made"

_ABSENT: dict[str, dict[str, str]] = {
    "dj": {
        "AUTOTUNE": _READS_AHEAD,
        "Accelerator DDP DistributedDataParallel": "build the model under dj.MirroredStrategy().scope()",
        "Accuracy Mean Metric": "dj.metrics has it",
        "Adam AdamW SGD optimizers": _OPTIMIZERS,
        "Callback EarlyStopping ModelCheckpoint": "dj.callbacks has it",
        "Checkpoint restore train": "dj.CheckpointManager saves and restores",
        "CollectiveAllReduceStrategy": "dj.MultiWorkerMirroredStrategy",
        "DDPStrategy DataParallel": "dj.MirroredStrategy, or dj.MultiWorkerMirroredStrategy",
        "DataLoader": "strategy.distribute_dataset takes a torch DataLoader as it is",
        "Dataset": _ARRAYS,
        "Loss": "dj.losses has it",
        "errors": "StopIteration, which an iterator raises at its end; dj has the other errors",
        "DeepSpeedStrategy FSDP FSDPStrategy fully_shard": "dj.FullyShardedStrategy",
        "DeviceMesh": "strategy.mesh, which the strategy makes of its devices",
        "Fabric": "strategy.run with your own step",
        "GradientTape grad value_and_grad": _GRADIENTS,
        "Dense Input Layer Linear layers": _FLAX,
        "LayoutMap ModelParallel": "dj.ModelParallelStrategy(model=…, rules=…)",
        "LightningDataModule": "strategy.distribute_dataset takes any iterable of batches",
        "LightningModule": "dj.Model(module), with compile and fit",
        "Mesh NamedSharding PartitionSpec": "jax.sharding has it",
        "Module Param Rngs Sequential": "flax.nnx has it",
        "Tensor": "jax.Array",
        "TrainState": "flax.training.train_state.TrainState; strategy.create makes one",
        "Trainer": "dj.Model has fit, evaluate and predict",
        "activations": "jax.nn has them",
        "all_gather": "dj.get_replica_context().all_gather(value, axis=0) in a step",
        "all_reduce psum": 'dj.get_replica_context().all_reduce("sum", value) in a step',
        "backend": "jax.numpy; model.learning_rate = rate sets a rate",
        "barrier": "nothing: processes wait for each other where they combine values",
        "broadcast replicate": _EQUAL,
        "config": "jax.config; dj.simulate(8) simulates devices",
        "constant": "jnp.asarray(value)",
        "cuda": "dj.MirroredStrategy() uses all local GPUs, and jax.devices() lists them",
        "device": _PLACED,
        "device_count get_world_size num_replicas": _WORLD,
        "distribute": "its names are here, as dj.MirroredStrategy",
        "distribution": "dj.MirroredStrategy, and other strategies",
        "function jit": "strategy.run compiles the step",
        "get_rank rank": _RANK,
        "init_process_group": "making a dj.MultiWorkerMirroredStrategy connects the processes",
        "initializers": "nnx.initializers",
        "keras": "dj.Model, dj.losses, dj.metrics and dj.callbacks have its names; " + _FLAX,
        "load load_model load_state_dict": _SAVING,
        "manual_seed random seed_everything": "nnx.Rngs(seed), and shuffle(seed=seed) of the data",
        "mixed_precision": 'compile(dtype_policy="mixed_bfloat16"), or dj.DTypePolicy',
        "models": _FLAX + "; " + _SAVING,
        "multi_process_runner": "dj.testing.LocalCluster",
        "nn": "dj.compute_average_loss and dj.scale_regularization_loss; jax.nn; " + _FLAX,
        "no_grad": _VALUES,
        "ops": "jax.numpy, jax.nn and jax.lax",
        "pmap shard_map": "strategy.run runs a step on every replica",
        "pmean": 'dj.get_replica_context().all_reduce("mean", value) in a step',
        "regularizers": "dj.AddedLoss, sown by a module, or optax.adamw",
        "save": "Model.save, or dj.CheckpointManager",
        "saved_model": "Model.export writes a program that JAX alone runs, Model.save the arrays",
        "set_distribution": "dj.experimental_set_strategy(strategy)",
        "shard": "strategy.distribute_dataset divides batches",
        "unreplicate": "nothing: an array that is equal on all replicas reads as one",
        "utils": "dj.DatasetCreator, dj.SidecarEvaluator and dj.unpack_x_y_sample_weight",
    },
    "dj.callbacks": {
        "BaseLogger": "History, which fit returns",
        "CallbackList": "fit(callbacks=[…]) takes a list",
        "GradientAccumulationScheduler": "compile(gradient_accumulation_steps=n)",
        "ModelSummary": "model.summary()",
        "OrbaxCheckpoint": "ModelCheckpoint, or BackupAndRestore to resume",
        "ProgbarLogger RichProgressBar TQDMProgressBar": "fit(verbose=1) shows a bar",
        "RemoteMonitor": "LambdaCallback(on_epoch_end=function)",
        "StochasticWeightAveraging": "compile(use_ema=True), and SwapEMAWeights",
        "WandbCallback WandbMetricsLogger": "WandbLogger",
        "experimental": "BackupAndRestore is in dj.callbacks",
    },
    "dj.data": {
        "AUTOTUNE": _READS_AHEAD,
        "DataLoader": "strategy.distribute_dataset takes a torch DataLoader as it is",
        "Dataset": "dj.data.from_arrays(…), as from_tensor_slices; a tf.data.Dataset is taken as it is",
        "DistributedSampler": "strategy.distribute_dataset divides batches",
        "Options": _OPTIONS,
        "TFRecordDataset TextLineDataset": "dj.data.from_files; a tf.data.Dataset is taken as it is",
        "TensorDataset": _ARRAYS,
        "from_generator": "strategy.distribute_dataset takes a function that yields batches",
        "from_tensor_slices": "dj.data.from_arrays",
        "experimental": "dj.AutoShardPolicy is an argument of dj.InputOptions",
    },
    "dj.experimental": {
        "CollectiveHints": "dj.experimental.CommunicationOptions",
        "ParameterServerStrategy": "dj.ParameterServerStrategy",
        "PreemptionWatcher": "dj.experimental.PreemptionCheckpointHandler",
        "coordinator rpc": "dj.coordinator",
    },
    "dj.losses": {
        "BCELoss": "BinaryCrossentropy()",
        "BCEWithLogitsLoss": "BinaryCrossentropy(from_logits=True)",
        "CTC ctc": "a function that calls optax.ctc_loss",
        "Circle Dice Tversky": "it compares all examples of the batch with each other: docs/losses.md",
        "CrossEntropyLoss": "SparseCategoricalCrossentropy(from_logits=True)",
        "HuberLoss": "Huber()",
        "KLDivLoss": "KLDivergence()",
        "L1Loss": "MeanAbsoluteError()",
        "MAE mae": "mean_absolute_error",
        "MSE mse": "mean_squared_error",
        "MSELoss": "MeanSquaredError()",
        "Reduction": 'the names themselves: reduction="sum_over_batch_size", "sum" or None',
        "bce": "binary_crossentropy",
        "deserialize": "dj.losses.get(name)",
        "kld": "kl_divergence",
        "logcosh": "log_cosh",
        "serialize": "the name itself: dj.losses.get(name)",
    },
    "dj.metrics": {
        (
            "BinaryIoU ConcordanceCorrelation F1Score FBetaScore IoU MeanIoU MeanRelativeError "
            "OneHotIoU PearsonCorrelation PrecisionAtRecall R2Score RecallAtPrecision "
            "SensitivityAtSpecificity SpecificityAtSensitivity"
        ): "pass a function of (y_true, y_pred), or compute it from model.predict(x)",
        "get": "compile(metrics=[name]) takes names",
    },
    "dj.tpu.experimental": {"shutdown_tpu_system": "nothing: a TPU is free when its program ends"},
    "dj.metrics.Metric": {
        "add_variable add_weight": "self.total = nnx.metrics.MetricState(jnp.zeros(()))",
        "merge_state": "a.total[...] += b.total[...], and so for each state",
        "reset_states": "reset_state()",
    },
    "jax.Array": {
        "assign assign_add assign_sub": "variable[...] = value, or += value; a dj.Variable has these",
        "backward": _GRADIENTS,
        "clone": "nothing: an array does not change",
        "contiguous": "nothing: JAX chooses the layout",
        "cpu cuda": "nothing: JAX places the step",
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
        "compute_gradients get_gradients": _GRADIENTS,
        "get_weights state_dict variables weights": "nnx.state(optimizer)",
        "iterations": "step",
        "lr param_groups": "learning_rate",
        "minimize": _GRADIENTS + "; then update(model, grads)",
        "set_weights": "nnx.update(optimizer, state)",
        "state": "opt_state",
        "zero_grad": _VALUES,
    },
    "dj.Model": {
        "add": "nnx.Sequential(layer, …) takes the layers",
        "add_loss": "dj.AddedLoss, sown by a module",
        "add_metric": "compile(metrics=[…])",
        "build": _BUILT,
        "call": "the forward pass is __call__ of the module",
        "compute_loss compute_metrics": "compute it in train_step, or call super().train_step(batch)",
        "count_params": "model.summary()",
        "cpu cuda to": _PLACED,
        "distribute_strategy": "strategy",
        "eval": "nothing: evaluate and predict set the mode; model.module.eval() for your own calls",
        "evaluate_generator fit_generator predict_generator": "fit, evaluate and predict take generators",
        "forward": "model(x)",
        "freeze trainable": "compile(trainable='^head') freezes all other weights",
        "from_config get_config to_json": "nothing: your code builds the module, and save writes its arrays",
        "get_layer layers": "the layers are attributes of model.module",
        "load_state_dict": "load_weights(folder)",
        "log": "return a dict of numbers from train_step",
        "metrics metrics_names": "model.evaluate(x, y, return_dict=True) has their values by name",
        "named_parameters parameters trainable_variables trainable_weights weights": _WEIGHTS,
        "non_trainable_variables non_trainable_weights": "nnx.state(model.module, nnx.Not(nnx.Param))",
        "predict_classes": "model.predict(x).argmax(-1)",
        "predict_proba": "predict(x)",
        "reset_metrics reset_states": "nothing: every epoch and evaluation starts its metrics",
        "state_dict": "nnx.state(model.module), or save_weights(folder)",
        "train": "fit; model.module.train() for your own calls",
        "variables": "nnx.state(model.module)",
        "zero_grad": _VALUES,
    },
    "dj.Model.learning_rate": {
        "assign": "model.learning_rate = rate",
        "numpy value": "nothing: it is a float",
    },
    "dj.DistributedDataset": {
        (
            "apply batch cache concatenate enumerate filter interleave map padded_batch rebatch repeat "
            "shard shuffle skip take unbatch window zip"
        ): "call it on the dataset that strategy.distribute_dataset gets",
        "as_numpy_iterator": "strategy.gather(value, axis=0) of each value",
        "options with_options": _OPTIONS,
        "prefetch": _READS_AHEAD,
    },
    "dj.data.ArrayDataset": {
        "cache": "the arrays are in memory",
        "cardinality": "len(dataset)",
        "concatenate": "from_arrays of concatenated arrays",
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
    "dj.CheckpointManager": {
        "checkpoint": "save(step, tree) and restore(step, tree) take the tree",
        "checkpoints": "all_steps()",
        "close wait_until_finished": "wait()",
        "latest_checkpoint": "latest_step()",
        "restore_or_initialize": "restore_latest(tree)",
    },
    "dj.checkpoint": {"Checkpoint": "dj.CheckpointManager", "restore": "load"},
    "dj.ReplicaContext": {"devices": "nothing: JAX places the step; see strategy.mesh"},
    "dj.Strategy": {
        "all_gather all_reduce merge_call": "dj.get_replica_context() has it, in a step",
        "batch_reduce": "strategy.extended.batch_reduce_to",
        "broadcast": _EQUAL,
        "configure group": "nothing: it belongs to the sessions of TensorFlow 1",
        "device_mesh": "mesh",
        "experimental_run_v2": "run",
        "global_rank local_rank": _RANK,
        "is_global_zero": "dj.is_chief()",
        "num_replicas num_towers": "num_replicas_in_sync",
        "reduce_to update value_container worker_devices": "strategy.extended has it",
        "devices root_device": "mesh.devices",
        "world_size": _WORLD,
    },
}

_KEYWORDS: dict[str, dict[str, str]] = {
    "dj.Model.compile": {
        "auto_scale_loss": 'dtype_policy="mixed_float16" scales the loss',
        "jit_compile": "leave it out: the step is always compiled",
        "run_eagerly": "leave it out: the step is always compiled; jax.disable_jit() runs one eagerly",
    },
    "dj.Model.fit": {
        "dataset": "x=dataset",
        "epoch max_epochs nb_epoch num_epochs": "epochs",
        "max_queue_size use_multiprocessing workers": "fit reads ahead by itself, see dj.InputOptions",
        "steps_per_execution": "model.compile(steps_per_execution=…)",
    },
    "dj.callbacks.ModelCheckpoint": {
        "dirpath": "filepath",
        "every_n_epochs period": "save_freq, in batches, or your own callback",
        "every_n_train_steps": "save_freq",
        "filename": "filepath, as 'folder/{epoch:02d}'",
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


def _expand(table: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Expands keys with several names, separated by spaces, into one entry for each."""
    return {
        owner: dict(sorted((name, text) for names, text in of.items() for name in names.split()))
        for owner, of in table.items()
    }


ABSENT = _expand(_ABSENT)
"""By the module or class that lacks the name."""
KEYWORDS = _expand(_KEYWORDS)
"""By the function or class that lacks the keyword."""


def attribute_error(owner: str, subject: str, name: str, obj: Any = None) -> AttributeError:
    """Returns the AttributeError for a name, with what to type instead if that is known."""
    instead = ABSENT.get(owner, {}).get(name)
    text = f"{subject} has no attribute {name!r}" + (f". Instead: {instead}" if instead else "")
    return AttributeError(text, name=name, obj=obj)


def getattr_with_hints(owner: str) -> Callable[[Any, str], Any]:
    """Returns a ``__getattr__`` for a class, whose error says what to type instead."""

    def answer(self: Any, name: str) -> Any:
        # Python also calls this after a property has raised an AttributeError.
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
        raise attribute_error(owner, f"{kind!r} object", name, self)

    return answer


def is_ours(member: Any) -> bool:
    """True for a class or function of this library."""
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
_EQUIVALENTS = {
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
"""By the name of a base class: what to type instead, or the module that may have the same class."""


def framework_of(module: Any) -> str:
    """Returns the framework that a module belongs to; empty if it can compute with JAX's arrays."""
    framework = _FRAMEWORKS.get(str(module).partition(".")[0], "")
    computes_with_jax = framework == "Keras" and "keras.src.backend.jax" in sys.modules
    return "" if computes_with_jax else framework


def is_foreign(value: Any) -> bool:
    """True if the class of a value is from a framework that cannot compute with JAX's arrays."""
    return any(framework_of(cls.__module__) for cls in type(value).__mro__)


def describe_foreign(value: Any) -> str:
    """Describes an object or class of another framework, and what to type instead; empty for others."""
    kind = value if isinstance(value, type) else type(value)
    for cls in kind.__mro__:
        framework = _FRAMEWORKS.get(str(cls.__module__).partition(".")[0])
        if framework and cls.__name__ in _EQUIVALENTS:
            instead = _equivalent(kind, _EQUIVALENTS[cls.__name__])
            return f"{kind.__name__} of {framework} (instead: {instead})"
    return ""


def _equivalent(kind: type, place: str) -> str:
    """Returns the class in module ``place`` with the name of a class or of a base; a hint as it is."""
    is_module = place.partition(".")[0] == "dj"
    module = import_module(place.replace("dj", str(__package__), 1)) if is_module else None
    for cls in kind.__mro__ if is_module else ():
        instead = ABSENT[place].get(cls.__name__, cls.__name__)
        if hasattr(module, instead.partition("(")[0]):
            return f"{place}.{instead}"
    return place
