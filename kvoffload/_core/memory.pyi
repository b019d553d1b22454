# C level only: nothing here is for Python.
