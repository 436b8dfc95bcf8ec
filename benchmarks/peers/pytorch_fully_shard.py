"""PyTorch: ``fully_shard`` over gloo, a process for each replica on this machine."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

from benchmarks.peers._protocol import serve
from benchmarks.peers.pytorch_ddp import TorchTrainer


def divided(model: Any) -> Any:
    """Divides each block, and what is left; what one device does without is marked."""
    for block in model.blocks:  # many
        fully_shard(block)  # many
    return fully_shard(model)


if __name__ == "__main__":
    serve(partial(TorchTrainer, wrap=divided), torch)
