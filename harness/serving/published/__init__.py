"""Published serving documents, their claims and their recipes, as data."""
