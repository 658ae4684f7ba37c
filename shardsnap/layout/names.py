"""Names of modules and tensors as the user wrote them, without what wrappers add."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from shardsnap.errors import UnsupportedTensorError

ROOT = "(root)"  # the name of an FSDP unit whose path is empty
WRAPPER_COMPONENTS = frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"})


def clean_name(name: str) -> str:
    """Return `name` without the path components that FSDP1, torch.compile and checkpoint wrappers add.

    Only whole components go: ``my_orig_mod.weight`` stays as it is. A DDP ``module.`` stays too, because a bare name
    does not tell it from a submodule that the user called so; `clean_modules` sees the owner and does tell.
    """
    return ".".join(component for component in name.split(".") if component not in WRAPPER_COMPONENTS)


def join(path: str, name: str) -> str:
    """Return ``path.name``, or the one that is not empty."""
    return f"{path}.{name}" if path and name else path or name


def clean_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module of `model` with its clean path, in registration order.

    A module that is registered in several places comes once per place, so that tied weights have all their names. A
    wrapper and what it wraps have the same path.
    """
    return _walk("", model)


def _walk(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(module, torch.jit.ScriptModule):
        raise UnsupportedTensorError(f"{path or '(root)'}: a TorchScript module keeps its tensors outside of Python")
    yield path, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(path if _is_wrapped_child(module, name) else join(path, name), child)


def _is_wrapped_child(owner: nn.Module, name: str) -> bool:
    return name in WRAPPER_COMPONENTS or (
        name == "module" and isinstance(owner, (DistributedDataParallel, DataParallel))
    )
