"""Lion: the shortest optimizer here, to copy when adding another.

An optimizer has two parts. What one step does to one vector of parameters is a C++ class, written once for every
instruction set and precision: see runtime_ext/optimizer_lion.h, which also says how to register it. What belongs to
PyTorch is a subclass of :class:`StageOptimizer`, like the one below: the names of the float32 state that each parameter
has, the options of a parameter group, and :meth:`make_update`, which gives the options of a group to the C++ class.
Everything else is inherited: when regions are updated, clipping, precision, and saving.
"""

from collections.abc import Mapping
from typing import Any, Unpack

from torch import nn
from torch.optim.optimizer import ParamsT

from megatrain_fx.extension import runtime as native
from megatrain_fx.optim.stage_optimizer import StageOptimizer
from megatrain_fx.optim.stage_options import StageOptions, check_hyperparameters


class Lion(StageOptimizer):
    """Lion (Chen et al., "Symbolic discovery of optimization algorithms", 2023, program 1)."""

    state_names = ("exp_avg",)

    def __init__(
        self,
        model: nn.Module,
        params: ParamsT | None = None,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **options: Unpack[StageOptions],
    ) -> None:
        """Attach to a compiled model.

        Args:
            model: a compiled model.
            params: its parameters to train, or groups of them; all trainable ones by default.
            lr: learning rate: by how much each parameter changes in a step.
            betas: how much of the average is kept, where the direction is chosen and where the average is updated.
            weight_decay: share of the parameter that is taken off each step, times ``lr``.
            **options: see :class:`megatrain_fx.optim.stage_options.StageOptions`.

        Raises:
            ConfigError: an option has a value that cannot work, or the model is not compiled.
        """
        check_hyperparameters(lr=lr, weight_decay=weight_decay, betas=betas)
        super().__init__(model, params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, **options)

    def make_update(self, group: Mapping[str, Any], **step: Any) -> native.Update:
        beta1, beta2 = group["betas"]
        return native.lion_update(
            lr=float(group["lr"]), beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"], **step
        )
