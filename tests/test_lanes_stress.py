"""Random programs on the host lanes, in C++ alone, under the thread sanitizer."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.mark.slow
def test_host_lanes_under_the_thread_sanitizer(tmp_path: Path) -> None:
    root = Path(__file__).parent.parent
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler on this machine")
    sanitize = [compiler, "-std=c++17", "-O1", "-fsanitize=thread", f"-I{root / 'runtime_ext'}", "-pthread"]
    (tmp_path / "empty.cpp").write_text("int main() {}\n")
    probe = [*sanitize, str(tmp_path / "empty.cpp"), "-o", str(tmp_path / "empty")]
    if subprocess.run(probe, capture_output=True).returncode or subprocess.run(tmp_path / "empty").returncode:
        pytest.skip(f"{compiler} cannot build and run programs with -fsanitize=thread")
    sources = [root / "tests" / "cpp" / "lanes_stress.cpp"]
    sources += [root / "runtime_ext" / f"{name}.cpp" for name in ("dispatcher", "gate", "lane_thread")]
    subprocess.run([*sanitize, *map(str, sources), "-o", str(tmp_path / "lanes_stress")], check=True)
    stress = subprocess.run([tmp_path / "lanes_stress", "200", "1"], capture_output=True, text=True)
    assert stress.returncode == 0, stress.stderr
    assert stress.stdout == "200 random programs held\n"
