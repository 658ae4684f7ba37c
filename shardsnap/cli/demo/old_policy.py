"""Ways to look through pi_old, the weights that began the cycle, while the live weights move on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FSDPModule

from shardsnap.cli.demo.clock import Clock
from shardsnap.cli.demo.helpers import Helpers

SAVE_PI_OLD, SAVE_LIVE = "save pi_old", "save live"
RESTORE_PI_OLD, RESTORE_LIVE = "restore pi_old", "restore live"
VERBS = (SAVE_PI_OLD, SAVE_LIVE, RESTORE_PI_OLD, RESTORE_LIVE)

_PI_OLD, _LIVE = 0, 1  # keys of the versions


class OldPolicy(Protocol):
    """Gives a model that holds pi_old."""

    def weights(self, mini_batch: int) -> AbstractContextManager[nn.Module]:
        """Give the model to forward mini-batch ``mini_batch`` of the cycle with; 0 begins a cycle."""


class InPlace:
    """pi_old in the live model itself, for as long as it is looked through: verl's sequence of calls."""

    def __init__(self, model: nn.Module, helpers: Helpers, clock: Clock) -> None:
        self._model, self._helpers, self._clock = model, helpers, clock

    @contextmanager
    def weights(self, mini_batch: int) -> Iterator[nn.Module]:  # noqa: D102 - as in OldPolicy
        helpers, clock = self._helpers, self._clock
        if mini_batch == 0:  # the live weights are pi_old
            clock.time(SAVE_PI_OLD, lambda: helpers.save_model_to_cpu(_PI_OLD))
            yield self._model
            return
        clock.time(SAVE_LIVE, lambda: helpers.save_model_to_cpu(_LIVE))
        clock.time(RESTORE_PI_OLD, lambda: helpers.restore_model_from_cpu(_PI_OLD))
        yield self._model
        clock.time(RESTORE_LIVE, lambda: helpers.restore_model_from_cpu(_LIVE))
        helpers.clear_cpu_model(_LIVE)


class SecondModel:
    """The reference: pi_old in a model of its own, and the live weights are never written but by the optimizer.

    The second model is wrapped like the live one, so that its forward adds up in the same order.
    """

    def __init__(self, model: nn.Module, second: nn.Module) -> None:
        self._model, self._second = model, second

    @contextmanager
    def weights(self, mini_batch: int) -> Iterator[nn.Module]:  # noqa: D102 - as in OldPolicy
        if mini_batch == 0:
            if isinstance(self._second, FSDPModule):
                self._second.reshard()  # loading, too, fails where the root is still gathered from a no_grad forward
            options = StateDictOptions(full_state_dict=True)
            set_model_state_dict(self._second, get_model_state_dict(self._model, options=options), options=options)
        yield self._second
