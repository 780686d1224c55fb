"""Web pages and servers: HTML pages and image grids, and the live page of runs."""
