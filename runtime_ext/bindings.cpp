// Python bindings: the module megatrain_fx._runtime.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "accumulate.h"
#include "executor.h"
#include "gate.h"
#include "instruction_bindings.h"
#include "memory_bindings.h"
#include "optimizer_bindings.h"
#include "runtime.h"
#include "signals.h"
#include "update_bindings.h"

namespace py = pybind11;

namespace megatrain {

namespace {

using SegmentTuple = std::tuple<std::int64_t, std::int64_t, at::ScalarType, int>;

void set_segments(AccumulateTask& task, const std::vector<SegmentTuple>& tuples,
                  std::optional<at::Tensor> rows) {
  std::vector<Segment> segments;
  segments.reserve(tuples.size());
  for (const auto& [byte_offset, count, dtype, mode] : tuples) {
    if (mode < 0 || mode > 2)
      throw std::invalid_argument("a segment's mode is 0 (skip), 1 (copy) or 2 (add)");
    segments.push_back({byte_offset, count, dtype, static_cast<AccumulateMode>(mode)});
  }
  task.set_segments(std::move(segments), std::move(rows));
}

void register_lane(py::module_& module) {
  py::enum_<Lane> lanes(module, "Lane", "An ordered queue of operations.");
  for (Lane lane : kLanes) lanes.value(lane_name(lane), lane);
}

void register_gate(py::module_& module) {
  py::class_<Gate, std::shared_ptr<Gate>>(
      module, "Gate", "A host-side condition that later runs wait for (e.g. 'these weights are up to date').")
      .def(py::init<>())
      .def("close", &Gate::close)
      .def("open", &Gate::open)
      .def("fail", &Gate::fail, py::arg("message"))
      .def("reset", &Gate::reset)
      .def(
          "wait", [](Gate& gate) { gate.wait(check_python_signals); },
          py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("is_open", &Gate::is_open);
}

void register_tasks(py::module_& module) {
  py::class_<Task, std::shared_ptr<Task>>(module, "Task", "Work in C++ that runs on a lane without the GIL.");
  py::class_<AccumulateTask, Task, std::shared_ptr<AccumulateTask>>(
      module, "AccumulateTask", "Moves one stage's gradients from a pinned slab into the host store.")
      .def(py::init<at::Tensor, at::Tensor, std::shared_ptr<WorkerPool>>(), py::arg("slab"),
           py::arg("gradient"), py::arg("pool") = py::none())
      .def("set_segments", &set_segments, py::arg("segments"), py::arg("rows") = py::none())
      .def("run", &AccumulateTask::run, py::call_guard<py::gil_scoped_release>());
}

void register_runtime(py::module_& module) {
  py::class_<Runtime, std::shared_ptr<Runtime>>(module, "Runtime", "The lanes of one device.")
      .def(py::init<c10::Device, std::optional<std::uint64_t>, std::int64_t>(), py::arg("device"),
           py::arg("chaos_seed") = py::none(), py::arg("chaos_delay_us") = 2000)
      .def(
          "synchronize", [](Runtime& runtime) { runtime.synchronize(check_python_signals); },
          py::call_guard<py::gil_scoped_release>())
      .def(
          "close", [](Runtime& runtime) { runtime.close(check_python_signals); },
          py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("device", &Runtime::device)
      .def_property_readonly("chaos", &Runtime::chaos);
}

}  // namespace

}  // namespace megatrain

PYBIND11_MODULE(_runtime, module) {
  module.doc() = "Lanes, executor and host tasks of MegaTrain-FX.";
  module.attr("built_for_torch") = MEGATRAIN_TORCH_VERSION;
  megatrain::register_lane(module);
  megatrain::register_gate(module);
  megatrain::register_tasks(module);
  megatrain::register_runtime(module);
  megatrain::register_memory(module);
  megatrain::register_instruction(module);
  megatrain::register_executor(module);
  megatrain::register_optimizer(module);
  megatrain::register_updates(module);
}
