// Gradient rules: how the gradients of an operator's calls with certain numbers are computed, by calls
// of other operators. The node of autograd that asks for them is in a library of its own, which may
// not be there; see autograd_node.h.

enum { MOST_RESULTS = 8 };

static fx_attach_function attach_node;  // NULL without that library

struct GradientRule {
  PyObject_HEAD
  fx_gradient_rule rule;
  PyObject* name;
  PyObject* arguments;  // of all parameters: FREE for a tensor, else the number
  PyObject* find;       // the calls of the operator that is the gradient of a tensor, by its place
  PyObject* slopes;     // those that were found, or None
  int tensor_count, result_count;
};

// Calls what computes the gradient of one tensor.
static bool call_slope(GradientRule* self, int place, PyObject** args, int count, Handle* found) {
  PyObject* calls = PyList_GET_ITEM(self->slopes, place);
  if (calls == Py_None) {
    if (!(calls = PyObject_CallFunction(self->find, "i", place))) return false;
    if (PyList_SetItem(self->slopes, place, calls)) return false;
  }
  static PyObject* fast = PyUnicode_InternFromString("fast");
  PyObject* function = PyObject_GetAttr(calls, fast);
  PyObject* result = function ? PyObject_Vectorcall(function, args, count, nullptr) : nullptr;
  Py_XDECREF(function);
  if (!result) return false;
  bool is_good = PyObject_IsInstance(result, layout.tensor) == 1 &&
                 !aoti_torch_new_tensor_handle(handle_of(result), found);
  if (!is_good && !PyErr_Occurred())
    PyErr_SetString(PyExc_TypeError, "expected a tensor as a gradient");
  Py_DECREF(result);
  return is_good;
}

static int differentiate(void* record, Handle const* operands, Handle const* grads,
                         const bool* needed, Handle* found) {
  GradientRule* self = (GradientRule*)record;
  PyObject* args[MOST_RESULTS + MOST_PARAMETERS];
  int count = 0, tensor = 0;
  for (int i = 0; i < self->result_count; ++i) args[count++] = THPVariable_Wrap(grads[i]);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->arguments); ++i) {
    PyObject* number = PyTuple_GET_ITEM(self->arguments, i);
    args[count++] = number == FREE ? THPVariable_Wrap(operands[tensor++]) : Py_NewRef(number);
  }
  bool is_good = true;
  for (int i = 0; i < count; ++i) is_good = is_good && args[i];
  for (int i = 0; is_good && i < self->tensor_count; ++i)
    if (needed[i]) is_good = call_slope(self, i, args, count, found + i);
  for (int i = 0; i < count; ++i) Py_XDECREF(args[i]);
  return !is_good;
}

static void retain_rule(void* record) { Py_INCREF((PyObject*)record); }

static void release_rule(void* record) { Py_DECREF((PyObject*)record); }

// Makes plain results those of a call of plain tensors whose gradients are asked for. Results that
// have gradients already, since torch stood in for kernels, stay as they are.
static bool attach_gradients(GradientRule* self, PyObject* const* tensors, PyObject* result) {
  Handle operands[MOST_PARAMETERS], results[MOST_RESULTS];
  PyObject* const* values = &result;
  if (PyTuple_Check(result)) values = &PyTuple_GET_ITEM(result, 0);
  for (int i = 0; i < self->result_count; ++i) {
    if (requires_grad(values[i])) return true;
    results[i] = handle_of(values[i]);
  }
  for (int i = 0; i < self->tensor_count; ++i) operands[i] = handle_of(tensors[i]);
  return !attach_node(&self->rule, operands, self->tensor_count, results, self->result_count);
}

// attach_by(address): the function of the library that has the node of autograd
static PyObject* attach_by(PyObject* module, PyObject* address) {
  attach_node = (fx_attach_function)PyLong_AsVoidPtr(address);
  if (PyErr_Occurred()) return nullptr;
  Py_RETURN_NONE;
}

// GradientRule(name of the node, arguments, callable that finds the calls of a gradient, how many
//              results there are)
static PyObject* new_gradient_rule(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  PyObject *name, *arguments, *find;
  int results, tensors = 0;
  if (!PyArg_ParseTuple(args, "UO!Oi", &name, &PyTuple_Type, &arguments, &find, &results))
    return nullptr;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(arguments); ++i)
    tensors += PyTuple_GET_ITEM(arguments, i) == FREE;
  if (results > MOST_RESULTS || PyTuple_GET_SIZE(arguments) > MOST_PARAMETERS) {
    PyErr_SetString(PyExc_ValueError, "expected few parameters and results");
    return nullptr;
  }
  GradientRule* self = (GradientRule*)type->tp_alloc(type, 0);
  if (!self) return nullptr;
  self->name = Py_NewRef(name);
  self->arguments = Py_NewRef(arguments);
  self->find = Py_NewRef(find);
  self->tensor_count = tensors;
  self->result_count = results;
  self->rule = {PyUnicode_AsUTF8(name), self, differentiate, retain_rule, release_rule};
  self->slopes = PyList_New(tensors);
  for (int i = 0; self->slopes && i < tensors; ++i)
    PyList_SET_ITEM(self->slopes, i, Py_NewRef(Py_None));
  if (self->slopes && self->rule.name) return (PyObject*)self;
  Py_DECREF(self);
  return nullptr;
}

static int clear_gradient_rule(PyObject* object) {
  GradientRule* self = (GradientRule*)object;
  Py_CLEAR(self->find);
  Py_CLEAR(self->slopes);
  return 0;
}

static int visit_gradient_rule(PyObject* object, visitproc visit, void* arg) {
  GradientRule* self = (GradientRule*)object;
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->find);
  Py_VISIT(self->slopes);
  return 0;
}

static void delete_gradient_rule(PyObject* object) {
  GradientRule* self = (GradientRule*)object;
  PyObject_GC_UnTrack(object);
  clear_gradient_rule(object);
  Py_XDECREF(self->arguments);
  Py_XDECREF(self->name);
  PyTypeObject* type = Py_TYPE(object);
  type->tp_free(object);
  Py_DECREF(type);
}

static PyType_Slot gradient_rule_slots[] = {
    {Py_tp_new, (void*)new_gradient_rule},
    {Py_tp_dealloc, (void*)delete_gradient_rule},
    {Py_tp_traverse, (void*)visit_gradient_rule},
    {Py_tp_clear, (void*)clear_gradient_rule},
    {0, nullptr},
};

static PyType_Spec gradient_rule_type = {"fxkit_binding.GradientRule", sizeof(GradientRule), 0,
                                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                                         gradient_rule_slots};
