"""The program `gerl`: the commands by name, their overview, recipes, versions and shell completion."""
