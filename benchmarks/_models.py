"""The models of the workloads: plain Flax, as a user writes them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


class Perceptron(nnx.Module):
    """Dense layers with ``relu`` between them."""

    def __init__(self, sizes: Sequence[int], rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in pairwise(sizes)])

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (batch, features) to logits (batch, classes)."""
        for layer in self.layers[:-1]:
            x = nnx.relu(layer(x))
        return self.layers[-1](x)


class ConvNet(nnx.Module):
    """Two convolutions, each halved by its largest values, and two dense layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(1, 32, (3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(32, 64, (3, 3), rngs=rngs)
        self.dense = nnx.Linear(7 * 7 * 64, 128, rngs=rngs)
        self.head = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps images (batch, 28, 28, 1) to logits (batch, 10)."""
        for conv in (self.conv1, self.conv2):
            x = nnx.max_pool(nnx.relu(conv(x)), (2, 2), strides=(2, 2))
        x = nnx.relu(self.dense(x.reshape(x.shape[0], -1)))
        return self.head(x)


class Block(nnx.Module):
    """Causal attention and a feed-forward part, each behind a layer norm."""

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = (nnx.LayerNorm(width, epsilon=1e-6, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (batch, length, width) to the same shape."""
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.down(nnx.relu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    """A language model over characters."""

    def __init__(
        self, vocabulary: int, length: int, width: int, layers: int, rngs: nnx.Rngs
    ) -> None:
        self.tokens = nnx.Embed(vocabulary, width, rngs=rngs)
        self.places = nnx.Embed(length, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, 4, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, epsilon=1e-6, rngs=rngs)
        self.head = nnx.Linear(width, vocabulary, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps characters (batch, length) to logits (batch, length, vocabulary)."""
        h = self.tokens(x) + self.places(jnp.arange(x.shape[1]))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


class TiedTransformer(nnx.Module):
    """A language model whose blocks are equal; its embedding also maps to logits."""

    def __init__(self, vocabulary: int, width: int, layers: int, mode: str, rngs: nnx.Rngs) -> None:
        """``mode`` says how it goes over its blocks: ``"loop"``, ``"scan"`` or ``"remat"``, a scan too."""
        self.tokens = nnx.Embed(vocabulary, width, rngs=rngs)
        self.mode = mode
        self.blocks: Any
        if mode == "loop":
            self.blocks = nnx.List([Block(width, 4, rngs) for _ in range(layers)])
        else:
            make: Any = nnx.vmap(lambda rngs: Block(width, 4, rngs))
            self.blocks = nnx.split_rngs(splits=layers)(make)(rngs)
        self.norm = nnx.LayerNorm(width, epsilon=1e-6, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps characters (batch, length) to logits (batch, length, vocabulary)."""
        h = self.tokens(x)
        if self.mode == "loop":
            for block in self.blocks:
                h = block(h)
        else:
            one: Any = lambda h, block: block(h)  # noqa: E731
            one = nnx.remat(one) if self.mode == "remat" else one
            h = nnx.scan(one, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(h, self.blocks)
        return self.tokens.attend(self.norm(h))


class Bottleneck(nnx.Module):
    """Three convolutions around which the input goes, as it is or through another convolution."""

    def __init__(self, features: int, width: int, stride: int, rngs: nnx.Rngs) -> None:
        steps = (stride, stride)
        self.convs = nnx.List([
            nnx.Conv(features, width, (1, 1), use_bias=False, rngs=rngs),
            nnx.Conv(width, width, (3, 3), strides=steps, use_bias=False, rngs=rngs),
            nnx.Conv(width, 4 * width, (1, 1), use_bias=False, rngs=rngs),
        ])  # fmt: skip
        self.norms = nnx.List([_norm(n, rngs) for n in (width, width, 4 * width)])
        around: Any = nnx.List([])
        if stride > 1 or features != 4 * width:
            around.append(
                nnx.Conv(features, 4 * width, (1, 1), strides=steps, use_bias=False, rngs=rngs)
            )
            around.append(_norm(4 * width, rngs))
        self.around = around

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (batch, height, width, features) to images with four times ``width`` features."""
        h = x
        for at, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            h = norm(conv(h))
            h = nnx.relu(h) if at < 2 else h
        for layer in self.around:
            x = layer(x)
        return nnx.relu(h + x)


class ResNet50(nnx.Module):
    """The shapes of ResNet-50, with group norm, so that no statistics depend on the replicas.

    Source: He et al., "Deep Residual Learning for Image Recognition", 2015,
    https://arxiv.org/abs/1512.03385; Wu and He, "Group Normalization", 2018,
    https://arxiv.org/abs/1803.08494
    """

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.stem = nnx.Conv(3, 64, (7, 7), strides=(2, 2), use_bias=False, rngs=rngs)
        self.norm = _norm(64, rngs)
        blocks, features = [], 64
        for stage, count in enumerate((3, 4, 6, 3)):
            for at in range(count):
                stride = 2 if stage > 0 and at == 0 else 1
                blocks.append(Bottleneck(features, 64 << stage, stride, rngs))
                features = 4 * (64 << stage)
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(features, 1000, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps images (batch, height, width, 3) to logits (batch, 1000)."""
        x = nnx.relu(self.norm(self.stem(x)))
        x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(axis=(1, 2)))


def _norm(features: int, rngs: nnx.Rngs) -> nnx.GroupNorm:
    return nnx.GroupNorm(features, num_groups=32, rngs=rngs)
