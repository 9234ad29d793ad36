/// Registration of the CPU optimizer's Python functions.
#pragma once

#include <pybind11/pybind11.h>

namespace megatrain {

/// Adds WorkerPool, instruction_sets, adamw_step, sgd_step, lion_step and squared_norm to the module.
void register_optimizer(pybind11::module_& m);

}  // namespace megatrain
