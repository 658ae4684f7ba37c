"""Who is inside a forward or a backward."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from shardsnap.errors import UnsafeStateError, UnsupportedTorchError
from shardsnap.layout import assert_safe, inside_backward, inside_forward, prepare_for_write
from shardsnap.layout.internals import require


def test_hooks_of_the_model_and_of_its_parts_are_inside() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    larger = nn.Sequential(model, nn.Linear(2, 2))
    stranger = nn.Linear(2, 2)
    seen: list[tuple[str, bool, bool, bool]] = []

    def look(where: str) -> None:
        seen.append((where, inside_forward(model), inside_forward(larger), inside_forward(stranger)))

    model[0].register_forward_pre_hook(lambda *_: look("part"))
    larger[1].register_forward_hook(lambda *_: look("sibling"))
    larger(torch.ones(1, 2))
    look("after")
    assert seen == [("part", True, True, False), ("sibling", False, True, False), ("after", False, False, False)]


def test_a_part_called_alone_is_inside_the_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    seen = []
    model[0].register_forward_hook(lambda *_: seen.append(inside_forward(model)))
    model[0](torch.ones(1, 2))
    assert seen == [True]


def test_another_thread_is_not_inside() -> None:
    model = nn.Linear(2, 2)
    seen = []

    def ask(*_: object) -> None:
        thread = threading.Thread(target=lambda: seen.append(inside_forward(model)))
        thread.start()
        thread.join()

    model.register_forward_hook(ask)
    model(torch.ones(1, 2))
    assert seen == [False]


@pytest.mark.parametrize("verb", [assert_safe, prepare_for_write])
def test_verbs_in_hooks_of_a_plain_model_are_refused(verb: object) -> None:
    model = nn.Linear(2, 2)
    refused = []

    def attempt(*_: object) -> None:
        with pytest.raises(UnsafeStateError) as caught:
            verb(model)  # type: ignore[operator]
        refused.append(str(caught.value))

    hook = model.register_forward_hook(attempt)
    output = model(torch.ones(1, 2))
    hook.remove()
    verb(model)  # type: ignore[operator]
    output.register_hook(attempt)
    assert not inside_backward()
    output.sum().backward()
    verb(model)  # type: ignore[operator]
    assert len(refused) == 2
    assert "forward of Linear" in refused[0]
    assert "backward" in refused[1]


def test_a_missing_internal_is_named() -> None:
    with pytest.raises(UnsupportedTorchError, match=rf"torch {torch.__version__.split('+')[0]}.*Linear._gone.*2.6"):
        require(nn.Linear(1, 1), "weight", "_gone")
