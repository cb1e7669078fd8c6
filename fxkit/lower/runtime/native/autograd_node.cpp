// The node of autograd for a call of an operator. This alone takes torch's headers, which take long
// to compile, so it is a library of its own. What is a gradient it asks of the binding.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#if __has_include(<torch/csrc/autograd/node_creation_hook.h>)  // since torch 2.14
#include <torch/csrc/autograd/node_creation_hook.h>
#define FX_HAS_CREATION_HOOKS
#endif

namespace {
using namespace torch::autograd;
using torch::dynamo::autograd::CompiledNodeArgs;
using torch::dynamo::autograd::IValuePacker;
using torch::dynamo::autograd::PackedArgs;
using torch::dynamo::autograd::SwapSavedVariables;

// An intrusive pointer since torch 2.13.
using NodePointer = decltype(Edge::function);

class PythonLock {
 public:
  PythonLock() : state_(PyGILState_Ensure()) {}
  ~PythonLock() { PyGILState_Release(state_); }

 private:
  PyGILState_STATE state_;
};

// What a gradient is summed and converted to: what its operand is.
at::Tensor fitted(at::Tensor found, const at::Tensor& operand) {
  if (!found.sizes().equals(operand.sizes())) found = found.sum_to_size(operand.sizes());
  if (found.scalar_type() != operand.scalar_type()) found = found.to(operand.scalar_type());
  return found;
}

variable_list gradients_of(const fx_gradient_rule& rule, const variable_list& operands,
                           const variable_list& grads, const std::vector<bool>& needed) {
  size_t count = operands.size();
  c10::SmallVector<void*, 8> given, slopes, found(count, nullptr);
  c10::SmallVector<bool, 8> flags(needed.begin(), needed.end());
  for (const auto& operand : operands) given.push_back((void*)&operand);
  for (const auto& grad : grads) slopes.push_back((void*)&grad);
  bool has_failed = false;
  {
    PythonLock lock;
    has_failed =
        rule.differentiate(rule.record, given.data(), slopes.data(), flags.data(), found.data());
    if (has_failed) {
      for (void* one : found) delete (at::Tensor*)one;
      python_error error;
      error.persist();
      throw error;
    }
  }
  variable_list gradients(count);
  for (size_t i = 0; i < count; ++i) {
    if (!found[i]) continue;
    gradients[i] = std::move(*(at::Tensor*)found[i]);
    delete (at::Tensor*)found[i];
  }
  for (size_t i = 0; i < count; ++i)
    if (gradients[i].defined()) gradients[i] = fitted(std::move(gradients[i]), operands[i]);
  return gradients;
}

// The same for compiled autograd, which has packed what the node knows.
variable_list gradients_of_packed(const variable_list& grads, const std::vector<c10::IValue>& args) {
  PackedArgs packed(args);
  auto rule = (const fx_gradient_rule*)packed.unpack<int64_t>();
  auto needed = packed.unpack<std::vector<bool>>();
  auto count = packed.unpack<int64_t>();
  variable_list operands, given;
  for (int64_t i = 0; i < count; ++i) operands.push_back(packed.unpack<at::Tensor>());
  for (const auto& grad : grads) {
    TORCH_CHECK_NOT_IMPLEMENTED(grad.defined(), "a result without a gradient");
    given.push_back(grad);
  }
  return gradients_of(*rule, operands, given, needed);
}

class OperatorNode : public Node {
 public:
  OperatorNode(const fx_gradient_rule* rule, edge_list&& edges)
      : Node(std::move(edges)), rule_(rule) {
    rule_->retain(rule_->record);
  }

  ~OperatorNode() override {
    if (!Py_IsInitialized()) return;
    PythonLock lock;
    rule_->release(rule_->record);
  }

  void save(const at::Tensor& operand) { operands_.emplace_back(operand, /*is_output=*/false); }

  // Takes note of a result; one that has no gradient is given zeros for it.
  void add_result(const at::Tensor& result, const NodePointer& self) {
    if (isDifferentiableType(result.scalar_type())) {
      set_history(result, self);
      zeros_.emplace_back();
    } else {
      add_input_metadata(undefined_input());
      zeros_.push_back(at::zeros({}, result.options()).expand(result.sizes()));
    }
  }

  std::string name() const override { return rule_->name; }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& operand : operands_) operand.reset_data();
  }

  void compiled_args(CompiledNodeArgs& args) const override {
    args.collect((int64_t)rule_);
    for (const auto& operand : operands_) args.collect(operand, /*is_output=*/false);
  }

  variable_list apply_with_saved(const variable_list& inputs, SwapSavedVariables& saved) override {
    {
      PythonLock lock;
      rule_->retain(rule_->record);  // for ever: what is compiled has its address
    }
    for (auto& operand : operands_) saved.before(operand);
    PackedArgs packed;
    packed.pack((int64_t)rule_);
    packed.pack(needed());
    packed.pack((int64_t)operands_.size());
    for (const auto& operand : unpacked()) packed.pack(operand);
    variable_list found = traced(inputs, saved, packed.vec());
    for (auto& operand : operands_) saved.after(operand);
    return found;
  }

 protected:
  variable_list apply(variable_list&& grads) override {
    for (size_t i = 0; i < grads.size(); ++i)
      if (!grads[i].defined())
        grads[i] = zeros_[i].defined() ? zeros_[i] : input_metadata(i).zeros_like();
    variable_list operands;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      operands = unpacked();
    }
    return gradients_of(*rule_, operands, grads, needed());
  }

 private:
  const fx_gradient_rule* rule_;
  c10::SmallVector<SavedVariable, 2> operands_;
  c10::SmallVector<at::Tensor, 1> zeros_;

  variable_list unpacked() const {
    variable_list found;
    found.reserve(operands_.size());
    for (const auto& operand : operands_) found.push_back(operand.unpack());
    return found;
  }

  std::vector<bool> needed() const {
    std::vector<bool> found(operands_.size());
    for (size_t i = 0; i < found.size(); ++i) found[i] = task_should_compute_output(i);
    return found;
  }

  variable_list traced(const variable_list& inputs, SwapSavedVariables& saved,
                       const std::vector<c10::IValue>& args) {
    std::vector<at::TypePtr> schema;
    for (const auto& value : args)
      schema.push_back(value.isTensor() ? at::TypePtr(at::TensorType::get()) : value.type());
    auto metadata = IValuePacker<std::vector<std::optional<InputMetadata>>>::pack(
        torch::dynamo::autograd::get_input_metadata(next_edges()));
    const auto& python = torch::dynamo::autograd::getPyCompilerInterface();
    auto bound = python->bind_function(saved.get_py_compiler(), name(), gradients_of_packed, schema,
                                       /*is_custom_function=*/true, /*is_traceable=*/false);
    return python->call_function(saved.get_py_compiler(), "apply_functional", bound, inputs, args,
                                 metadata);
  }
};

template <class Made, class Pointer, class... Args>
std::pair<Pointer, Made*> made(Args&&... args) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
    Made* node = new Made(std::forward<Args>(args)...);
    return {Pointer(node, [](auto* one) { deleteNode(one); }), node};
  } else {
    auto node = c10::make_intrusive<Made>(std::forward<Args>(args)...);
    Made* address = node.get();
    return {Pointer(std::move(node)), address};
  }
}
}  // namespace

extern "C" __attribute__((visibility("default"))) int fx_attach_node(const fx_gradient_rule* rule,
                                                                     void* const* operands,
                                                                     int operand_count,
                                                                     void* const* results,
                                                                     int result_count) {
  HANDLE_TH_ERRORS
  edge_list edges;
  edges.reserve(operand_count);
  for (int i = 0; i < operand_count; ++i)
    edges.push_back(impl::gradient_edge(*(at::Tensor*)operands[i]));
  auto [pointer, node] = made<OperatorNode, NodePointer>(rule, std::move(edges));
  for (int i = 0; i < operand_count; ++i) node->save(*(at::Tensor*)operands[i]);
  for (int i = 0; i < result_count; ++i) node->add_result(*(at::Tensor*)results[i], pointer);
#ifdef FX_HAS_CREATION_HOOKS
  fire_node_creation_hooks(pointer);
#endif
  return 0;
  END_HANDLE_TH_ERRORS_RET(1)
}
