// Programs: a graph's kernels and calls of Python in one call.
//
// Between steps a value is a Python object in a slot. Inside a run of kernels values are pointers:
// to the tensors that the run is given, to those that it makes, and into one block of scratch
// memory whose layout was planned by liveness. All that a call changes lies on its own stack, so
// that calls may overlap and may call each other. The kernels of a run are run by kernel_run.cpp, which
// knows neither Python nor torch.
//
// Where a kernel fails, what it has written is void and Python has to stand in. Large tensors that no
// one needs after a kernel are let go of there, where no later one of the run may fail. Scratch
// memory on another device is a tensor there, which later work on its stream may reuse.

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
  int given_count, attribute_count;
  Given *given, *made;  // made tensors go to the slots of `outs`
  Attribute* attributes;
  fx_run run;
  Spec* block;   // the scratch memory of a run on another device; NULL where it needs none
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

enum { ON_STACK = 64 };  // slots of a program

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

static bool parse_kernels(PyObject* tuple, fx_run* run) {
  run->kernels = make_array<fx_kernel>(tuple, &run->kernel_count);
  for (int i = 0; run->kernels && i < run->kernel_count; ++i) {
    fx_kernel* one = run->kernels + i;
    unsigned long long address;
    PyObject *buffers, *numbers, *freed;
    int parallel;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(tuple, i), "KOpSOi", &address, &buffers, &parallel,
                          &numbers, &freed, &one->scratch))
      return false;
    one->numbers = PyBytes_GET_SIZE(numbers) ? PyBytes_AS_STRING(numbers) : nullptr;
    one->function = (void*)(uintptr_t)address;
    one->is_parallel = parallel;
    run->is_parallel |= one->is_parallel;
    if (!parse_ints(buffers, &one->buffers, &one->count)) return false;
    if (!parse_ints(freed, &one->freed, &one->freed_count)) return false;
  }
  return run->kernels != nullptr;
}

static bool parse_launcher(PyObject* description, Step* step) {
  if (description == Py_None) return true;
  unsigned long long stream, exchange;
  PyObject* block;
  fx_launcher* launcher = &step->run.launcher;
  if (!PyArg_ParseTuple(description, "KKiO", &stream, &exchange, &launcher->device_index, &block))
    return false;
  launcher->stream = (fx_stream_function)(uintptr_t)stream;
  launcher->exchange = (fx_exchange_function)(uintptr_t)exchange;
  return block == Py_None || (step->block = new_spec(block));
}

static bool parse_run(PyObject* description, Step* step) {
  PyObject *given, *attributes, *made, *homes, *scratch, *kernels, *launcher;
  long long bytes;
  int is_long, made_count, home_count;
  fx_run* run = &step->run;
  if (!PyArg_ParseTuple(description, "OOOLOOOpO", &given, &attributes, &made, &bytes, &homes,
                        &scratch, &kernels, &is_long, &launcher))
    return false;
  if (!parse_launcher(launcher, step)) return false;
  step->is_run = true;
  step->is_long = is_long;
  run->scratch_bytes = (size_t)bytes;
  if (!parse_given(given, step->ins, &step->given, &step->given_count)) return false;
  if (!parse_attributes(attributes, step)) return false;
  if (!parse_given(made, step->outs, &step->made, &made_count)) return false;
  if (!parse_ints(homes, &run->homes, &home_count)) return false;
  if (!(run->scratch = make_array<size_t>(scratch, &run->scratch_count))) return false;
  for (int i = 0; i < run->scratch_count; ++i)
    run->scratch[i] = PyLong_AsSize_t(PyTuple_GET_ITEM(scratch, i));
  run->input_count = step->given_count + step->attribute_count;
  run->output_count = made_count;
  if (PyErr_Occurred() || !parse_kernels(kernels, run)) return false;
  bool is_small = fx_run_fits(run) && made_count == step->out_count;
  if (!is_small || home_count != run->scratch_count) {
    PyErr_SetString(PyExc_ValueError, "expected a run of fewer values");
    return false;
  }
  return true;
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
  fx_run* run = &step->run;
  for (int i = 0; run->kernels && i < run->kernel_count; ++i) {
    PyMem_Free(run->kernels[i].buffers);
    PyMem_Free(run->kernels[i].freed);
  }
  void* arrays[] = {step->attributes, run->kernels, run->scratch, run->homes,
                    step->ins,        step->outs,   step->dead,   step->block};
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
