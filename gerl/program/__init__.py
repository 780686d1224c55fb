"""The program `gerl`: its commands, their overview, recipes and versions."""
