"""The systems that are compared: each makes the same model train, and returns the parts of one step."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

LEARNING_RATE = 1e-5
WEIGHT_DECAY = 0.01
ZERO3_CLIP = 1.0
"""ZeRO-3 is given clipping unless asked otherwise: it is how it is commonly run, and it has no faster path without."""

MEGATRAIN_OPTIONS: dict[str, Any] = {"template": "inductor", "stage_bytes": 0, "slots": 3}
"""Fields of `megatrain_fx.StreamConfig` that differ from its defaults."""

OPTIMIZER = "optimizer."
"""What the name of an option of `megatrain_fx.optim.AdamW` begins with, for example `optimizer.threads`."""


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Training:
    """The parts of one training step.

    Attributes:
        differentiate: forward and backward pass; returns the loss, a scalar on the device.
        update: optimizer step; gradients are cleared.
        drain: waits for what a step leaves behind on the CPU.
        model: what is trained, as the system wrapped it.
    """

    differentiate: Callable[[], torch.Tensor]
    update: Callable[[], None]
    model: nn.Module
    drain: Callable[[], None] = _nothing

    def step(self) -> torch.Tensor:
        """One whole step; returns the loss."""
        loss = self.differentiate()
        self.update()
        return loss


@dataclass(frozen=True)
class Setting:
    """What a system is given beside the model.

    Attributes:
        tokens: int64 (batch, sequence) on the device; also the labels.
        clip: largest norm of all gradients together; None for no clipping.
        options: overrides of `MEGATRAIN_OPTIONS`; names that begin with `optimizer.` go to the optimizer instead.
    """

    tokens: torch.Tensor
    clip: float | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self.tokens.device


def eager(model: nn.Module, setting: Setting) -> Training:
    """The whole model on the GPU, activations checkpointed by layer."""
    _checkpoint_layers(model)
    return _with_torch_optimizer(model, setting)


def compiled(model: nn.Module, setting: Setting) -> Training:
    """As `eager`, each layer compiled by Inductor (once, since all layers share one code object)."""
    _compile_layers(model)
    return _with_torch_optimizer(model, setting)


def compute(model: nn.Module, setting: Setting) -> Training:
    """As `compiled` but without an optimizer: the least that forward, recompute and backward take."""
    _compile_layers(model)
    return Training(_differentiate(model, setting), lambda: model.zero_grad(set_to_none=True), model)


def fsdp2(model: nn.Module, setting: Setting) -> Training:
    """PyTorch's FSDP2 on one device with `CPUOffloadPolicy`, layers sharded one by one."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    _set_rendezvous()
    backend = "cpu:gloo,cuda:nccl" if setting.device.type == "cuda" else "gloo"
    dist.init_process_group(backend)
    mesh = init_device_mesh(setting.device.type, (1,))
    _checkpoint_layers(model)
    for module in (*_layers(model), model):
        fully_shard(module, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=setting.device.type == "cuda"))
    return _with_torch_optimizer(model, setting)


def zero3(model: nn.Module, setting: Setting) -> Training:
    """DeepSpeed ZeRO-3 on one device, parameters and optimizer offloaded to pinned host memory."""
    import deepspeed

    _set_rendezvous()
    _checkpoint_layers(model)
    config = zero3_config(len(setting.tokens), setting.clip or ZERO3_CLIP)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def differentiate() -> torch.Tensor:
        loss: torch.Tensor = engine(input_ids=setting.tokens, labels=setting.tokens).loss
        engine.backward(loss)
        return loss.detach()

    return Training(differentiate, engine.step, engine)


def megatrain(model: nn.Module, setting: Setting) -> Training:
    """This project: one line and its optimizer."""
    import megatrain_fx

    streaming = {name: value for name, value in setting.options.items() if not name.startswith(OPTIMIZER)}
    updating = {n.removeprefix(OPTIMIZER): value for n, value in setting.options.items() if n.startswith(OPTIMIZER)}
    model = megatrain_fx.compile(model, device=setting.device, **{**MEGATRAIN_OPTIONS, **streaming})
    if setting.clip is not None:
        updating["max_grad_norm"] = setting.clip
    optimizer = megatrain_fx.optim.AdamW(model, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, **updating)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Training(_differentiate(model, setting), update, model, lambda: megatrain_fx.synchronize(model))


SYSTEMS: dict[str, Callable[[nn.Module, Setting], Training]] = {
    "eager": eager,
    "compiled": compiled,
    "zero3": zero3,
    "fsdp2": fsdp2,
    "megatrain": megatrain,
    "compute": compute,
}
ON_DEVICE = frozenset({"eager", "compiled", "compute"})
"""Systems whose model lies on the device; the others start from one in host memory."""

CLIPPED = "-clip"
"""What a name ends with if gradients are to be clipped, for example `megatrain-clip`."""


def clip_of(name: str, clip: float | None) -> float | None:
    """The largest gradient norm for a system: `megatrain` has none, a name in `-clip` has 1.0 if nothing was asked.

    Args:
        name: of a system, with or without `-clip`.
        clip: what was asked for all peers.
    """
    if name.endswith(CLIPPED):
        return 1.0 if clip is None else clip
    if name == "zero3":
        return ZERO3_CLIP if clip is None else clip
    return None if name in ("megatrain", "compute") else clip


def zero3_config(batch: int, clip: float) -> dict[str, Any]:
    """The configuration of ZeRO-3 offload; buckets large enough that bigger ones gain nothing at these shapes."""
    offload = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": clip,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "offload_param": offload,
            "offload_optimizer": offload,
            "sub_group_size": 10**9,
            "reduce_bucket_size": 2 * 10**8,
            "stage3_prefetch_bucket_size": 5 * 10**8,
            "stage3_param_persistence_threshold": 10**5,
            "stage3_max_live_parameters": 10**9,
            "stage3_max_reuse_distance": 10**9,
        },
    }


def _differentiate(model: nn.Module, setting: Setting) -> Callable[[], torch.Tensor]:
    def differentiate() -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=setting.tokens, labels=setting.tokens).loss
        loss.backward()
        return loss.detach()

    return differentiate


def _with_torch_optimizer(model: nn.Module, setting: Setting) -> Training:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)

    def update() -> None:
        if setting.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), setting.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Training(_differentiate(model, setting), update, model)


def _layers(model: nn.Module) -> list[nn.Module]:
    return list(model.get_submodule("model.layers").children())


def _checkpoint_layers(model: Any) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _compile_layers(model: nn.Module) -> None:
    _checkpoint_layers(model)
    for layer in _layers(model):
        layer.compile(dynamic=False)


def _set_rendezvous() -> None:
    """Make this process a group of its own, on a port that nothing uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
