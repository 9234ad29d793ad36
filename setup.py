"""Builds the package and its C++ runtime; needs PyTorch and a C++ compiler, no CUDA toolkit."""

from __future__ import annotations

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NAME = "megatrain_fx._runtime"
SOURCES = sorted(path.as_posix() for path in Path("runtime_ext").glob("*.cpp"))
HEADERS = sorted(path.as_posix() for path in Path("runtime_ext").glob("*.h"))
FLAGS = ["-O3", "-g0", "-Wall", "-Wextra", "-fvisibility=hidden"]


class TorchRequired(build_ext):
    """Stands in for the build step where PyTorch is missing: metadata can be made, the runtime cannot."""

    def run(self) -> None:
        raise SystemExit(
            "The C++ runtime is compiled against the installed PyTorch, and none was found. Install torch first, "
            "then run: pip install --no-build-isolation -e ."
        )


def runtime_extension() -> tuple[Extension, type[build_ext]]:
    """The extension module and the command that builds it, with PyTorch's headers as system headers."""
    try:
        import torch
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError:
        return Extension(NAME, SOURCES), TorchRequired
    extension = CppExtension(
        NAME,
        SOURCES,
        depends=HEADERS,
        define_macros=[("MEGATRAIN_TORCH_VERSION", f'"{torch.__version__}"')],
    )
    system_headers = [f"-isystem{directory}" for directory in extension.include_dirs]
    extension.include_dirs = []
    extension.extra_compile_args = {"cxx": [*FLAGS, *system_headers]}
    return extension, BuildExtension


extension, builder = runtime_extension()

setup(
    name="megatrain-fx",
    version="0.1.0",
    packages=["megatrain_fx", "megatrain_fx.optim", "megatrain_fx.passes"],
    package_dir={"megatrain_fx": "megatrain_fx", "megatrain_fx.passes": "passes"},
    package_data={"megatrain_fx": ["py.typed", "*.pyi"]},
    ext_modules=[extension],
    cmdclass={"build_ext": builder},
)
