"""What the function of ``distribute_datasets_from_function`` is told."""

from __future__ import annotations

from dataclasses import dataclass

from distribute_jax._errors import ArgumentError


@dataclass(frozen=True)
class InputContext:
    """For which part of the input a function makes its dataset.

    Raises:
        ArgumentError: a number is no int, a count is below 1, or the id is not below the count.

    Example:
        >>> import distribute_jax as dj
        >>> context = dj.InputContext(num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=6)
        >>> context.get_per_replica_batch_size(12)
        2

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/InputContext
    """

    __module__ = "distribute_jax"

    num_input_pipelines: int = 1
    """How many datasets are made: one for each process, or each replica."""
    input_pipeline_id: int = 0
    """Which of them this is, from 0."""
    num_replicas_in_sync: int = 1
    """The number of all replicas."""

    def __post_init__(self) -> None:
        """Refuses numbers that no input has."""
        for name, value in vars(self).items():
            least = 0 if name == "input_pipeline_id" else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ArgumentError(
                    f"InputContext({name}={value!r}): {name} must be an int of at least {least}."
                )
        if self.input_pipeline_id >= self.num_input_pipelines:
            raise ArgumentError(
                f"{self!r}: input_pipeline_id counts from 0, so it must be below "
                "num_input_pipelines."
            )

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Gives the batch size with which all replicas together take a global batch.

        Args:
            global_batch_size: the number of examples of one step.

        Returns:
            The number of examples of one replica.

        Raises:
            ArgumentError: the replicas do not divide it.

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/InputContext#get_per_replica_batch_size
        """
        share, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest:
            raise ArgumentError(
                f"The `global_batch_size` {global_batch_size} is not divisible by "
                f"`num_replicas_in_sync` {self.num_replicas_in_sync}. Choose a multiple of it, or "
                "let strategy.distribute_dataset divide global batches of any size."
            )
        return share
