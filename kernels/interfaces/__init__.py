"""The interfaces of libraries, read from their sources or their functions."""
