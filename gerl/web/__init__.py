"""Pages and what serves them: HTML pages and image grids, the live page of runs, and the votes of people."""
