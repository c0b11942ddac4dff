"""The GPUs of this machine, and which of them a process may use."""
