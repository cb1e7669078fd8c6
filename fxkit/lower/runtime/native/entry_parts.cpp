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
