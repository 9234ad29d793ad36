"""Golden files: whole schedules of six architectures and of one inference; ``EXPECTTEST_ACCEPT=1`` rewrites them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import megatrain_fx as megatrain
from golden_files import GOLDEN, assert_golden
from models import example
from traced_examples import traced

TRAINED = ("mlp", "gpt", "gpt_tied", "encoder_decoder", "moe", "skip")
INFERENCE = "gpt_inference"


@pytest.mark.parametrize("name", TRAINED)
def test_training_schedule(name: str) -> None:
    assert_golden(name, str(traced(name).program.schedule))


def test_inference_schedule() -> None:
    args, kwargs = example("gpt").make_inputs()
    options = {"device": "cpu", "slots": 3, "stage_bytes": 0}
    with torch.no_grad():
        program = megatrain.trace(example("gpt").make_model(), *args, megatrain_options=options, **kwargs)
    assert_golden(INFERENCE, str(program.schedule))


def test_every_golden_file_is_legal_and_in_use() -> None:
    files = {path.stem: path for path in GOLDEN.glob("*.txt")}
    assert set(files) == {*TRAINED, INFERENCE}
    for path in files.values():
        schedule = megatrain.Schedule.parse(path.read_text(encoding="utf-8"))
        schedule.verify()
        assert str(schedule) + "\n" == path.read_text(encoding="utf-8")


def test_a_difference_is_shown_as_a_diff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EXPECTTEST_ACCEPT", raising=False)
    (tmp_path / "model.txt").write_text("first\nold\nlast\n", encoding="utf-8")
    with pytest.raises(AssertionError) as caught:
        assert_golden("model", "first\nnew\nlast", tmp_path)
    text = str(caught.value)
    assert "\n first\n-old\n+new\n last\n" in text
    assert "EXPECTTEST_ACCEPT=1" in text


def test_a_difference_is_accepted_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPECTTEST_ACCEPT", "1")
    assert_golden("model", "new", tmp_path)
    monkeypatch.delenv("EXPECTTEST_ACCEPT")
    assert_golden("model", "new", tmp_path)


def test_a_missing_file_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EXPECTTEST_ACCEPT", raising=False)
    with pytest.raises(AssertionError, match="there is no golden file"):
        assert_golden("model", "new", tmp_path)
