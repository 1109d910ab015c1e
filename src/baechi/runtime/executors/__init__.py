"""Programs run by worker threads on CPUs, by streams on GPUs, and by ranks."""
