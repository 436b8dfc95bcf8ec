"""PyTorch's DataLoader, with the real PyTorch."""

from typing import Any

import numpy as np
import pytest
from flax import nnx
from source_helpers import Pair, assert_same, assert_two_epochs, cut, epoch_of

import distribute_jax as dj
from distribute_jax.data.sources import find_source
from distribute_jax.data.sources._base import on_host

torch = pytest.importorskip("torch", reason="needs PyTorch: dev.py test --sources has it")

N = np.arange(11, dtype=np.int32)


class Examples(torch.utils.data.Dataset):
    """Eleven examples, of which one optionally fails."""

    fails = False

    def __len__(self) -> int:
        return 11

    def __getitem__(self, i: int) -> Any:
        if self.fails and i == 5:
            raise OSError("disk")
        if i >= 11:
            raise IndexError(i)
        return {"x": torch.tensor(i, dtype=torch.int32), "y": (np.float32(i / 2), i > 3)}


class Stream(torch.utils.data.IterableDataset):
    """The numbers below eleven, of which each worker gives its share."""

    def __iter__(self) -> Any:
        worker = torch.utils.data.get_worker_info()
        count, index = (worker.num_workers, worker.id) if worker else (1, 0)
        return iter(range(index, 11, count))


def loader(dataset: Any, **options: Any) -> Any:
    return torch.utils.data.DataLoader(dataset, batch_size=4, **options)


TABLE = {"x": N, "y": [N / np.float32(2), N > 3]}
"""PyTorch makes lists of the tuples that it collates."""


def test_batches_keep_structure_order_and_values(strategy):
    """A dict, a list, an int, a float and a bool, the last batch partial, in two epochs."""
    assert_two_epochs(strategy, loader(Examples()), cut(TABLE, 4))


@pytest.mark.exhaustive
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_start_again_for_each_epoch(s2, persistent):
    """Two worker processes, persistent or not, yield every batch in every epoch, also after a preview."""
    options = {
        "num_workers": 2,
        "multiprocessing_context": "spawn",
        "persistent_workers": persistent,
    }
    dataset = s2.distribute_dataset(loader(torch.arange(11), **options))
    assert dataset.element_spec.shape == (2,)
    for _ in range(2):
        assert_same(epoch_of(dataset), cut(np.arange(11), 4))


def test_a_distributed_sampler_is_refused(s2):
    """Unless it has a single share, or belongs to a worker's dataset function."""
    whole, part = (torch.utils.data.DistributedSampler(Examples(), n, 0, False) for n in (1, 2))
    assert_two_epochs(s2, loader(Examples(), sampler=whole), cut(TABLE, 4))
    with pytest.raises(dj.ArgumentError, match="1 of 2 shares"):
        s2.distribute_dataset(loader(Examples(), sampler=part))
    made = s2.distribute_datasets_from_function(lambda _: loader(Examples(), sampler=part))
    assert len(list(made)) == 1


def test_an_iterable_dataset_has_no_length(s2):
    """Its batches come in order, and again in the next epoch."""
    assert_two_epochs(s2, loader(Stream()), cut(np.arange(11), 4))
    assert find_source(loader(Stream())).length is None
    assert find_source(loader(Examples())).length == 3
    assert find_source(loader(Examples(), drop_last=True)).length == 2


def test_reading_the_spec_does_not_change_the_order_of_shuffling(s2):
    """A preview draws from PyTorch's generator once, for the epoch that follows."""
    make = lambda: s2.distribute_dataset(  # noqa: E731
        loader(torch.arange(8), shuffle=True, generator=torch.Generator().manual_seed(0))
    )
    plain, looked = make(), make()
    assert looked.element_spec.shape == (2,)
    for _ in range(2):
        assert_same(epoch_of(looked), epoch_of(plain))


def test_tensors_in_a_tree_become_arrays_without_a_copy():
    """In lists, dicts and dataclasses of any iterable; the memory is the tensor's."""
    tensor = torch.arange(4)
    batch = {"a": [tensor, None], "b": Pair(tensor.reshape(2, 2).T, np.ones(2))}
    (given,) = find_source([batch]).open()
    assert np.shares_memory(given["a"][0], tensor.numpy())
    assert np.shares_memory(given["b"].left, tensor.numpy())
    assert given["b"].right is batch["b"].right


@pytest.mark.parametrize(
    "name",
    [
        *("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"),
        *("bfloat16", "complex64", "float8_e4m3fn", "float8_e5m2"),
    ],
)
def test_every_dtype_keeps_its_name_and_values(name):
    """Also dtypes that NumPy has only from ml_dtypes; a tensor that requires gradients is read too."""
    tensor = torch.tensor([[0, 1], [1, 1]]).to(getattr(torch, name))
    array = on_host(tensor)
    assert array.dtype.name == name
    np.testing.assert_array_equal(array.real.astype(np.float32), [[0, 1], [1, 1]])
    if tensor.is_floating_point():
        assert on_host(tensor.requires_grad_()).dtype == array.dtype


def test_a_sparse_tensor_is_refused_by_leaf():
    """NumPy has no counterpart; the message names the leaf."""
    with pytest.raises(dj.ArgumentError, match=r"batch\['s'\] is a Tensor[\s\S]*dense"):
        on_host({"s": torch.eye(2).to_sparse()})


def test_strings_are_named(s2):
    """The loader gives a list of strings."""
    dataset = s2.distribute_dataset(loader([{"name": "a"}, {"name": "b"}]))
    with pytest.raises(dj.ArgumentError, match=r"batch\['name'\]\[0\]: str 'a'"):
        next(iter(dataset))


@pytest.mark.parametrize(
    "make", [Examples, Stream, lambda: torch.utils.data.TensorDataset(torch.ones(3))]
)
def test_a_dataset_without_a_loader_is_refused(s2, make):
    """Its elements are single examples; the message shows the loader."""
    with pytest.raises(ValueError, match=r"DataLoader\(dataset, batch_size=256\)"):
        s2.distribute_dataset(make())


def test_a_loader_that_does_not_batch_says_to_batch(s2):
    """batch_size=None passes single examples on, which the first one shows."""
    dataset = s2.distribute_dataset(torch.utils.data.DataLoader(Examples(), batch_size=None))
    with pytest.raises(ValueError, match="Pass batch_size=256 to this PyTorch DataLoader"):
        next(iter(dataset))


def test_an_error_midway_passes_through_and_the_next_epoch_works(s2):
    """The user's own exception after the good batches; then everything."""
    examples = Examples()
    examples.fails = True
    dataset = s2.distribute_dataset(loader(examples))
    iterator = iter(dataset)
    next(iterator)
    with pytest.raises(OSError, match="disk"):
        next(iterator)
    examples.fails = False
    assert_same(epoch_of(dataset), cut(TABLE, 4))


def test_fit_accepts_tensors_that_numpy_refuses(s2):
    """Those that require gradients and those of bfloat16 are the same numbers; sparse ones are refused."""
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    model = dj.Model(nnx.Linear(3, 1, rngs=nnx.Rngs(0)))
    expected = model.predict(x, verbose=0)
    for tensor in (torch.tensor(x, requires_grad=True), torch.tensor(x).bfloat16()):
        np.testing.assert_allclose(model.predict(tensor, verbose=0), expected, rtol=1e-2)
    with pytest.raises(
        ValueError, match=r"predict: x is a Tensor .* Pass dense tensors of numbers\."
    ):
        model.predict(torch.tensor(x).to_sparse(), verbose=0)
