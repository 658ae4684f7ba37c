"""What becomes a region and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shardsnap.errors import UnsupportedTensorError
from shardsnap.layout import Layout, layout_of
from shardsnap.layout.tensors import build_layout, check_copyable, check_devices, piece_of
from tests.layout.reading import by_name, bytes_of, entry_bytes, region_bytes


def layout(**tensors: torch.Tensor) -> Layout:
    return build_layout("plain", [piece_of(name, "parameter", tensor) for name, tensor in tensors.items()])


FLOAT8 = [getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, name)]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64, *FLOAT8]
)
def test_bytes_of_every_dtype(dtype: torch.dtype) -> None:
    tensor = torch.randn(3, 5).to(dtype) if dtype is not torch.bool else torch.rand(3, 5) > 0.5
    found = layout(a=tensor)
    (entry,) = found.entries
    assert (entry.dtype, entry.shape, entry.nbytes) == (dtype, (3, 5), 15 * dtype.itemsize)
    assert region_bytes(found) == [bytes_of(tensor)]


def test_scalars_and_empty_tensors() -> None:
    tensors = {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "after": torch.ones(2)}
    found = layout(**tensors)
    entries = by_name(found)
    assert (entries["scalar"].shape, entries["scalar"].nbytes) == ((), 4)
    assert (entries["empty"].region, entries["empty"].nbytes, entries["empty"].shape) == (-1, 0, (0, 4))
    assert [region.name for region in found.regions] == ["scalar", "after"]
    assert entry_bytes(found, entries["scalar"]) == bytes_of(torch.tensor(3.5))


@settings(deadline=None, max_examples=60)
@given(st.permutations([0, 1, 2, 3]), st.lists(st.integers(1, 4), min_size=4, max_size=4), st.integers(0, 3))
def test_permuted_tensors_are_one_run(order: list[int], shape: list[int], start: int) -> None:
    numel = torch.Size(shape).numel()
    base = torch.arange(float(start + numel))
    permuted = base[start:].reshape(shape).permute(order)
    (entry,) = layout(a=permuted).entries
    assert region_bytes(layout(a=permuted)) == [bytes_of(base[start:])]  # memory order, from the lowest address
    assert entry.local_stride == permuted.stride()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 19), st.integers(1, 8)), min_size=1, max_size=6))
def test_regions_are_the_unions_of_overlapping_views(spans: list[tuple[int, int]]) -> None:
    base = torch.arange(32.0)
    views = {f"t{i}": base[start : start + length] for i, (start, length) in enumerate(spans)}
    found = layout(**views)
    covered: set[int] = set()
    for start, length in spans:
        covered |= set(range(start, start + length))
    addresses = [set(range(r.address, r.address + r.nbytes, 4)) for r in found.regions]
    assert set().union(*addresses) == {base.data_ptr() + 4 * index for index in covered}
    assert sum(map(len, addresses)) == len(covered)  # no byte is in two regions
    for entry in found.entries:
        assert entry_bytes(found, entry) == bytes_of(views[entry.name])
    firsts = [min(int(e.name[1:]) for e in found.entries if e.region == index) for index in range(len(found.regions))]
    assert firsts == sorted(firsts)
    assert [region.name for region in found.regions] == [f"t{first}" for first in firsts]


def test_neighbours_are_not_merged_and_aliases_are() -> None:
    base = torch.arange(6.0)
    found = layout(left=base[:3], right=base[3:], middle=base[1:2])
    assert [region.name for region in found.regions] == ["left", "right"]
    assert [(entry.region, entry.offset) for entry in found.entries] == [(0, 0), (1, 0), (0, 4)]


class Subclass(torch.Tensor):
    pass


def conjugate() -> torch.Tensor:
    return torch.ones(2, dtype=torch.complex64).conj()


def freed() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def partitioned() -> torch.Tensor:
    tensor = nn.Parameter(torch.empty(0))
    tensor.ds_id, tensor.ds_status = 3, "NOT_AVAILABLE"  # type: ignore[attr-defined]
    return tensor


def fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(2)


REFUSED = {
    "meta tensor": lambda: torch.empty(3, device="meta"),
    "fake tensor": fake,
    "not one run": lambda: torch.eye(3).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "conjugated": conjugate,
    "negated": lambda: conjugate().imag,
    "Subclass": lambda: torch.ones(2).as_subclass(Subclass),
    "gaps or overlaps": lambda: torch.ones(4, 4)[:, :2],
    "strides (0, 1)": lambda: torch.ones(3).expand(2, 3),
    "overlaps itself": lambda: torch.ones(8).as_strided((3, 3), (2, 1)),
    "freed": freed,
    "ZeRO-3": partitioned,
    "lazy parameter": lambda: nn.LazyLinear(3).weight,
}


@pytest.mark.parametrize("reason", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_copied_is_refused_by_name(reason: str) -> None:
    with pytest.raises(UnsupportedTensorError, match=r"decoder\.weird") as caught:
        layout(**{"decoder.fine": torch.ones(2), "decoder.weird": REFUSED[reason]()})
    assert reason in str(caught.value)
    assert "decoder.fine" not in str(caught.value)


def test_resolved_tensors_are_fine() -> None:
    check_copyable("a", conjugate().resolve_conj())
    check_copyable("b", torch.ones(4, 4)[:2])
    check_copyable("c", torch.ones(1, 3).expand(1, 3))


def test_two_accelerators_are_refused_with_names() -> None:
    host, first, second = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)
    check_devices([("a", host), ("b", first), ("c", first)])
    with pytest.raises(UnsupportedTensorError, match=r"cuda:0: b.*cuda:1: c, d, e and 1 more"):
        check_devices([("a", host), ("b", first), *((name, second) for name in "cdef")])


def test_two_tensors_of_one_name_are_refused() -> None:
    model = nn.Module()
    model._orig_mod = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.ones(2))
    with pytest.raises(UnsupportedTensorError, match="weight: two tensors"):
        layout_of(model)


def test_overlapping_bytes_of_two_storages_are_refused_by_name() -> None:
    array = np.arange(8, dtype=np.float32)
    one, other = torch.from_numpy(array[:5]), torch.from_numpy(array[3:])
    with pytest.raises(UnsupportedTensorError, match="other: overlaps one from another storage"):
        layout(one=one, other=other)
