"""`python -m gerl COMMAND`: the same as the program `gerl`."""

from gerl.program.commands import program

program()
