// The module of Python.

static PyObject* memory_statistics(PyObject* module, PyObject* unused) {
  fx_pool_statistics found;
  fx_pool_read(&found);
  return Py_BuildValue("(KKKKKKK)", found.used, found.peak, found.kept, found.limit, found.reused,
                       found.fresh, found.dropped);
}

static PyObject* trim_memory(PyObject* module, PyObject* unused) {
  return PyLong_FromSize_t(fx_pool_trim());
}

static PyObject* limit_memory(PyObject* module, PyObject* bytes) {
  size_t value = PyLong_AsSize_t(bytes);
  if (PyErr_Occurred()) return nullptr;
  fx_pool_limit(value);
  Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"find_layout", find_layout, METH_VARARGS, nullptr},
    {"describe", describe, METH_O, nullptr},
    {"read_local_keys", read_local_keys, METH_NOARGS, nullptr},
    {"memory_statistics", memory_statistics, METH_NOARGS, nullptr},
    {"trim_memory", trim_memory, METH_NOARGS, nullptr},
    {"limit_memory", limit_memory, METH_O, nullptr},
    {"attach_by", attach_by, METH_O, nullptr},
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
  fx_pool_start();
  MISS = PyObject_CallNoArgs((PyObject*)&PyBaseObject_Type);
  FREE = PyObject_CallNoArgs((PyObject*)&PyBaseObject_Type);
  if (MISS && !PyModule_AddObject(module, "MISS", Py_NewRef(MISS)) && FREE &&
      !PyModule_AddObject(module, "FREE", Py_NewRef(FREE)) && find_dual_level() &&
      find_saved_tensor_hooks() &&
      add_type(module, "Program", &program_type) && add_type(module, "Entry", &entry_type) &&
      add_type(module, "GradientRule", &gradient_rule_type) &&
      add_type(module, "Calls", &calls_type))
    return module;
  Py_DECREF(module);
  return nullptr;
}
