"""GPUs of this machine: which there are, and which of them a process is shown."""
