"""From a command line to a configuration, and what every command does around its work."""
