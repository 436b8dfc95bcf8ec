"""Compiles a per-replica function into one program: bind, trace, prove, plan, lower, call.

In the order of a call: ``_run`` looks up a program (``_arguments``, ``_binding``, ``_cache``), and
``_program`` builds one if there is none. ``_capture``, ``_graph`` and ``_paths`` find what the function
reaches, ``_trace`` traces it into a jaxpr, ``_replication`` proves which values are equal on all replicas,
``_plan`` decides how state and results are combined, ``_lowerings`` compiles a program for the mesh, with
``_sharded_update`` and ``_gather`` where ``_placement`` shards state, and ``_call`` executes it.
``_padding_check`` and ``_verify`` check results, ``_across_processes`` the other processes.
"""

from distribute_jax.program._aggregation import (
    Combine as Combine,
    MergeRule as MergeRule,
    combine_moments as combine_moments,
    register_aggregation as register_aggregation,
    register_merge as register_merge,
)
from distribute_jax.program._ahead_of_time import (
    PlanTable as PlanTable,
    StepPlan as StepPlan,
    plan as plan,
    plan_table as plan_table,
)
from distribute_jax.program._binding import step_lock as step_lock
from distribute_jax.program._hlo import Collective as Collective
from distribute_jax.program._notices import results_are_parts as results_are_parts
from distribute_jax.program._options import (
    RunOptions as RunOptions,
    library_options as library_options,
)
from distribute_jax.program._placement import (
    ParameterDevice as ParameterDevice,
    Path as Path,
    PlacedLeaf as PlacedLeaf,
    PlainArray as PlainArray,
    Replicas as Replicas,
    Rules as Rules,
    modules_of as modules_of,
)
from distribute_jax.program._program import PreparationClock as PreparationClock
from distribute_jax.program._replica_context import (
    MergedValues as MergedValues,
    ReplicaContext as ReplicaContext,
    same_on_all_replicas as same_on_all_replicas,
)
from distribute_jax.program._results import per_example as per_example
from distribute_jax.program._run import Runner as Runner
from distribute_jax.program._state_placement import snapshot as snapshot
