"""What libraries take, as their sources and their functions tell it."""
