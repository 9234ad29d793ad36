"""Staged copies: right for all sizes, under chaos and in whole models; chosen and said once when the driver refuses."""

from __future__ import annotations

import gc
import logging
import random

import pytest
import torch

import megatrain_fx as megatrain
from comparison import Pair, features, make_pair, perceptron
from megatrain_fx.extension import runtime as cpp
from models import scalar_loss
from test_host_memory import RecordingDriver

Instruction, Lane = cpp.Instruction, cpp.Lane


def host(size: int, device: torch.device) -> torch.Tensor:
    """Bytes from which the device can copy asynchronously."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


def make_staging(chunk_bytes: int, device: torch.device, threads: int = 1) -> cpp.Staging:
    return cpp.Staging(host(chunk_bytes, device), host(chunk_bytes, device), device, threads)


def noise(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8)


MIB = 2**20
SIZES = [
    (size, chunk, threads)
    for chunk in (1, 8, 1000)
    for size in (0, 1, chunk - 1, chunk, chunk + 1, 2 * chunk, 2 * chunk + 1, 7 * chunk + 3)
    for threads in (1, 3)
]


@pytest.mark.parametrize(
    ("size", "chunk_bytes", "threads"), [*SIZES, (5 * MIB + 77, 3 * MIB, 2), (5 * MIB + 77, 8 * MIB, 4)]
)
def test_staged_copies_bring_every_byte(size: int, chunk_bytes: int, threads: int, device: torch.device) -> None:
    runtime = cpp.Runtime(device)
    inbound, outbound = (make_staging(chunk_bytes, device, threads) for _ in range(2))
    assert inbound.chunk_bytes == chunk_bytes
    source, slot = noise(size), torch.zeros(size + 2, dtype=torch.uint8, device=device)
    home = torch.zeros(size + 2, dtype=torch.uint8)
    executor = cpp.Executor(
        runtime,
        [
            Instruction.staged_copy("prefetch", Lane.h2d, source, slot[1:-1], inbound, []),
            Instruction.call("backward", Lane.compute, lambda _: slot.bitwise_not_(), [0]),
            Instruction.staged_deliver("evacuate", Lane.d2h, slot[1:-1], cpp.Destination(home[1:-1]), outbound, [1]),
        ],
    )
    for _ in range(2):
        slot.zero_()
        executor.run(0, 3, None)
        assert torch.equal(home[1:-1], source.bitwise_not())
        assert home[0] == home[-1] == 0
        assert slot[0] == slot[-1] == 255
    runtime.close()


REGIONS, SLOTS = 8, 2


class Streamed:
    """Regions of many sizes go through two slots and one slab, staged both ways, and come home inverted."""

    def __init__(self, device: torch.device, seed: int) -> None:
        chooser = random.Random(seed)
        sizes = [chooser.randrange(400) for _ in range(REGIONS)]
        self.runtime = cpp.Runtime(device, chaos_seed=seed, chaos_delay_us=500)
        self.regions = [noise(size) for size in sizes]
        self.homes = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
        self.slots = [torch.zeros(400, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
        self.slab = torch.zeros(400, dtype=torch.uint8, device=device)
        self.staging = make_staging(chooser.randrange(1, 100), device), make_staging(64, device)
        instructions = [each for region in range(REGIONS) for each in self.region(region)]
        self.executor = cpp.Executor(self.runtime, instructions)

    def region(self, number: int) -> list[cpp.Instruction]:
        slot, size = self.slots[number % SLOTS], self.regions[number].numel()
        first = 3 * number
        freed = [first - 3 * SLOTS + 1] if number >= SLOTS else []

        def compute(_: object) -> None:
            torch.bitwise_not(slot, out=self.slab)

        home = cpp.Destination(self.homes[number])
        inbound, outbound = self.staging
        return [
            Instruction.staged_copy(f"prefetch {number}", Lane.h2d, self.regions[number], slot[:size], inbound, freed),
            Instruction.call(
                f"forward {number}", Lane.compute, compute, [first, *([first - 1] if number else [])], poison=[slot]
            ),
            Instruction.staged_deliver(
                f"evacuate {number}", Lane.d2h, self.slab[:size], home, outbound, [first + 1], poison=[self.slab]
            ),
        ]


@pytest.mark.parametrize("seed", range(5))
def test_staged_copies_keep_their_order_under_chaos(device: torch.device, seed: int) -> None:
    streamed = Streamed(device, seed)
    for _ in range(3):
        for home in streamed.homes:
            home.zero_()
        streamed.executor.run(0, 3 * REGIONS, None)
        for region, home in zip(streamed.regions, streamed.homes, strict=True):
            assert torch.equal(home, region.bitwise_not())
    streamed.runtime.close()


def test_a_destination_may_change_between_runs(device: torch.device) -> None:
    runtime, source = cpp.Runtime(device), noise(50).to(device)
    homes = [torch.zeros(50, dtype=torch.uint8) for _ in range(2)]
    destination = cpp.Destination(homes[0])
    deliver = Instruction.staged_deliver("evacuate", Lane.d2h, source, destination, make_staging(16, device), [])
    executor = cpp.Executor(runtime, [deliver])
    for home in homes:
        destination.target = home
        executor.run(0, 1, None)
    assert all(torch.equal(home, source.cpu()) for home in homes)
    destination.target = torch.zeros(49, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="operation evacuate failed on lane d2h: .*uint8 tensors of one size"):
        executor.run(0, 1, None)
    destination.target = homes[0].zero_()
    executor.run(0, 1, None)
    assert torch.equal(homes[0], source.cpu())
    runtime.close()


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.zeros(4), torch.zeros(4)),
        (torch.zeros(4, dtype=torch.uint8), torch.zeros(5, dtype=torch.uint8)),
        (torch.zeros(2, 2, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.uint8)),
        (torch.zeros(8, dtype=torch.uint8)[::2], torch.zeros(4, dtype=torch.uint8)),
    ],
    ids=["dtype", "size", "shape", "strided"],
)
def test_staged_copies_of_other_tensors_are_refused(source: torch.Tensor, target: torch.Tensor) -> None:
    staging = make_staging(16, torch.device("cpu"))
    with pytest.raises(ValueError, match="one-dimensional contiguous uint8 tensors of one size"):
        Instruction.staged_copy("prefetch", Lane.h2d, source, target, staging, [])
    with pytest.raises(ValueError, match="one-dimensional contiguous uint8 tensors of one size"):
        Instruction.staged_deliver("evacuate", Lane.d2h, source, cpp.Destination(target), staging, [])


@pytest.mark.parametrize(("first", "second", "message"), [(0, 0, "at least one byte"), (4, 5, "of one size")])
def test_buffers_that_cannot_work(first: int, second: int, message: str) -> None:
    cpu = torch.device("cpu")
    with pytest.raises(ValueError, match=message):
        cpp.Staging(host(first, cpu), host(second, cpu), cpu)


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("staging_bytes", [1, 100, 2**20])
@pytest.mark.parametrize("chaos", [None, 3])
def test_a_staged_model_equals_eager(device: torch.device, staging_bytes: int, slots: int, chaos: int | None) -> None:
    pair = make_pair(perceptron, device, pin="staging", staging_bytes=staging_bytes, slots=slots, chaos=chaos)
    for seed in range(3):  # gradients accumulate from the second on
        pair.step(features(seed=seed, device=device))
    report = megatrain.memory(pair.compiled)
    assert report.staged
    assert report.staging_bytes == 4 * staging_bytes
    assert "copies staged" in str(report)


def test_a_model_that_is_not_staged_has_no_buffers() -> None:
    pair = make_pair(perceptron)
    pair.step(features())
    report = megatrain.memory(pair.compiled)
    assert not report.staged
    assert report.staging_bytes == 0
    assert "copies direct" in str(report)


@pytest.mark.parametrize("value", [0, -1, 1.5, None])
def test_a_staging_buffer_has_a_size(value: object) -> None:
    with pytest.raises(megatrain.ConfigError, match=r"staging_bytes=.*at least 1"):
        megatrain.StreamConfig(device="cpu", staging_bytes=value)


def refused_pair(device: torch.device, refused: int) -> tuple[Pair, RecordingDriver]:
    """A model whose registration number ``refused`` will be refused."""
    pair = make_pair(perceptron, device, staging_bytes=300, chaos=1)
    driver = RecordingDriver(refused)
    pair.compiled.__dict__["_megatrain"].registration.driver = driver
    return pair, driver


@pytest.mark.parametrize("refused", [0, 1, 4, 7])
def test_a_refusal_is_said_once_and_changes_no_number(
    device: torch.device, refused: int, caplog: pytest.LogCaptureFixture
) -> None:
    pair, driver = refused_pair(device, refused)
    with caplog.at_level(logging.WARNING, logger="megatrain_fx"):
        for seed in range(3):
            pair.step(features(seed=seed, device=device))
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "no more. Copies of host memory that is not registered go through" in warnings[0].getMessage()
    assert megatrain.memory(pair.compiled).staged
    assert len(driver.registered) == refused
    store = pair.compiled.__dict__["_megatrain"].store
    staged = [store.inbound(region) is not None for region in range(3)]
    assert staged == [region >= refused for region in range(3)]


def test_what_was_registered_is_unregistered_with_the_model(caplog: pytest.LogCaptureFixture) -> None:
    pair, driver = refused_pair(torch.device("cpu"), 100)
    pair.step(features())
    assert not megatrain.memory(pair.compiled).staged
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert len(driver.registered) > 3
    pair.compiled.zero_grad()
    del pair
    gc.collect()
    assert len(driver.unregistered) == len(driver.registered)
    assert all(mapped for _, mapped in driver.unregistered)


def test_parameters_changed_between_steps_are_what_is_staged() -> None:
    pair = make_pair(perceptron, pin="staging", staging_bytes=64)
    pair.step(features())
    for model in pair.both:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.step()
        optimizer.zero_grad()
    pair.step(features(seed=5))
    losses = [scalar_loss(model(features(seed=6))).item() for model in pair.both]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("clip", [None, 0.5], ids=["during_backward", "clipped"])
def test_updates_in_the_schedule_meet_staged_copies(device: torch.device, clip: float | None) -> None:
    pairs = []
    for options in ({"pin": "none"}, {"pin": "staging", "staging_bytes": 100, "chaos": 2}):
        model = make_pair(lambda: perceptron(5), device, **options).compiled
        optimizer = megatrain.optim.AdamW(model, lr=0.01, max_grad_norm=clip)
        for seed in range(4):
            scalar_loss(model(features(seed=seed, device=device))).backward()
            optimizer.step()
            optimizer.zero_grad()
        pairs.append(dict(model.named_parameters()))
    assert all(torch.equal(parameter, pairs[1][name]) for name, parameter in pairs[0].items())
