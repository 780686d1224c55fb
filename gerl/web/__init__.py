"""Web pages and servers: HTML pages and image grids, the live page of runs, and voting."""
