"""The files of serving clients: formats/*.toml says what each of them writes, and one reader reads them."""
