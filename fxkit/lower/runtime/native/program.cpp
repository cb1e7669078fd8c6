// Programs: a graph's kernels and calls of Python in one call.
//
// Between steps a value is a Python object in a slot. Inside a run of kernels values are pointers:
// to the tensors that the run is given, to those that it makes, and into one block of scratch
// memory whose layout was planned by liveness. All that a call changes lies on its own stack, so
// that calls may overlap and may call each other.
//
// A kernel's buffers are followed by the numbers that it reads at run time, where it reads any. It
// returns zero, or else what it has written is void and Python has to stand in. Large tensors that
// no one needs after a kernel are let go of there, where no later one of the run may fail.
//
// A run on another device launches its kernels on the stream that is current there. Its scratch
// memory is a tensor on that device, which later work on the stream may reuse.
typedef long (*KernelFunction)(void* const* buffers, long threads);
typedef int (*LaunchFunction)(void* const* buffers, void* scratch, void* stream, int device);
typedef int32_t (*StreamFunction)(int32_t device, void** stream);  // of torch; 0 for no error
typedef int8_t (*ExchangeFunction)(int8_t device);  // makes it current, returns which one was

struct Kernel {
  void* function;  // a KernelFunction, or a LaunchFunction
  int count;
  int* buffers;
  bool is_parallel;
  const char* numbers;  // NULL where there are none; a bytes object of the program's parts
  int* freed;           // slots
  int freed_count;
  int scratch;  // the value that is its own scratch memory, or -1; only where it is launched
};

struct Launcher {
  StreamFunction stream;  // NULL where kernels run on the processor
  ExchangeFunction exchange;
  Spec* block;  // the scratch memory of a run; NULL where it needs none
  int device_index;
};

struct Given {  // a tensor in a slot
  int slot;
  Spec* spec;
};

struct Attribute {  // a tensor in a module's table
  PyObject *table, *key;
  Spec* spec;
};

struct Step {
  PyObject* function;  // of Python: the step itself, or what stands in for a run
  PyObject* owner;     // its first argument
  int *ins, *outs, *dead;
  int in_count, out_count, dead_count;
  bool is_run;
  int given_count, attribute_count, scratch_count, kernel_count, value_count;
  Given *given, *made;  // made tensors go to the slots of `outs`
  Attribute* attributes;
  size_t scratch_bytes;
  size_t* scratch;  // offset of each value in the scratch memory, or
  int* homes;       // in that of the made tensor of this number, unless it is negative
  Kernel* kernels;
  Launcher launcher;
  bool is_long;  // whether others may run meanwhile
};

struct Link {  // table[key] has to be this object
  PyObject *table, *key, *value;
};

struct Program {
  PyObject_HEAD
  PyObject* parts;  // keeps alive all that the fields below point to
  int input_count, slot_count, step_count, link_count, grad_count, output_count;
  Spec** inputs;
  Step* steps;
  Link* links;
  Link* grads;
  int* outputs;
  bool is_single, runs_with_grad;
  long long calls, stand_ins;
};

PyObject *MISS, *FREE;

enum { ON_STACK = 64, MAX_VALUES = 128 };  // slots of a program, values of a run

// Building --------------------------------------------------------------------------------------

static bool parse_ints(PyObject* tuple, int** values, int* count) {
  if (!PyTuple_Check(tuple)) {
    PyErr_SetString(PyExc_TypeError, "expected a tuple of numbers");
    return false;
  }
  *count = (int)PyTuple_GET_SIZE(tuple);
  *values = (int*)PyMem_Calloc(*count + 1, sizeof(int));
  for (int i = 0; *values && i < *count; ++i)
    (*values)[i] = (int)PyLong_AsLong(PyTuple_GET_ITEM(tuple, i));
  return *values && !PyErr_Occurred();
}

template <class T>
static T* make_array(PyObject* tuple, int* count) {
  if (!PyTuple_Check(tuple)) {
    PyErr_SetString(PyExc_TypeError, "expected a tuple");
    return nullptr;
  }
  *count = (int)PyTuple_GET_SIZE(tuple);
  T* made = (T*)PyMem_Calloc(*count + 1, sizeof(T));
  if (!made) PyErr_NoMemory();
  return made;
}

static bool parse_links(PyObject* tuple, Link** links, int* count) {
  if (!(*links = make_array<Link>(tuple, count))) return false;
  for (int i = 0; i < *count; ++i) {
    Link* link = *links + i;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(tuple, i), "O!OO", &PyDict_Type, &link->table,
                          &link->key, &link->value))
      return false;
  }
  return true;
}

static bool parse_specs(PyObject* tuple, Spec*** specs, int* count) {
  if (!(*specs = make_array<Spec*>(tuple, count))) return false;
  for (int i = 0; i < *count; ++i)
    if (!((*specs)[i] = new_spec(PyTuple_GET_ITEM(tuple, i)))) return false;
  return true;
}

static bool parse_given(PyObject* tuple, const int* slots, Given** given, int* count) {
  if (!(*given = make_array<Given>(tuple, count))) return false;
  for (int i = 0; i < *count; ++i) {
    (*given)[i].slot = slots[i];
    if (!((*given)[i].spec = new_spec(PyTuple_GET_ITEM(tuple, i)))) return false;
  }
  return true;
}

static bool parse_attributes(PyObject* tuple, Step* step) {
  step->attributes = make_array<Attribute>(tuple, &step->attribute_count);
  for (int i = 0; step->attributes && i < step->attribute_count; ++i) {
    Attribute* one = step->attributes + i;
    PyObject* spec;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(tuple, i), "O!OO", &PyDict_Type, &one->table, &one->key,
                          &spec))
      return false;
    if (!(one->spec = new_spec(spec))) return false;
  }
  return step->attributes != nullptr;
}

static bool parse_kernels(PyObject* tuple, Step* step) {
  step->kernels = make_array<Kernel>(tuple, &step->kernel_count);
  for (int i = 0; step->kernels && i < step->kernel_count; ++i) {
    Kernel* one = step->kernels + i;
    unsigned long long address;
    PyObject *buffers, *numbers, *freed;
    int parallel;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(tuple, i), "KOpSOi", &address, &buffers, &parallel,
                          &numbers, &freed, &one->scratch))
      return false;
    one->numbers = PyBytes_GET_SIZE(numbers) ? PyBytes_AS_STRING(numbers) : nullptr;
    one->function = (void*)(uintptr_t)address;
    one->is_parallel = parallel;
    if (!parse_ints(buffers, &one->buffers, &one->count)) return false;
    if (!parse_ints(freed, &one->freed, &one->freed_count)) return false;
  }
  return step->kernels != nullptr;
}

static bool parse_launcher(PyObject* description, Launcher* launcher) {
  if (description == Py_None) return true;
  unsigned long long stream, exchange;
  PyObject* block;
  if (!PyArg_ParseTuple(description, "KKiO", &stream, &exchange, &launcher->device_index, &block))
    return false;
  launcher->stream = (StreamFunction)(uintptr_t)stream;
  launcher->exchange = (ExchangeFunction)(uintptr_t)exchange;
  return block == Py_None || (launcher->block = new_spec(block));
}

static bool parse_run(PyObject* run, Step* step) {
  PyObject *given, *attributes, *made, *homes, *scratch, *kernels, *launcher;
  long long bytes;
  int is_long, made_count, home_count, scratch_count;
  if (!PyArg_ParseTuple(run, "OOOLOOOpO", &given, &attributes, &made, &bytes, &homes, &scratch,
                        &kernels, &is_long, &launcher))
    return false;
  if (!parse_launcher(launcher, &step->launcher)) return false;
  step->is_run = true;
  step->is_long = is_long;
  step->scratch_bytes = (size_t)bytes;
  if (!parse_given(given, step->ins, &step->given, &step->given_count)) return false;
  if (!parse_attributes(attributes, step)) return false;
  if (!parse_given(made, step->outs, &step->made, &made_count)) return false;
  if (!parse_ints(homes, &step->homes, &home_count)) return false;
  if (!(step->scratch = make_array<size_t>(scratch, &scratch_count))) return false;
  for (int i = 0; i < scratch_count; ++i)
    step->scratch[i] = PyLong_AsSize_t(PyTuple_GET_ITEM(scratch, i));
  step->scratch_count = scratch_count;
  step->value_count = step->given_count + step->attribute_count + made_count + scratch_count;
  if (PyErr_Occurred() || !parse_kernels(kernels, step)) return false;
  bool is_small = step->value_count <= MAX_VALUES && made_count == step->out_count;
  is_small = is_small && home_count == scratch_count;
  for (int i = 0; i < home_count; ++i) is_small = is_small && step->homes[i] < made_count;
  for (int i = 0; i < step->kernel_count; ++i)
    is_small = is_small && step->kernels[i].count <= MAX_VALUES &&
               step->kernels[i].scratch < step->value_count;
  if (!is_small) PyErr_SetString(PyExc_ValueError, "expected a run of fewer values");
  return is_small;
}

static bool parse_step(PyObject* description, Step* step) {
  PyObject *ins, *outs, *dead, *run;
  if (!PyArg_ParseTuple(description, "OOOOOO", &step->function, &step->owner, &ins, &outs, &dead,
                        &run))
    return false;
  return parse_ints(ins, &step->ins, &step->in_count) &&
         parse_ints(outs, &step->outs, &step->out_count) &&
         parse_ints(dead, &step->dead, &step->dead_count) &&
         (run == Py_None || parse_run(run, step));
}

// Program(inputs, slots, links, grads, runs with grad, steps, outputs, is single)
static PyObject* new_program(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  PyObject *inputs, *links, *grads, *steps, *outputs;
  int slots, with_grad, single;
  if (!layout.is_known) {
    PyErr_SetString(PyExc_RuntimeError, "expected the layout of tensors to be known");
    return nullptr;
  }
  if (!PyArg_ParseTuple(args, "OiOOpOOp", &inputs, &slots, &links, &grads, &with_grad, &steps,
                        &outputs, &single))
    return nullptr;
  Program* self = (Program*)type->tp_alloc(type, 0);
  if (!self) return nullptr;
  self->parts = Py_NewRef(args);
  self->slot_count = slots;
  self->is_single = single;
  self->runs_with_grad = with_grad;
  bool is_good = parse_specs(inputs, &self->inputs, &self->input_count) &&
                 parse_links(links, &self->links, &self->link_count) &&
                 parse_links(grads, &self->grads, &self->grad_count) &&
                 parse_ints(outputs, &self->outputs, &self->output_count) &&
                 (self->steps = make_array<Step>(steps, &self->step_count));
  for (int i = 0; is_good && i < self->step_count; ++i)
    is_good = parse_step(PyTuple_GET_ITEM(steps, i), self->steps + i);
  if (is_good) return (PyObject*)self;
  Py_DECREF(self);
  return nullptr;
}

static void free_specs(Given* given, int count) {
  for (int i = 0; given && i < count; ++i) PyMem_Free(given[i].spec);
  PyMem_Free(given);
}

static void free_step(Step* step) {
  free_specs(step->given, step->given_count);
  free_specs(step->made, step->is_run ? step->out_count : 0);
  for (int i = 0; step->attributes && i < step->attribute_count; ++i)
    PyMem_Free(step->attributes[i].spec);
  for (int i = 0; step->kernels && i < step->kernel_count; ++i) {
    PyMem_Free(step->kernels[i].buffers);
    PyMem_Free(step->kernels[i].freed);
  }
  void* arrays[] = {step->attributes, step->kernels, step->scratch, step->homes,
                    step->ins,        step->outs,    step->dead,    step->launcher.block};
  for (void* array : arrays) PyMem_Free(array);
}

static int clear_program(PyObject* object) {
  Py_CLEAR(((Program*)object)->parts);
  return 0;
}

static void delete_program(PyObject* object) {
  Program* self = (Program*)object;
  PyObject_GC_UnTrack(object);
  for (int i = 0; self->inputs && i < self->input_count; ++i) PyMem_Free(self->inputs[i]);
  for (int i = 0; self->steps && i < self->step_count; ++i) free_step(self->steps + i);
  void* arrays[] = {self->inputs, self->steps, self->links, self->grads, self->outputs};
  for (void* array : arrays) PyMem_Free(array);
  clear_program(object);
  PyTypeObject* type = Py_TYPE(object);
  type->tp_free(object);
  Py_DECREF(type);
}

static int visit_program(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(((Program*)object)->parts);
  return 0;
}

// Running ---------------------------------------------------------------------------------------

// A slot is read as NULL where an earlier step has let go of it: that can't be.
static bool call_python(Step* step, PyObject** slots) {
  PyObject* box = PyList_New(step->in_count);
  if (!box) return false;
  for (int i = 0; i < step->in_count; ++i)
    PyList_SET_ITEM(box, i, Py_NewRef(slots[step->ins[i]]));
  for (int i = 0; i < step->dead_count; ++i) Py_CLEAR(slots[step->dead[i]]);
  PyObject* args[] = {step->owner, box};
  PyObject* results = PyObject_Vectorcall(step->function, args, 2, nullptr);
  Py_DECREF(box);
  if (!results) return false;
  if (!PyTuple_Check(results) || PyTuple_GET_SIZE(results) != step->out_count) {
    Py_DECREF(results);
    PyErr_SetString(PyExc_RuntimeError, "a step of a program returned another number of values");
    return false;
  }
  for (int i = 0; i < step->out_count; ++i)
    Py_XSETREF(slots[step->outs[i]], Py_NewRef(PyTuple_GET_ITEM(results, i)));
  Py_DECREF(results);
  return true;
}

// Points to the memory of a tensor that has the expected type; false when it hasn't.
static bool point_to(PyObject* value, const Spec* spec, void** pointer) {
  if (!value || !fits(value, spec)) return false;
  const void* data;
  if (torch_get_const_data_ptr(handle_of(value), &data)) return false;
  *pointer = (void*)data;
  return data || !spec->bytes;
}

static bool point_to_inputs(Step* step, PyObject** slots, void** values, PyObject** held) {
  for (int i = 0; i < step->given_count; ++i)
    if (!point_to(slots[step->given[i].slot], step->given[i].spec, values++)) return false;
  for (int i = 0; i < step->attribute_count; ++i) {
    Attribute* one = step->attributes + i;
    PyObject* tensor = PyDict_GetItemWithError(one->table, one->key);
    if (!tensor) return PyErr_Clear(), false;
    if (!point_to(tensor, one->spec, values++)) return false;
    held[i] = Py_NewRef(tensor);
  }
  return true;
}

static void let_go(const Kernel* kernel, PyObject** slots, PyThreadState** thread) {
  if (*thread) PyEval_RestoreThread(*thread);
  for (int i = 0; i < kernel->freed_count; ++i) Py_CLEAR(slots[kernel->freed[i]]);
  if (*thread) *thread = PyEval_SaveThread();
}

static bool run_kernels(Step* step, PyObject** slots, void** values, PyThreadState** thread) {
  void* buffers[MAX_VALUES + 1];
  uint32_t threads = 0;
  for (int k = 0; k < step->kernel_count; ++k) {
    Kernel* kernel = step->kernels + k;
    if (kernel->is_parallel && !threads && (is_forked || torch_get_num_threads(&threads)))
      threads = 1;
    for (int i = 0; i < kernel->count; ++i) buffers[i] = values[kernel->buffers[i]];
    buffers[kernel->count] = (void*)kernel->numbers;
    if (((KernelFunction)kernel->function)(buffers, kernel->is_parallel ? threads : 1))
      return false;
    if (kernel->freed_count) let_go(kernel, slots, thread);
  }
  return true;
}

static bool launch_kernels(Step* step, PyObject** slots, void** values, PyThreadState** thread) {
  const Launcher* launcher = &step->launcher;
  void *buffers[MAX_VALUES], *stream;
  if (launcher->stream(launcher->device_index, &stream)) return false;
  int8_t before = launcher->exchange((int8_t)launcher->device_index);
  bool is_good = true;
  for (int k = 0; is_good && k < step->kernel_count; ++k) {
    Kernel* kernel = step->kernels + k;
    for (int i = 0; i < kernel->count; ++i) buffers[i] = values[kernel->buffers[i]];
    void* scratch = kernel->scratch < 0 ? nullptr : values[kernel->scratch];
    is_good = !((LaunchFunction)kernel->function)(buffers, scratch, stream, launcher->device_index);
    if (is_good && kernel->freed_count) let_go(kernel, slots, thread);
  }
  launcher->exchange(before);
  return is_good;
}

static bool make_outputs(Step* step, void** values, Handle* handles) {
  for (int i = 0; i < step->out_count; ++i) {
    if (!(handles[i] = new_tensor(step->made[i].spec))) return false;
    const void* data;
    if (torch_get_const_data_ptr(handles[i], &data)) return false;
    values[i] = (void*)data;
  }
  return true;
}

// One block of memory for a run: of the pool, or a tensor on its device.
struct Room {
  void* memory;
  Handle tensor;
};

static bool take_room(const Step* step, Room* room) {
  const void* data;
  if (!step->scratch_bytes) return true;
  if (!step->launcher.stream) return (room->memory = pool_take(step->scratch_bytes));
  if (!(room->tensor = new_tensor(step->launcher.block))) return false;
  if (torch_get_const_data_ptr(room->tensor, &data)) return false;
  return (room->memory = (void*)data);
}

static void give_room(const Step* step, const Room* room) {
  if (room->tensor) aoti_torch_delete_tensor_object(room->tensor);
  else if (room->memory) pool_give(room->memory, step->scratch_bytes);
}

// Points to the values of a run that are no tensors; they follow the tensors that it makes.
static void point_to_scratch(const Step* step, void** made, const Room* room) {
  void** values = made + step->out_count;
  for (int i = 0; i < step->scratch_count; ++i) {
    void* home = step->homes[i] < 0 ? room->memory : made[step->homes[i]];
    values[i] = (char*)home + step->scratch[i];
  }
}

static bool wrap_outputs(Step* step, Handle* handles, PyObject** slots) {
  for (int i = 0; i < step->out_count; ++i) {
    PyObject* tensor = THPVariable_Wrap(handles[i]);
    if (!tensor) return false;
    Py_XSETREF(slots[step->outs[i]], tensor);
  }
  return true;
}

// Runs the kernels of a step: 1 when done, 0 when they can't serve, -1 with an exception.
static int run_natively(Step* step, PyObject** slots, void** values, PyObject** held,
                        Handle* handles) {
  if (!point_to_inputs(step, slots, values, held)) return 0;
  void** made = values + step->given_count + step->attribute_count;
  if (!make_outputs(step, made, handles)) return 0;
  Room room = {};
  bool is_valid = take_room(step, &room);
  if (is_valid) {
    point_to_scratch(step, made, &room);
    PyThreadState* thread = step->is_long ? PyEval_SaveThread() : nullptr;
    is_valid = step->launcher.stream ? launch_kernels(step, slots, values, &thread)
                                     : run_kernels(step, slots, values, &thread);
    if (thread) PyEval_RestoreThread(thread);
  }
  give_room(step, &room);
  if (!is_valid) return 0;
  return wrap_outputs(step, handles, slots) ? 1 : -1;
}

static bool run_step(Program* self, Step* step, PyObject** slots) {
  if (!step->is_run) return call_python(step, slots);
  void* values[MAX_VALUES];
  PyObject* held[MAX_VALUES];
  Handle handles[MAX_VALUES];
  for (int i = 0; i < step->attribute_count; ++i) held[i] = nullptr;
  for (int i = 0; i < step->out_count; ++i) handles[i] = nullptr;
  int done = run_natively(step, slots, values, held, handles);
  for (int i = 0; i < step->out_count; ++i)
    if (handles[i]) aoti_torch_delete_tensor_object(handles[i]);
  for (int i = 0; i < step->attribute_count; ++i) Py_XDECREF(held[i]);
  if (done < 0) return false;
  if (!done) {
    ++self->stand_ins;
    return call_python(step, slots);
  }
  for (int i = 0; i < step->dead_count; ++i) Py_CLEAR(slots[step->dead[i]]);
  return true;
}

static bool links_hold(Program* self) {
  for (int i = 0; i < self->link_count; ++i) {
    Link* link = self->links + i;
    PyObject* value = PyDict_GetItemWithError(link->table, link->key);
    if (value != link->value) return PyErr_Clear(), false;
  }
  return true;
}

// Whether no gradient is asked for.
static bool needs_no_grad(Program* self, PyObject* const* args) {
  if (!self->runs_with_grad) return false;
  for (int i = 0; i < self->input_count; ++i)
    if (requires_grad(args[i])) return false;
  for (int i = 0; i < self->grad_count; ++i) {
    PyObject* value = PyDict_GetItemWithError(self->grads[i].table, self->grads[i].key);
    if (!value || !is_tensor(value)) return PyErr_Clear(), false;
    if (requires_grad(value)) return false;
  }
  return true;
}

// Whether nothing is on that has to see each call of torch.
static bool is_quiet(void) {
  if (count_function_modes() || is_in_dual_level()) return false;
  if (!local_keys.included && !local_keys.excluded) return true;
  return local_keys.included == layout.inference.included &&
         local_keys.excluded == layout.inference.excluded;
}

static PyObject* take_outputs(Program* self, PyObject** slots) {
  if (self->is_single) return Py_NewRef(slots[self->outputs[0]]);
  PyObject* result = PyTuple_New(self->output_count);
  for (int i = 0; result && i < self->output_count; ++i)
    PyTuple_SET_ITEM(result, i, Py_NewRef(slots[self->outputs[i]]));
  return result;
}

static PyObject* run_steps(Program* self, PyObject* const* args, PyObject** slots) {
  for (int i = 0; i < self->slot_count; ++i)
    slots[i] = i < self->input_count ? Py_NewRef(args[i]) : nullptr;
  bool is_good = true;
  for (int i = 0; is_good && i < self->step_count; ++i)
    is_good = run_step(self, self->steps + i, slots);
  PyObject* result = is_good ? take_outputs(self, slots) : nullptr;
  for (int i = 0; i < self->slot_count; ++i) Py_XDECREF(slots[i]);
  return result;
}

PyObject* run_program(Program* self, PyObject* const* args, Py_ssize_t count) {
  if (count != self->input_count || !is_quiet()) return Py_NewRef(MISS);
  for (int i = 0; i < self->input_count; ++i)
    if (!fits(args[i], self->inputs[i])) return Py_NewRef(MISS);
  if (aoti_torch_grad_mode_is_enabled() && !needs_no_grad(self, args)) return Py_NewRef(MISS);
  if (!links_hold(self)) return Py_NewRef(MISS);
  ++self->calls;
  PyObject* on_stack[ON_STACK];
  if (self->slot_count <= ON_STACK) return run_steps(self, args, on_stack);
  PyObject** slots = (PyObject**)PyMem_Malloc(self->slot_count * sizeof(PyObject*));
  if (!slots) return PyErr_NoMemory();
  PyObject* result = run_steps(self, args, slots);
  PyMem_Free(slots);
  return result;
}

static PyObject* call_program(PyObject* self, PyObject* args, PyObject* kwargs) {
  if (kwargs && PyDict_GET_SIZE(kwargs)) return Py_NewRef(MISS);
  Program* program = (Program*)self;
  Py_INCREF(self);
  PyObject* result = run_program(program, &PyTuple_GET_ITEM(args, 0), PyTuple_GET_SIZE(args));
  Py_DECREF(self);
  return result;
}

static PyMemberDef program_members[] = {
    {"calls", T_LONGLONG, offsetof(Program, calls), READONLY, "How often it ran."},
    {"stand_ins", T_LONGLONG, offsetof(Program, stand_ins), READONLY,
     "How often Python stood in for a run of kernels."},
    {nullptr, 0, 0, 0, nullptr},
};

static PyType_Slot program_slots[] = {
    {Py_tp_new, (void*)new_program},      {Py_tp_dealloc, (void*)delete_program},
    {Py_tp_traverse, (void*)visit_program}, {Py_tp_clear, (void*)clear_program},
    {Py_tp_call, (void*)call_program},    {Py_tp_members, program_members},
    {0, nullptr},
};

static PyType_Spec program_type = {"fxkit_binding.Program", sizeof(Program), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, program_slots};
