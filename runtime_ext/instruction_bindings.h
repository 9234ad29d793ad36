// Bindings of Instruction and Executor, the two classes that hold Python functions.
#pragma once

#include <pybind11/pybind11.h>

namespace megatrain {

void register_instruction(pybind11::module_& module);
void register_executor(pybind11::module_& module);

}  // namespace megatrain
