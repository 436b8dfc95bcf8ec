"""Every exception of the library.

Each is also the builtin that a TensorFlow user would catch::

    DistributeError(Exception)
    ├── ContextError(RuntimeError)          called in the wrong place: run inside run, under the user's jit
    │   ├── IterationError(…, ValueError)   a dataset was iterated inside run
    │   └── MixedStrategiesError            two strategies at once
    ├── DeadlockError(RuntimeError)         a collective that not every replica would reach
    ├── DeadlineExceededError(TimeoutError) a process did not come in time
    ├── DonatedError(RuntimeError)          an array that was donated to a later step was read
    ├── StepFailedError(RuntimeError)       the compiled step failed after its state was donated
    ├── BackendStartedError(RuntimeError)   the devices were fixed before the call that wanted to choose them
    ├── ArgumentError(ValueError)           an argument has the wrong structure, shape or value
    │   ├── TFConfigError(…, json.JSONDecodeError)  TF_CONFIG is not JSON
    │   └── TaskConflictError(…, KeyError)  two clusters give one task an address each
    ├── ArgumentTypeError(TypeError)        an argument is of another type than it may be
    ├── ClusterError(RuntimeError)          the surroundings do not say what the cluster is
    │   ├── NoClusterError                  nothing around the process describes one
    │   ├── ProcessesDifferError            what has to be the same on all processes is not
    │   └── ServiceError                    a service that knows the cluster did not answer, or refused
    ├── ProcessFailedError(RuntimeError)    a process that was started ended as it should not
    ├── MissingPackageError(ImportError)    an optional package is needed and not installed
    ├── CheckpointError(ValueError)          a checkpoint cannot be saved, or does not fit the tree
    │   ├── CheckpointDamagedError           what is on the disk is not what was saved
    │   └── CheckpointFileError(…, OSError) the disk is full, read-only or not there
    ├── OutOfSyncError(ValueError)          state would differ between replicas
    ├── PaddingLeakError(ValueError)        the padding of a partial batch changed a result
    ├── NotEqualError(ValueError)           the distributed step is not the step on one device
    ├── StaleCaptureError(ValueError)       an array was captured in a way that would go stale
    ├── PerReplicaError(ValueError)         a per-replica value was used as if it were one array
    │   └── PerReplicaAttributeError(…, AttributeError)  it was asked for what only one array has
    ├── PerReplicaTypeError(TypeError)      arithmetic on a per-replica value outside run
    ├── TracedValueError(TypeError)         Python needed the value of a traced number
    ├── LoweringError(NotImplementedError)  the chosen lowering cannot run an operation of the step
    └── UnsupportedError(NotImplementedError)  the strategy does not offer what an option asks for

A message has five parts: what failed, where in the tree, what was received, the rule, and the next
thing to type.
"""

from __future__ import annotations

import json


class DistributeError(Exception):
    """The base of every error that this library raises on purpose."""


class ContextError(DistributeError, RuntimeError):
    """A method was called in a context that does not allow it."""


class IterationError(ContextError, ValueError):
    """A distributed dataset was iterated inside ``run``, on one replica."""


class MixedStrategiesError(ContextError):
    """Two different strategies met: one is current, the other was used."""


class DeadlockError(DistributeError, RuntimeError):
    """A collective stands where not every replica is sure to reach it, so the step would hang."""


class DonatedError(DistributeError, RuntimeError):
    """An array was read after it had been given to a later step, which reused its memory."""


class StepFailedError(DistributeError, RuntimeError):
    """The compiled step failed while running, after its state had been donated to it."""


class BackendStartedError(DistributeError, RuntimeError):
    """The devices of this process were already fixed when a call wanted to choose them."""


class ArgumentError(DistributeError, ValueError):
    """An argument has the wrong structure, shape, dtype or value."""


class CheckpointError(DistributeError, ValueError):
    """A tree cannot be saved, or a checkpoint does not fit the tree that it should be restored into."""


class CheckpointDamagedError(CheckpointError):
    """What is on the disk is not what was saved."""


class CheckpointFileError(CheckpointError, OSError):
    """The file system refused what was to be written, or to be read."""


class TFConfigError(ArgumentError, json.JSONDecodeError):
    """The environment variable TF_CONFIG is not JSON; where it goes wrong stands in the message."""


class TaskConflictError(ArgumentError, KeyError):
    """Two clusters that are to be joined each give one task an address."""

    __str__ = Exception.__str__  # a KeyError would show the text in quotes


class ArgumentTypeError(DistributeError, TypeError):
    """An argument is of another type than it may be."""


class ClusterError(DistributeError, RuntimeError):
    """The surroundings of the process do not say, or say wrongly, what the cluster is."""


class NoClusterError(ClusterError):
    """Nothing around the process describes a cluster; the message lists what was looked for."""


class ProcessesDifferError(ClusterError):
    """The processes of a job disagree about what has to be the same on all of them."""


class DeadlineExceededError(DistributeError, TimeoutError):
    """A process did not come, or a collective did not end, in time; the message names who is missing."""


class ServiceError(ClusterError):
    """A service that knows the cluster did not answer in time, or refused.

    Args:
        message: what to tell the user.
        status: the HTTP status of a refusal; None where there was no answer.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class ProcessFailedError(DistributeError, RuntimeError):
    """A process of a ``LocalCluster`` failed, or did not end in time; its output stands in the message."""


class MissingPackageError(DistributeError, ImportError):
    """An optional package is needed and not installed."""


class OutOfSyncError(DistributeError, ValueError):
    """State or a model-shaped result would end up different on each replica."""


class PaddingLeakError(DistributeError, ValueError):
    """What a partial batch was padded with changed the state or a result."""


class NotEqualError(DistributeError, ValueError):
    """The step on many replicas does not give what it gives on one device."""


class StaleCaptureError(DistributeError, ValueError):
    """The step captured an array in a way that later calls would not see change."""


class PerReplicaError(DistributeError, ValueError):
    """A per-replica value was used where one array is needed."""


class PerReplicaAttributeError(PerReplicaError, AttributeError):
    """A per-replica value was asked for what only one array has, such as ``shape`` or ``numpy``."""


class PerReplicaTypeError(DistributeError, TypeError):
    """Arithmetic was tried on a per-replica value outside ``run``."""


class TracedValueError(DistributeError, TypeError):
    """Python code needed the value of a number that is traced inside ``run``."""


class LoweringError(DistributeError, NotImplementedError):
    """The chosen lowering cannot run an operation of the step, or only with other numbers."""


class UnsupportedError(DistributeError, NotImplementedError):
    """The strategy, or the method, does not offer what an option asks for."""
