// How entries tell whether they hold: see entry_parts.cpp for what they consist of.

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
  PyObject* result = self->is_program ? run_program((Program*)self->run, values, count, false)
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
