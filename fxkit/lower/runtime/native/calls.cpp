// Calls: the programs of one operator, found by the types of tensors and by numbers without Python.
//
// An argument that is no tensor is a part of what a program holds for. Where a number stands for a
// tensor, the program is given the tensor that was made of it once.

enum { MOST_PROGRAMS = 16 };

struct Remembered {
  PyObject* program;
  PyObject* given;   // for each parameter MISS where it is a tensor, else the number
  PyObject* passed;  // for each parameter MISS for what is given, FREE for nothing, or a tensor
  PyObject* rule;    // how gradients are computed, or None where Python sees to them
};

struct Calls {
  PyObject_HEAD
  PyObject *names, *defaults;  // of the parameters; MISS where there is no default
  PyObject* otherwise;
  PyObject* undifferentiated;  // a callable of all arguments, for calls within `forward`
  PyObject* differentiate;     // one that calls `forward`, and keeps what gradients need
  int count, positional, program_count;  // so many parameters need no name
  Remembered programs[MOST_PROGRAMS];  // the one used last comes first
};

// Calls(names, how many of them are positional, defaults, callable for all other calls, callable of
//       all arguments that asks for no gradients)
static PyObject* new_calls(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  PyObject *names, *defaults, *otherwise, *undifferentiated;
  int positional;
  if (!PyArg_ParseTuple(args, "O!iO!OO", &PyTuple_Type, &names, &positional, &PyTuple_Type,
                        &defaults, &otherwise, &undifferentiated))
    return nullptr;
  if (PyTuple_GET_SIZE(names) > MOST_PARAMETERS ||
      PyTuple_GET_SIZE(names) != PyTuple_GET_SIZE(defaults)) {
    PyErr_SetString(PyExc_ValueError, "expected few parameters, and a default for each");
    return nullptr;
  }
  Calls* self = (Calls*)type->tp_alloc(type, 0);
  if (!self) return nullptr;
  self->names = Py_NewRef(names);
  self->defaults = Py_NewRef(defaults);
  self->otherwise = Py_NewRef(otherwise);
  self->undifferentiated = Py_NewRef(undifferentiated);
  self->count = (int)PyTuple_GET_SIZE(names);
  self->positional = positional;
  return (PyObject*)self;
}

static void forget(Remembered* one) {
  Remembered before = *one;
  *one = Remembered{};
  Py_XDECREF(before.program);
  Py_XDECREF(before.given);
  Py_XDECREF(before.passed);
  Py_XDECREF(before.rule);
}

static void move_to_front(Calls* self, int place) {
  Remembered one = self->programs[place];
  memmove(self->programs + 1, self->programs, place * sizeof one);
  self->programs[0] = one;
}

static bool has_type(PyObject* value, const char* name) {
  return !strcmp(Py_TYPE(value)->tp_name, name);
}

static bool is_same_call(const Remembered* one, const Remembered* other) {
  if (one->program != other->program) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(one->given); ++i)
    if (!is_same(PyTuple_GET_ITEM(one->given, i), PyTuple_GET_ITEM(other->given, i))) return false;
  return true;
}

// add(program, given, passed, rule): forgets an equal one, or that which was not used for longest
// where there is no room
static PyObject* add_program(PyObject* object, PyObject* args) {
  Calls* self = (Calls*)object;
  Remembered one;
  if (!PyArg_ParseTuple(args, "OO!O!O", &one.program, &PyTuple_Type, &one.given, &PyTuple_Type,
                        &one.passed, &one.rule))
    return nullptr;
  bool fits = has_type(one.program, "fxkit_binding.Program") &&
              (one.rule == Py_None || has_type(one.rule, "fxkit_binding.GradientRule"));
  if (!fits || PyTuple_GET_SIZE(one.given) != self->count || PyTuple_GET_SIZE(one.passed) != self->count) {
    PyErr_SetString(PyExc_ValueError, "expected a program, and a value for each parameter");
    return nullptr;
  }
  Py_INCREF(one.program);
  Py_INCREF(one.given);
  Py_INCREF(one.passed);
  Py_INCREF(one.rule);
  int place = 0;
  while (place < self->program_count && !is_same_call(self->programs + place, &one)) ++place;
  if (place == MOST_PROGRAMS) --place;
  Remembered before = {};
  if (place < self->program_count) before = self->programs[place];
  else ++self->program_count;
  self->programs[place] = one;
  move_to_front(self, place);
  forget(&before);
  Py_RETURN_NONE;
}

static int place_of(Calls* self, PyObject* name) {
  for (int i = 0; i < self->count; ++i)
    if (PyTuple_GET_ITEM(self->names, i) == name) return i;
  for (int i = 0; i < self->count; ++i)
    if (!PyUnicode_Compare(PyTuple_GET_ITEM(self->names, i), name)) return i;
  return -1;
}

// Whether each parameter has one value.
static bool bind_arguments(Calls* self, PyObject* args, PyObject* kwargs, PyObject** values) {
  Py_ssize_t given = PyTuple_GET_SIZE(args);
  if (given > self->positional) return false;
  for (int i = 0; i < self->count; ++i)
    values[i] = i < given ? PyTuple_GET_ITEM(args, i) : nullptr;
  PyObject *name, *value;
  Py_ssize_t position = 0;
  while (kwargs && PyDict_Next(kwargs, &position, &name, &value)) {
    int place = place_of(self, name);
    if (place < 0 || values[place]) return false;
    values[place] = value;
  }
  for (int i = (int)given; i < self->count; ++i)
    if (!values[i] && (values[i] = PyTuple_GET_ITEM(self->defaults, i)) == MISS) return false;
  return true;
}

// How many tensors a program is to be given; -1 where it does not hold for the numbers.
static int choose_tensors(const Remembered* one, int count, PyObject** values, PyObject** tensors) {
  int chosen = 0;
  for (int i = 0; i < count; ++i) {
    PyObject* given = PyTuple_GET_ITEM(one->given, i);
    PyObject* passed = PyTuple_GET_ITEM(one->passed, i);
    if (given != MISS && !is_same(values[i], given)) return -1;
    if (passed != FREE) tensors[chosen++] = passed == MISS ? values[i] : passed;
  }
  return chosen;
}

// Runs a program that holds for the arguments. Where gradients are asked for, its results get a
// node of autograd.
static PyObject* run_remembered(const Remembered* one, PyObject** tensors, int count,
                                bool is_differentiated) {
  if (is_differentiated && one->rule == Py_None) return Py_NewRef(MISS);
  PyObject* result = run_program((Program*)one->program, tensors, count, is_differentiated);
  if (!is_differentiated || !result || result == MISS) return result;
  if (attach_gradients((GradientRule*)one->rule, tensors, result)) return result;
  Py_DECREF(result);
  return nullptr;
}

static PyObject* call_remembered(Calls* self, PyObject** values, bool is_differentiated) {
  PyObject* tensors[MOST_PARAMETERS];
  for (int i = 0; i < self->program_count; ++i) {
    int count = choose_tensors(self->programs + i, self->count, values, tensors);
    if (count < 0) continue;
    Remembered one = self->programs[i];
    Py_INCREF(one.program);
    Py_INCREF(one.passed);
    Py_INCREF(one.rule);
    PyObject* result = run_remembered(&one, tensors, count, is_differentiated);
    bool is_here = i < self->program_count && self->programs[i].program == one.program;
    Py_DECREF(one.program);
    Py_DECREF(one.passed);
    Py_DECREF(one.rule);
    if (result != MISS) {
      if (i && is_here) move_to_front(self, i);
      return result;
    }
    Py_DECREF(result);
    if (!is_here) break;
  }
  return Py_NewRef(MISS);
}

// Whether gradients are asked for of plain tensors, with numbers of the types that kernels expect.
// A number may stand for a tensor.
static bool asks_for_gradients(Calls* self, PyObject** values) {
  if (!self->differentiate || !aoti_torch_grad_mode_is_enabled() || !is_quiet()) return false;
  bool is_asked = false;
  for (int i = 0; i < self->count; ++i) {
    PyObject* usual = PyTuple_GET_ITEM(self->defaults, i);
    if (usual != MISS) {
      if (Py_TYPE(values[i]) != Py_TYPE(usual)) return false;
    } else if (is_tensor(values[i])) {
      if (keys_of(values[i]) != layout.plain_keys) return false;
      is_asked = is_asked || requires_grad(values[i]);
    }
  }
  return is_asked;
}

// A call whose gradients are asked for: by a node of autograd, or where there is none by an autograd
// function.
static PyObject* call_differentiated(Calls* self, PyObject** values) {
  if (attach_node) return call_remembered(self, values, true);
  for (int i = 0; i < self->count; ++i)
    if (PyTuple_GET_ITEM(self->defaults, i) == MISS && !is_tensor(values[i])) return Py_NewRef(MISS);
  return PyObject_Vectorcall(self->differentiate, values, self->count, nullptr);
}

// differentiate_by(callable of all arguments): one that calls `forward`, as an autograd function does
static PyObject* differentiate_by(PyObject* object, PyObject* function) {
  Calls* self = (Calls*)object;
  PyObject* before = self->differentiate;
  self->differentiate = Py_NewRef(function);
  Py_XDECREF(before);
  Py_RETURN_NONE;
}

// Let autograd save the tensors among all arguments, and keep the others.
static bool save_for_backward(Calls* self, PyObject* ctx, PyObject* const* values) {
  static PyObject *to_save = PyUnicode_InternFromString("to_save"),
                  *numbers = PyUnicode_InternFromString("numbers");
  int tensor_count = 0;
  for (int i = 0; i < self->count; ++i)
    tensor_count += PyTuple_GET_ITEM(self->defaults, i) == MISS;
  PyObject* saved = PyTuple_New(tensor_count);
  PyObject* kept = PyTuple_New(self->count - tensor_count);
  bool is_good = saved && kept;
  for (int i = 0, tensor = 0, number = 0; is_good && i < self->count; ++i) {
    bool is_operand = PyTuple_GET_ITEM(self->defaults, i) == MISS;
    PyTuple_SET_ITEM(is_operand ? saved : kept, is_operand ? tensor++ : number++,
                     Py_NewRef(values[i]));
  }
  is_good = is_good && !PyObject_SetAttr(ctx, to_save, saved) &&
            !PyObject_SetAttr(ctx, numbers, kept);
  Py_XDECREF(saved);
  Py_XDECREF(kept);
  return is_good;
}

// forward(context of autograd, all arguments): the call itself, without gradients
static PyObject* forward(PyObject* object, PyObject* const* args, Py_ssize_t count) {
  Calls* self = (Calls*)object;
  if (count != self->count + 1) {
    PyErr_SetString(PyExc_TypeError, "expected a context, and a value for each parameter");
    return nullptr;
  }
  PyObject* values[MOST_PARAMETERS];
  for (int i = 0; i < self->count; ++i) values[i] = args[i + 1];
  if (!save_for_backward(self, args[0], values)) return nullptr;
  PyObject* result = call_remembered(self, values, false);
  if (result != MISS) return result;
  Py_DECREF(result);
  return PyObject_Vectorcall(self->undifferentiated, args + 1, self->count, nullptr);
}

static PyObject* call_calls(PyObject* object, PyObject* args, PyObject* kwargs) {
  Calls* self = (Calls*)object;
  PyObject* values[MOST_PARAMETERS];
  if (self->program_count && bind_arguments(self, args, kwargs, values)) {
    Py_INCREF(object);
    PyObject* result = asks_for_gradients(self, values) ? call_differentiated(self, values)
                                                        : call_remembered(self, values, false);
    Py_DECREF(object);
    if (result != MISS) return result;
    Py_DECREF(result);
  }
  return PyObject_Call(self->otherwise, args, kwargs);
}

static int clear_calls(PyObject* object) {
  Calls* self = (Calls*)object;
  int count = self->program_count;
  self->program_count = 0;
  for (int i = 0; i < count; ++i) forget(self->programs + i);
  Py_CLEAR(self->otherwise);
  Py_CLEAR(self->undifferentiated);
  Py_CLEAR(self->differentiate);
  return 0;
}

static void delete_calls(PyObject* object) {
  Calls* self = (Calls*)object;
  PyObject_GC_UnTrack(object);
  clear_calls(object);
  Py_XDECREF(self->names);
  Py_XDECREF(self->defaults);
  PyTypeObject* type = Py_TYPE(object);
  type->tp_free(object);
  Py_DECREF(type);
}

static int visit_calls(PyObject* object, visitproc visit, void* arg) {
  Calls* self = (Calls*)object;
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->otherwise);
  Py_VISIT(self->undifferentiated);
  Py_VISIT(self->differentiate);
  for (int i = 0; i < self->program_count; ++i) {
    Py_VISIT(self->programs[i].program);
    Py_VISIT(self->programs[i].given);
    Py_VISIT(self->programs[i].passed);
    Py_VISIT(self->programs[i].rule);
  }
  return 0;
}

static PyMethodDef calls_methods[] = {
    {"add", add_program, METH_VARARGS, nullptr},
    {"differentiate_by", differentiate_by, METH_O, nullptr},
    {"forward", (PyCFunction)(void*)forward, METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

static PyType_Slot calls_slots[] = {
    {Py_tp_new, (void*)new_calls},        {Py_tp_dealloc, (void*)delete_calls},
    {Py_tp_traverse, (void*)visit_calls}, {Py_tp_clear, (void*)clear_calls},
    {Py_tp_call, (void*)call_calls},      {Py_tp_methods, calls_methods},
    {0, nullptr},
};

static PyType_Spec calls_type = {"fxkit_binding.Calls", sizeof(Calls), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, calls_slots};
