"""The garbage collector's switch: finalisers are Python code, which must not run in a call."""

cdef extern from "Python.h":
    int PyGC_Disable()
    int PyGC_Enable()
