"""The collector's switch: finalisers are Python code, and none may run inside a call."""

cdef extern from "Python.h":
    int PyGC_Disable()
    int PyGC_Enable()
