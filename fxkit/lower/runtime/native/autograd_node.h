// What the binding and the node of autograd, which is a library of its own, ask of each other. A
// handle is the address of an at::Tensor. All is called with the lock of Python's interpreter held.

// How the gradients of a call are computed.
struct fx_gradient_rule {
  const char* name;  // of the node
  void* record;      // what the functions are given
  // Computes those that are needed, as new handles in `found`: 0, or else an exception is set.
  int (*differentiate)(void* record, void* const* operands, void* const* grads, const bool* needed,
                       void** found);
  void (*retain)(void* record);
  void (*release)(void* record);
};

// Makes results those of a call whose gradients are asked for: 0, or else an exception is set.
typedef int (*fx_attach_function)(const fx_gradient_rule* rule, void* const* operands,
                                  int operand_count, void* const* results, int result_count);
