"""Host memory: size, storages, lifetime, registration and its end, forked processes, the peak of compiling."""

from __future__ import annotations

import copy
import gc
import io
import mmap
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatrain_fx.driver import CudaDriver
from megatrain_fx.host_memory import HostMemory
from peak_memory import peak_bytes

HUGE_PAGE = 2**21
needs_proc = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's /proc to look at mappings")


def is_mapped(address: int) -> bool:
    """Whether this process has memory at an address."""
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)


class RecordingDriver:
    """Registers nothing, and notes what it is asked to do; refuses the registration number ``refused``."""

    def __init__(self, refused: int | None = None) -> None:
        self.refused = refused
        self.registered: list[tuple[int, int]] = []
        self.unregistered: list[tuple[int, bool]] = []

    def register(self, address: int, size: int) -> str | None:
        if len(self.registered) == self.refused:
            return "no more"
        self.registered.append((address, size))
        return None

    def unregister(self, address: int) -> None:
        self.unregistered.append((address, is_mapped(address)))


@pytest.mark.parametrize("size", [0, 1, mmap.PAGESIZE, mmap.PAGESIZE + 1, HUGE_PAGE - 1, 3 * HUGE_PAGE + 5])
def test_the_mapping_has_the_pages_that_it_needs(size: int) -> None:
    memory = HostMemory(size)
    assert memory.mapped_bytes == max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE
    assert memory.flat().shape == (size,)
    assert not memory.flat().any()
    memory.flat().fill_(255)
    assert memory.flat().eq(255).all()


def flags_at(address: int) -> list[str]:
    """The kernel's flags of the mapping at an address (see proc(5), VmFlags)."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(number, 16) for number in first.split("-"))
            inside = start <= address < end
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    raise AssertionError(f"nothing is mapped at {address:x}")


@needs_proc
@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the kernel has no huge pages")
@pytest.mark.parametrize("size", [HUGE_PAGE, 5 * HUGE_PAGE + 1])
def test_large_memory_asks_for_huge_pages_from_its_first_byte(size: int) -> None:
    memory = HostMemory(size)
    assert memory.address % HUGE_PAGE == 0
    assert "hg" in flags_at(memory.address)


@needs_proc
def test_a_mapping_takes_no_more_address_space_than_its_pages() -> None:
    def size() -> int:
        line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmSize"))
        return int(line.split()[1]) * 1024

    before = size()
    memory = [HostMemory(3 * HUGE_PAGE + 5) for _ in range(20)]
    assert size() - before <= sum(each.mapped_bytes for each in memory) + HUGE_PAGE


def test_tensors_share_memory_but_not_storage() -> None:
    memory = HostMemory(64)
    first, second = memory.tensor(0, 4, torch.float32), memory.tensor(16, 4, torch.float32)
    assert first.untyped_storage().nbytes() == 16
    assert second.data_ptr() == first.data_ptr() + 16
    second.fill_(1.0)
    assert memory.tensor(0, 16, torch.float32).tolist() == [0.0] * 4 + [1.0] * 4 + [0.0] * 8
    assert torch.equal(copy.deepcopy(second), second)
    file = io.BytesIO()
    torch.save(memory.tensor(0, 1, torch.uint8), file)
    alone = io.BytesIO()
    torch.save(torch.zeros(1, dtype=torch.uint8), alone)
    assert len(file.getvalue()) == len(alone.getvalue())


@pytest.mark.parametrize(("offset", "count"), [(2, 1), (0, 5), (16, 1), (20, 0), (-4, 1), (0, -1), (0, 2**62)])
def test_tensors_outside_or_misaligned_are_refused(offset: int, count: int) -> None:
    with pytest.raises(ValueError, match="misaligned in, or reach outside, 16 bytes"):
        HostMemory(16).tensor(offset, count, torch.float32)


def test_more_memory_than_there_can_be() -> None:
    with pytest.raises(MemoryError, match="refuses to map 1152921504606846976 bytes of host memory"):
        HostMemory(2**60)


@needs_proc
def test_memory_lives_as_long_as_a_tensor_of_it() -> None:
    memory = HostMemory(HUGE_PAGE)
    address, tensor = memory.address, memory.tensor(8, 4, torch.int32)
    tensor.fill_(7)
    del memory
    gc.collect()
    assert tensor.tolist() == [7] * 4
    view = tensor[1:]
    del tensor
    assert is_mapped(address)
    del view
    assert not is_mapped(address)


@needs_proc
def test_memory_is_unregistered_once_before_it_is_unmapped() -> None:
    driver, memory = RecordingDriver(), HostMemory(2 * HUGE_PAGE)
    assert memory.register(driver) is None
    assert memory.registered
    assert memory.register(driver) is None
    address, tensor = memory.address, memory.flat()
    assert driver.registered == [(address, 2 * HUGE_PAGE)]
    del memory
    assert driver.unregistered == []
    del tensor
    assert driver.unregistered == [(address, True)]
    assert not is_mapped(address)


@needs_proc
def test_large_memory_is_registered_in_pieces() -> None:
    driver, memory = RecordingDriver(), HostMemory(10_000)
    memory.register(driver, at_most=4096)
    start = memory.address
    assert driver.registered == [(start, 4096), (start + 4096, 4096), (start + 8192, 1808)]
    del memory
    assert driver.unregistered == [(start, True), (start + 4096, True), (start + 8192, True)]


@needs_proc
def test_a_refusal_leaves_nothing_registered() -> None:
    driver, memory = RecordingDriver(refused=2), HostMemory(10_000)
    assert memory.register(driver, at_most=4096) == "no more"
    assert not memory.registered
    assert [address for address, _ in driver.unregistered] == [address for address, _ in driver.registered]
    memory.flat().fill_(1)
    del memory
    assert len(driver.unregistered) == 2


def test_nothing_is_registered_of_empty_memory() -> None:
    driver = RecordingDriver()
    assert HostMemory(0).register(driver) is None
    assert driver.registered == []


FORKED = """
import os, sys
import torch
from megatrain_fx.host_memory import HostMemory

class Driver:
    process = os.getpid()
    def register(self, address, size):
        return None
    def unregister(self, address):
        print("unregistered in the", "parent" if os.getpid() == self.process else "child", flush=True)

memory = HostMemory(3 * 2**21)
tensor = memory.tensor(0, 4, torch.int32).fill_(5)
if {registered}:
    memory.register(Driver())
child = os.fork()
if child == 0:
    if {registered}:
        taken = [HostMemory(3 * 2**21).flat().fill_(1) for _ in range(8)]
        del memory, tensor
        assert all(each.eq(1).all() for each in taken)
    else:
        assert tensor.tolist() == [5] * 4
        tensor.fill_(6)
        del memory, tensor
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert tensor.tolist() == [5] * 4
"""


@needs_proc
@pytest.mark.parametrize("registered", [False, True])
def test_a_forked_process_neither_unregisters_nor_changes_memory(registered: bool) -> None:
    root = Path(__file__).parent.parent
    program = FORKED.format(registered=registered) + "del memory, tensor\n"
    command = [sys.executable, "-W", "ignore", "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=root, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == ("unregistered in the parent\n" if registered else "")


@needs_proc
def test_a_process_ends_while_registered_memory_lives() -> None:
    root = Path(__file__).parent.parent
    program = FORKED.format(registered=True)
    command = [sys.executable, "-W", "ignore", "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=root, check=False)
    assert ended.returncode == 0
    assert ended.stderr == ""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@needs_proc
def test_an_error_of_the_driver_does_not_keep_memory() -> None:
    class Failing(RecordingDriver):
        def unregister(self, address: int) -> None:
            raise RuntimeError(f"cannot unregister {address}")

    memory = HostMemory(4096)
    memory.register(Failing())
    address = memory.address
    del memory
    assert not is_mapped(address)


@pytest.mark.cuda
def test_registered_memory_is_pinned() -> None:
    memory = HostMemory(5_000_001)
    assert not memory.flat().is_pinned()
    assert memory.register(CudaDriver(torch.device("cuda", 0))) is None
    assert memory.flat().is_pinned()
    memory.flat().fill_(3)
    assert memory.flat().cuda().eq(3).all()


@pytest.mark.cuda
def test_a_refusal_of_cuda_leaves_no_error_behind() -> None:
    driver, memory = CudaDriver(torch.device("cuda", 0)), HostMemory(2**20)
    assert memory.register(driver) is None
    refusal = driver.register(memory.address, 2**20)
    assert refusal is not None
    assert "cudaHostRegister of 1048576 bytes failed" in refusal
    assert torch.ones(4, device="cuda").mul(2).sum().item() == 8
    torch.cuda.synchronize()


WIDTH, DEPTH = 1024, 96
PARAMETER_BYTES = DEPTH * (WIDTH + 1) * WIDTH * 4
BUILD = f"""
layers = [nn.utils.skip_init(nn.Linear, {WIDTH}, {WIDTH}) for _ in range({DEPTH})]
"""
COMPILE = f"""
with torch.no_grad():
    for layer in layers:
        layer.weight.fill_(0.5)
        layer.bias.fill_(0.5)
    model = megatrain.compile(nn.Sequential(*layers), device="cpu", slots=1, stage_bytes=0)
    model(torch.ones(1, {WIDTH}))
"""


def test_compiling_needs_the_model_and_one_stage() -> None:
    stage = PARAMETER_BYTES // DEPTH
    slot, slack = stage, 16 * 2**20
    assert PARAMETER_BYTES <= peak_bytes(BUILD, COMPILE) < PARAMETER_BYTES + stage + slot + slack
