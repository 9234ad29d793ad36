"""Optimizers whose steps overlap with the passes of a compiled model, on vectorised and threaded CPU kernels.

    model = megatrain.compile(model)
    optimizer = megatrain.optim.AdamW(model, lr=1e-4, max_grad_norm=1.0)

Each is a `torch.optim.Optimizer`. Any other optimizer of PyTorch works on a compiled model too, without overlap. To add
one, see :mod:`megatrain_fx.optim.lion`.
"""

from megatrain_fx.optim.adamw import AdamW
from megatrain_fx.optim.lion import Lion
from megatrain_fx.optim.sgd import SGD
from megatrain_fx.optim.stage_optimizer import StageOptimizer

__all__ = ["SGD", "AdamW", "Lion", "StageOptimizer"]
