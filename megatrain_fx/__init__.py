"""MegaTrain-FX: a PyTorch compiler that trains models larger than the accelerator's memory.

    import megatrain_fx as megatrain
    model = megatrain.compile(model)

The schedule of a training step is produced by torch.fx passes, printed, verified, and run by a small C++ runtime.
"""

from megatrain_fx import optim
from megatrain_fx.compiler import compile, synchronize, trace  # noqa: A004
from megatrain_fx.config import StreamConfig
from megatrain_fx.errors import (
    CaptureError,
    ConfigError,
    DataDependentGlueError,
    ExecutionError,
    InputDeviceError,
    MegatrainError,
    ModelChangedError,
    ModelDeviceError,
    NoParametersError,
    OptimizerError,
    OutputTreeError,
    ParameterHookError,
    PassError,
    RuntimeExtensionError,
    ScheduleError,
    ScheduleParseError,
    StaleWeightsError,
    UnsupportedInputError,
    WeightsError,
)
from megatrain_fx.memory import MemoryReport, memory
from megatrain_fx.program import Program
from megatrain_fx.schedule import Schedule

__all__ = [
    "CaptureError",
    "ConfigError",
    "DataDependentGlueError",
    "ExecutionError",
    "InputDeviceError",
    "MegatrainError",
    "MemoryReport",
    "ModelChangedError",
    "ModelDeviceError",
    "NoParametersError",
    "OptimizerError",
    "OutputTreeError",
    "ParameterHookError",
    "PassError",
    "Program",
    "RuntimeExtensionError",
    "Schedule",
    "ScheduleError",
    "ScheduleParseError",
    "StaleWeightsError",
    "StreamConfig",
    "UnsupportedInputError",
    "WeightsError",
    "compile",
    "memory",
    "optim",
    "synchronize",
    "trace",
]
__version__ = "0.1.0"
