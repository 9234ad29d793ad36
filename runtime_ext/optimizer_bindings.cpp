/// Python functions of the CPU optimizer: tensors are checked here and are raw memory everywhere below.
#include "optimizer_bindings.h"

#include <ATen/core/Tensor.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "optimizer.h"
#include "optimizer_list.h"

namespace py = pybind11;

namespace megatrain {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

std::string describe(const at::Tensor& tensor) {
  std::string text = std::string(c10::toString(tensor.scalar_type())) + "[";
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    text += (dim ? ", " : "") + std::to_string(tensor.size(dim));
  return text + "] on " + tensor.device().str();
}

/// Requires a dense 1-D CPU tensor of the given type and size.
void require_flat(const std::string& function, const std::string& name, const at::Tensor& tensor,
                  at::ScalarType dtype, int64_t size) {
  const std::string found = function + ": " + name + " is " + describe(tensor);
  if (tensor.layout() != c10::kStrided || !tensor.device().is_cpu()) {
    throw py::value_error(found + "; give a dense CPU tensor");
  }
  if (tensor.scalar_type() != dtype) {
    throw py::type_error(found + "; its dtype must be " + c10::toString(dtype));
  }
  if (tensor.dim() != 1 || !tensor.is_contiguous()) {
    throw py::value_error(found + "; give a contiguous 1-D tensor, such as a flat region or tensor.view(-1)");
  }
  if (tensor.numel() != size) {
    throw py::value_error(found + "; it must have as many elements as param, " + std::to_string(size));
  }
}

/// What every step takes besides its own hyperparameters.
struct StepArguments {
  std::string function;
  at::Tensor param;
  at::Tensor grad;
  std::vector<std::pair<std::string, at::Tensor>> states;
  OptionalTensor remainder;
  int64_t step;
  double grad_scale;
  std::optional<uint64_t> stochastic_seed;
};

at::ScalarType require_parameter_dtype(const std::string& function, const std::string& name,
                                       const at::Tensor& tensor) {
  const at::ScalarType dtype = tensor.scalar_type();
  if (dtype == at::kFloat || dtype == at::kBFloat16) return dtype;
  throw py::type_error(function + ": " + name + " is " + describe(tensor) +
                       "; its dtype must be Float (torch.float32) or BFloat16 (torch.bfloat16)");
}

void check_options(const StepArguments& given, at::ScalarType dtype) {
  if (given.remainder && dtype != at::kBFloat16) {
    throw py::type_error(given.function + ": a remainder was given with param " + describe(given.param) +
                         "; only a BFloat16 parameter has one, give None");
  }
  if (given.stochastic_seed && (given.remainder || dtype != at::kBFloat16)) {
    throw py::value_error(
        given.function +
        ": stochastic_seed was given, but nothing is rounded here: the master is exact float32; "
        "give None, or BFloat16 parameters without a remainder");
  }
  if (given.step < 1) {
    throw py::value_error(given.function + ": step is " + std::to_string(given.step) +
                          "; the first step is 1");
  }
}

Region region_of(const StepArguments& given) {
  const at::ScalarType dtype = require_parameter_dtype(given.function, "param", given.param);
  Region region;
  region.size = given.param.numel();
  require_flat(given.function, "param", given.param, dtype, region.size);
  require_flat(given.function, "grad", given.grad, dtype, region.size);
  check_options(given, dtype);
  region.precision = dtype == at::kFloat ? Precision::kFloat32 : Precision::kBFloat16;
  if (given.remainder) {
    require_flat(given.function, "remainder", *given.remainder, at::kShort, region.size);
    region.precision = Precision::kBFloat16Split;
    region.remainder = given.remainder->data_ptr<int16_t>();
  }
  for (size_t k = 0; k < given.states.size(); ++k) {
    const auto& [name, state] = given.states[k];
    require_flat(given.function, name, state, at::kFloat, region.size);
    region.state[k] = state.data_ptr<float>();
  }
  region.param = given.param.data_ptr();
  region.grad = given.grad.const_data_ptr();
  region.grad_scale = static_cast<float>(given.grad_scale);
  region.stochastic_rounding = given.stochastic_seed.has_value();
  if (given.stochastic_seed) {
    derive_stochastic_key(*given.stochastic_seed, static_cast<uint64_t>(given.step), region.stochastic_key);
  }
  return region;
}

/// Checks the tensors, runs the step without the GIL, and tells autograd that the parameters changed.
template <class Optimizer>
void run_step(WorkerPool& pool, const StepArguments& given, const Optimizer& optimizer,
              const std::string& instruction_set) {
  const Region region = region_of(given);
  const InstructionSet instructions = instruction_set_named(instruction_set);
  {
    const py::gil_scoped_release no_gil;
    update_region(pool, region, optimizer, instructions);
  }
  if (!given.param.is_inference()) given.param.unsafeGetTensorImpl()->bump_version();
}

void adamw_step(WorkerPool& pool, const at::Tensor& param, const at::Tensor& grad, const at::Tensor& exp_avg,
                const at::Tensor& exp_avg_sq, const OptionalTensor& remainder, double lr, double beta1,
                double beta2, double eps, double weight_decay, int64_t step, double grad_scale,
                std::optional<uint64_t> stochastic_seed, bool decoupled, const std::string& instruction_set) {
  const StepArguments given{
      "adamw_step", param, grad,       {{"exp_avg", exp_avg}, {"exp_avg_sq", exp_avg_sq}},
      remainder,    step,  grad_scale, stochastic_seed};
  run_step(pool, given, AdamW({lr, beta1, beta2, eps, weight_decay, step, decoupled}), instruction_set);
}

void sgd_step(WorkerPool& pool, const at::Tensor& param, const at::Tensor& grad,
              const OptionalTensor& momentum_buffer, const OptionalTensor& remainder, double lr,
              double momentum, double dampening, double weight_decay, bool nesterov, int64_t step,
              double grad_scale, std::optional<uint64_t> stochastic_seed,
              const std::string& instruction_set) {
  StepArguments given{"sgd_step", param, grad, {}, remainder, step, grad_scale, stochastic_seed};
  if (momentum == 0.0) {
    run_step(pool, given, Sgd(lr, weight_decay), instruction_set);
    return;
  }
  if (!momentum_buffer) {
    throw py::value_error("sgd_step: momentum is " + std::to_string(momentum) +
                          " but momentum_buffer is None; give a Float tensor of param's size");
  }
  given.states = {{"momentum_buffer", *momentum_buffer}};
  const bool first_step = step == 1;
  run_step(pool, given, SgdMomentum({lr, momentum, dampening, weight_decay, nesterov, first_step}),
           instruction_set);
}

void lion_step(WorkerPool& pool, const at::Tensor& param, const at::Tensor& grad, const at::Tensor& exp_avg,
               const OptionalTensor& remainder, double lr, double beta1, double beta2, double weight_decay,
               int64_t step, double grad_scale, std::optional<uint64_t> stochastic_seed,
               const std::string& instruction_set) {
  const StepArguments given{"lion_step", param, grad,       {{"exp_avg", exp_avg}},
                            remainder,   step,  grad_scale, stochastic_seed};
  run_step(pool, given, Lion(lr, beta1, beta2, weight_decay), instruction_set);
}

double squared_norm_of(WorkerPool& pool, const at::Tensor& grad, const std::string& instruction_set) {
  const at::ScalarType dtype = require_parameter_dtype("squared_norm", "grad", grad);
  require_flat("squared_norm", "grad", grad, dtype, grad.numel());
  Region region;
  region.precision = dtype == at::kFloat ? Precision::kFloat32 : Precision::kBFloat16;
  region.grad = grad.const_data_ptr();
  region.size = grad.numel();
  const InstructionSet instructions = instruction_set_named(instruction_set);
  const py::gil_scoped_release no_gil;
  return squared_norm(pool, region, instructions);
}

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (InstructionSet instruction_set : supported_instruction_sets())
    names.push_back(name_of(instruction_set));
  return names;
}

}  // namespace

void register_optimizer(pybind11::module_& m) {
  py::class_<WorkerPool, std::shared_ptr<WorkerPool>>(
      m, "WorkerPool", "A fixed set of threads for CPU optimizer steps, the caller included.")
      .def(py::init<int>(), py::arg("threads"))
      .def_property_readonly("threads", &WorkerPool::threads);
  m.def("instruction_sets", &instruction_sets,
        "Instruction sets that have kernels on this processor, best first.");
  m.def("adamw_step", &adamw_step, py::arg("pool"), py::arg("param"), py::arg("grad"), py::arg("exp_avg"),
        py::arg("exp_avg_sq"), py::arg("remainder"), py::kw_only(), py::arg("lr"), py::arg("beta1"),
        py::arg("beta2"), py::arg("eps"), py::arg("weight_decay"), py::arg("step"),
        py::arg("grad_scale") = 1.0, py::arg("stochastic_seed") = py::none(), py::arg("decoupled") = true,
        py::arg("instruction_set") = "auto",
        "One AdamW step (Adam if not decoupled) of a flat region, in place.");
  m.def("sgd_step", &sgd_step, py::arg("pool"), py::arg("param"), py::arg("grad"), py::arg("momentum_buffer"),
        py::arg("remainder"), py::kw_only(), py::arg("lr"), py::arg("momentum"), py::arg("dampening"),
        py::arg("weight_decay"), py::arg("nesterov"), py::arg("step"), py::arg("grad_scale") = 1.0,
        py::arg("stochastic_seed") = py::none(), py::arg("instruction_set") = "auto",
        "One step of gradient descent, with or without momentum, of a flat region, in place.");
  m.def("lion_step", &lion_step, py::arg("pool"), py::arg("param"), py::arg("grad"), py::arg("exp_avg"),
        py::arg("remainder"), py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"),
        py::arg("weight_decay"), py::arg("step"), py::arg("grad_scale") = 1.0,
        py::arg("stochastic_seed") = py::none(), py::arg("instruction_set") = "auto",
        "One Lion step of a flat region, in place.");
  m.def("squared_norm", &squared_norm_of, py::arg("pool"), py::arg("grad"),
        py::arg("instruction_set") = "auto",
        "The sum of the squares of a flat gradient, accumulated in float64 in a fixed order.");
}

}  // namespace megatrain
