// Bindings of host memory and of the staging buffers for copies from it.
#include "memory_bindings.h"

#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "host_mapping.h"
#include "staging.h"

namespace py = pybind11;

namespace megatrain {

void register_memory(py::module_& module) {
  py::class_<HostMapping, std::shared_ptr<HostMapping>>(
      module, "HostMapping", "Exactly sized host memory, and tensors that keep it alive.")
      .def(py::init<std::int64_t>(), py::arg("bytes"))
      .def("tensor", &HostMapping::tensor, py::arg("offset"), py::arg("count"), py::arg("dtype"))
      .def("set_inherited", &HostMapping::set_inherited, py::arg("inherited"))
      .def("before_unmap", &HostMapping::before_unmap, py::arg("release"))
      .def_property_readonly("address", &HostMapping::address)
      .def_property_readonly("bytes", &HostMapping::bytes)
      .def_property_readonly("mapped_bytes", &HostMapping::mapped_bytes);
  module.def("return_freed_memory", &return_freed_memory, py::call_guard<py::gil_scoped_release>());
  py::class_<Staging, std::shared_ptr<Staging>>(
      module, "Staging", "Two pinned buffers through which a lane copies unregistered host memory.")
      .def(py::init<at::Tensor, at::Tensor, c10::Device, int>(), py::arg("first"), py::arg("second"),
           py::arg("device"), py::arg("threads") = 1)
      .def_property_readonly("chunk_bytes", &Staging::chunk_bytes);
}

}  // namespace megatrain
