// Reading and making tensors without torch's headers.

// Where an object's first bytes are searched for what is known to be in them.
enum { SEARCHED = 192 };

static bool has_at(const char* base, Py_ssize_t offset, uint64_t value) {
  uint64_t found;
  memcpy(&found, base + offset, sizeof found);
  return found == value;
}

// Each sample is (tensor, its _cdata, its dispatch keys, whether it has autograd's metadata), where
// None says that something is not known.
static Py_ssize_t find_offset(PyObject* samples, int column, Py_ssize_t first, Py_ssize_t end) {
  Py_ssize_t found = 0;
  for (Py_ssize_t offset = first; offset + 8 <= end; offset += 8) {
    bool is_it = true;
    for (Py_ssize_t i = 0; is_it && i < PyTuple_GET_SIZE(samples); ++i) {
      PyObject* sample = PyTuple_GET_ITEM(samples, i);
      PyObject* tensor = PyTuple_GET_ITEM(sample, 0);
      if (PyTuple_GET_ITEM(sample, column) == Py_None) continue;
      const char* base = column == 1 ? (char*)tensor : impl_of(tensor);
      uint64_t value = PyLong_AsUnsignedLongLongMask(PyTuple_GET_ITEM(sample, column));
      is_it = column == 3 ? has_at(base, offset, 0) != (value != 0) : has_at(base, offset, value);
    }
    if (is_it && found) return -1;
    if (is_it) found = offset;
  }
  return found ? found : -1;
}

// Whether a tensor's rank, sizes and strides, as torch says them, lie at an offset.
static bool has_geometry_at(PyObject* tensor, Py_ssize_t offset) {
  int64_t rank, *sizes, *strides;
  Handle handle = handle_of(tensor);
  if (aoti_torch_get_dim(handle, &rank) || aoti_torch_get_sizes(handle, &sizes) ||
      aoti_torch_get_strides(handle, &strides) || rank > INLINE)
    return false;
  const char* base = impl_of(tensor);
  if (!has_at(base, offset, (uint64_t)rank)) return false;
  for (int64_t i = 0; i < rank; ++i)
    if (!has_at(base, offset + 8 * (1 + i), (uint64_t)sizes[i]) ||
        !has_at(base, offset + 8 * (1 + INLINE + i), (uint64_t)strides[i]))
      return false;
  return true;
}

static Py_ssize_t find_geometry(PyObject* samples) {
  Py_ssize_t found = -1;
  for (Py_ssize_t offset = 8; offset + 8 * (1 + 2 * INLINE) <= SEARCHED; offset += 8) {
    bool is_it = true;
    for (Py_ssize_t i = 0; is_it && i < PyTuple_GET_SIZE(samples); ++i)
      is_it = has_geometry_at(PyTuple_GET_ITEM(PyTuple_GET_ITEM(samples, i), 0), offset);
    if (is_it && found >= 0) return -1;
    if (is_it) found = offset;
  }
  return found;
}

// find_layout(tensor class, parameter class, samples, (plain keys, inference keys), inference)
PyObject* find_layout(PyObject* module, PyObject* args) {
  PyObject *tensor, *parameter, *samples;
  unsigned long long plain, inference, included, excluded;
  if (!PyArg_ParseTuple(args, "OOO!(KK)(KK)", &tensor, &parameter, &PyTuple_Type, &samples, &plain,
                        &inference, &included, &excluded))
    return NULL;
  Py_ssize_t size = ((PyTypeObject*)tensor)->tp_basicsize;
  layout.impl = find_offset(samples, 1, sizeof(PyObject), size);
  if (layout.impl < 0) Py_RETURN_FALSE;
  layout.keys = find_offset(samples, 2, 8, SEARCHED);
  layout.autograd = find_offset(samples, 3, 8, SEARCHED);
  if (layout.keys < 0) Py_RETURN_FALSE;
  layout.geometry = find_geometry(samples);
  layout.tensor = Py_NewRef(tensor);
  layout.parameter = Py_NewRef(parameter);
  layout.plain_keys = plain;
  layout.inference_keys = inference;
  layout.inference.included = included;
  layout.inference.excluded = excluded;
  layout.is_known = true;
  Py_RETURN_TRUE;
}

PyObject* read_local_keys(PyObject* module, PyObject* unused) {
  return Py_BuildValue("(KK)", (unsigned long long)local_keys.included,
                       (unsigned long long)local_keys.excluded);
}

static PyObject* tuple_of(const int64_t* values, int64_t count) {
  PyObject* result = PyTuple_New(count);
  for (int64_t i = 0; result && i < count; ++i) {
    PyObject* value = PyLong_FromLongLong(values[i]);
    if (!value) Py_CLEAR(result);
    else PyTuple_SET_ITEM(result, i, value);
  }
  return result;
}

// describe(tensor) -> (dtype, sizes, strides, pointer, requires_grad), as the binding reads them
PyObject* describe(PyObject* module, PyObject* tensor) {
  if (!is_tensor(tensor)) Py_RETURN_NONE;
  Handle handle = handle_of(tensor);
  int32_t dtype;
  int64_t rank, *sizes, *strides;
  const void* data;
  if (aoti_torch_get_dtype(handle, &dtype) || aoti_torch_get_dim(handle, &rank) ||
      aoti_torch_get_sizes(handle, &sizes) || aoti_torch_get_strides(handle, &strides) ||
      torch_get_const_data_ptr(handle, &data))
    Py_RETURN_NONE;
  return Py_BuildValue("iNNKO", (int)dtype, tuple_of(sizes, rank), tuple_of(strides, rank),
                       (unsigned long long)(uintptr_t)data,
                       requires_grad(tensor) ? Py_True : Py_False);
}

bool requires_grad(PyObject* tensor) {
  if (layout.autograd > 0 && has_at(impl_of(tensor), layout.autograd, 0)) return false;
  return impl_requires_grad(impl_of(tensor));
}

Spec* new_spec(PyObject* description) {
  int dtype, device = 0, device_index = -1;
  long long bytes;
  unsigned long long keys = layout.plain_keys, inference_keys = layout.inference_keys;
  PyObject *sizes, *strides;
  if (!PyArg_ParseTuple(description, "iLO!O!|(iiKK)", &dtype, &bytes, &PyTuple_Type, &sizes,
                        &PyTuple_Type, &strides, &device, &device_index, &keys, &inference_keys))
    return NULL;
  Py_ssize_t rank = PyTuple_GET_SIZE(sizes);
  Spec* spec = (Spec*)PyMem_Malloc(sizeof(Spec) + 2 * rank * sizeof(int64_t));
  if (!spec) return (Spec*)PyErr_NoMemory();
  spec->dtype = dtype;
  spec->rank = (int32_t)rank;
  spec->device = device;
  spec->device_index = device_index;
  spec->keys = keys;
  spec->inference_keys = inference_keys;
  spec->bytes = bytes;
  for (Py_ssize_t i = 0; i < rank; ++i) {
    spec->geometry[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(sizes, i));
    spec->geometry[rank + i] = PyLong_AsLongLong(PyTuple_GET_ITEM(strides, i));
  }
  if (!PyErr_Occurred()) return spec;
  PyMem_Free(spec);
  return NULL;
}

static bool has_geometry(PyObject* value, const Spec* spec) {
  const int64_t* found = (const int64_t*)(impl_of(value) + layout.geometry);
  if (found[0] != spec->rank) return false;
  for (int32_t i = 0; i < spec->rank; ++i)
    if (found[1 + i] != spec->geometry[i] || found[1 + INLINE + i] != spec->geometry[spec->rank + i])
      return false;
  return true;
}

bool fits(PyObject* value, const Spec* spec) {
  if (!is_tensor(value)) return false;
  uint64_t keys = keys_of(value);
  if (keys != spec->keys && keys != spec->inference_keys) return false;
  Handle handle = handle_of(value);
  int32_t dtype, index;
  if (aoti_torch_get_dtype(handle, &dtype) || dtype != spec->dtype) return false;
  if (spec->device && (aoti_torch_get_device_index(handle, &index) || index != spec->device_index))
    return false;
  if (layout.geometry > 0 && spec->rank <= INLINE) return has_geometry(value, spec);
  int64_t rank, *sizes, *strides;
  if (aoti_torch_get_dim(handle, &rank) || rank != spec->rank) return false;
  if (aoti_torch_get_sizes(handle, &sizes) || aoti_torch_get_strides(handle, &strides))
    return false;
  for (int64_t i = 0; i < rank; ++i)
    if (sizes[i] != spec->geometry[i] || strides[i] != spec->geometry[rank + i]) return false;
  return true;
}

// From this size on memory comes from the pool: below, the C library's is as fast.
enum { POOLED_BYTES = 1 << 20 };

static void give_back(void* block, void* bytes) { fx_pool_give(block, (size_t)(uintptr_t)bytes); }

Handle new_tensor(const Spec* spec) {
  const int64_t *sizes = spec->geometry, *strides = sizes + spec->rank;
  Handle made = NULL;
  if (spec->device || spec->bytes < POOLED_BYTES)
    return aoti_torch_empty_strided(spec->rank, sizes, strides, spec->dtype, spec->device,
                                    spec->device_index, &made)
               ? NULL
               : made;
  void* block = fx_pool_take(spec->bytes);
  if (!block) return NULL;
  if (torch_from_blob(block, spec->rank, sizes, strides, 0, spec->dtype, 0, -1, &made, 0, NULL, 0,
                      give_back, (void*)(uintptr_t)spec->bytes)) {
    fx_pool_give(block, spec->bytes);
    return NULL;
  }
  return made;
}
