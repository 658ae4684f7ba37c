"""Names with and without wrappers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from shardsnap.errors import UnsupportedTensorError
from shardsnap.layout import clean_name, layout_of
from shardsnap.layout.names import clean_modules


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("_fsdp_wrapped_module.layers.0._checkpoint_wrapped_module.weight", "layers.0.weight"),
        ("_orig_mod._fsdp_wrapped_module.weight", "weight"),
        ("layers._orig_mod", "layers"),
        ("my_orig_mod.weight", "my_orig_mod.weight"),
        ("_orig_mod_too.weight", "_orig_mod_too.weight"),
        ("module.weight", "module.weight"),
        ("", ""),
    ],
)
def test_only_whole_components_of_wrappers_go(name: str, clean: str) -> None:
    assert clean_name(name) == clean


class Owner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = checkpoint_wrapper(nn.Linear(2, 2))
        self.my_orig_mod = nn.Linear(2, 2)
        self.twice = nn.ModuleList([self.my_orig_mod])


def test_a_compiled_and_checkpointed_model_has_the_user_s_names() -> None:
    names = [entry.name for entry in layout_of(torch.compile(Owner(), backend="eager")).entries]
    paths = ("module", "my_orig_mod", "twice.0")
    assert names == [f"{path}.{name}" for path in paths for name in ("weight", "bias")]


def test_data_parallel_has_no_name_of_its_own() -> None:
    paths = [path for path, _ in clean_modules(nn.DataParallel(Owner()))]
    assert paths == ["", "", "module", "module", "my_orig_mod", "twice", "twice.0"]


@pytest.mark.filterwarnings("ignore")
def test_torchscript_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(UnsupportedTensorError, match="1: a TorchScript module"):
        layout_of(model)
