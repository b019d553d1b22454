# C level only: Python can use nothing here.
