"""Packages that plug into lower layers, named by the package `gerl` when it is imported: the lower layers know none."""

PACKAGES: dict[str, str] = {}  # "algorithms": the package whose files define them
