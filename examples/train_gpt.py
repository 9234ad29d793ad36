"""Train a byte-level GPT on the sources of the Python standard library through one line, ``megatrain.compile``.

The accelerator (or, on a machine without one, a budget of the same kind in host memory) only ever holds ``--slots``
stages of one transformer block each; all parameters, gradients and optimizer state stay in host memory.

    python examples/train_gpt.py                        # a minute or so on two cores; results in runs/gpt
    python examples/train_gpt.py --resume --steps 600   # continue from the last checkpoint on the same loss curve
    python examples/train_gpt.py --compare              # train the eager model beside it and report the differences
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import sysconfig
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import megatrain_fx as megatrain


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of a batch, and the hyperparameters; the defaults are for two CPU cores."""

    layers: int = 20
    heads: int = 4
    width: int = 64
    context: int = 64
    dropout: float = 0.1
    batch: int = 16
    learning_rate: float = 6e-3
    warmup: int = 40
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 1


class Block(nn.Module):
    """Pre-norm transformer block, [batch, time, width] -> [batch, time, width]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(config.width)
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.project = nn.Linear(config.width, config.width)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.expand = nn.Linear(config.width, 4 * config.width)
        self.contract = nn.Linear(4 * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        split = self.query_key_value(self.attention_norm(hidden)).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.transpose(1, 3).unbind(2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        hidden = hidden + self.dropout(self.project(mixed))
        return hidden + self.dropout(self.contract(F.gelu(self.expand(self.mlp_norm(hidden)))))


class GPT(nn.Module):
    """Byte-level GPT: tokens [batch, time] -> logits [batch, time, 256], or with targets the mean cross-entropy."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, config.width)
        self.positions = nn.Parameter(torch.zeros(config.context, config.width))
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, 256, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("project.weight", "contract.weight"))
                nn.init.normal_(parameter, std=0.05 / (2 * config.layers) ** 0.5 if residual else 0.05)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        hidden = self.dropout(self.tokens(tokens) + self.positions[: tokens.shape[1]])
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Text:
    """Bytes of the standard library's sources; every tenth file, in order of path, is for validation."""

    def __init__(self, config: Config, device: torch.device) -> None:
        root = Path(sysconfig.get_path("stdlib"))
        excluded = {"site-packages", "test", "tests"}
        files = sorted(path for path in root.rglob("*.py") if not excluded & set(path.relative_to(root).parts))
        chosen = {"train": [path for index, path in enumerate(files) if index % 10], "validation": files[::10]}
        self.config, self.device = config, device
        self.splits = {
            split: torch.frombuffer(bytearray().join(path.read_bytes() for path in paths), dtype=torch.uint8)
            for split, paths in chosen.items()
        }

    def batch(self, split: str, number: int) -> tuple[Tensor, Tensor]:
        """Return batch ``number`` of a split as (tokens, targets), int64 [batch, context]; equal for equal numbers."""
        data, size = self.splits[split], self.config.context
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + number)
        starts = torch.randint(len(data) - size, (self.config.batch,), generator=generator)
        rows = torch.stack([data[start : start + size + 1] for start in starts.tolist()]).long().to(self.device)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def make_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """AdamW over two groups: matrices decay, biases and norms do not."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95))


def update(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, config: Config) -> None:
    """Clip the gradients and step, at a rate that rises for ``warmup`` steps, then falls with the root of the step."""
    rate = config.learning_rate * min((step + 1) / config.warmup, (config.warmup / (step + 1)) ** 0.5)
    for group in optimizer.param_groups:
        group["lr"] = rate
    nn.utils.clip_grad_norm_(model.parameters(), config.clip)
    optimizer.step()
    optimizer.zero_grad()


class EagerReference:
    """The same training in eager PyTorch: a copy on the device computes; the original, on the CPU, is updated."""

    def __init__(self, model: nn.Module, config: Config, device: torch.device) -> None:
        self.model, self.config, self.device = model, config, device
        self.worker = copy.deepcopy(model).to(device)
        self.optimizer = make_optimizer(model, config)
        self.loss_difference = 0.0

    def load(self, checkpoint: dict[str, Any]) -> None:
        self.worker.load_state_dict(checkpoint["model"])
        self.model.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(copy.deepcopy(checkpoint["optimizer"]))  # it would share the moments

    def step(self, step: int, tokens: Tensor, targets: Tensor) -> float:
        """Take one step and return its loss; the random number generators are left as they were found."""
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            loss = self.worker(tokens, targets)
            loss.backward()
        for parameter, copied in zip(self.model.parameters(), self.worker.parameters(), strict=True):
            parameter.grad, copied.grad = copied.grad.to("cpu"), None
        update(self.model, self.optimizer, step, self.config)
        self.worker.load_state_dict(self.model.state_dict())
        return loss.item()

    def parameter_difference(self, model: nn.Module) -> float:
        pairs = zip(self.model.parameters(), model.parameters(), strict=True)
        return max((eager - streamed).abs().max().item() for eager, streamed in pairs)


@dataclass
class History:
    """Losses so far: one training loss a step, and (step, loss) of every validation."""

    train: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)

    def plot(self, path: Path) -> None:
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        axes.plot(range(1, len(self.train) + 1), self.train, linewidth=0.8, alpha=0.6, label="train (dropout on)")
        axes.plot(*zip(*self.validation, strict=True), marker="o", markersize=3, label="validation")
        axes.set(xlabel="step", ylabel="cross-entropy, nats per byte", title="Byte-level GPT on the standard library")
        axes.legend()
        figure.savefig(path, dpi=150)


@torch.no_grad()
def validate(model: nn.Module, text: Text, batches: int = 8) -> float:
    """Return the mean loss over the same validation batches each time."""
    model.eval()
    losses = [model(*text.batch("validation", number)).item() for number in range(batches)]
    model.train()
    return sum(losses) / len(losses)


def save_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, history: History) -> None:
    """Write all that a later run needs to go on bit for bit; an interrupted write leaves the previous file whole."""
    checkpoint = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "history": asdict(history),
        "rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }
    torch.save(checkpoint, path.with_suffix(".partial"))
    os.replace(path.with_suffix(".partial"), path)


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], History]:
    """Restore what ``save_checkpoint`` wrote; returns the checkpoint and the history."""
    if not path.exists():
        sys.exit(f"--resume found no checkpoint at {path}: train first, or name its folder with --out")
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    torch.set_rng_state(checkpoint["rng"])
    if checkpoint["cuda_rng"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(checkpoint["cuda_rng"])
    return checkpoint, History(**checkpoint["history"])


def arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="train until this many steps are done in all")
    parser.add_argument("--interval", type=int, default=50, help="steps between validations with checkpoints")
    parser.add_argument("--slots", type=int, default=2, help="device buffers for the weights of one stage each")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("runs/gpt"))
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out")
    parser.add_argument("--compare", action="store_true", help="train the eager model beside it, compare every step")
    return parser.parse_args()


def main() -> None:
    """Train, validating and saving every ``--interval`` steps, and report."""
    args, config = arguments(), Config()
    device = torch.device(args.device)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.compare:  # atomics of GPU kernels would make eager differ from itself
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    torch.manual_seed(config.seed)

    model = GPT(config)
    eager = EagerReference(copy.deepcopy(model), config, device) if args.compare else None
    block_bytes = sum(p.nbytes for p in model.blocks[0].parameters())
    model = megatrain.compile(model, device=device, slots=args.slots, stage_bytes=block_bytes)  # the one line

    optimizer, history, text = make_optimizer(model, config), History(), Text(config, device)
    if args.resume:
        checkpoint, history = load_checkpoint(args.out / "checkpoint.pt", model, optimizer)
        if eager is not None:
            eager.load(checkpoint)
    (args.out / "schedule.txt").write_text(str(megatrain.trace(model, *text.batch("train", 0)).schedule))

    first, seconds = len(history.train), 0.0
    if first >= args.steps:
        sys.exit(f"the checkpoint is at step {first} already: ask for more than that with --steps")
    bar = tqdm(range(first, args.steps), initial=first, total=args.steps, unit="step")
    for step in bar:
        tokens, targets = text.batch("train", step)
        eager_loss = eager.step(step, tokens, targets) if eager is not None else None
        started = time.perf_counter()
        loss = model(tokens, targets)
        loss.backward()
        update(model, optimizer, step, config)
        history.train.append(loss.item())
        seconds += time.perf_counter() - started
        if eager is not None and eager_loss is not None:
            eager.loss_difference = max(eager.loss_difference, abs(history.train[-1] - eager_loss))
        if (step + 1) % args.interval == 0 or step + 1 == args.steps:
            history.validation.append((step + 1, validate(model, text)))
            save_checkpoint(args.out / "checkpoint.pt", model, optimizer, history)
        speed = (step + 1 - first) * tokens.numel() / seconds
        validation = f"{history.validation[-1][1]:.3f}" if history.validation else "-"
        bar.set_postfix_str(f"train {history.train[-1]:.3f}, validation {validation}, {speed:,.0f} tokens/s")
    report(model, eager, history, args.out, device)


def report(model: nn.Module, eager: EagerReference | None, history: History, out: Path, device: torch.device) -> None:
    """Print what was reached and where the results are, and draw the losses."""
    memory = megatrain.memory(model)
    budget = memory.parameter_bytes / memory.slot_bytes
    print(f"parameters      {memory.parameter_bytes / 2**20:.2f} MiB, {budget:.1f} times the budget for weights")
    print(f"device weights  {memory.weight_peak_bytes / 2**20:.2f} MiB at the peak, of a budget of", end=" ")
    print(f"{memory.slot_bytes / 2**20:.2f} MiB on {device}")
    if history.validation:
        print(
            f"loss            train {history.train[-1]:.4f}, validation {history.validation[-1][1]:.4f} nats per byte"
        )
        history.plot(out / "loss.png")
    if eager is not None:
        print(f"against eager   largest difference of the loss {eager.loss_difference:g},", end=" ")
        print(f"of a parameter {eager.parameter_difference(model):g}")
    print(f"written         {out}/checkpoint.pt, {out}/loss.png, {out}/schedule.txt")


if __name__ == "__main__":
    main()
