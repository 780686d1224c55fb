"""The program `gerl`: the commands by name, their overview, recipes and versions."""
