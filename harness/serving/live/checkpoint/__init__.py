"""A small checkpoint with DeepSeek-V3's structure, made here."""
