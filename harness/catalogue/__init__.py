"""Facts as data: flags, recipes, architectures, devices, published figures. Nothing is measured here."""
