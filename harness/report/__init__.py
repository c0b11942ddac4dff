"""Records as text for people. Nothing is measured or decided here."""
