// Signals: lets Python's signal handlers end a wait of the thread that blocks in C++.
#pragma once

#include <pybind11/pybind11.h>

namespace megatrain {

// Runs pending handlers, if this is Python's main thread. Takes the GIL; throws what a handler raises.
inline void check_python_signals() {
  pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
}

}  // namespace megatrain
