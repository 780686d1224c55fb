"""HTML pages and image grids."""
