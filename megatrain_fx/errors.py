"""Every error that this package raises, one class a kind of failure.

Each message says what was found, where (operation, stage, unit, parameter or source line), and what to do.
"""


class MegatrainError(Exception):
    """Base of all errors of this package."""


class ConfigError(MegatrainError, ValueError):
    """A compile option has a value that cannot work."""


class NoParametersError(MegatrainError, ValueError):
    """The model owns no parameter, so there is nothing to stream."""


class ModelDeviceError(MegatrainError, ValueError):
    """Some parameter is not on the CPU (or, for a traced model, on the meta device)."""


class WeightsError(MegatrainError, RuntimeError):
    """Files of weights are damaged, or do not hold what the model needs."""


class InputDeviceError(MegatrainError, ValueError):
    """A tensor given to the model is not on the device where the model computes."""


class ModelChangedError(MegatrainError, RuntimeError):
    """Parameters or modules of a compiled model were replaced, added or removed after its first call."""


class ParameterHookError(MegatrainError, RuntimeError):
    """A parameter has a hook that cannot run as it would in eager PyTorch."""


class CaptureError(MegatrainError):
    """The model's forward could not be captured as a graph of units and glue."""


class DataDependentGlueError(CaptureError):
    """Code outside every unit branches on the values of a tensor."""


class UnsupportedInputError(CaptureError, TypeError):
    """An argument is neither a tensor nor a plain constant, so a captured graph cannot stand for the call."""


class OutputTreeError(CaptureError, TypeError):
    """The model returns something that is not a tree of tensors and plain constants."""


class PassError(MegatrainError):
    """A pass was given a graph that lacks what it requires, or did not deliver what it promises."""


class ScheduleError(MegatrainError):
    """A schedule is not legal: a race, a deadlock, a value read before it is written, or a broken rule."""


class ScheduleParseError(ScheduleError, ValueError):
    """A text is not a schedule."""


class RuntimeExtensionError(MegatrainError, ImportError):
    """The C++ runtime is missing, or was built for another version of PyTorch."""


class ExecutionError(MegatrainError, RuntimeError):
    """An operation failed on a lane while a schedule ran."""


class StaleWeightsError(MegatrainError, RuntimeError):
    """Parameters were modified between a forward pass and its backward pass."""


class OptimizerError(MegatrainError, RuntimeError):
    """An optimizer is used in an order in which its overlapped updates would not be what was asked for."""
