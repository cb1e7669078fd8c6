// What the parts of the binding share. Only Python.h is included: torch is reached through the C
// functions that libtorch exports, declared here, and through what `find_layout` has made sure of.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <structmember.h>

// The address of an at::Tensor, which is itself one pointer to a TensorImpl.
typedef void* Handle;

extern "C" {
int32_t aoti_torch_get_dim(Handle, int64_t*);
int32_t aoti_torch_get_sizes(Handle, int64_t**);
int32_t aoti_torch_get_strides(Handle, int64_t**);
int32_t aoti_torch_get_dtype(Handle, int32_t*);
int32_t aoti_torch_get_device_index(Handle, int32_t*);
int32_t aoti_torch_empty_strided(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t,
                                 Handle*);
int32_t aoti_torch_new_tensor_handle(Handle, Handle*);
int32_t aoti_torch_delete_tensor_object(Handle);
bool aoti_torch_grad_mode_is_enabled(void);
int32_t torch_get_num_threads(uint32_t*);
int32_t torch_get_const_data_ptr(Handle, const void**);
int32_t torch_from_blob(void*, int64_t, const int64_t*, const int64_t*, int64_t, int32_t, int32_t,
                        int32_t, Handle*, int32_t, const uint8_t*, int64_t,
                        void (*)(void*, void*), void*);
}

// C++ functions of torch that take and return nothing but plain values, by their linker names.
PyObject* THPVariable_Wrap(Handle) __asm__("_Z16THPVariable_WrapRKN2at10TensorBaseE");
int64_t count_function_modes(void)
    __asm__("_ZN2at4impl22PythonTorchFunctionTLS9stack_lenEv");
bool impl_requires_grad(const void* impl) __asm__("_ZNK3c1010TensorImpl13requires_gradEv");

// Dispatch keys that this thread adds and hides: both zero unless a mode, autocast, a transform or
// a region without gradients is on.
struct LocalKeys {
  uint64_t included, excluded;
};
extern __thread LocalKeys local_keys __asm__("_ZN3c104impl26raw_local_dispatch_key_setE");

// The globals of torch.autograd.forward_ad, which tell how deep within forward-mode
// differentiation the process is.
struct DualLevel {
  PyObject *globals, *name;
};
static DualLevel dual_level;

static bool find_dual_level(void) {
  PyObject* module = PyImport_ImportModule("torch.autograd.forward_ad");
  if (!module) return false;
  dual_level.globals = Py_NewRef(PyModule_GetDict(module));
  dual_level.name = PyUnicode_InternFromString("_current_level");
  Py_DECREF(module);
  if (!dual_level.name) return false;
  if (PyDict_GetItemWithError(dual_level.globals, dual_level.name)) return true;
  if (!PyErr_Occurred()) PyErr_SetString(PyExc_ImportError, "no level of forward-mode AD");
  return false;
}

// Whether tensors may carry tangents; so it is where that can't be told.
static bool is_in_dual_level(void) {
  PyObject* level = PyDict_GetItemWithError(dual_level.globals, dual_level.name);
  if (!level || !PyLong_Check(level)) return PyErr_Clear(), true;
  int overflow;
  return PyLong_AsLongAndOverflow(level, &overflow) != -1 || overflow;
}

// torch._C._autograd._top_saved_tensors_default_hooks, which returns hooks for the tensors that
// autograd saves, or None.
static PyObject* top_hooks;

static bool find_saved_tensor_hooks(void) {
  PyObject* module = PyImport_ImportModule("torch._C._autograd");
  if (!module) return false;
  top_hooks = PyObject_GetAttrString(module, "_top_saved_tensors_default_hooks");
  Py_DECREF(module);
  return top_hooks;
}

// Whether there are such hooks; so it is where that can't be told.
static bool has_saved_tensor_hooks(void) {
  PyObject* found = PyObject_CallOneArg(top_hooks, Py_True);
  if (!found) return PyErr_Clear(), true;
  Py_DECREF(found);
  return found != Py_None;
}

enum { INLINE = 5 };

enum { MOST_PARAMETERS = 24 };  // of an operator

// Where things lie in a Python tensor and in a TensorImpl; found by `find_layout`.
struct Layout {
  Py_ssize_t impl, keys, autograd;
  Py_ssize_t geometry;  // the rank, then room for INLINE sizes and for as many strides; or negative
  bool is_known;
  PyObject *tensor, *parameter;  // the two classes
  uint64_t plain_keys, inference_keys;
  LocalKeys inference;
};
static Layout layout;

// The type of a tensor, as far as a kernel is concerned.
struct Spec {
  int32_t dtype;
  int32_t rank;
  int32_t device, device_index;  // the kind of device as torch numbers them, 0 for main memory
  uint64_t keys, inference_keys;
  int64_t bytes;  // of memory that it spans
  int64_t geometry[];  // sizes, then strides
};

// (dtype, bytes, sizes, strides), and where it is not in main memory (device, its index, dispatch
// keys of plain tensors there, those of inference tensors)
Spec* new_spec(PyObject* description);

static inline Handle handle_of(PyObject* tensor) { return (char*)tensor + layout.impl; }

static inline char* impl_of(PyObject* tensor) { return *(char**)handle_of(tensor); }

static inline uint64_t keys_of(PyObject* tensor) {
  return *(uint64_t*)(impl_of(tensor) + layout.keys);
}

static inline bool is_tensor(PyObject* value) {
  PyObject* kind = (PyObject*)Py_TYPE(value);
  return (kind == layout.tensor || kind == layout.parameter) && impl_of(value) != NULL;
}

// Whether gradients are asked for.
bool requires_grad(PyObject* tensor);

// Whether a value is a plain strided tensor of this type.
bool fits(PyObject* value, const Spec* spec);
