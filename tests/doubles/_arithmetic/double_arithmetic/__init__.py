"""Arithmetic and checks that several doubles share; `tests.doubles.lent` puts it on the path beside them."""
