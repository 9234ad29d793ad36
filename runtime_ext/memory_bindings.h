// Registration of host memory and of the staging buffers for copies from it.
#pragma once

#include <pybind11/pybind11.h>

namespace megatrain {

// Adds HostMapping, return_freed_memory and Staging to the module.
void register_memory(pybind11::module_& module);

}  // namespace megatrain
