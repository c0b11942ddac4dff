"""Two loaded serving results: whether they are alike, and what differs between them."""
