"""AdamW."""

from collections.abc import Mapping
from typing import Any, Unpack

from torch import nn
from torch.optim.optimizer import ParamsT

from megatrain_fx.extension import runtime as native
from megatrain_fx.optim.stage_optimizer import StageOptimizer
from megatrain_fx.optim.stage_options import StageOptions, check_hyperparameters


class AdamW(StageOptimizer):
    """AdamW (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019).

    In float32 the same bits as `torch.optim.AdamW(fused=True)` on a CPU with fused multiply-add; with bfloat16
    parameters those of a float32 master, unless ``precision="bf16"`` keeps none.
    """

    state_names = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        model: nn.Module,
        params: ParamsT | None = None,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **options: Unpack[StageOptions],
    ) -> None:
        """Attach to a compiled model.

        Args:
            model: a compiled model.
            params: its parameters to train, or groups of them; all trainable ones by default.
            lr: learning rate.
            betas: how much of the averages of the gradient and of its square is kept each step.
            eps: added to the denominator.
            weight_decay: share of the parameter that is taken off each step, times ``lr``.
            **options: see :class:`megatrain_fx.optim.stage_options.StageOptions`.

        Raises:
            ConfigError: an option has a value that cannot work, or the model is not compiled.
        """
        check_hyperparameters(lr=lr, eps=eps, weight_decay=weight_decay, betas=betas)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(model, params, defaults, **options)

    def make_update(self, group: Mapping[str, Any], **step: Any) -> native.Update:
        beta1, beta2 = group["betas"]
        return native.adamw_update(
            lr=float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            **step,
        )
