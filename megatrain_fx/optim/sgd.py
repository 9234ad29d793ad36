"""Stochastic gradient descent, with and without momentum."""

from collections.abc import Mapping
from typing import Any, Unpack

from torch import nn
from torch.optim.optimizer import ParamsT

from megatrain_fx.errors import ConfigError
from megatrain_fx.extension import runtime as native
from megatrain_fx.optim.stage_optimizer import StageOptimizer
from megatrain_fx.optim.stage_options import StageOptions, check_hyperparameters


class SGD(StageOptimizer):
    """Gradient descent with momentum, plain or Nesterov (Sutskever et al., 2013), in the form of `torch.optim.SGD`.

    Without momentum it keeps no state.
    """

    state_names = ("momentum_buffer",)

    def __init__(
        self,
        model: nn.Module,
        params: ParamsT | None = None,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **options: Unpack[StageOptions],
    ) -> None:
        """Attach to a compiled model.

        Args:
            model: a compiled model.
            params: its parameters to train, or groups of them; all trainable ones by default.
            lr: learning rate.
            momentum: how much of the momentum buffer is kept each step; 0 for none.
            dampening: share of the gradient that is kept from the momentum buffer.
            weight_decay: added to the gradient, times the parameter.
            nesterov: look ahead by one step; needs momentum and no dampening.
            **options: see :class:`megatrain_fx.optim.stage_options.StageOptions`.

        Raises:
            ConfigError: an option has a value that cannot work, or the model is not compiled.
        """
        check_hyperparameters(lr=lr, momentum=momentum, weight_decay=weight_decay)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ConfigError(
                f"nesterov=True needs momentum and no dampening; found momentum={momentum}, dampening={dampening}"
            )
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening}
        defaults |= {"weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(model, params, defaults, **options)

    def states_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return self.state_names if group["momentum"] else ()

    def make_update(self, group: Mapping[str, Any], **step: Any) -> native.Update:
        names = ("momentum", "dampening", "weight_decay", "nesterov")
        return native.sgd_update(lr=float(group["lr"]), **{name: group[name] for name in names}, **step)
