"""The choice of configurations: by compiling offline, by races on a device; and where choices are stored."""
