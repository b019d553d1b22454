"""Cases that need a process of their own: the choice of twins, leaks, threads, memory."""
