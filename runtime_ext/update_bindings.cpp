// Bindings of updates, the tasks that do them, and the queue that runs these in the background.
#include "update_bindings.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "norm_task.h"
#include "optimizer_list.h"
#include "signals.h"
#include "update.h"
#include "update_queue.h"
#include "update_task.h"

namespace py = pybind11;

namespace megatrain {

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;
using Seed = std::optional<std::uint64_t>;
using UpdatePointer = std::shared_ptr<Update>;
using UpdateSegmentTuple = std::tuple<std::int64_t, std::int64_t, std::int64_t, at::ScalarType, std::size_t>;
using NormSegmentTuple = std::tuple<std::int64_t, std::int64_t, at::ScalarType>;

template <class Optimizer>
UpdatePointer make_update(const Optimizer& optimizer, std::int64_t step, double grad_scale, Seed seed) {
  if (step < 1) throw py::value_error("step is " + std::to_string(step) + "; the first step is 1");
  return std::make_shared<UpdateOf<Optimizer>>(optimizer, UpdateOptions{step, grad_scale, seed});
}

UpdatePointer adamw_update(double lr, double beta1, double beta2, double eps, double weight_decay,
                           std::int64_t step, double grad_scale, Seed seed) {
  return make_update(AdamW({lr, beta1, beta2, eps, weight_decay, step, true}), step, grad_scale, seed);
}

UpdatePointer sgd_update(double lr, double momentum, double dampening, double weight_decay, bool nesterov,
                         std::int64_t step, double grad_scale, Seed seed) {
  if (momentum == 0) return make_update(Sgd(lr, weight_decay), step, grad_scale, seed);
  const bool first_step = step == 1;
  return make_update(SgdMomentum({lr, momentum, dampening, weight_decay, nesterov, first_step}), step,
                     grad_scale, seed);
}

UpdatePointer lion_update(double lr, double beta1, double beta2, double weight_decay, std::int64_t step,
                          double grad_scale, Seed seed) {
  return make_update(Lion(lr, beta1, beta2, weight_decay), step, grad_scale, seed);
}

void set_updates(UpdateTask& task, const std::vector<UpdateSegmentTuple>& tuples,
                 const std::vector<UpdatePointer>& updates, std::optional<at::Tensor> rows, bool chosen) {
  std::vector<UpdateSegment> segments;
  segments.reserve(tuples.size());
  for (const auto& [byte_offset, state_offset, count, dtype, update] : tuples) {
    segments.push_back({byte_offset, state_offset, count, dtype, update});
  }
  std::optional<RowSelection> selection;
  if (rows) selection = RowSelection{std::move(*rows), chosen};
  task.set(std::move(segments), {updates.begin(), updates.end()}, std::move(selection));
}

void set_norm_segments(NormTask& task, const std::vector<NormSegmentTuple>& tuples) {
  std::vector<NormSegment> segments;
  segments.reserve(tuples.size());
  for (const auto& [byte_offset, count, dtype] : tuples) segments.push_back({byte_offset, count, dtype});
  task.set_segments(std::move(segments));
}

// Its thread may need the GIL to finish what is pending, and its last owner may hold the GIL.
void destroy(UpdateQueue* queue) {
  if (PyGILState_Check() == 0) {
    delete queue;
    return;
  }
  const py::gil_scoped_release no_gil;
  delete queue;
}

std::shared_ptr<UpdateQueue> make_queue(int threads) { return {new UpdateQueue(threads), destroy}; }

void register_update(py::module_& module) {
  py::class_<Update, UpdatePointer>(module, "Update",
                                    "One step of one optimizer, for one group of parameters.");
  module.def("adamw_update", &adamw_update, py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"),
             py::arg("eps"), py::arg("weight_decay"), py::arg("step"), py::arg("grad_scale") = 1.0,
             py::arg("stochastic_seed") = py::none(), "A step of AdamW.");
  module.def("sgd_update", &sgd_update, py::kw_only(), py::arg("lr"), py::arg("momentum"),
             py::arg("dampening"), py::arg("weight_decay"), py::arg("nesterov"), py::arg("step"),
             py::arg("grad_scale") = 1.0, py::arg("stochastic_seed") = py::none(),
             "A step of gradient descent, with or without momentum.");
  module.def("lion_update", &lion_update, py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"),
             py::arg("weight_decay"), py::arg("step"), py::arg("grad_scale") = 1.0,
             py::arg("stochastic_seed") = py::none(), "A step of Lion.");
}

void register_region_tasks(py::module_& module) {
  py::class_<UpdateTask, Task, std::shared_ptr<UpdateTask>>(module, "UpdateTask",
                                                            "The optimizer's step of one region.")
      .def(py::init<at::Tensor, at::Tensor, std::vector<at::Tensor>, std::optional<at::Tensor>,
                    std::shared_ptr<WorkerPool>>(),
           py::arg("weights"), py::arg("gradients"), py::arg("states"), py::arg("remainder"),
           py::arg("pool").none(false))
      .def("set", &set_updates, py::arg("segments"), py::arg("updates"), py::arg("rows") = py::none(),
           py::arg("chosen") = true, NoGil())
      .def("run", &UpdateTask::run, NoGil())
      .def_property_readonly("runs", &UpdateTask::runs);
  py::class_<NormTask, Task, std::shared_ptr<NormTask>>(module, "NormTask",
                                                        "The sum of the squares of one region's gradients.")
      .def(py::init<at::Tensor, std::shared_ptr<WorkerPool>>(), py::arg("gradients"),
           py::arg("pool").none(false))
      .def("set_segments", &set_norm_segments, py::arg("segments"), NoGil())
      .def("run", &NormTask::run, NoGil())
      .def_property_readonly("value", &NormTask::value)
      .def_property_readonly("runs", &NormTask::runs);
}

void register_queue(py::module_& module) {
  py::class_<UpdateQueue, std::shared_ptr<UpdateQueue>>(
      module, "UpdateQueue", "Runs updates in the background, the most urgent first.")
      .def(py::init(&make_queue), py::arg("threads"))
      .def("submit", &UpdateQueue::submit, py::arg("priority"), py::arg("task").none(false),
           py::arg("gate").none(false), py::arg("name") = "an update", NoGil())
      .def(
          "wait", [](UpdateQueue& queue) { queue.wait(check_python_signals); }, NoGil())
      .def("close", &UpdateQueue::close, NoGil())
      .def_property_readonly("pending", &UpdateQueue::pending)
      .def_property_readonly("pool", &UpdateQueue::pool);
  py::class_<SubmitTask, Task, std::shared_ptr<SubmitTask>>(module, "SubmitTask", "Hands a task to a queue.")
      .def(py::init<std::shared_ptr<UpdateQueue>, std::int64_t, std::shared_ptr<Task>, std::shared_ptr<Gate>,
                    std::string>(),
           py::arg("queue").none(false), py::arg("priority"), py::arg("task").none(false),
           py::arg("gate").none(false), py::arg("name") = "an update")
      .def("run", &SubmitTask::run, NoGil());
}

}  // namespace

void register_updates(py::module_& module) {
  register_update(module);
  register_region_tasks(module);
  register_queue(module);
}

}  // namespace megatrain
