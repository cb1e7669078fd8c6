// How programs run: see program_parts.cpp for what they consist of.

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

// What a run needs to let go of tensors meanwhile.
struct Holding {
  PyObject** slots;
  PyThreadState* thread;  // NULL while Python may run
};

static void let_go(void* context, const int* slots, int count) {
  Holding* holding = (Holding*)context;
  if (holding->thread) PyEval_RestoreThread(holding->thread);
  for (int i = 0; i < count; ++i) Py_CLEAR(holding->slots[slots[i]]);
  if (holding->thread) holding->thread = PyEval_SaveThread();
}

static bool run_kernels(const Step* step, PyObject** slots, void** values, void* memory) {
  uint32_t threads = 1;
  if (step->run.is_parallel && !is_forked && torch_get_num_threads(&threads)) threads = 1;
  Holding holding = {slots, step->is_long ? PyEval_SaveThread() : nullptr};
  int failed = fx_run_kernels(&step->run, values, memory, threads, let_go, &holding);
  if (holding.thread) PyEval_RestoreThread(holding.thread);
  return !failed;
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
  if (!step->run.scratch_bytes) return true;
  if (!step->run.launcher.stream) return (room->memory = fx_pool_take(step->run.scratch_bytes));
  if (!(room->tensor = new_tensor(step->block))) return false;
  if (torch_get_const_data_ptr(room->tensor, &data)) return false;
  return (room->memory = (void*)data);
}

static void give_room(const Step* step, const Room* room) {
  if (room->tensor) aoti_torch_delete_tensor_object(room->tensor);
  else if (room->memory) fx_pool_give(room->memory, step->run.scratch_bytes);
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
  bool is_valid = take_room(step, &room) && run_kernels(step, slots, values, room.memory);
  give_room(step, &room);
  if (!is_valid) return 0;
  return wrap_outputs(step, handles, slots) ? 1 : -1;
}

static bool run_step(Program* self, Step* step, PyObject** slots) {
  if (!step->is_run) return call_python(step, slots);
  void* values[FX_MAX_VALUES];
  PyObject* held[FX_MAX_VALUES];
  Handle handles[FX_MAX_VALUES];
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

// `adds_gradients` says that the caller sees to gradients that are asked for.
PyObject* run_program(Program* self, PyObject* const* args, Py_ssize_t count, bool adds_gradients) {
  if (count != self->input_count || !is_quiet()) return Py_NewRef(MISS);
  for (int i = 0; i < self->input_count; ++i)
    if (!fits(args[i], self->inputs[i])) return Py_NewRef(MISS);
  if (!adds_gradients && aoti_torch_grad_mode_is_enabled() && !needs_no_grad(self, args))
    return Py_NewRef(MISS);
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
  PyObject* result = run_program(program, &PyTuple_GET_ITEM(args, 0), PyTuple_GET_SIZE(args), false);
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
