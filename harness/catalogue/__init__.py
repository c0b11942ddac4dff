"""Catalogue of facts as data: flags, recipes, architectures, devices, published figures."""
