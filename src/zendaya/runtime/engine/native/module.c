/* Makes the library a Python extension module, so that it is built and installed like one. Its functions are called through ctypes. */

#include <Python.h>

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "_native", .m_doc = "The native decoder.", .m_size = -1};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&definition); }
