// Registration of what runs optimizer steps in the background.
#pragma once

#include <pybind11/pybind11.h>

namespace megatrain {

// Adds Update and the functions that make one, UpdateTask, NormTask, UpdateQueue and SubmitTask to the
// module.
void register_updates(pybind11::module_& module);

}  // namespace megatrain
