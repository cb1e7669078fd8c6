// Entries: whether a captured program holds for a call, told without Python where nothing changed.
//
// An entry says yes only when every fact is as it was; a no means nothing, since the guards decide.

struct ArgumentFacts {
  PyObject* kind;
  uint64_t keys;
  bool requires_grad;
  int first;   // the first argument that is the same object
  Spec* spec;  // NULL where the program itself asks
};

struct OutsideTensor {
  PyObject* tensor;
  PyObject* kind;
  uint64_t keys;
  bool requires_grad;
  Spec* spec;
};

// A dict of which some values are guarded, or all. Among the values MISS stands for a key that it
// has to lack, and FREE for one that may have any. A whole one has no other keys than these, unless
// `is_guarded` tells that they are free.
struct Table {
  PyObject *dict, *known, *keys, *values, *is_guarded;
  bool is_whole;
  uint64_t version;  // when it was last found to hold
};

enum { MAX_TABLES = 4096 };

struct Sequence {
  PyObject *list, *values;
};

// What something consists of beside its attributes: none of it may be exchanged.
enum { OF_OBJECT, OF_FUNCTION, OF_CLASS };
static const int part_counts[] = {2, 6, 4};

struct Parts {
  PyObject* value;
  PyObject* const* before;
  PyObject** dict;  // where an object keeps its attributes; NULL without such
  int kind;
};

struct Entry {
  PyObject_HEAD
  PyObject* parts;
  PyObject* run;    // a program, or
  bool is_program;  // else a callable of Python
  PyObject *check_globals, *look_closer;
  bool with_grad, always_look;
  LocalKeys keys;
  int argument_count, outside_count, table_count, sequence_count, cell_count,
      parts_count;
  ArgumentFacts* arguments;
  OutsideTensor* outside;
  Table* tables;
  Sequence* sequences;
  Sequence* cells;
  Parts* owners;
  PyObject* empties;
};

// Python 3.11 counts up a number at each write to a dict; later versions can't be asked.
static uint64_t version_of(PyObject* dict) {
#if PY_VERSION_HEX < 0x030C0000
  return ((PyDictObject*)dict)->ma_version_tag;
#else
  (void)dict;
  return 0;
#endif
}

static bool has_versions(void) { return PY_VERSION_HEX < 0x030C0000; }

// Building --------------------------------------------------------------------------------------

static bool parse_facts(PyObject* tuple, Entry* self) {
  self->arguments = make_array<ArgumentFacts>(tuple, &self->argument_count);
  for (int i = 0; self->arguments && i < self->argument_count; ++i) {
    ArgumentFacts* one = self->arguments + i;
    unsigned long long keys;
    int grad;
    PyObject* spec;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(tuple, i), "OKpiO", &one->kind, &keys, &grad,
                          &one->first, &spec) ||
        (!self->is_program && !(one->spec = new_spec(spec))))
      return false;
    one->keys = keys;
    one->requires_grad = grad;
  }
  return self->arguments != nullptr;
}

static bool parse_outside(PyObject* tuple, Entry* self) {
  self->outside = make_array<OutsideTensor>(tuple, &self->outside_count);
  for (int i = 0; self->outside && i < self->outside_count; ++i) {
    OutsideTensor* one = self->outside + i;
    PyObject* spec;
    unsigned long long keys;
    int grad;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(tuple, i), "OOKpO", &one->tensor, &one->kind, &keys,
                          &grad, &spec) ||
        !(one->spec = new_spec(spec)))
      return false;
    one->keys = keys;
    one->requires_grad = grad;
  }
  return self->outside != nullptr;
}

static bool parse_tables(PyObject* tuple, Entry* self) {
  self->tables = make_array<Table>(tuple, &self->table_count);
  if (self->table_count > MAX_TABLES) {
    PyErr_SetString(PyExc_ValueError, "too many tables");
    return false;
  }
  for (int i = 0; self->tables && i < self->table_count; ++i) {
    Table* one = self->tables + i;
    unsigned long long version;
    int whole;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(tuple, i), "O!O!O!O!pOK", &PyDict_Type, &one->dict,
                          &PyDict_Type, &one->known, &PyTuple_Type, &one->keys, &PyTuple_Type,
                          &one->values, &whole, &one->is_guarded, &version))
      return false;
    if (PyTuple_GET_SIZE(one->keys) != PyTuple_GET_SIZE(one->values)) {
      PyErr_SetString(PyExc_ValueError, "as many values as keys");
      return false;
    }
    one->is_whole = whole;
    one->version = version;
  }
  return self->tables != nullptr;
}

static bool parse_sequences(PyObject* tuple, Sequence** sequences, int* count) {
  if (!(*sequences = make_array<Sequence>(tuple, count))) return false;
  for (int i = 0; i < *count; ++i)
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(tuple, i), "OO", &(*sequences)[i].list,
                          &(*sequences)[i].values))
      return false;
  return true;
}

static bool parse_parts(PyObject* tuple, Entry* self) {
  self->owners = make_array<Parts>(tuple, &self->parts_count);
  for (int i = 0; self->owners && i < self->parts_count; ++i) {
    Parts* one = self->owners + i;
    PyObject* parts;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(tuple, i), "OiO!", &one->value, &one->kind,
                          &PyTuple_Type, &parts))
      return false;
    bool is_right = one->kind == OF_OBJECT ||
                    (one->kind == OF_FUNCTION && PyFunction_Check(one->value)) ||
                    (one->kind == OF_CLASS && PyType_Check(one->value) &&
                     PyType_HasFeature((PyTypeObject*)one->value, Py_TPFLAGS_HEAPTYPE));
    if (!is_right || PyTuple_GET_SIZE(parts) != part_counts[one->kind]) {
      PyErr_SetString(PyExc_ValueError, "parts of another kind");
      return false;
    }
    one->before = &PyTuple_GET_ITEM(parts, 0);
    one->dict = one->kind == OF_OBJECT ? _PyObject_GetDictPtr(one->value) : nullptr;
  }
  return self->owners != nullptr;
}

// Entry(program, whether it is none of Python, arguments, outside, (grad, included, excluded), check of globals, closer look,
//       whether always to look closer, tables, lists, cells, parts, tables that are empty)
static PyObject* new_entry(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  PyObject *run, *arguments, *outside, *check, *look, *tables, *lists, *cells, *owners, *empties;
  unsigned long long included, excluded;
  int grad, always, is_program;
  if (!PyArg_ParseTuple(args, "OpOO(pKK)OOpOOOOO!", &run, &is_program, &arguments, &outside, &grad, &included,
                        &excluded, &check, &look, &always, &tables, &lists, &cells, &owners, &PyTuple_Type,
                        &empties))
    return nullptr;
  Entry* self = (Entry*)type->tp_alloc(type, 0);
  if (!self) return nullptr;
  self->parts = Py_NewRef(args);
  self->run = run;
  self->is_program = is_program;
  self->check_globals = check;
  self->look_closer = look;
  self->always_look = always;
  self->with_grad = grad;
  self->keys.included = included;
  self->keys.excluded = excluded;
  self->empties = empties;
  if (parse_facts(arguments, self) && parse_outside(outside, self) && parse_tables(tables, self) &&
      parse_sequences(lists, &self->sequences, &self->sequence_count) &&
      parse_sequences(cells, &self->cells, &self->cell_count) && parse_parts(owners, self))
    return (PyObject*)self;
  Py_DECREF(self);
  return nullptr;
}

static int clear_entry(PyObject* object) {
  Py_CLEAR(((Entry*)object)->parts);
  return 0;
}

static void delete_entry(PyObject* object) {
  Entry* self = (Entry*)object;
  PyObject_GC_UnTrack(object);
  for (int i = 0; self->arguments && i < self->argument_count; ++i)
    PyMem_Free(self->arguments[i].spec);
  for (int i = 0; self->outside && i < self->outside_count; ++i) PyMem_Free(self->outside[i].spec);
  void* arrays[] = {self->arguments, self->outside, self->tables, self->sequences, self->cells,
                    self->owners};
  for (void* array : arrays) PyMem_Free(array);
  clear_entry(object);
  PyTypeObject* type = Py_TYPE(object);
  type->tp_free(object);
  Py_DECREF(type);
}

static int visit_entry(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(((Entry*)object)->parts);
  return 0;
}

// Checking --------------------------------------------------------------------------------------

static bool is_true(PyObject* function) {
  PyObject* answer = PyObject_CallNoArgs(function);
  if (!answer) return PyErr_Clear(), false;
  int truth = PyObject_IsTrue(answer);
  Py_DECREF(answer);
  return truth == 1;
}

static bool has_facts(PyObject* value, PyObject* kind, uint64_t keys, bool grad) {
  if ((PyObject*)Py_TYPE(value) != kind || !is_tensor(value) || keys_of(value) != keys)
    return false;
  return requires_grad(value) == grad;
}

// Whether a tensor has been given attributes, which the program may ask for. Python 3.11 keeps the
// first ones in an array before the object, without a dict; to ask for the dict would make one.
static bool has_attributes(PyObject* tensor) {
#if PY_VERSION_HEX < 0x030C0000
  if (PyType_HasFeature(Py_TYPE(tensor), Py_TPFLAGS_MANAGED_DICT)) {
    PyObject* table = ((PyObject**)tensor)[-3];
    const uint8_t* values = ((const uint8_t**)tensor)[-4];
    return table ? PyDict_GET_SIZE(table) != 0 : values && values[-2];
  }
#endif
  PyObject** dict = _PyObject_GetDictPtr(tensor);
  return dict && *dict && PyDict_GET_SIZE(*dict);
}

static bool arguments_hold(Entry* self, PyObject* const* args) {
  for (int i = 0; i < self->argument_count; ++i) {
    ArgumentFacts* one = self->arguments + i;
    if (!has_facts(args[i], one->kind, one->keys, one->requires_grad)) return false;
    if (one->spec && !fits(args[i], one->spec)) return false;
    if (has_attributes(args[i])) return false;
    for (int j = 0; j < i; ++j)
      if ((args[i] == args[j]) != (one->first == self->arguments[j].first)) return false;
  }
  return true;
}

static bool outside_holds(Entry* self) {
  for (int i = 0; i < self->outside_count; ++i) {
    OutsideTensor* one = self->outside + i;
    if (!has_facts(one->tensor, one->kind, one->keys, one->requires_grad) ||
        !fits(one->tensor, one->spec))
      return false;
  }
  return true;
}

// The same object, or an equal number or text: no code of Python is asked.
static bool is_same(PyObject* now, PyObject* before) {
  if (now == before || before == FREE) return true;
  if (Py_TYPE(now) != Py_TYPE(before)) return false;
  if (PyFloat_CheckExact(now)) {
    double ours = PyFloat_AS_DOUBLE(now), theirs = PyFloat_AS_DOUBLE(before);
    return !memcmp(&ours, &theirs, sizeof ours);
  }
  if (!PyLong_CheckExact(now) && !PyUnicode_CheckExact(now)) return false;
  return PyObject_RichCompareBool(now, before, Py_EQ) == 1;
}

static bool same_items(const Table* one) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(one->keys); ++i) {
    PyObject* before = PyTuple_GET_ITEM(one->values, i);
    if (before == FREE) continue;
    PyObject* now = PyDict_GetItemWithError(one->dict, PyTuple_GET_ITEM(one->keys, i));
    if (!is_same(now ? now : MISS, before)) return PyErr_Clear(), false;
  }
  return true;
}

// Whether a dict holds these very keys, in this order, and the values that they had.
static bool same_content(const Table* one) {
  Py_ssize_t count = PyTuple_GET_SIZE(one->keys), i = 0, place = 0;
  if (PyDict_GET_SIZE(one->dict) != count) return false;
  PyObject *key, *value;
  while (PyDict_Next(one->dict, &place, &key, &value)) {
    if (i == count || key != PyTuple_GET_ITEM(one->keys, i)) return false;
    if (!is_same(value, PyTuple_GET_ITEM(one->values, i++))) return false;
  }
  return i == count;
}

static bool is_free(const Table* one, PyObject* key) {
  int known = PyDict_Contains(one->known, key);
  if (known) return known == 1;
  PyObject* answer = PyObject_CallOneArg(one->is_guarded, key);
  bool is_free = answer == Py_False;
  Py_XDECREF(answer);
  return is_free;
}

static bool other_keys_are_free(const Table* one) {
  if (one->is_guarded == Py_None) return false;
  PyObject* keys = PyDict_Keys(one->dict);
  bool all = keys;
  for (Py_ssize_t i = 0; all && i < PyList_GET_SIZE(keys); ++i)
    all = is_free(one, PyList_GET_ITEM(keys, i));
  Py_XDECREF(keys);
  if (PyErr_Occurred()) return PyErr_Clear(), false;
  return all;
}

static bool table_holds(const Table* one) {
  if (!one->is_whole) return same_items(one);
  return same_content(one) || (other_keys_are_free(one) && same_items(one));
}

static bool tables_hold(Entry* self, const uint64_t* seen) {
  for (int i = 0; i < self->table_count; ++i) {
    Table* one = self->tables + i;
    if (has_versions() && seen[i] == one->version) continue;
    if (!table_holds(one)) return false;
    one->version = seen[i];
  }
  return true;
}

static bool same_sequence(PyObject* list, PyObject* values) {
  if (PyList_GET_SIZE(list) != PyTuple_GET_SIZE(values)) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(values); ++i)
    if (PyList_GET_ITEM(list, i) != PyTuple_GET_ITEM(values, i)) return false;
  return true;
}

static bool sequences_hold(Entry* self) {
  for (int i = 0; i < self->sequence_count; ++i)
    if (!same_sequence(self->sequences[i].list, self->sequences[i].values)) return false;
  for (int i = 0; i < self->cell_count; ++i)
    if (PyCell_GET(self->cells[i].list) != self->cells[i].values) return false;
  return true;
}

static bool is_part(PyObject* now, PyObject* before) { return (now ? now : Py_None) == before; }

static bool same_parts(const Parts* one) {
  PyObject* const* before = one->before;
  if (one->kind == OF_FUNCTION) {
    PyFunctionObject* fn = (PyFunctionObject*)one->value;
    return is_part(fn->func_code, before[0]) && is_part(fn->func_defaults, before[1]) &&
           is_part(fn->func_kwdefaults, before[2]) && is_part(fn->func_dict, before[3]) &&
           is_part(fn->func_name, before[4]) && is_part(fn->func_qualname, before[5]);
  }
  if ((PyObject*)Py_TYPE(one->value) != before[0]) return false;
  if (one->kind == OF_CLASS) {
    PyHeapTypeObject* type = (PyHeapTypeObject*)one->value;
    return type->ht_type.tp_mro == before[1] && type->ht_name == before[2] &&
           type->ht_qualname == before[3];
  }
  return is_part(one->dict ? *one->dict : nullptr, before[1]);
}

static bool parts_hold(Entry* self) {
  for (int i = 0; i < self->parts_count; ++i)
    if (!same_parts(self->owners + i)) return false;
  return true;
}

static bool state_holds(Entry* self) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->empties); ++i)
    if (PyDict_Size(PyTuple_GET_ITEM(self->empties, i))) return PyErr_Clear(), false;
  uint64_t seen[MAX_TABLES];  // before anything is looked at, which may take a while
  for (int i = 0; i < self->table_count; ++i) seen[i] = version_of(self->tables[i].dict);
  if (!self->always_look && tables_hold(self, seen) && sequences_hold(self) &&
      parts_hold(self))
    return true;
  if (!is_true(self->look_closer)) return false;
  for (int i = 0; i < self->table_count; ++i) self->tables[i].version = seen[i];
  return true;
}

static bool entry_holds(Entry* self, PyObject* const* args, Py_ssize_t count) {
  return count == self->argument_count && !count_function_modes() && !is_in_dual_level() &&
         (self->is_program || !self->with_grad || !has_saved_tensor_hooks()) &&
         local_keys.included == self->keys.included &&
         local_keys.excluded == self->keys.excluded &&
         aoti_torch_grad_mode_is_enabled() == self->with_grad && arguments_hold(self, args) &&
         is_true(self->check_globals) && outside_holds(self) && state_holds(self);
}

static PyObject* call_entry(PyObject* object, PyObject* args, PyObject* kwargs) {
  Entry* self = (Entry*)object;
  PyObject* const* values = &PyTuple_GET_ITEM(args, 0);
  Py_ssize_t count = PyTuple_GET_SIZE(args);
  if ((kwargs && PyDict_GET_SIZE(kwargs)) || !entry_holds(self, values, count))
    return Py_NewRef(MISS);
  Py_INCREF(object);
  PyObject* result = self->is_program ? run_program((Program*)self->run, values, count)
                                      : PyObject_Vectorcall(self->run, values, count, nullptr);
  Py_DECREF(object);
  // The program itself may handle what was raised here: it runs again.
  if (result || !PyErr_ExceptionMatches(PyExc_Exception)) return result;
  PyErr_Clear();
  return Py_NewRef(MISS);
}

static PyType_Slot entry_slots[] = {
    {Py_tp_new, (void*)new_entry},        {Py_tp_dealloc, (void*)delete_entry},
    {Py_tp_traverse, (void*)visit_entry}, {Py_tp_clear, (void*)clear_entry},
    {Py_tp_call, (void*)call_entry},      {0, nullptr},
};

static PyType_Spec entry_type = {"fxkit_binding.Entry", sizeof(Entry), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, entry_slots};

// The module ------------------------------------------------------------------------------------

static PyMethodDef functions[] = {
    {"find_layout", find_layout, METH_VARARGS, nullptr},
    {"describe", describe, METH_O, nullptr},
    {"read_local_keys", read_local_keys, METH_NOARGS, nullptr},
    {"memory_statistics", memory_statistics, METH_NOARGS, nullptr},
    {"trim_memory", trim_memory, METH_NOARGS, nullptr},
    {"limit_memory", limit_memory, METH_O, nullptr},
    {"fingerprint", (PyCFunction)(void (*)(void))fingerprint, METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "fxkit_binding", nullptr, -1, functions};

static bool add_type(PyObject* module, const char* name, PyType_Spec* spec) {
  PyObject* type = PyType_FromSpec(spec);
  return type && !PyModule_AddObject(module, name, type);
}

PyMODINIT_FUNC PyInit_fxkit_binding(void) {
  PyObject* module = PyModule_Create(&definition);
  if (!module) return nullptr;
  pool_start();
  MISS = PyObject_CallNoArgs((PyObject*)&PyBaseObject_Type);
  FREE = PyObject_CallNoArgs((PyObject*)&PyBaseObject_Type);
  if (MISS && !PyModule_AddObject(module, "MISS", Py_NewRef(MISS)) && FREE &&
      !PyModule_AddObject(module, "FREE", Py_NewRef(FREE)) && find_dual_level() &&
      find_saved_tensor_hooks() &&
      add_type(module, "Program", &program_type) && add_type(module, "Entry", &entry_type))
    return module;
  Py_DECREF(module);
  return nullptr;
}
