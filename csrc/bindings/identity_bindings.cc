// Whether Python objects hold what they held, by identity: a look at each, and no comparison.
#include <algorithm>

#include "bindings/bindings.h"

using namespace nanobind::literals;

namespace baechi {
namespace {

bool same_items(PyObject* dict, PyObject* row) {
  if (PyDict_GET_SIZE(dict) * 2 != PyTuple_GET_SIZE(row)) return false;
  PyObject **next = PySequence_Fast_ITEMS(row), *key, *value;
  for (Py_ssize_t position = 0; PyDict_Next(dict, &position, &key, &value);) {
    if (*next++ != key || *next++ != value) return false;
  }
  return true;
}

bool same_elements(PyObject* list, PyObject* row) {
  PyObject** first = PySequence_Fast_ITEMS(row);
  return PyList_GET_SIZE(list) == PyTuple_GET_SIZE(row) &&
         std::equal(first, first + PyTuple_GET_SIZE(row), PySequence_Fast_ITEMS(list));
}

bool same_attributes(PyObject* object, PyObject* row) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(row); i += 2) {
    PyObject* value = PyObject_GetAttr(object, PyTuple_GET_ITEM(row, i));
    if (value == nullptr) PyErr_Clear();
    Py_XDECREF(value);  // the row holds the one that it is compared with
    if (value != PyTuple_GET_ITEM(row, i + 1)) return false;
  }
  return true;
}

// Each row is what a holder held: keys and values of a dict, elements of a list, names and values
// of another object's attributes, or an equal frozenset of a set.
bool same_contents(const nb::list& holders, const nb::list& rows) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(holders.ptr()); ++i) {
    PyObject* holder = PyList_GET_ITEM(holders.ptr(), i);
    PyObject* row = PyList_GET_ITEM(rows.ptr(), i);
    const bool same = PyDict_Check(holder)     ? same_items(holder, row)
                      : PyList_Check(holder)   ? same_elements(holder, row)
                      : PyAnySet_Check(holder) ? nb::handle(holder).equal(nb::handle(row))
                                               : same_attributes(holder, row);
    if (!same) return false;
  }
  return true;
}

}  // namespace

void bind_identity(nb::module_& m) {
  m.def("same_contents", &same_contents, "holders"_a, "rows"_a);
}

}  // namespace baechi
