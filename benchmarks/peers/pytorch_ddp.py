"""PyTorch: ``DistributedDataParallel`` over gloo, a process for each replica on this machine.

Each process has its share of the cores, at least one thread: one process has them all.
"""

from __future__ import annotations

import os
import sys
from itertools import cycle
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import distributed as dist, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers._protocol import EPSILON, LEARNING_RATE, Start, serve


class Perceptron(nn.Module):
    """Dense layers with ``relu`` between them."""

    def __init__(self, start: Start) -> None:
        super().__init__()
        kernels = [v.shape for name, v in start.weights.items() if name.endswith("kernel")]
        self.layers = nn.ModuleList([nn.Linear(*shape) for shape in kernels])

    def forward(self, x: Any) -> Any:
        """Maps (batch, features) to logits."""
        for layer in self.layers[:-1]:
            x = functional.relu(layer(x))
        return self.layers[-1](x)


class CNN(nn.Module):
    """Two convolutions, each halved by its largest values, and two dense layers."""

    def __init__(self, start: Start) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.dense = nn.Linear(7 * 7 * 64, 128)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Any) -> Any:
        """Maps images (batch, height, width, channels) to logits; they stay so in memory."""
        x = x.permute(0, 3, 1, 2)
        for conv in (self.conv1, self.conv2):
            x = functional.max_pool2d(functional.relu(conv(x)), 2)
        x = functional.relu(self.dense(x.permute(0, 2, 3, 1).flatten(1)))
        return self.head(x)


class Attention(nn.Module):
    """Causal attention of four heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Any) -> Any:
        """Maps (batch, length, width) to the same shape."""
        parts = (self.query(x), self.key(x), self.value(x))
        heads = [part.unflatten(-1, (4, -1)).transpose(1, 2) for part in parts]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Causal attention and a feed-forward part, each behind a layer norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(width, eps=1e-6) for _ in range(2))
        self.attention = Attention(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        """Maps (batch, length, width) to the same shape."""
        x = x + self.attention(self.norm1(x))
        return x + self.down(functional.relu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A language model over characters."""

    def __init__(self, start: Start) -> None:
        super().__init__()
        vocabulary, width = start.weights["tokens.embedding"].shape
        layers = [name for name in start.weights if name.endswith("up.kernel")]
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(len(start.weights["places.embedding"]), width)
        self.blocks = nn.ModuleList([Block(width) for _ in layers])
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: Any) -> Any:
        """Maps characters (batch, length) to logits (batch, length, vocabulary)."""
        h = self.tokens(x) + self.places.weight
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


MODELS = {"mlp": Perceptron, "cnn": CNN, "transformer": Transformer}


def model_of(start: Start) -> nn.Module:
    """Builds the model with its initial weights, turned to where PyTorch keeps inputs."""
    model: Any = MODELS[start.model](start)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(_value(start, name)))
    return model.to(memory_format=torch.channels_last)


def _value(start: Start, name: str) -> Any:
    layer, _, kind = name.rpartition(".")
    if kind == "bias":
        return start.weights[name]
    (found,) = {f"{layer}.{k}" for k in ("kernel", "scale", "embedding")} & set(start.weights)
    value = start.weights[found]
    if not found.endswith("kernel"):
        return value
    return value.transpose(3, 2, 0, 1) if value.ndim == 4 else value.T


def rank_steps(start: Start, rank: int, link: Connection, port: int, wrap: Any) -> None:
    """Trains one replica: for each number of steps that it is sent, sends back their losses.

    What one device does without is marked, less what `torchrun` would do.
    """
    torch.set_num_threads(max(1, torch.get_num_threads() // start.replicas))
    store = dist.TCPStore("127.0.0.1", port, start.replicas, is_master=False)
    dist.init_process_group("gloo", rank=rank, world_size=start.replicas, store=store)  # many
    model = wrap(model_of(start))  # many
    adam = torch.optim.Adam(model.parameters(), LEARNING_RATE, eps=EPSILON)
    share = start.x.shape[1] // start.replicas  # many
    mine = slice(rank * share, (rank + 1) * share)  # many
    batches = cycle(
        [
            (torch.from_numpy(x[mine]), torch.from_numpy(y[mine]).long())  # many
            for x, y in zip(start.x, start.y, strict=True)
        ]
    )

    def step() -> Any:
        x, y = next(batches)
        adam.zero_grad()
        loss = functional.cross_entropy(model(x).flatten(0, -2), y.flatten())
        loss.backward()
        adam.step()
        return loss.detach()

    link.send("ready")
    while steps := link.recv():
        if steps == STATE:
            tensors = [*model.parameters(), *(t for s in adam.state.values() for t in s.values())]
            local = [getattr(tensor, "to_local", lambda t=tensor: t)() for tensor in tensors]
            link.send(sum(tensor.nbytes for tensor in local))
            continue
        losses = [step() for _ in range(steps)]
        link.send([float(loss) for loss in losses])
    dist.destroy_process_group()  # many


STATE = -1
"""Sent to a replica instead of a number of steps; it sends back the bytes of its state."""


class TorchTrainer:
    """Starts the replicas and tells them when to train."""

    def __init__(self, start: Start, wrap: Any = DistributedDataParallel) -> None:
        # The replicas meet over loopback, whatever name this machine has in its network.
        os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
        spawn = torch.multiprocessing.get_context("spawn")
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.links = []
        for rank in range(start.replicas):
            link, theirs = spawn.Pipe()
            arguments = (start, rank, theirs, self.store.port, wrap)
            # A daemon ends with this process, also when this one is interrupted.
            spawn.Process(target=rank_steps, args=arguments, daemon=True).start()
            theirs.close()  # so that the replica's death is the end of its messages
            self.links.append(link)
        for link in self.links:
            link.recv()

    def losses(self, steps: int) -> list[float]:
        """Trains, and gives each step's loss, the mean over the replicas' equal shares."""
        shares = self._train(steps)
        return [sum(losses) / len(losses) for losses in zip(*shares, strict=True)]  # many

    def run(self, steps: int) -> None:
        """Trains, and returns when every replica has finished."""
        self._train(steps)

    def state_bytes(self) -> int:
        """Counts what the state takes in the process that has most of it."""
        return max(self._train(STATE))

    def _train(self, steps: int) -> list[Any]:
        for link in self.links:
            link.send(steps)
        return [link.recv() for link in self.links]


if __name__ == "__main__":
    serve(TorchTrainer, torch)
