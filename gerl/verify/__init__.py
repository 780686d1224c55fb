"""Check what a run claims against its files and, with its model, by computing it again: `gerl verify`."""
