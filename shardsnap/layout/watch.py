"""Whether anything has moved since a layout was built, asked before every save: no Python loop over tensors.

Everything here is a C function mapped over a list and a comparison with a list. No step makes a container per tensor
that outlives it, which would wake the garbage collector. The objects are held, so the same id is the same object.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import compress
from operator import attrgetter, eq, is_
from typing import Any

import torch
from torch import nn

_DTYPE = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]
_REQUIRES_GRAD = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
local_tensors = attrgetter("_local_tensor")


def same_objects(now: Sequence[object], before: Sequence[object]) -> bool:
    """Whether two sequences hold the same objects, by identity: tensors must not be compared by value."""
    return len(now) == len(before) and all(map(is_, now, before))


class Registrations:
    """The submodules, parameters and buffers that modules hold, by name and identity.

    Args:
        modules: of the model.
        kinds: of "parameters" and "buffers", those that count.
        managed: (id of module, name) of parameters that a wrapper registers and takes away; their identity is the
            wrapper's business, only that the module holds as many names as before counts.
    """

    def __init__(
        self, modules: Sequence[nn.Module], kinds: Collection[str], managed: Collection[tuple[int, str]] = ()
    ) -> None:
        self._modules = modules  # held, so that no id in `managed` can come to mean another module
        self._tables: list[dict[str, Any]] = []
        self._owners: list[dict[str, Any]] = []
        self._names: list[str] = []
        for module in {id(module): module for module in modules}.values():
            tables: list[dict[str, Any]] = [module._modules]
            tables += [module._parameters] if "parameters" in kinds else []
            tables += [module._buffers] if "buffers" in kinds else []
            for table in tables:
                self._tables.append(table)
                names = [name for name in table if (id(module), name) not in managed]
                self._owners += [table] * len(names)
                self._names += names
        self._sizes = list(map(len, self._tables))
        self._values = list(map(dict.get, self._owners, self._names))

    def hold(self) -> bool:
        """Whether every name still stands for the same object, and no module has more or fewer names."""
        return self._sizes == list(map(len, self._tables)) and all(
            map(is_, map(dict.get, self._owners, self._names), self._values)
        )


class Tensors:
    """Address, shape, order of dimensions and dtype of tensors, and whether some want a gradient.

    Args:
        fetch: gives the tensors as they are now, in the same order every time.
        trainable: the tensors whose requires_grad counts.
    """

    def __init__(self, fetch: Callable[[], Sequence[torch.Tensor]], trainable: Sequence[torch.Tensor] = ()) -> None:
        self._fetch = fetch
        self._trainable = trainable
        tensors = fetch()
        self._addresses = list(map(torch.Tensor.data_ptr, tensors))
        self._shapes = list(map(torch.Tensor.size, tensors))
        self._dtypes = list(map(_DTYPE, tensors))
        self._flags = list(map(_REQUIRES_GRAD, trainable))
        # One shape has several dense orders of elements only where two dimensions have some length.
        orderable = [sum(size > 1 for size in shape) > 1 for shape in self._shapes]
        contiguous = list(map(torch.Tensor.is_contiguous, tensors))
        self._contiguous = [i and j for i, j in zip(orderable, contiguous, strict=True)]
        self._permuted = [i and not j for i, j in zip(orderable, contiguous, strict=True)]
        self._strides = list(map(torch.Tensor.stride, compress(tensors, self._permuted)))

    def hold(self) -> bool:
        """Whether the tensors are where and what they were."""
        tensors = self._fetch()
        return (
            self._addresses == list(map(torch.Tensor.data_ptr, tensors))
            and self._dtypes == list(map(_DTYPE, tensors))
            and all(map(eq, map(torch.Tensor.size, tensors), self._shapes))
            and all(map(torch.Tensor.is_contiguous, compress(tensors, self._contiguous)))
            and all(map(eq, map(torch.Tensor.stride, compress(tensors, self._permuted)), self._strides))
            and self._flags == list(map(_REQUIRES_GRAD, self._trainable))
        )
