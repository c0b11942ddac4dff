"""Pictures of recorded results: a page of HTML, or files of SVG and PNG."""
