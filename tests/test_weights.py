"""Weights from safetensors files: equal to loading eagerly, in little memory; files that do not fit are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import megatrain_fx as megatrain
from architectures import VOCABULARY, ConvolutionNetwork, Gpt, MultilayerPerceptron
from comparison import WIDTH, Pair, perceptron
from models import scalar_loss
from peak_memory import peak_bytes


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def random_state(model: nn.Module) -> dict[str, Tensor]:
    """What a file of the model holds: each tied parameter once."""
    names = {id(parameter): name for name, parameter in reversed(list(model.named_parameters(remove_duplicate=False)))}
    state = model.state_dict(keep_vars=True)
    return {
        name: torch.rand_like(tensor.detach()) if tensor.is_floating_point() else tensor.detach() + 3
        for name, tensor in state.items()
        if names.get(id(tensor), name) == name
    }


def save(state: dict[str, Tensor], directory: Path, shards: int = 1, index: bool = True) -> None:
    """Write a state as one file, or as shards with or without their index."""
    if shards == 1:
        save_file(state, directory / "model.safetensors")
        return
    files = {name: f"model-{number % shards + 1:05}.safetensors" for number, name in enumerate(state)}
    for file in set(files.values()):
        save_file({name: tensor for name, tensor in state.items() if files[name] == file}, directory / file)
    if index:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def check_equal(eager: nn.Module, filled: nn.Module) -> None:
    """All parameters and buffers are equal, of equal kind and on the CPU."""
    pairs = zip(
        [*eager.named_parameters(remove_duplicate=False), *eager.named_buffers(remove_duplicate=False)],
        [*filled.named_parameters(remove_duplicate=False), *filled.named_buffers(remove_duplicate=False)],
        strict=True,
    )
    for (name, expected), (other, actual) in pairs:
        assert name == other
        assert type(expected) is type(actual)
        assert expected.requires_grad == actual.requires_grad
        assert (expected.dtype, expected.stride(), actual.device.type) == (actual.dtype, actual.stride(), "cpu"), name
        assert torch.equal(expected, actual), name


def load_both(build: Callable[[], nn.Module], state: dict[str, Tensor], path: Path) -> Pair:
    """An eager model with a state, and one built on meta that is compiled with the files of the state."""
    eager, model = build(), on_meta(build)
    eager.load_state_dict(state, strict=False)
    compiled = megatrain.compile(model, weights=path, device="cpu", stage_bytes=0)
    check_equal(eager, compiled)
    return Pair(eager, compiled, torch.device("cpu"))


@pytest.mark.parametrize(("shards", "index"), [(1, False), (3, True), (3, False)])
def test_a_model_on_meta_equals_one_loaded_eagerly(shards: int, index: bool, tmp_path: Path) -> None:
    build = Gpt
    state = random_state(build())
    save(state, tmp_path, shards, index)
    load_both(build, state, tmp_path).step(torch.randint(0, VOCABULARY, (2, 6)))


def test_buffers_are_read_too(tmp_path: Path) -> None:
    state = random_state(ConvolutionNetwork())
    save(state, tmp_path)
    pair = load_both(ConvolutionNetwork, state, tmp_path / "model.safetensors")
    pair.step(torch.rand(2, 3, 8, 8))


@pytest.mark.parametrize("name", ["head.weight", "tokens.weight", "both"])
def test_tied_parameters_may_have_any_of_their_names(name: str, tmp_path: Path) -> None:
    def build() -> nn.Module:
        return Gpt(tied=True, dropout=0.0)

    state = random_state(build())
    values = state.pop("tokens.weight")
    names = ["head.weight", "tokens.weight"] if name == "both" else [name]
    save({**state, **{each: values.clone() for each in names}}, tmp_path)
    eager, model = build(), on_meta(build)
    eager.load_state_dict({**state, "head.weight": values, "tokens.weight": values})
    compiled = megatrain.compile(model, weights=tmp_path, device="cpu")
    assert compiled.head.weight is compiled.tokens.weight
    check_equal(eager, compiled)


def test_tied_parameters_that_differ_are_refused(tmp_path: Path) -> None:
    state = random_state(Gpt(tied=True))
    save({**state, "head.weight": state["tokens.weight"] + 1}, tmp_path)
    with pytest.raises(megatrain.WeightsError, match=r"tokens.weight and head.weight are one parameter .* but differ"):
        megatrain.compile(on_meta(lambda: Gpt(tied=True)), weights=tmp_path, device="cpu")


@pytest.mark.parametrize(("stored", "wanted"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_values_are_converted_to_the_dtypes_of_the_model(
    stored: torch.dtype, wanted: torch.dtype, tmp_path: Path
) -> None:
    state = {name: tensor.to(stored) for name, tensor in random_state(perceptron()).items()}
    save(state, tmp_path)
    pair = load_both(lambda: perceptron().to(wanted), state, tmp_path)
    assert next(pair.compiled.parameters()).dtype == wanted


def test_parameters_stay_the_same_objects(tmp_path: Path) -> None:
    save(random_state(perceptron()), tmp_path)
    model = on_meta(perceptron)
    model[0].bias.requires_grad_(False)
    model[0].weight.note = "mine"  # type: ignore[union-attr]
    held = dict(model.named_parameters())
    optimizer = torch.optim.SGD([model[2].weight], lr=0.1)
    compiled = megatrain.compile(model, weights=tmp_path, device="cpu")
    assert all(held[name] is parameter for name, parameter in compiled.named_parameters())
    assert optimizer.param_groups[0]["params"][0] is compiled[2].weight
    assert not compiled[0].bias.requires_grad
    assert compiled[0].weight.note == "mine"
    assert type(compiled[0].weight) is nn.Parameter


def test_memory_formats_of_the_model_are_kept(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last)

    state = random_state(build())
    save({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path)
    load_both(build, state, tmp_path).step(torch.rand(2, 3, 8, 8))


def test_a_model_on_the_cpu_is_filled_in_place(tmp_path: Path) -> None:
    state = random_state(perceptron())
    save(state, tmp_path)
    model = perceptron()
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    megatrain.compile(model, weights=tmp_path, device="cpu")
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    assert all(torch.equal(state[name], parameter) for name, parameter in model.named_parameters())


def test_compiling_inside_the_context_of_the_meta_device(tmp_path: Path) -> None:
    state = random_state(perceptron())
    save({name: tensor.double() for name, tensor in state.items()}, tmp_path)
    with torch.device("meta"):
        model = megatrain.compile(perceptron(), weights=tmp_path, device="cpu")
    assert all(torch.equal(state[name], parameter) for name, parameter in model.named_parameters())


def renamed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    state["other"] = state.pop("0.weight")
    return state


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (renamed, r"missing from the files: 0.weight; unexpected in the files: other\."),
        (lambda state: {**state, "0.bias": torch.zeros(3)}, r"of another shape: 0.bias \(\[3\], in the model \[16\]\)"),
        (lambda state: {}, r"missing from the files: 0.weight, 0.bias, 2.weight, 2.bias, 4.weight, 4.bias\."),
        (lambda state: {f"x{i}": torch.zeros(1) for i in range(14)}, r"unexpected in the files: x0, .* and 4 more"),
    ],
    ids=["renamed", "shape", "empty", "many"],
)
def test_files_that_do_not_fit_change_nothing(edit: Callable[[Any], Any], message: str, tmp_path: Path) -> None:
    save(edit(random_state(perceptron())), tmp_path)
    model = on_meta(perceptron)
    with pytest.raises(megatrain.WeightsError, match=message):
        megatrain.compile(model, weights=tmp_path, device="cpu")
    assert all(parameter.is_meta for parameter in model.parameters())
    assert type(model) is nn.Sequential


def write_header(path: Path, header: dict[str, Any] | bytes, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no safetensors file"),
        (b"\xff" * 40, "is no safetensors file: its header would be longer"),
        (b"not json", "is no safetensors file: its header cannot be read"),
        (b"[1]", "is no safetensors file: its header cannot be read"),
        ({"0.weight": {"dtype": "F32", "shape": [2]}}, "its header cannot be read"),
        ({"0.weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "its header cannot be read"),
        ({"0.weight": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, "is of type F4, which PyTorch"),
        ({"0.weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, "ends before tensor 0.weight does"),
    ],
    ids=["empty", "length", "text", "list", "no_range", "range", "dtype", "truncated"],
)
def test_damaged_files(content: dict[str, Any] | bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    if content in (b"", b"\xff" * 40):
        path.write_bytes(content)  # type: ignore[arg-type]
    else:
        write_header(path, content)
    with pytest.raises(megatrain.WeightsError, match=message):
        megatrain.compile(on_meta(perceptron), weights=tmp_path, device="cpu")


def test_missing_files(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(megatrain.WeightsError, match="neither a safetensors file nor a directory that holds one"):
            megatrain.compile(on_meta(perceptron), weights=path, device="cpu")
    save(random_state(perceptron()), tmp_path, shards=2)
    (tmp_path / "model-00002.safetensors").unlink()
    with pytest.raises(megatrain.WeightsError, match=r"lists model-00002.safetensors, which is not there"):
        megatrain.compile(on_meta(perceptron), weights=tmp_path, device="cpu")


def test_shards_that_contradict_their_index_or_each_other(tmp_path: Path) -> None:
    state = random_state(perceptron())
    save(state, tmp_path, shards=2)
    index = tmp_path / "model.safetensors.index.json"
    files = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {**files, "0.weight": "model-00002.safetensors"}}))
    with pytest.raises(megatrain.WeightsError, match="says that model-00002.safetensors holds 0.weight, which it does"):
        megatrain.compile(on_meta(perceptron), weights=tmp_path, device="cpu")
    index.write_text("{}")
    with pytest.raises(megatrain.WeightsError, match="it has no weight_map"):
        megatrain.compile(on_meta(perceptron), weights=tmp_path, device="cpu")
    index.unlink()
    save_file({"0.weight": state["0.weight"]}, tmp_path / "more.safetensors")
    with pytest.raises(megatrain.WeightsError, match=r"both .*model-00001.safetensors and .*more.safetensors hold"):
        megatrain.compile(on_meta(perceptron), weights=tmp_path, device="cpu")


def test_without_files_a_model_on_meta_is_refused() -> None:
    with pytest.raises(megatrain.ModelDeviceError, match=r"megatrain.compile\(model, weights=...\)"):
        megatrain.compile(on_meta(perceptron), device="cpu")


class Rotation(nn.Module):
    """A parameter-free module with a buffer that files do not hold, and a tensor that is no buffer at all."""

    def __init__(self, config: int) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("angles", torch.arange(WIDTH) * 0.5 * config, persistent=False)
        self.table = torch.arange(WIDTH) + float(config)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.angles.cos() + self.table


class Rotated(nn.Module):
    def __init__(self, rotation: Callable[[], nn.Module] = lambda: Rotation(3)) -> None:
        super().__init__()
        self.layers = perceptron()
        self.rotation = rotation()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.rotation(self.layers(inputs))


def test_buffers_are_built_again_from_a_config(tmp_path: Path) -> None:
    state = random_state(Rotated())
    assert "rotation.angles" not in state
    save(state, tmp_path)
    before = torch.get_rng_state()
    pair = load_both(Rotated, state, tmp_path)
    assert torch.equal(pair.eager.rotation.table, pair.compiled.rotation.table)
    pair.step(torch.rand(2, WIDTH))
    model = on_meta(Rotated)
    torch.set_rng_state(before)
    megatrain.compile(model, weights=tmp_path, device="cpu")
    assert torch.equal(torch.get_rng_state(), before)


def test_buffers_that_files_hold_are_not_built_again(tmp_path: Path) -> None:
    state = {**random_state(Rotated()), "rotation.angles": torch.full((WIDTH,), 9.0)}
    save(state, tmp_path)
    compiled = megatrain.compile(on_meta(Rotated), weights=tmp_path, device="cpu")
    assert compiled.rotation.angles.eq(9.0).all()


class NeedsTwo(Rotation):
    def __init__(self, config: int, more: int) -> None:
        super().__init__(config + more)


class Unlike(Rotation):
    def __init__(self, config: int = 1) -> None:
        super().__init__(config)
        self.angles = torch.arange(config * WIDTH)
        self.config = 2


@pytest.mark.parametrize("rotation", [lambda: NeedsTwo(1, 2), Unlike], ids=["constructor", "shape"])
def test_buffers_that_cannot_be_built_again_are_named(rotation: Callable[[], nn.Module], tmp_path: Path) -> None:
    def build() -> nn.Module:
        return Rotated(rotation)

    state = random_state(build())
    save(state, tmp_path)
    with pytest.raises(
        megatrain.WeightsError, match=r"buffer rotation.angles of \w+ is on the meta device .* assign it"
    ):
        megatrain.compile(on_meta(build), weights=tmp_path, device="cpu")
    model, real = on_meta(build), rotation()
    model.rotation.angles, model.rotation.table = real.angles, real.table
    compiled = megatrain.compile(model, weights=tmp_path, device="cpu")
    assert torch.equal(compiled.rotation.angles, real.angles)


def test_parameters_loaded_from_files_train_like_eager_ones(tmp_path: Path) -> None:
    state = random_state(MultilayerPerceptron())
    save(state, tmp_path, shards=2)
    pair = load_both(MultilayerPerceptron, state, tmp_path)
    for seed in range(3):
        pair.step(torch.rand(2, WIDTH, generator=torch.Generator().manual_seed(seed)))
        for model in pair.both:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            optimizer.step()
            optimizer.zero_grad()
    pair.check()


HUGGING_FACE = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "gemma3_text": {"head_dim": 8},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16},
    "bert": {"is_decoder": True},
}


@pytest.mark.parametrize("kind", HUGGING_FACE)
def test_hugging_face_models(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    other = {"num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 16, "bos_token_id": 0}
    options = {**sizes, **other, "eos_token_id": 1, "pad_token_id": 2, "use_cache": False, **HUGGING_FACE[kind]}

    def build() -> nn.Module:
        return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **options))

    build().save_pretrained(tmp_path, max_shard_size="40KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    eager = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    compiled = megatrain.compile(on_meta(build), weights=tmp_path, device="cpu", stage_bytes=0)
    check_equal(eager, compiled)
    tokens = torch.randint(3, 64, (2, 8))
    losses = [scalar_loss(model.eval()(input_ids=tokens).logits) for model in (eager, compiled)]
    assert torch.equal(*losses)


LAYERS, SIZE = 24, 2048
PARAMETER_BYTES = LAYERS * (SIZE + 1) * SIZE * 4
BUILD = f"""
def build():
    return nn.Sequential(*(nn.utils.skip_init(nn.Linear, {SIZE}, {SIZE}, device="meta") for _ in range({LAYERS})))

model = build()
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["same_dtype", "converted"])
def test_loading_needs_the_model_and_one_tensor(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {name: torch.ones(shape, dtype=dtype) for name, shape in (("weight", (SIZE, SIZE)), ("bias", (SIZE,)))}
    for layer in range(LAYERS):
        file = tmp_path / f"model-{layer}.safetensors"
        save_file({f"{layer}.{name}": tensor for name, tensor in tensors.items()}, file)
    run = f"""
megatrain.compile(model, weights={str(tmp_path)!r}, device="cpu", slots=1, stage_bytes=0)
with torch.no_grad():
    model(torch.ones(1, {SIZE}))
"""
    stage = PARAMETER_BYTES // LAYERS
    read = 0 if dtype == torch.float32 else 2 * stage
    assert PARAMETER_BYTES <= peak_bytes(BUILD, run) < PARAMETER_BYTES + 2 * stage + read + 16 * 2**20
